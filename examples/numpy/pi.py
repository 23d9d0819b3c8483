"""Estimate pi with every rank's share of the samples, and give one rank the answer.

    torchrun --nproc-per-node 4 examples/numpy/pi.py

Every rank draws points of its own and counts those inside the circle. Rank 0 gets the sum of the
counts, and with `gather` also what each rank contributed.
"""

import numpy as np

import unisono

SAMPLES = 400_000

with unisono.init() as comm:
    points = np.random.default_rng(comm.rank).random((SAMPLES, 2))
    inside = np.array([(np.square(points).sum(axis=1) < 1.0).sum()])

    per_rank = comm.gather(inside)
    total = comm.reduce(inside)
    if comm.rank == 0:
        estimate = 4.0 * float(total[0]) / (SAMPLES * comm.size)
        assert abs(estimate - np.pi) < 0.02
        print(f"rank 0: pi is about {estimate:.4f}, from {per_rank.ravel().tolist()}")
