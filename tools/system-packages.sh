#!/usr/bin/env bash
# Makes sure that what pip and cargo cannot bring is there. As root on Debian the missing packages are installed;
# otherwise they are named.
#
#   tools/system-packages.sh c             what the C library and the launcher need: cargo and a C compiler
#   tools/system-packages.sh build VENV    what everything needs; VENV is the environment that exists or will be made
#   tools/system-packages.sh docs          what builds the reference of the C header
#   tools/system-packages.sh tests         what some tests use besides, which skip without: so it never fails
#   tools/system-packages.sh slow-tests    the same, and what the slow ones use
#
# CARGO and PYTHON are the commands to use, cargo and python3 by default.
set -euo pipefail

cargo=${CARGO:-cargo}
python=${PYTHON:-python3}
missing=()

there() { command -v "$1" >/dev/null; }
is_root_on_debian() { [ "$(id -u)" -eq 0 ] && there apt-get; }

install_missing() {
  echo "installing ${missing[*]}"
  apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" </dev/null
}

need_compiler_and_cargo() {
  there "$cargo" || {
    echo "cargo is not installed. Install stable Rust (https://rust-lang.org/tools/install), then run make again." >&2
    exit 1
  }
  there cc || missing+=(gcc)
}

need_all_to_build() {
  local venv=$1
  there c++ || missing+=(g++)
  there "$python" || missing+=(python3 python3-venv)
  # The tests across hosts skip without it, so no user is asked for it.
  ! is_root_on_debian || there ip || missing+=(iproute2)
  if [ ! -x "$venv/bin/python" ] && there "$python"; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
      echo "$("$python" --version) is too old: unisono needs 3.10 or newer (make PYTHON=python3.12)" >&2
      exit 1
    }
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  fi
}

case $1 in
  c) need_compiler_and_cargo ;;
  build)
    need_compiler_and_cargo
    need_all_to_build "$2"
    ;;
  docs) there doxygen || missing+=(doxygen) ;;
  tests | slow-tests)
    is_root_on_debian || exit 0
    for tool in clang valgrind pkg-config doxygen zsh fish; do there $tool || missing+=("$tool"); done
    there sshd || missing+=(openssh-client openssh-server)
    there nft || missing+=(nftables)
    [ "$1" = tests ] || there slurmd || missing+=(slurm-wlm munge)
    [ ${#missing[@]} -eq 0 ] || install_missing ||
      echo "${missing[*]} could not be installed: some tests will be skipped"
    exit 0
    ;;
  *)
    echo "system-packages.sh: c, build VENV, docs, tests or slow-tests" >&2
    exit 2
    ;;
esac

if [ ${#missing[@]} -eq 0 ]; then
  exit 0
elif is_root_on_debian; then
  install_missing
else
  echo "missing: ${missing[*]}. On Debian: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
