#!/usr/bin/env bash
# Builds the emulated CUDA driver into a folder with libcuda.so and libcuda.so.1, which tests put into LD_LIBRARY_PATH,
# and prints the folder.
#
#   tools/build-cuda-emulator.sh TARGET
#
# CARGO is the cargo to use, and TARGET its folder.
set -euo pipefail

target=$1
here=$(dirname "$0")
folder=$target/cuda-emulator

"$here/quietly.sh" "${CARGO:-cargo}" build --release -p unisono-cuda-emulator --target-dir "$target"
mkdir -p "$folder"
"$here/replace-file.sh" "$target/release/libunisono_cuda_emulator.so" "$folder/libcuda.so.1"
ln -sf libcuda.so.1 "$folder/libcuda.so"
echo "$folder"
