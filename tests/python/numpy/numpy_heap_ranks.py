"""The rank functions of `test_numpy_heap.py`, for arrays in the shared heap."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path

import numpy as np

import unisono

ELEMENTS = 300_000


def target(entry: Path) -> str:
    with contextlib.suppress(FileNotFoundError):  # The descriptor of the listing itself.
        return str(entry.readlink())
    return ""


def files() -> list[str]:
    """The memory files of shared heaps, its own and its peers', that this process holds or maps."""
    held = [target(entry) for entry in Path("/proc/self/fd").iterdir()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in [*held, *maps] if "memfd:unisono heap" in line]


def sums() -> dict[str, object]:
    """All reduce arrays in the heap, and see what is left of it afterwards."""
    with unisono.init() as comm:
        array = unisono.empty(ELEMENTS, "float32")
        in_heap = array in unisono.heap()
        for _ in range(3):
            array[:] = comm.rank + 1
            comm.all_reduce(array)
        gathered = unisono.empty((comm.size, ELEMENTS), "float32")
        comm.all_gather(array, out=gathered)
        values = [float(array.min()), float(array.max()), float(gathered.sum())]
        busy = unisono.heap()
        seen = len(files())
        # Taken along past the end of the group.
        kept = array[10:20]
        del array, gathered
        comm.barrier()
    some = unisono.heap().blocks
    values.append(float(kept.sum()))
    del kept
    gc.collect()
    # The links of a group that was closed end on another thread.
    deadline = time.monotonic() + 10
    while unisono.heap().segments and time.monotonic() < deadline:
        time.sleep(0.01)
    rest = unisono.heap()
    return {
        "in_heap": in_heap,
        "values": values,
        "blocks": [busy.blocks, some, rest.blocks],
        "in_use": [busy.in_use, rest.in_use],
        "limit": rest.limit,
        "files": [seen, len(files())],
        "segments": rest.segments,
    }


def fork_in_between() -> list[float]:
    """A child has the arrays for itself, and a heap of its own."""
    with unisono.init() as comm:
        array = unisono.empty(ELEMENTS, "float32")
        array[:] = comm.rank + 1
        child = os.fork()
        if child == 0:
            status = 1
            try:
                before = float(array[0])
                array[1] = 50
                mine = unisono.empty(ELEMENTS)
                mine[:] = 7
                alone = mine in unisono.heap() and array not in unisono.heap()
                alone = alone and unisono.heap().blocks == 1
                del array, mine
                gc.collect()
                status = int(not (alone and before == comm.rank + 1))
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert status == 0
        seen = float(array[1])
        assert array in unisono.heap()
        assert unisono.heap().blocks == 1
        comm.all_reduce(array)
        return [seen, float(array[0]), float(array[1])]


def make_and_free() -> dict[str, object]:
    """Arrays of one rank alone, in a heap of a few MiB."""
    with unisono.init():
        first, second, third = (unisono.empty((1000, 1000), "float32") for _ in range(3))
        first[:], second[:], third[:] = 1, 2, 3
        small = unisono.empty(10)
        where = [array in unisono.heap() for array in (first, second, third, small)]
        sums = [float(array.sum()) for array in (first, second, third)]
        reserved = unisono.heap().reserved
        del first
        again = unisono.empty((1000, 1000), "float32")
        where.append(again in unisono.heap())
        assert np.shares_memory(again, again[5:7])
        limit = unisono.heap().limit
    return {"where": where, "sums": sums, "reserved": reserved, "limit": limit}
