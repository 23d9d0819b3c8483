#!/usr/bin/env bash
# Writes which crates the wheel is made of, with all features and for all platforms, as CycloneDX into
# dist/unisono-rust.cdx.json. (The wheel has its own of what maturin built, without the torch door.)
#
#   tools/make-sbom.sh
#
# It needs cargo-cyclonedx, which puts one file beside each Cargo.toml of the workspace.
set -euo pipefail

name=unisono-bill-of-materials
trap 'find rust tests -name "$name.json" -delete' EXIT
"${CARGO:-cargo}" cyclonedx --quiet --all-features --target all --format json --spec-version 1.5 --override-filename "$name"
mkdir -p dist
# Crates of the workspace are named by where it lies, which would differ from machine to machine.
sed "s|$PWD|/unisono|g" "rust/torch/$name.json" >dist/unisono-rust.cdx.json
