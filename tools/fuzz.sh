#!/usr/bin/env bash
# Fuzzes all that is parsed from a peer or from the environment, one target after the other.
#
#   tools/fuzz.sh TARGET SECONDS
#
# What a target finds goes to fuzz/artifacts, and what it learns to cargo's folder TARGET: fuzz/corpus has the seeds alone.
# SECONDS is for each of them. It says why it skips where there is no nightly toolchain with cargo-fuzz.
set -euo pipefail

target=$1 seconds=$2
cargo=${CARGO:-cargo}

if ! "$cargo" +nightly --version >/dev/null 2>&1; then
  echo "fuzz: there is no nightly toolchain, skipped (rustup toolchain install nightly)"
  exit 0
fi
if ! "$cargo" +nightly fuzz --version >/dev/null 2>&1; then
  echo "fuzz: cargo-fuzz is not installed, skipped (cargo install cargo-fuzz)"
  exit 0
fi
unset CARGO_TARGET_DIR
"$cargo" +nightly fuzz build --target-dir "$target/fuzz"
for path in fuzz/fuzz_targets/*.rs; do
  name=$(basename "$path" .rs)
  learned=$target/fuzz/corpus/$name
  mkdir -p "$learned"
  echo "fuzz: $name, $seconds s"
  ASAN_OPTIONS=detect_leaks=0 "$cargo" +nightly fuzz run --target-dir "$target/fuzz" "$name" "$learned" "fuzz/corpus/$name" -- \
    "-max_total_time=$seconds" -max_len=4096 -rss_limit_mb=2048 -timeout=20 -verbosity=0 -print_final_stats=1
done
