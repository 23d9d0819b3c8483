#!/usr/bin/env bash
# Builds the native modules into python/unisono/: the Python door, and the door for the torch of a virtual environment.
# cargo decides whether there is anything to do.
#
#   tools/build-extension.sh VENV TARGET
#
# CARGO is the cargo to use, and TARGET its folder.
set -euo pipefail

venv=$1 target=$2
here=$(dirname "$0")

# shellcheck disable=SC2016 # with-torch.sh sets UNISONO_DOOR.
"$here/with-torch.sh" "$venv" bash -euc '
  "$0/quietly.sh" "${CARGO:-cargo}" build --release -p unisono-module -p unisono-torch --target-dir "$1"
  "$0/replace-file.sh" "$1/release/lib_core.so" python/unisono/_core.abi3.so
  "$0/replace-file.sh" "$1/release/libcore_torch.so" "python/unisono/$UNISONO_DOOR"
' "$here" "$target"
