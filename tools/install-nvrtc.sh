#!/usr/bin/env bash
# Installs the compiler of the CUDA kernels, of exactly the version they are compiled with, into a folder of its own: torch
# has another. A test skips without it, so it never fails.
#
#   tools/install-nvrtc.sh VENV FOLDER
set -euo pipefail

python=$1/bin/python folder=$2
requirement=$("$python" rust/core/src/transport/cuda/kernels/build.py --requirement)

[ ! -f "$folder/$requirement" ] || exit 0
echo "installing $requirement into $folder"
rm -rf "$folder"
if "$python" -m pip install --no-deps --target "$folder" "$requirement"; then
  touch "$folder/$requirement"
else
  echo "NVRTC could not be installed: that the PTX is the sources' will not be tested in full"
fi
