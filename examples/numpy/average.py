"""Average an array over all ranks.

    torchrun --nproc-per-node 4 examples/numpy/average.py

torchrun is one way to start it; anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
does as well, and so do srun and mpirun.
"""

import numpy as np

import unisono

with unisono.init() as comm:
    measured = np.linspace(0.0, 1.0, 5) + comm.rank
    comm.all_reduce(measured, "avg")

    expected = np.linspace(0.0, 1.0, 5) + (comm.size - 1) / 2
    assert np.allclose(measured, expected)
    print(f"rank {comm.rank}: the average is {measured.tolist()}")
