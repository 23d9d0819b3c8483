#!/usr/bin/env bash
# Builds for aarch64 what a package has, into a folder (by default target/aarch64/out):
#
#   tools/aarch64/build.sh [FOLDER]
#
#   c/libunisono.so, c/libunisono.a   the C library
#   unisono                           the launcher
#   _core.abi3.so                     the Python module
#   core-torch-2.N.so                 the backend for the torch of that architecture whose folder is UNISONO_TORCH_DIR, if set:
#                                     pip download --platform manylinux_2_28_aarch64 --only-binary :all: --no-deps torch==2.N.0
#
# `environment.sh` names the variables that choose the compilers; `prepare.sh` gets them where they are missing. The results
# need no newer C library than the linker's.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
"$here/prepare.sh" build
# shellcheck source=environment.sh
source "$here/environment.sh"
into=${1:-$out}
mkdir -p "$into"
into=$(cd "$into" && pwd)
use_compilers
cd "$checkout"

publish() {
  cmp -s "$1" "$2" || { "$STRIP" --strip-debug -o "$2.new" "$1" && mv "$2.new" "$2"; }
}

# An interpreter is not asked: the module is for the stable ABI.
export CARGO_BUILD_TARGET=$triple PYO3_NO_PYTHON=1
CC=$CC_aarch64_unknown_linux_gnu CARGO=$cargo rust/capi/build.sh "$into/c"
"$cargo" build --release -p unisono-launch -p unisono-module
publish "$CARGO_TARGET_DIR/$triple/release/unisono" "$into/unisono"
publish "$CARGO_TARGET_DIR/$triple/release/lib_core.so" "$into/_core.abi3.so"
if [ -n "${UNISONO_TORCH_DIR:-}" ]; then
  minor=$(sed -n "s/^__version__ = '\([0-9]*\.[0-9]*\).*/\1/p" "$UNISONO_TORCH_DIR/version.py")
  UNISONO_DOOR=core-torch-$minor.so "$cargo" build --release -p unisono-torch
  publish "$CARGO_TARGET_DIR/$triple/release/libcore_torch.so" "$into/core-torch-$minor.so"
fi
