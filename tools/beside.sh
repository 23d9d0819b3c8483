#!/usr/bin/env bash
# Runs two commands at the same time, for one that waits leaves cores to the other. Only the output of the second is seen
# while it runs; that of the first comes at the end. It fails where either does, and where the second does it ends the first.
#
#   tools/beside.sh COMMAND... -- COMMAND...
set -euo pipefail

first=()
while [ "$1" != -- ]; do
  first+=("$1")
  shift
done
shift

output=$(mktemp)
began=$EPOCHSECONDS
# A process group of its own, which ends as a whole.
set -m
{
  status=0
  "${first[@]}" || status=$?
  echo "${first[*]}: ended after $(((EPOCHSECONDS - began + 30) / 60)) min, with status $status"
  exit "$status"
} >"$output" 2>&1 </dev/null &
pid=$!
set +m
trap 'kill -- -$pid 2>/dev/null || true; rm -f "$output"' EXIT
trap 'exit 130' INT TERM

second=0
"$@" || second=$?
[ "$second" -eq 0 ] || kill -- "-$pid" 2>/dev/null || true
status=0
wait "$pid" || status=$?
printf '\n%s, beside that:\n' "${first[*]}"
cat "$output"
[ "$second" -eq 0 ] || status=$second
exit "$status"
