#!/bin/bash
# A program with NumPy, without torch:  sbatch numpy.sh program.py [its arguments]
#
# srun tells every task its number and the nodes of the job, and unisono takes them from there: nothing is set here for
# the ranks to meet. A program in C starts in the same way, without `python`.
#
#SBATCH --job-name=unisono-numpy
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
# Many clusters ask for these; with one # they count:
##SBATCH --partition=NAME
##SBATCH --account=NAME
set -euo pipefail

# Where unisono is installed: at the same path on every node. `module load ...` comes before, if the cluster has modules.
# shellcheck source=/dev/null
source "${VENV:-$HOME/venv}/bin/activate"

# Since Slurm 22.05 srun does not take this over from #SBATCH.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# Where other users reach the network of the nodes: a file that only you can read (docs/security.md).
# export UNISONO_SECRET_FILE=$HOME/job.secret
# Where nodes have several networks: the interfaces to use, by name (docs/hosts.md).
# export UNISONO_INTERFACE=ib

srun --label --kill-on-bad-exit=1 python "$@"
