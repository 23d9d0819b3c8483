"""The ranks of test_grow.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import unisono


def place() -> int:
    return int(os.environ["RANK"])


def total(comm) -> float:
    array = np.full(1000, comm.rank + 1.0)
    comm.all_reduce(array)
    return array[0]


def further_ranks(folder: str, first: str, second: str) -> None:
    """Ranks 3 and 4 come later, at another place, and then rank 2 is replaced by itself."""
    rank, mark = place(), Path(folder, "now")
    if rank >= 3:
        while not mark.exists():
            time.sleep(0.01)
        grown = unisono.init(second, rank=rank, world_size=5)
    else:
        comm = unisono.init(first, rank=rank, world_size=3)
        assert (total(comm), comm.newcomers) == (6, [0, 1, 2])
        part = comm.split(0)
        assert part.newcomers == []
        with pytest.raises(unisono.InvalidArgumentError, match="where those that come cannot"):
            part.grow(5)
        with pytest.raises(unisono.InvalidArgumentError, match="world_size"):
            comm.grow(url=second)
        with pytest.raises(unisono.InvalidArgumentError, match="3 ranks already"):
            comm.grow()
        mark.touch()
        grown = comm.grow(5, url=second)
        # The smaller group serves on.
        assert total(comm) == 6
        comm.close()
    assert (grown.rank, grown.size, grown.newcomers) == (rank, 5, [3, 4])
    assert total(grown) == 15
    rest = grown.split(0 if rank != 2 else 1)
    if rank == 2:
        rest.close()
        grown.close()
        # Its own place is free, and it takes it as a process that comes does.
        again = unisono.init(second, rank=2, world_size=5)
    else:
        with pytest.raises(unisono.InvalidArgumentError, match="number 4"):
            rest.grow(4, url=second)
        again = rest.grow(5, url=second)
    assert (again.rank, again.newcomers, total(again)) == (rank, [2], 15)


def none_comes(folder: str, url: str) -> None:
    comm = unisono.init()
    begun = time.monotonic()
    with pytest.raises(unisono.TimeoutError, match="2" if comm.rank == 0 else None):
        comm.grow(3, timeout=0.5)
    assert time.monotonic() - begun < 10
    assert (total(comm), comm.error) == (3, None)
    # A file keeps the entries of those that have met there.
    with pytest.raises(unisono.InvalidArgumentError, match="URL"):
        unisono.init(f"file://{folder}/file", rank=comm.rank, world_size=2).grow(3)
    # One calls it when the other has given up, and the other way round; then both do.
    for first in (0, 1):
        if comm.rank == first:
            with pytest.raises(
                unisono.TimeoutError, match="ranks 1, 2" if first == 0 else "rank 0"
            ):
                comm.grow(3, url=url, timeout=0.1)
        comm.barrier()
        if comm.rank != first:
            with pytest.raises(unisono.Error):
                comm.grow(3, url=url, timeout=0.1)
        comm.barrier()
    begun = time.monotonic()
    with pytest.raises(unisono.TimeoutError, match="2" if comm.rank == 0 else None):
        comm.grow(3, timeout=0.5)
    assert time.monotonic() - begun < 3


def one_cannot(url: str) -> None:
    comm = unisono.init()
    wrong = "tcp://127.0.0.1:1" if comm.rank == 1 else None
    kinds = (unisono.TimeoutError, unisono.AbortedError)
    begun = time.monotonic()
    with pytest.raises(kinds):
        comm.grow(4, url=wrong or url, timeout=1)
    assert time.monotonic() - begun < 10
    assert total(comm) == 6


def one_is_lost() -> float:
    comm = unisono.init()
    total(comm)
    if comm.rank == 2:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begun = time.monotonic()
    with pytest.raises(unisono.PeerLostError, match="rank 2"):
        comm.grow(4)
    seconds = time.monotonic() - begun
    left = comm.shrink()
    assert total(left) == 3
    return seconds


class InterruptError(Exception):
    pass


def interrupted() -> None:
    comm = unisono.init()
    total(comm)
    if comm.rank == 1:

        def end(*_):
            raise InterruptError

        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(InterruptError):
            comm.grow(3)
    else:
        with pytest.raises(unisono.AbortedError, match="interrupted in grow"):
            comm.grow(3)
