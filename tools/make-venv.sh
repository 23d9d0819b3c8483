#!/usr/bin/env bash
# Makes a virtual environment with a pip of today, and installs into it what is named.
#
#   tools/make-venv.sh VENV [ARGUMENT-OF-PIP-INSTALL...]
#
# PYTHON is the interpreter to make it with, python3 by default.
set -euo pipefail

venv=$1
shift
"${PYTHON:-python3}" -m venv "$venv"
# A group of pyproject.toml can be installed since pip 25.1, and what a distribution puts into an environment is older.
"$venv/bin/python" -m pip install --upgrade pip
[ $# -eq 0 ] || "$venv/bin/python" -m pip install "$@"
