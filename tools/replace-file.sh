#!/usr/bin/env bash
# Puts a copy of FROM at TO, unless it is the same already. Never in place: a process may have the old one mapped.
#
#   tools/replace-file.sh FROM TO
set -euo pipefail

if ! cmp -s "$1" "$2"; then
  cp "$1" "$2.new"
  mv "$2.new" "$2"
fi
