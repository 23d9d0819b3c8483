#!/usr/bin/env bash
# Installs this checkout into a virtual environment: editable, with its console scripts, with the entry points that torch
# finds it by, with the tools of development, and with torch, unless the environment has one.
#
#   tools/install-development.sh VENV TORCH TARGET
#
# TORCH is a version; TARGET is cargo's folder. Only a change of metadata asks for it again: sources are the business of
# tools/build-extension.sh.
set -euo pipefail

venv=$1 torch=$2 target=$3
here=$(dirname "$0")
python=$venv/bin/python

if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is not None)'; then
  echo "installing torch $torch (a large download)"
  "$python" -m pip install "torch==$torch"
fi
echo "installing the package and its development tools into $venv"
"$python" -m pip install 'maturin>=1.9,<2'
VIRTUAL_ENV=$venv "$here/quietly.sh" \
  "$venv/bin/maturin" develop --release --target-dir "$target" --extras examples,test,lint
