#!/usr/bin/env bash
# Gets what building and testing for aarch64 needs on an x86-64 machine, where it is not there yet.
#
#   tools/aarch64/prepare.sh [build]     (build: the compilers alone, without the emulator and what it runs)
#
# On Debian nothing has to be installed, and root is not needed: packages are fetched and unpacked below target/.
# Elsewhere: a Rust with the target (rustup target add aarch64-unknown-linux-gnu), aarch64-linux-gnu-gcc and -g++, and
# qemu-aarch64-static. Ends with 3 and one sentence when something is missing that cannot be had here.
set -euo pipefail
# shellcheck source=environment.sh
source "$(dirname "$0")/environment.sh"
only=${1:-all}

give_up() {
  echo "aarch64: $1" >&2
  exit 3
}

[ "$(uname -m)" != aarch64 ] || give_up "this machine is one; its tests are \`make test\`"
command -v "$cargo" >/dev/null || give_up "cargo is not installed"

# apt for an architecture, with lists of its own that know of both: those of the machine stay as they are. `status` says
# which packages are there already.
apt=$folder/apt
apt_for() {
  local architecture=$1 status=$2
  shift 2
  mkdir -p "$apt/lists/partial" "$apt/$architecture/archives/partial"
  cat >"$apt/configuration" <<CONFIGURATION
Dir::State::lists "$apt/lists";
Dir::State::status "$status";
Dir::Cache "$apt/$architecture";
APT::Architecture "$architecture";
#clear APT::Architectures;
APT::Architectures { "$architecture"; "arm64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "$(id -un)";
Debug::NoLocking "true";
CONFIGURATION
  APT_CONFIG=$apt/configuration apt-get -qq "$@" </dev/null >/dev/null
}

# Unpacks what was fetched for an architecture into a folder.
unpack() {
  local package
  mkdir -p "$2"
  for package in "$apt/$1/archives"/*.deb; do
    dpkg -x "$package" "$2"
  done
  rm -r "${apt:?}/$1"
}

# Once, before anything is fetched for `$1`.
update_lists() {
  [ ! -d "$apt/lists/partial" ] || return 0
  { grep -qx ID=debian /etc/os-release && command -v apt-get && command -v dpkg; } >/dev/null 2>&1 ||
    give_up "$1 is missing, and can be fetched on Debian only: tools/aarch64/prepare.sh says what else will do"
  mkdir -p "$apt"
  : >"$apt/empty"
  apt_for "$native" "$apt/empty" update || give_up "the lists of Debian's packages cannot be fetched"
}

mkdir -p "$folder"
rm -rf "$apt"
native=$(dpkg --print-architecture 2>/dev/null || uname -m)

missing=()
rust_compiler >/dev/null || missing+=(rustc-web libstd-rust-web-dev)
program aarch64-linux-gnu-g++ >/dev/null || missing+=(gcc-aarch64-linux-gnu g++-aarch64-linux-gnu)
[ "$only" = build ] || emulator >/dev/null || missing+=(qemu-user-static)
if [ ${#missing[@]} -gt 0 ]; then
  update_lists "${missing[*]}"
  echo "aarch64: fetching ${missing[*]}"
  apt_for "$native" /var/lib/dpkg/status -y --download-only install "${missing[@]}" ||
    give_up "${missing[*]} cannot be fetched from Debian"
  if [[ " ${missing[*]} " == *" rustc-web "* ]]; then
    # The standard library to link with. Its dependencies would be the compiler for that architecture.
    (cd "$apt/$native/archives" && apt_for "$native" "$apt/empty" download libstd-rust-web-dev:arm64) ||
      give_up "Rust's standard library for aarch64 cannot be fetched from Debian"
  fi
  unpack "$native" "$tools"
  rm -rf "${tools:?}/usr/share"
  # They name their libraries as if they were installed.
  for script in "$tools"/usr/aarch64-linux-gnu/lib/lib{c,m}.so; do
    if [ -f "$script" ] && [ "$(head -c 2 "$script")" = '/*' ]; then sed -i 's|/usr/aarch64-linux-gnu/lib/||g' "$script"; fi
  done
  mkdir -p "$tools/bin"
  for path in "$tools"/usr/bin/{rustc,qemu-aarch64-static,aarch64-linux-gnu-{gcc,g++,ar,strip}}; do
    [ -x "$path" ] || continue
    name=$(basename "$path")
    case $name in
    # The kernel holds on to it by its descriptor, for which it must be a program and no script.
    qemu-*) ln -sf "$path" "$tools/bin/$name" ;;
    *)
      # shellcheck disable=SC2016 # The script expands it.
      printf '#!/bin/sh\nLD_LIBRARY_PATH=%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec %s "$@"\n' \
        "$tools/usr/lib/$(uname -m)-linux-gnu" "$path" >"$tools/bin/$name"
      chmod +x "$tools/bin/$name"
      ;;
    esac
  done
  rust_compiler >/dev/null || give_up "Debian's rustc-web was fetched and does not run here"
fi
[ "$only" = all ] || exit 0

if [ ! -x "$sysroot/usr/bin/python3" ]; then
  update_lists "Python for aarch64"
  echo "aarch64: fetching Debian's Python and C library for it"
  apt_for arm64 "$apt/empty" -y --download-only install libc6 libstdc++6 libgcc-s1 python3 ||
    give_up "Debian's Python for aarch64 cannot be fetched"
  unpack arm64 "$sysroot"
fi
rm -rf "$apt"

# The modules are fetched by this machine's pip, which runs nothing of theirs.
requirements=(numpy pytest pytest-timeout ml_dtypes psutil)
if [ "$(cat "$modules/.complete" 2>/dev/null)" != "${requirements[*]}" ]; then
  version=$(basename "$(readlink "$sysroot/usr/bin/python3")" | sed 's/python//')
  echo "aarch64: fetching NumPy and pytest for its Python $version"
  rm -rf "$modules"
  python=${PYTHON:-$checkout/.venv/bin/python}
  [ -x "$python" ] || python=python3
  PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --quiet --disable-pip-version-check --target "$modules" --python-version "$version" \
    --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --only-binary :all: \
    "${requirements[@]}" </dev/null || give_up "NumPy for aarch64 cannot be fetched"
  echo "${requirements[*]}" >"$modules/.complete"
fi
