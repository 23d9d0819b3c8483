#!/usr/bin/env bash
# Builds the native modules into python/unisono/: the Python door, and the door for the torch of a virtual environment.
# cargo decides whether there is anything to do.
#
#   tools/build-extension.sh VENV TARGET
#
# They are two builds of one crate; CARGO is the cargo to use, and TARGET its folder.
set -euo pipefail

venv=$1 target=$2
here=$(dirname "$0")

VIRTUAL_ENV=$venv "$here/quietly.sh" "$venv/bin/maturin" develop --release --target-dir "$target" --skip-install
# shellcheck disable=SC2016 # the variables are those that with-torch.sh sets
"$here/with-torch.sh" "$venv" "$target" bash -euc '
  "$0/quietly.sh" "${CARGO:-cargo}" build --release -p unisono-python --features torch
  "$0/replace-file.sh" "$CARGO_TARGET_DIR/release/lib_core.so" "python/unisono/$UNISONO_DOOR"
' "$here"
