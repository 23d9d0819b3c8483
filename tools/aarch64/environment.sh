# shellcheck shell=bash disable=SC2034
# What the scripts beside it share: where things lie, and with which compilers they are made. Sourced.
#
# Everything lies in TARGET/aarch64 (TARGET is CARGO_TARGET_DIR, or target/):
#
#   tools/    Debian's compilers and the emulator, as far as this machine has none of its own; nothing is installed
#   sysroot/  Debian's C library and Python for aarch64: what the emulated programs find at /
#   python/   NumPy and pytest for that Python
#   out/      what was built: libunisono.so, libunisono.a, unisono, _core.abi3.so, core-torch-2.N.so
#
# All of these can be chosen from outside: CARGO, RUSTC, CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER,
# CC_aarch64_unknown_linux_gnu, CXX_aarch64_unknown_linux_gnu, AR_aarch64_unknown_linux_gnu, STRIP and EMULATOR.

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
triple=aarch64-unknown-linux-gnu
# Exported, since the scripts call each other, and cargo by another CARGO_TARGET_DIR.
export AARCH64_FOLDER=${AARCH64_FOLDER:-$(realpath -m "${CARGO_TARGET_DIR:-$checkout/target}")/aarch64}
folder=$AARCH64_FOLDER
builds=${AARCH64_BUILDS:-$folder/build}
tools=$folder/tools
sysroot=$folder/sysroot
modules=$folder/python
out=$folder/out
cargo=${CARGO:-cargo}

# The first that exists: a program of this machine, or one that `prepare.sh` has fetched.
program() {
  local name
  for name in "$@"; do
    command -v "$name" && return
    if [ -x "$tools/bin/$name" ]; then
      echo "$tools/bin/$name"
      return
    fi
  done
  return 1
}

# Whether this rustc can compile for aarch64: rustup's does after `rustup target add aarch64-unknown-linux-gnu`.
has_target() {
  [ -d "$("$1" --print sysroot 2>/dev/null)/lib/rustlib/$triple/lib" ]
}

# The ordinary compiler if it can, else the fetched one. Fails where there is neither.
rust_compiler() {
  local candidate
  for candidate in "${RUSTC:-rustc}" "$tools/bin/rustc"; do
    if has_target "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

emulator() {
  if [ -n "${EMULATOR:-}" ]; then echo "$EMULATOR"; else program qemu-aarch64-static; fi
}

# Exports what cargo, and the crates that compile C, need.
use_compilers() {
  RUSTC=$(rust_compiler)
  CC_aarch64_unknown_linux_gnu=${CC_aarch64_unknown_linux_gnu:-$(program aarch64-linux-gnu-gcc)}
  CXX_aarch64_unknown_linux_gnu=${CXX_aarch64_unknown_linux_gnu:-$(program aarch64-linux-gnu-g++)}
  AR_aarch64_unknown_linux_gnu=${AR_aarch64_unknown_linux_gnu:-$(program aarch64-linux-gnu-ar)}
  STRIP=${STRIP:-$(program aarch64-linux-gnu-strip llvm-strip)}
  local linker=$CC_aarch64_unknown_linux_gnu
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=${CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER:-$linker}
  export RUSTC STRIP CC_aarch64_unknown_linux_gnu CXX_aarch64_unknown_linux_gnu AR_aarch64_unknown_linux_gnu \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER
  # Not where the tests of this machine look for what they run.
  export CARGO_TARGET_DIR=$builds
}
