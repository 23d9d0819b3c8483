#!/usr/bin/env bash
# Fuzzes all that is parsed from a peer or from the environment, as many targets at a time as there are cores.
#
#   tools/fuzz.sh TARGET SECONDS
#
# The findings of a target go to fuzz/artifacts, and the inputs that it learns to cargo's folder TARGET: fuzz/corpus has the
# seeds alone. SECONDS is for each target. It says why it skips where there is no nightly toolchain with cargo-fuzz.
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
export ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0
# Where it runs for a shorter time than it compiles.
[ "$seconds" -ge 60 ] || export CARGO_PROFILE_RELEASE_OPT_LEVEL=0
"$cargo" +nightly fuzz build --target-dir "$target/fuzz"
programs=$target/fuzz/$(uname -m)-unknown-linux-gnu/release

# Runs one target as cargo fuzz does. Its output is shown when it has ended.
fuzz() {
  local name=$1 learned=$target/fuzz/corpus/$1 artifacts=fuzz/artifacts/$1
  mkdir -p "$learned" "$artifacts"
  local output status=0
  output=$("$programs/$name" -artifact_prefix="$artifacts/" "-max_total_time=$seconds" -max_len=4096 -rss_limit_mb=2048 \
    -timeout=20 -verbosity=0 -print_final_stats=1 "$learned" "fuzz/corpus/$name" 2>&1) || status=$?
  printf 'fuzz: %s, %s s\n%s\n' "$name" "$seconds" "$output"
  return "$status"
}
export -f fuzz
export programs target seconds
basename -s .rs fuzz/fuzz_targets/*.rs | xargs -P "$(nproc)" -I{} bash -c 'fuzz {}'
