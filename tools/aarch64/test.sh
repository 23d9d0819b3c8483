#!/usr/bin/env bash
# Tests the build for aarch64 under an emulator:
#
#   tools/aarch64/test.sh quick    the kernels, the heap, the links and the wire format; a C program; a NumPy job; a few minutes
#   tools/aarch64/test.sh whole    all tests in Rust, the C examples, the tests of the NumPy door
#
# Both also with long pages, where the size of a page matters. Where a tool cannot be had, or nothing can be emulated, the
# script says so and skips the tests; with REQUIRED=yes they fail instead. An emulator orders memory as the machine below it
# does: only loom and the hardware find what a weaker order breaks.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
part=${1:?quick or whole}
skip_if_3() {
  [ "$1" -eq 3 ] || exit "$1"
  if [ "${REQUIRED:-no}" = yes ]; then
    echo "test-aarch64: failed, for here it is required (REQUIRED=yes)" >&2
    exit 1
  fi
  echo "test-aarch64: skipped"
  exit 0
}
"$here/prepare.sh" || skip_if_3 $?
# shellcheck source=environment.sh
source "$here/environment.sh"
"$here/emulate.sh" true || skip_if_3 $?

say() { echo "test-aarch64: $*"; }

built=$out
if [ "$part" = quick ]; then
  # It compiles sooner, and what the tests wait for is the emulator.
  export CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_DEBUG=false CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true
  export AARCH64_BUILDS=$folder/quick
  builds=$AARCH64_BUILDS
  built=$builds/out
fi
use_compilers
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$here/emulate.sh
cd "$checkout"

# Tests that this emulator (qemu-user 7.2) is not able to run:
left_out=(
  # It has no process_vm_readv, which these are about; all the rest then goes the way that the library falls back to.
  descriptions_that_no_member_writes_are_errors messages_in_the_middle_of_a_loan_are_errors
  a_trial_lies_in_private_memory_as_a_whole private_memory_goes_the_way_that_takes_less
  private_memory_out_of_reach_is_copied a_revoked_loan_is_never_whole what_a_forked_child_drops_takes_nothing_back
  a_successor_to_the_number_delivers_nothing
  who_dies_while_its_memory_is_read_is_lost processes_talk_with_messages_of_every_kind
  a_successor_delivers_nothing who_executes_another_program_is_lost
  # For want of it these move megabytes through rings of 64 bytes, between threads that take turns: it takes minutes.
  messages_of_every_kind_arrive_in_order sleepers_are_woken_by_messages_of_every_kind
  # It maps no tens of GiB at a time.
  what_no_heap_can_fill_is_not_mapped
  # In /proc/self/stat each thread of a process has begun at another time.
  many_threads_lose_nothing ranks_meet_in_a_file
  # Its deadline is for a processor that is there.
  a_deadline_before_the_end_of_refusals_is_a_timeout
)
# They take longest where nothing is optimized, and tell no more than shorter ones beside them.
[ "$part" = whole ] ||
  left_out+=(a_hundred_megabytes_arrive what_exceeds_the_cache_arrives float32_narrows_to_the_nearest
    a_pass_has_the_bits_of_successive_folds every_operator_matches_the_reference_across_blocks)
say "left out: ${left_out[*]}"

# Tests of the packages and targets before `--` whose names contain one of what follows, all if nothing does.
test_rust() {
  say "cargo test $*"
  local skipped=("${left_out[@]/#/--skip=}")
  "$cargo" test --quiet --target "$triple" "$@" "${skipped[@]}"
}

# Where the size of a page matters. The emulator makes long pages of the machine's short ones: of a private mapping only those
# are copied that are written to, and a backtrace, which maps the program's own file, ends it.
export RUST_BACKTRACE=0
of_pages=(
  --skip=a_loan_that_comes_back_leaves_what_is_shared_beside_it --skip=what_a_stopped_peer_writes_when_it_goes_on_is_lost
  heap:: transport::shm::tests::
)
if [ "$part" = quick ]; then
  export PROPTEST_CASES=16
  test_rust --release -p unisono-reduce --lib --
  test_rust --release -p unisono --lib -- reduce:: wire heap:: transport::shm::tests::
  PAGE=65536 test_rust --release -p unisono --lib -- "${of_pages[@]}"
else
  # Not those of devices, which are emulated for this machine, nor of lending, which needs process_vm_readv.
  test_rust -p unisono-plan -p unisono-reduce --lib --
  test_rust -p unisono --lib --test collectives --test counts --test engine --test threads --
  # Not what is in their documentation: that would be compiled by the rustdoc of another compiler.
  test_rust -p unisono-capi -p unisono-launch --lib --bins --tests --
  for page in 16384 65536; do
    PAGE=$page test_rust -p unisono --lib -- "${of_pages[@]}"
  done
fi

say "the C library, the launcher and the Python module"
"$here/build.sh" "$built"

emulate() { timeout "${LIMIT:-120}" "$here/emulate.sh" "$@"; }
launch() { emulate "$built/unisono" launch -n "$@"; }

programs=$builds/programs
mkdir -p "$programs"
examples=(hello)
[ "$part" = quick ] || examples=(hello ring heat sample_sort store)
for example in "${examples[@]}"; do
  say "examples/c/$example.c with 4 ranks"
  "$CC_aarch64_unknown_linux_gnu" -std=c99 -O2 -Wall -Wextra -Werror -Iinclude -o "$programs/$example" \
    "examples/c/$example.c" -L"$built/c" -lunisono -Wl,-rpath,"$built/c" -lm -ldl
  place=$(mktemp -d)
  launch 4 "$programs/$example" "$place"
  rm -r "$place"
done

# As a package of that architecture would be installed, beside NumPy.
package=$builds/package
rm -rf "$package"
mkdir -p "$package"
cp -r python/unisono "$package/"
rm -rf "$package"/unisono/{*.so,c,__pycache__}
cp "$built/_core.abi3.so" "$package/unisono/"
export PYTHONPATH=$package:$modules PYTHONDONTWRITEBYTECODE=1
python=$sysroot/usr/bin/python3
for page in 4096 16384 65536; do
  for example in average pi; do
    say "examples/numpy/$example.py with 2 ranks and pages of $page bytes"
    PAGE=$page launch 2 "$python" "examples/numpy/$example.py"
  done
done

if [ "$part" = whole ]; then
  say "the tests of the NumPy door"
  # The limits of the tests are for a processor that is there.
  export UNISONO_TEST_PATIENCE=10
  # Of those that meet in a file: in /proc/self/stat each thread of an emulated process has begun at another time, so a
  # process is taken for two.
  files=(--deselect "tests/python/numpy/test_numpy_arrays.py::test_meeting_at_a_url[file]")
  files+=(--deselect tests/python/numpy/test_numpy_failures.py::test_threads_go_with_the_last_communicator)
  LIMIT=3600 emulate "$python" -m pytest -q -rs -p no:cacheprovider -o pythonpath=tests/support --timeout 1800 "${files[@]}" \
    tests/python/numpy/test_numpy_{arrays,collectives,failures,heap}.py tests/python/project/test_ranks.py \
    tests/python/jobs/test_store.py
fi
say "passed"
