"""The rank functions to see that groups give back what they took from a CUDA device.

It shows in the memory that is free on the device: a window takes 32 MiB, and an import of it that
is not closed keeps it, also after its owner has freed it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from cuda_array_ranks import until
from cuda_arrays import InterfaceArray, cuda

import unisono

# A driver keeps tables of pages, pools of events and room for commands in steps of 2 MiB.
SLACK = 16 << 20
# Within this time a closed group has given back everything that it gives back soon.
SOON = 5.0


def join(folder: str, name: str, size: int) -> unisono.Communicator:
    """A group of the first ranks. Each has a file of its own to meet in."""
    url = f"file://{folder}/{name}"
    return unisono.init(url, rank=int(os.environ["RANK"]), world_size=size, timeout=60)


def forms_groups(folder: str, times: int) -> None:
    """Group after group: each is all there is, so with it goes all that there was."""
    cuda().enter()
    size = int(os.environ["WORLD_SIZE"])
    array = InterfaceArray(np.ones(1000, np.float32))

    def form(name: str) -> None:
        with join(folder, name, size) as comm:
            array.fill(np.ones(1000, np.float32))
            comm.all_reduce(array)
            assert (array.numpy() == size).all()

    def meet(name: str) -> None:
        with join(folder, name, size) as comm:
            comm.barrier()

    def free_memory(name: str) -> int:
        """The bytes that are free when no rank has a group."""
        meet(f"before-{name}")
        time.sleep(SOON)
        free = cuda().free_memory
        meet(f"after-{name}")
        return free

    for number in range(2):
        form(f"first-{number}")
    before = free_memory("memory")
    for number in range(times):
        form(f"group-{number}")
    # No rank ends before all have looked: a process that ends gives everything back.
    kept = before - free_memory("memory-again")
    assert kept <= SLACK, f"{kept} bytes are kept"


def loses_a_peer(folder: str) -> None:
    """Ranks 0, 1 and 2 form a group, 2 is killed, the others close; 3 looks at the memory.

    Before and after, ranks 0 and 1 are there without a group; rank 2 has not come yet, or has gone.
    Where they are they tell by files, since groups end with their ranks.
    """
    rank, place = int(os.environ["RANK"]), Path(folder)

    def tell(what: str) -> None:
        (place / f"{what}-{rank}").touch()

    def await_all(what: str, *ranks: int) -> None:
        for _ in until(lambda: all((place / f"{what}-{other}").exists() for other in ranks), 60):
            pass

    if rank == 3:
        cuda().enter(0)
        await_all("warm", 0, 1)
        time.sleep(SOON)
        before = cuda().free_memory
        tell("measured")
        await_all("closed", 0, 1)
        for _ in until(lambda: cuda().free_memory >= before - SLACK):
            pass
        tell("seen")
        return
    if rank == 2:
        await_all("measured", 3)
    cuda().enter(0)
    array = InterfaceArray(np.ones(1000, np.float32))
    if rank < 2:
        with join(folder, "pair", 2) as comm:
            comm.all_reduce(array)
            assert (array.numpy() == 2).all()
        tell("warm")
        await_all("measured", 3)
    before = cuda().free_memory
    comm = join(folder, "three", 3)
    array.fill(np.ones(1000, np.float32))
    comm.all_reduce(array)
    assert (array.numpy() == 3).all()
    comm.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(unisono.PeerLostError, match="rank 2"):
        comm.all_reduce(array, async_op=True).wait()
    comm.close()
    tell("closed")
    # unisono waits for what a dead peer may have had under way. A process that ends earlier leaves
    # that to the driver.
    for _ in until(lambda: cuda().free_memory >= before - SLACK):
        pass
    await_all("seen", 3)
