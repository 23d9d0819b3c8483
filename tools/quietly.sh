#!/usr/bin/env bash
# Runs a command without the lines in which maturin and cargo announce themselves; those that compile remain.
# maturin also warns that pip would not call it by itself, which is as it should be: pip calls tools/unisono_build.
#
#   tools/quietly.sh COMMAND...
set -euo pipefail

# shellcheck disable=SC2016 # The backquotes are maturin's.
"$@" 2>&1 | { grep -Ev '^(🍹|🐍|🔗|📦|🛠|✏️|📡|    Finished|⚠️  Warning: `build-backend`)' || true; }
