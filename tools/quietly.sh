#!/usr/bin/env bash
# Runs a command without the lines in which maturin and cargo announce themselves; those that compile remain.
#
#   tools/quietly.sh COMMAND...
set -euo pipefail

"$@" 2>&1 | { grep -Ev '^(🍹|🐍|🔗|📦|🛠|✏️|📡|    Finished)' || true; }
