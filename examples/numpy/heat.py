"""Heat in a rod that is divided among the ranks: neighbours exchange edges while they compute.

    torchrun --nproc-per-node 4 examples/numpy/heat.py

Each rank holds one piece of the rod, with a cell more at both ends for the neighbour's edge. In
every step the edges are on their way while the inner cells, which do not need them, are computed.
The result is compared with the same computation on one rank.
"""

import numpy as np

import unisono

CELLS, STEPS, RATE = 240, 500, 0.25


def step(rod: np.ndarray) -> np.ndarray:
    """The inner cells of `rod` one step later."""
    return rod[1:-1] + RATE * (rod[:-2] - 2 * rod[1:-1] + rod[2:])


with unisono.init() as comm:
    start = np.zeros(CELLS + 2)
    start[1 : CELLS // 3] = 100.0

    # Pieces may differ in size: the first ranks take one cell more.
    counts = [CELLS // comm.size + (rank < CELLS % comm.size) for rank in range(comm.size)]
    first = sum(counts[: comm.rank])
    rod = start[first : first + counts[comm.rank] + 2].copy()
    left, right = comm.rank - 1, comm.rank + 1

    for _ in range(STEPS):
        exchange = []
        if left >= 0:
            exchange += [comm.irecv(rod[:1], left), comm.isend(rod[1:2].copy(), left)]
        if right < comm.size:
            exchange += [comm.irecv(rod[-1:], right), comm.isend(rod[-2:-1].copy(), right)]
        inner = step(rod[1:-1])
        for work in exchange:
            work.wait()
        edges = step(rod[:3]), step(rod[-3:])
        rod[2:-2] = inner
        rod[1:2], rod[-2:-1] = edges

    whole = comm.gather_v(rod[1:-1], counts)
    if comm.rank == 0:
        alone = start
        for _ in range(STEPS):
            alone[1:-1] = step(alone)
        assert np.array_equal(whole, alone[1:-1])
        print(f"rank 0: {comm.size} ranks computed what one would, to the last bit")
