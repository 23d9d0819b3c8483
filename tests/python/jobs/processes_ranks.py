"""The rank functions of `test_processes.py`: ranks fork, and execute other programs."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import unisono

LARGE = 1 << 18
BEFORE, AFTER = 42.0, 666.0
# The seconds after which a child that hangs ends.
LIFE = 40


def in_child(body: Callable[[], None]) -> int:
    """Fork a child that does `body` and ends as a Python process does; returns its number."""
    child = os.fork()
    if child == 0:
        threading.Timer(LIFE, os._exit, [99]).start()
        code = 1
        try:
            body()
            code = 0
        except BaseException as error:
            print("child:", type(error).__name__, error, file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def exchange(comm: unisono.Communicator) -> None:
    """Every way that a message can take."""
    world = comm.size
    assert comm.all_reduce(np.ones(3)).tolist() == [world] * 3
    for make in (np.empty, unisono.empty):
        for _ in range(3):
            array = make(LARGE, "float32")
            array[:] = comm.rank + 1
            comm.all_reduce(array)
            assert set(array.tolist()) == {world * (world + 1) / 2}
        send = comm.isend(np.full(LARGE, comm.rank, np.float32), (comm.rank + 1) % world)
        array = make(LARGE, "float32")
        comm.recv(array, (comm.rank - 1) % world)
        assert set(array.tolist()) == {(comm.rank - 1) % world}
        send.wait()
    part = comm.split(0)
    assert part is not None
    part.barrier()
    work = part.all_reduce(np.ones(LARGE), async_op=True)
    assert work.result().sum() == world * LARGE
    part.close()


def meet_in(path: str, like: unisono.Communicator) -> unisono.Communicator:
    """A group of the children of the ranks of another one."""
    return unisono.init(f"file://{path}", rank=like.rank, world_size=like.size, timeout=30)


def children_make_groups(folder: str) -> None:
    """Each rank's children form groups, twice, while the rank's own group is open and in use.

    Their parent's threads are in the middle of something: one waits for a message, and one computes
    sums with the other ranks.
    """
    with unisono.init(timeout=60) as comm:
        exchange(comm)
        silent = comm.irecv(np.zeros(1), (comm.rank + 1) % comm.size, tag=7)
        waiter = threading.Thread(target=silent.wait)
        waiter.start()
        other = comm.split(0)
        assert other is not None
        goes_on = True

        def compute() -> None:
            while other.all_reduce(np.array([goes_on]), "min")[0]:
                pass

        computer = threading.Thread(target=compute)
        computer.start()

        def child(number: int) -> None:
            with pytest.raises(unisono.Error, match="forked"):
                comm.barrier()
            for round_ in range(2):
                with meet_in(f"{folder}/{number}-{round_}", comm) as own:
                    exchange(own)

            # Its own child, too.
            def grandchild() -> None:
                with meet_in(f"{folder}/{number}-grandchild", comm) as own:
                    exchange(own)

            assert ended(in_child(grandchild)) == 0
            gc.collect()

        for number in range(2):
            assert ended(in_child(lambda number=number: child(number))) == 0
        goes_on = False
        computer.join()
        comm.send(np.ones(1), (comm.rank - 1) % comm.size, tag=7)
        waiter.join()
        exchange(comm)


def a_child_ends_with_an_open_group(folder: str) -> None:
    """It ends as a Python process does: what it has left open is closed in good order."""
    with unisono.init(timeout=30) as comm:
        comm.barrier()
        child = os.fork()
        if child == 0:
            own = meet_in(f"{folder}/open", comm)
            own.all_reduce(np.ones(LARGE))
            raise SystemExit(0)
        assert ended(child) == 0
        comm.barrier()


def a_child_writes_what_it_has_of_its_parent() -> None:
    """Its parent does not see what it writes, nor do the peers, whose memory it has mapped."""
    with unisono.init(timeout=30) as comm:
        mine = unisono.empty(LARGE, "float32")
        mine[:] = comm.rank + 1
        comm.all_reduce(mine)
        before = mine.copy()

        def child() -> None:
            assert np.array_equal(mine, before)
            mine[:] = -1
            assert set(mine.tolist()) == {-1}
            scribble_over_shared_memory()

        assert ended(in_child(child)) == 0
        comm.barrier()
        assert np.array_equal(mine, before)
        exchange(comm)


def scribble_over_shared_memory() -> None:
    """Writes to every mapping of this process that others share with it."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in maps if "unisono" in line and line.split()[1][1:4] == "w-s"]
    assert not shared, shared
    # The rings had no name that could be told; whatever is shared and can be written is spoiled.
    for line in maps:
        addresses, access, *_ = line.split()
        if access.startswith("rw-s"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            ctypes.memset(start, 0xFF, end - start)


def executes(folder: str) -> str:
    """Rank 1 executes another program while a message of its memory is lent to rank 0."""
    there = Path(folder) / "there"
    comm = unisono.init(timeout=5)
    lent = np.full(LARGE, BEFORE, np.float32)
    # Until loans are proven, and are the faster way.
    for _ in range(30):
        if comm.rank == 1:
            comm.send(lent, 0)
        else:
            comm.recv(np.zeros(LARGE, np.float32), 1)
    if comm.rank == 1:
        work = comm.isend(lent, 0)
        while not work.done() and not there.exists():
            time.sleep(0.3)
            leave_inherited_descriptors()
            program = [sys.executable, __file__, str(there)]
            os.execv(sys.executable, program)
    until = time.monotonic() + 15
    while not there.exists():
        assert time.monotonic() < until, "there is no program after the first one"
        time.sleep(0.01)
    received = np.zeros(LARGE, np.float32)
    try:
        comm.recv(received, 1)
    except unisono.Error:
        return "an error"
    return ",".join(str(value) for value in np.unique(received))


def leave_inherited_descriptors() -> None:
    """Nothing of the library's is left open for the program that comes after."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
            inherited = os.get_inheritable(int(entry.name))
        except OSError:
            continue
        kinds = ("socket:", "anon_inode:", "/memfd:unisono")
        assert not inherited or int(entry.name) <= 2 or not target.startswith(kinds), target


def program_after(there: str) -> None:
    """Has other numbers wherever an array may have been."""
    arrays = [np.full(LARGE, AFTER, np.float32) for _ in range(40)]
    Path(there).touch()
    time.sleep(5)
    assert arrays


def meet() -> float:
    with unisono.init(timeout=20) as comm:
        return float(comm.all_reduce(np.ones(LARGE)).sum() / LARGE)


if __name__ == "__main__":
    program_after(sys.argv[1])
