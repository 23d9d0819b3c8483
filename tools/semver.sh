#!/usr/bin/env bash
# Compares the public items of the crates that are published with those of an earlier commit, and fails for a change that the
# version does not allow: docs/versioning.md says what it promises.
#
#   tools/semver.sh TOOLS [BASELINE]
#
# TOOLS is a folder, into which cargo-semver-checks is installed where it is not there. BASELINE is a git revision; without
# one it is the tag of the last release before this commit, and before the first release there is nothing to compare with.
set -euo pipefail

tools=$1 baseline=${2:-}
cargo=${CARGO:-cargo}
# A compiler that is newer than this one may write what it does not read. It needs Rust 1.93 itself.
version=0.51.0
crates=(unisono-plan unisono-reduce unisono unisono-launch)

if [ -z "$baseline" ]; then
  if [ "$(git rev-parse --is-shallow-repository)" = true ]; then
    echo "semver: this clone may lack the tag of the last release: git fetch --unshallow --tags, or name a BASELINE" >&2
    exit 1
  fi
  # The tag of a release that is this commit is not before it.
  baseline=$(git tag --merged HEAD --no-contains HEAD --sort=-version:refname --list 'v[0-9]*.[0-9]*.[0-9]*' | grep -v -- - | head -n 1 || true)
  if [ -z "$baseline" ]; then
    echo "semver: there is no release yet, nothing is compared: it will be with the last tag v*;" \
      "make semver BASELINE=REVISION compares with any commit"
    exit 0
  fi
fi

if [ "$("$tools/bin/cargo-semver-checks" --version 2>/dev/null)" != "cargo-semver-checks $version" ]; then
  # Compiled as its profile says it would take several times as long as all that it does here.
  CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_OPT_LEVEL=1 \
    "$cargo" install --quiet --locked --root "$tools" "cargo-semver-checks@$version"
fi
echo "semver: compared with $baseline"
# shellcheck disable=SC2046 # One word for each.
"$tools/bin/cargo-semver-checks" semver-checks --baseline-rev "$baseline" $(printf -- '--package %s ' "${crates[@]}")
