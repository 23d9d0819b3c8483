#!/usr/bin/env bash
# Installs what an extra of pyproject.toml names, once, and leaves the torch of the environment as it is. The tools and tests
# that need the extra do without it or skip, so this never fails.
#
#   tools/install-extra.sh VENV EXTRA WHAT WITHOUT
#
# WHAT says in words what it is, and WITHOUT what follows where it cannot be installed.
set -euo pipefail

venv=$1 extra=$2 what=$3 without=$4
python=$venv/bin/python
stamp=$venv/.unisono-$extra

[ ! -f "$stamp" ] || exit 0
echo "installing $what"
requirements_of='
import importlib.metadata, sys
for requirement in importlib.metadata.requires("unisono"):
    name, _, marker = requirement.partition(";")
    if sys.argv[1] in marker:
        print(name.strip())
'
"$python" -m pip freeze | grep '^torch==' >"$stamp.constraints" || true
mapfile -t requirements < <("$python" -c "$requirements_of" "$extra")
# DeepSpeed would compile its kernels.
if [ ${#requirements[@]} -gt 0 ] &&
  DS_BUILD_OPS=0 "$python" -m pip install -c "$stamp.constraints" "${requirements[@]}"; then
  touch "$stamp"
else
  echo "$without"
fi
