#!/usr/bin/env bash
# Builds the module that knows no torch for a Python without a GIL into python/unisono/, where an import on that Python finds it
# before the one for abi3; and makes an environment of that Python with what the tests of the NumPy door need.
#
#   tools/build-free-threaded.sh PYTHON TARGET
#
# CARGO is the cargo to use, and TARGET its folder. The environment is TARGET/free-threaded.
set -euo pipefail

target=$2
here=$(dirname "$0")
python=$target/free-threaded/bin/python

name=$("$1" -c '
import sys, sysconfig
if "t" not in sys.abiflags:
    raise SystemExit(f"{sys.executable} is a Python with a GIL")
print("_core" + sysconfig.get_config_var("EXT_SUFFIX"))')
PYTHON=$1 "$here/make-venv.sh" "$target/free-threaded" --only-binary numpy,ml_dtypes numpy ml_dtypes pytest pytest-timeout
env -u PYO3_NO_PYTHON PYO3_PYTHON="$python" \
  "$here/quietly.sh" "${CARGO:-cargo}" build --release -p unisono-module --target-dir "$target"
"$here/replace-file.sh" "$target/release/lib_core.so" "python/unisono/$name"
