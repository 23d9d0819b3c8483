#!/bin/sh
# Installs the headers, libunisono and what finds them (pkg-config, CMake) below a folder.
#
#   rust/capi/install.sh [--wheel] BUILT PREFIX [LIBDIR]
#
# BUILT is the folder that build.sh made; LIBDIR is lib unless given (lib64, lib/x86_64-linux-gnu). Nothing installed names
# PREFIX, so it may be moved. --wheel leaves the static library out, for its size, and makes no symbolic links, which a wheel
# cannot hold: the library is a file of the name that programs ask for, and libunisono.so a linker script that leads to it.
set -eu

wheel=no
[ "$1" != --wheel ] || { wheel=yes; shift; }
built=$1 prefix=$2 libdir=${3:-lib}
here=$(CDPATH='' cd "$(dirname "$0")" && pwd)
root=$(CDPATH='' cd "$here/../.." && pwd)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -1)
soname=$(readlink "$built/libunisono.so")
# The way from LIBDIR/pkgconfig, and from LIBDIR/cmake/unisono, back to PREFIX.
up=$(echo "$libdir" | sed 's|[^/][^/]*|..|g')

lib=$prefix/$libdir
mkdir -p "$prefix/include/unisono" "$lib/pkgconfig" "$lib/cmake/unisono"
install -m 644 "$root/include/unisono.h" "$root/include/unisono.hpp" "$prefix/include/"
install -m 644 "$root"/include/unisono/*.hpp "$prefix/include/unisono/"
if [ $wheel = no ]; then
  install -m 644 "$built/libunisono.a" "$lib/"
  install -m 755 "$built/libunisono.so.$version" "$lib/"
  [ "$soname" = "libunisono.so.$version" ] || ln -sf "libunisono.so.$version" "$lib/$soname"
  ln -sf "$soname" "$lib/libunisono.so"
else
  # A process may have the old one mapped.
  install -m 755 "$built/libunisono.so.$version" "$lib/$soname.new"
  mv "$lib/$soname.new" "$lib/$soname"
  rm -f "$lib/libunisono.a"
  echo "INPUT($soname)" > "$lib/libunisono.so"
fi
fill() {
  sed -e "s|@version@|$version|g" -e "s|@libdir@|$libdir|g" -e "s|@up@|$up|g" -e "s|@soname@|$soname|g" "$here/$1" > "$2"
}
fill unisono.pc.in "$lib/pkgconfig/unisono.pc"
fill unisono-config.cmake.in "$lib/cmake/unisono/unisono-config.cmake"
fill unisono-config-version.cmake.in "$lib/cmake/unisono/unisono-config-version.cmake"
