#!/bin/bash
# A program with PyTorch by torchrun, one on each node:  sbatch torchrun.sh train.py [its arguments]
#
# srun starts torchrun, and torchrun starts the ranks of its node. It ends them all when one fails.
#
#SBATCH --job-name=unisono-torchrun
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
# Many clusters ask for these; with one # they count:
##SBATCH --partition=NAME
##SBATCH --account=NAME
set -euo pipefail

# The number of ranks on each node.
export PER_NODE=2

# Where unisono and torch are installed: at the same path on every node.
# shellcheck source=/dev/null
source "${VENV:-$HOME/venv}/bin/activate"

# Since Slurm 22.05 srun does not take this over from #SBATCH.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / PER_NODE))

# Rank 0 is on the first node. Jobs that share a node need different ports.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))
export MASTER_ADDR MASTER_PORT

# Any process that reaches torch's store can join, unless the ranks share a secret: a file that only you can read.
# export UNISONO_SECRET_FILE=$HOME/job.secret
# Where nodes have several networks: the interfaces to use, by name (docs/hosts.md).
# export UNISONO_INTERFACE=ib

# In single quotes: each task has its own values.
# shellcheck disable=SC2016
srun --label --kill-on-bad-exit=1 bash -c '
  exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"' bash "$@"
