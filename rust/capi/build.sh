#!/bin/sh
# Builds libunisono.a and libunisono.so into a folder (by default target/c), from this checkout.
#
#   rust/capi/build.sh [FOLDER]
#
# cargo makes the static library; the shared one is linked from it, so that it has a SONAME and versioned symbols and
# exports nothing but unisono_*. CARGO, CARGO_TARGET_DIR, CARGO_BUILD_TARGET, and CC and STRIP for that target are respected.
set -eu

here=$(CDPATH='' cd "$(dirname "$0")" && pwd)
root=$(CDPATH='' cd "$here/../.." && pwd)
# Relative ones are relative to this checkout.
absolute() { case $1 in /*) echo "$1" ;; *) echo "$root/$1" ;; esac; }
target=$(absolute "${CARGO_TARGET_DIR:-target}")
folder=$(absolute "${1:-$target/c}")
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -1)
# Until 1.0 a minor version may break what is there.
soname=libunisono.so.$(echo "$version" | sed 's/^0\.\([0-9]*\)\..*/0.\1/; t; s/\..*//')

# cargo and rustup obey files in the folders above the one they work in, and of the sources' others may own some.
(cd / && "${CARGO:-cargo}" build --release -p unisono-capi --manifest-path "$root/Cargo.toml" --target-dir "$target")
mkdir -p "$folder"
archive=$target/${CARGO_BUILD_TARGET:+$CARGO_BUILD_TARGET/}release/libunisono_capi.a
library=$folder/libunisono.so.$version
if [ ! "$library" -nt "$archive" ] || [ ! "$library" -nt "$here/unisono.map" ]; then
  # Whole: nothing refers to our functions yet. It is never unloaded, since it has threads and an exit handler.
  "${CC:-cc}" -shared -o "$library.new" \
    -Wl,--whole-archive "$archive" -Wl,--no-whole-archive \
    -Wl,-soname,"$soname" -Wl,--version-script="$here/unisono.map" \
    -Wl,--gc-sections -Wl,-O1 -Wl,-z,now -Wl,-z,relro -Wl,-z,nodelete -Wl,--no-undefined \
    -lgcc_s -lpthread -lm -ldl -lc
  "${STRIP:-strip}" --strip-debug "$library.new"
  mv "$library.new" "$library"
  cp "$archive" "$folder/libunisono.a.new"
  "${STRIP:-strip}" --strip-debug "$folder/libunisono.a.new"
  mv "$folder/libunisono.a.new" "$folder/libunisono.a"
fi
[ "$soname" = "libunisono.so.$version" ] || ln -sf "libunisono.so.$version" "$folder/$soname"
ln -sf "$soname" "$folder/libunisono.so"
