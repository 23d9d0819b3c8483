"""NumPy arrays, without torch."""

from __future__ import annotations

import sys

import numpy as np

import unisono

comm = unisono.init()
for dtype in (np.float32, np.float64, np.int64, np.uint8, np.complex128):
    for length in (1, 1000, 500_000):
        array = np.full(length, comm.rank + 1, dtype=dtype)
        comm.all_reduce(array)
        assert (array == sum(range(1, comm.size + 1))).all()
heap = unisono.empty(1000, np.float32)
heap[:] = comm.rank
comm.broadcast(heap, root=1)
assert (heap == 1).all()
assert "torch" not in sys.modules
if comm.rank == 0:
    print("arrays are right")
