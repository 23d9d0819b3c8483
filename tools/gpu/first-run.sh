#!/usr/bin/env bash
# The first minutes on a GPU, in the order in which the answers matter:
#
#   tools/gpu/first-run.sh [RESULTS]
#
# In the root of a checkout, on a machine with a GPU, torch and pytest, and with a wheel for that torch in dist/ (`make
# wheel`, made anywhere); it needs neither Rust nor a network. Its results go to the folder RESULTS (gpu-results). It takes
# some minutes, and each step has its own limit, so that one that hangs costs that step alone. With pytest-xdist the tests
# run several at a time.
set -uo pipefail

results=${1:-gpu-results}
python=${PYTHON:-python3}
mkdir -p "$results"
rm -rf "$results/site"
"$python" -m zipfile -e dist/unisono-*.whl "$results/site" || exit 1
PYTHONPATH=$(cd "$results/site" && pwd)
export PYTHONPATH PYTHONUNBUFFERED=1

# step NAME SECONDS COMMAND...: runs it, and keeps what it prints.
step() {
  local name=$1 limit=$2
  shift 2
  echo "== $name: $*"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$results/$name.txt"
  local status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] || echo "== $name: exit status $status" | tee -a "$results/$name.txt"
}

step environment 30 bash -c 'nvidia-smi; '"$python"' -c "import torch; print(torch.__version__, torch.cuda.nccl.version())"
  which make gcc compute-sanitizer'
step installed 30 "$python" -m unisono
step probe 160 "$python" tools/gpu/probe.py rust/core/src/transport/cuda/kernels/ptx
step all_reduce 90 "$python" benchmarks/cuda.py --ranks 2,4 --backends unisono,gloo --collectives all_reduce \
  --sizes 8,64K,1M,16M,64M,256M --rounds 5
# Where each block of a kernel, or each chunk of a window, costs time of its own, these differ.
for window in 16M 256M; do
  step "all_reduce-$window" 60 "$python" benchmarks/cuda.py --ranks 2 --backends unisono --collectives all_reduce \
    --sizes 8,1M,256M --rounds 5 --window "$window"
done
step in-place 60 "$python" benchmarks/cuda.py --ranks 2,4 --backends unisono --collectives all_reduce,broadcast --sizes 16M,64M,256M --rounds 5 --in-place
step exchange 60 "$python" benchmarks/cuda.py --ranks 2,4 --backends unisono --collectives exchange --sizes 64K,2M,16M,64M --rounds 5
at_once=()
"$python" -c 'import xdist' 2>/dev/null && at_once=(TEST='-n 6 --dist worksteal')
step tests 480 make test-cuda-quick SETUP=no PYTHON="$python" "${at_once[@]}"
echo "== what was learned is in $results; the figures belong into docs/cuda.md, with the GPU's name"
