#!/usr/bin/env bash
# Runs a command that builds for aarch64, with the compilers of `environment.sh`, fetched where there are none:
#
#   tools/aarch64/with-compilers.sh COMMAND [ARGUMENT...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
"$here/prepare.sh" build
# shellcheck source=environment.sh
source "$here/environment.sh"
use_compilers
exec "$@"
