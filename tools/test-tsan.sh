#!/usr/bin/env bash
# Runs under ThreadSanitizer the tests in which threads of one process share memory at the same addresses; what ranks map
# twice it cannot follow. Simulated worlds have one thread each, and are left out.
#
#   tools/test-tsan.sh TARGET
#
# The standard library is built anew, because all code must be instrumented. Threads that the process ends with are no leak.
# It says why it skips where there is no nightly toolchain with the sources of the standard library.
set -euo pipefail

target=$1
tests=(engine:: heap:: reduce::workers transport::)

if ! sysroot=$(rustc +nightly --print sysroot 2>/dev/null); then
  echo "test-tsan: there is no nightly toolchain, skipped (rustup toolchain install nightly)"
  exit 0
fi
if [ ! -d "$sysroot/lib/rustlib/src" ]; then
  echo "test-tsan: rust-src is not installed, skipped (rustup component add rust-src --toolchain nightly)"
  exit 0
fi
export RUSTFLAGS=-Zsanitizer=thread TSAN_OPTIONS="halt_on_error=1 report_thread_leaks=0"
set -x
"${CARGO:-cargo}" +nightly test -Zbuild-std --target "$(uname -m)-unknown-linux-gnu" --target-dir "$target/tsan" \
  -p unisono --lib -- "${tests[@]}" --skip engine::world
