#!/usr/bin/env bash
# Runs a command of cargo for the torch that is installed in a virtual environment.
#
#   tools/with-torch.sh VENV TARGET COMMAND...
#
# The command sees the torch as UNISONO_TORCH_DIR, the file name of the door for it as UNISONO_DOOR, the interpreter as
# PYO3_PYTHON, and as CARGO_TARGET_DIR a folder of its own for each torch below TARGET, so that what was built for another
# one stays.
set -euo pipefail

venv=$1 target=$2
shift 2
find_torch='
from unisono_build import torches
torch = torches.find()
if torch is None:
    raise SystemExit(f"this environment has no torch of 2.{torches.OLDEST_MINOR} or newer to build for")
print(torch, torches.door_of(torch), sep="\n")
'
found=$(env -u UNISONO_TORCH_DIR -u VIRTUAL_ENV PYTHONPATH="$(dirname "$0")" "$venv/bin/python" -c "$find_torch")
{ read -r UNISONO_TORCH_DIR; read -r UNISONO_DOOR; } <<<"$found"
door=${UNISONO_DOOR#core-}
export UNISONO_TORCH_DIR UNISONO_DOOR
export PYO3_PYTHON=$venv/bin/python CARGO_TARGET_DIR=$target/${door%.so}
exec "$@"
