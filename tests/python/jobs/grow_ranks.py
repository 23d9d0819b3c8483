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
        with pytest.raises(unisono.InvalidArgumentError, match="3 ranks already"):
            comm.grow()
        mark.touch()
        grown = comm.grow(5, url=second)
        # The smaller group serves on.
        assert total(comm) == 6
        comm.close()
    assert (grown.rank, grown.size, grown.newcomers) == (rank, 5, [3, 4])
    assert total(grown) == 15
    # In the opposite order: the rank that serves the store is the last.
    rest = grown.split(0 if rank != 2 else 1, key=-rank)
    if rank == 2:
        rest.close()
        grown.close()
        # Its own place is free, and it takes it as a process that comes does.
        again = unisono.init(second, rank=2, world_size=5)
    else:
        assert (rest.rank, rest.size) == ([3, 2, None, 1, 0][rank], 4)
        with pytest.raises(unisono.InvalidArgumentError, match="number 4"):
            rest.grow(4, url=second)
        again = rest.grow(5, url=second)
    assert (again.rank, again.newcomers, total(again)) == (rank, [2], 15)
    # As many as met there, where none is said.
    if rank == 4:
        again.close()
        whole = unisono.init(second, rank=4, world_size=5)
    else:
        whole = again.shrink([4]).grow(url=second)
    assert (whole.rank, whole.newcomers, total(whole)) == (rank, [4], 15)


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


def of_handles(folder: str) -> None:
    """Ranks 0 to 2 form a group, then those but 1 with rank 3, in another order."""
    rank, me = place(), unisono.Candidate()
    Path(folder, f"{rank}.part").write_text(me.handle)
    Path(folder, f"{rank}.part").rename(Path(folder, str(rank)))
    handles = []
    for other in range(4):
        while not Path(folder, str(other)).exists():
            time.sleep(0.01)
        handles.append(Path(folder, str(other)).read_text())
    first, second = [0, 1, 2], [3, 0, 2]
    if rank in first:
        comm = me.form([handles[r] for r in first], 1)
        assert (comm.rank, comm.size, total(comm)) == (rank, 3, 6)
        with pytest.raises(unisono.InvalidArgumentError, match="not among"):
            me.form(handles[3:], 2)
        with pytest.raises(unisono.InvalidArgumentError, match="was used"):
            me.form(handles, 1)
    if rank in second:
        again = me.form([handles[r] for r in second], 2)
        assert (again.rank, again.size, total(again)) == (second.index(rank), 3, 6)
        # One does not come.
        begun = time.monotonic()
        with pytest.raises(unisono.TimeoutError, match="rank 3" if rank == 3 else None):
            me.form([*(handles[r] for r in second), handles[1]], 3, timeout=0.5)
        assert time.monotonic() - begun < 10
        assert total(again) == 6
        Path(folder, f"done-{rank}").touch()
    else:
        # As long as its candidate lives the process can be reached.
        while not all(Path(folder, f"done-{other}").exists() for other in second):
            time.sleep(0.01)
