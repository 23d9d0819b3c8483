#!/usr/bin/env bash
# Checks that a tag names the version of this checkout, and that CHANGELOG.md says what is in it.
#
#   tools/check-tag.sh v0.1.0
set -euo pipefail

tag=$1
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -1)
[ "$tag" = "v$version" ] || {
  echo "the tag is $tag, but Cargo.toml says $version: set the version, commit, and move the tag" >&2
  exit 1
}
grep -q "^## \[$version\] - " CHANGELOG.md || {
  echo "CHANGELOG.md has no section '## [$version] - DATE': rename [Unreleased] to it, commit, and move the tag" >&2
  exit 1
}
