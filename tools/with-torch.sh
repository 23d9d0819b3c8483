#!/usr/bin/env bash
# Runs a command of cargo for the torch that is installed in a virtual environment.
#
#   tools/with-torch.sh VENV COMMAND...
#
# The command sees the torch as UNISONO_TORCH_DIR, and the file name of the door for it as UNISONO_DOOR. With the same folder
# for what cargo builds, builds for several torches share all but what is compiled against torch, and that is compiled anew when
# another one has its turn.
set -euo pipefail

venv=$1
shift
find_torch='
from unisono_build import torches
torch = torches.find()
if torch is None:
    raise SystemExit(f"this environment has no torch of 2.{torches.OLDEST_MINOR} or newer to build for")
print(torch, torches.door_of(torch), sep="\n")
'
found=$(env -u UNISONO_TORCH_DIR -u VIRTUAL_ENV PYTHONPATH="$(dirname "$0")" "$venv/bin/python" -c "$find_torch")
{ read -r UNISONO_TORCH_DIR; read -r UNISONO_DOOR; } <<<"$found"
export UNISONO_TORCH_DIR UNISONO_DOOR PYO3_NO_PYTHON=1
exec "$@"
