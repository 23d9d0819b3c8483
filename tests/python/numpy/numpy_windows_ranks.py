"""The rank functions of `test_numpy_windows.py`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

import unisono

LENGTH = 1000


def exposed(comm: unisono.Communicator, *, shared: bool) -> np.ndarray:
    """An array of this rank, full of its number."""
    array = unisono.empty((LENGTH,), "int32") if shared else np.empty(LENGTH, "int32")
    array[:] = comm.rank
    return array


def exchange(where: str) -> list[bool]:
    """Put, get and signal around the ring; return which ranks' arrays are mapped.

    `where`: the arrays lie in the heap (``shared``) or not (``private``), or of rank 1 alone not
    (``mixed``).
    """
    comm = unisono.init(timeout=30)
    rank, size = comm.rank, comm.size
    shared = where == "shared" or (where == "mixed" and rank != 1)
    array = exposed(comm, shared=shared)
    left, right = (rank - 1) % size, (rank + 1) % size
    with comm.window(array) as window:
        assert (window.rank, window.size) == (rank, size)
        assert window.array is array
        for number in range(20):
            window.put(np.full(3, 100 * number + rank, "int32"), right, offset=10)
            window.signal(right)
            window.wait_signal(left)
            assert array[9:14].tolist() == [rank, *[100 * number + left] * 3, rank]
            got = window.get(np.zeros(2, "int32"), left, offset=LENGTH - 2)
            assert got.tolist() == [left] * 2
            # That this rank has read what it got, and the next may put again.
            window.signal(left)
            window.wait_signal(right)
        parts = [np.full(1, rank, "int32") for _ in range(8)]
        for index, part in enumerate(parts):
            window.put(part, right, offset=20 + index, wait=False)
        window.fence()
        assert array[20:28].tolist() == [left] * 8
        window.put(array[:2], rank, offset=30)
        assert array[30:32].tolist() == [rank] * 2
        window.signal(rank)
        window.wait_signal(rank)
        mapped = [window.can_map(other) for other in range(size)]
    with pytest.raises(unisono.InvalidArgumentError, match="closed"):
        window.signal(right)
    return mapped


def mapped() -> None:
    """The array of a neighbour is the memory itself, of its own shape and type."""
    comm = unisono.init(timeout=30)
    rank, other = comm.rank, comm.rank ^ 1
    array = unisono.empty((2, 3 + rank), "float64" if rank else "complex64")
    array[:] = 0
    window = comm.window(array)
    assert window.map(rank) is array
    theirs = window.map(other)
    assert theirs.shape == (2, 3 + other)
    assert theirs.dtype == ("float64" if other else "complex64")
    theirs[1] = 7 + rank
    window.signal(other)
    window.wait_signal(other)
    assert (array[1] == 7 + other).all()
    assert (array[0] == 0).all()
    with pytest.raises(unisono.InvalidArgumentError, match="but the array of rank"):
        window.put(np.ones(1) if other == 0 else np.ones(1, "complex64"), other)
    window.fence()
    window.close()
    # It is that rank's memory as long as there is a view of it.
    del array, window
    comm.barrier()
    blocks = [unisono.empty((2, 4), "float64") for _ in range(8)]
    for block in blocks:
        block[:] = -1
    comm.barrier()
    assert (theirs[1] == 7 + rank).all()


def refusals() -> None:
    """Each is refused, naming the argument, and the window goes on."""
    comm = unisono.init(timeout=30)
    other = comm.rank ^ 1
    frozen = np.ones(4, "float32")
    frozen.flags.writeable = False
    for wrong, text in (
        (frozen, "array is read-only"),
        (np.ones(8, "float32")[::2], "array is written to, but is not contiguous"),
        ([1.0], "array is a list"),
    ):
        with pytest.raises(unisono.InvalidArgumentError, match=f"window: {text}"):
            comm.window(wrong)
    window = comm.window(np.zeros(4, "float32"))
    one = np.ones(1, "float32")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: window.put(one, 2), "dest 2 is out of range"),
        (lambda: window.put(one, -1), "dest -1 is out of range"),
        (lambda: window.put(one, other, 4), "do not lie in the 16 bytes"),
        (lambda: window.put(one, other, -1), "offset -1"),
        (lambda: window.put(one, other, 1 << 62), "offset|do not lie"),
        (lambda: window.put(np.ones(1), other), "is float64, but the array of rank"),
        (lambda: window.get(frozen, other), "array is read-only"),
        (lambda: window.get(np.ones(5, "float32"), other), "do not lie in the 16 bytes"),
        (lambda: window.signal(2), "dest 2 is out of range"),
        (lambda: window.wait_signal(2), "source 2 is out of range"),
        (lambda: window.wait_signal(other, timeout=0), "timeout"),
        (lambda: window.map(2), "rank 2 is out of range"),
    ]
    for call, text in cases:
        with pytest.raises(unisono.InvalidArgumentError, match=text):
            call()
    with pytest.raises(unisono.UnsupportedError, match=r"unisono\.empty"):
        window.map(other)
    with pytest.raises(unisono.TimeoutError, match=f"no signal of rank {other}.*signal"):
        window.wait_signal(other, timeout=0.1)
    window.put(one, other, 3)
    window.fence()
    assert window.array.tolist() == [0, 0, 0, 1]
    # A rank may expose nothing.
    with comm.window(np.zeros(4 * comm.rank)) as uneven:
        if comm.rank == 0:
            uneven.put(np.ones(4), 1)
        uneven.fence()
        assert uneven.array.tolist() == [1.0] * (4 * comm.rank)


def peer_dies(victim: int, doing: str) -> tuple[str, float, int | None, str | None, str]:
    """Rank `victim` kills itself; return the others' errors."""
    comm = unisono.init(timeout=60)
    array = unisono.empty((1 << 20,), "uint8")
    array[:] = 0
    window = comm.window(array)
    window.fence()
    begin = time.monotonic()
    if comm.rank == victim:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    begin += 0.5
    try:
        if doing == "wait_signal":
            window.wait_signal(victim)
        elif doing == "fence":
            window.fence()
        else:
            ones = np.ones(1 << 20, "uint8")
            while True:
                window.put(ones, victim)
    except unisono.Error as error:
        first = error
    took = time.monotonic() - begin
    with pytest.raises(unisono.Error) as second:
        window.signal(0 if victim != 0 else 1)
    # Those that are left go on with a window of their own.
    left = comm.shrink()
    with left.window(array) as new:
        new.put(np.full(1, 5, "uint8"), (left.rank + 1) % left.size)
        new.fence()
        assert array[0] == 5
    assert isinstance(first, unisono.PeerLostError), repr(first)
    return str(first), took, first.peer, first.operation, str(second.value)


def dies_amid_a_put(shared: bool) -> float:
    """Rank 1 is killed in the middle of puts into rank 0's array; return how long closing takes."""
    comm = unisono.init(timeout=60)
    array = unisono.empty((64 << 20,), "uint8") if shared else np.empty(64 << 20, "uint8")
    array[:] = 0
    window = comm.window(array)
    window.fence()
    if comm.rank == 1:
        ones = np.ones(64 << 20, "uint8")
        window.signal(0)
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
        while True:
            window.put(ones, 0)
    window.wait_signal(1)
    with pytest.raises(unisono.PeerLostError, match="rank 1"):
        window.wait_signal(1)
    begin = time.monotonic()
    window.close()
    took = time.monotonic() - begin
    array[:] = 2
    time.sleep(0.1)
    assert (array == 2).all()
    return took


def stopped_amid_a_put() -> float:
    """Rank 1 is stopped in the middle of puts: rank 0 gets its memory back all the same."""
    comm = unisono.init(timeout=60)
    array = unisono.empty((64 << 20,), "uint8")
    array[:] = 0
    window = comm.window(array)
    pids = comm.all_gather_object(os.getpid())
    window.fence()
    if comm.rank == 1:
        window.signal(0)
        ones = np.ones(64 << 20, "uint8")
        try:
            while True:
                window.put(ones, 0)
        except unisono.Error:
            return 0.0
    window.wait_signal(1)
    time.sleep(0.1)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        begin = time.monotonic()
        window.close()
        took = time.monotonic() - begin
        array[:] = 2
    finally:
        os.kill(pids[1], signal.SIGCONT)
    time.sleep(0.3)
    assert (array == 2).all()
    return took


def interrupted() -> float:
    """Ctrl-C ends the wait for a signal, and the window goes on."""
    comm = unisono.init(timeout=60)
    window = comm.window(unisono.empty((4,), "uint8"))
    took = 0.0
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            window.wait_signal(1)
        took = time.monotonic() - begin
        window.signal(1)
    else:
        window.wait_signal(0)
        window.signal(0)
    if comm.rank == 0:
        window.wait_signal(1)
    window.fence()
    return took


def masked() -> None:
    """A window of a communicator whose ranks keep their numbers has these numbers."""
    comm = unisono.init(timeout=30)
    if comm.rank == 1:
        os._exit(0)
    with pytest.raises(unisono.PeerLostError):
        comm.all_reduce(np.ones(1))
        comm.barrier()
    comm = comm.mask()
    array = exposed(comm, shared=True)
    with comm.window(array) as window:
        assert (window.rank, window.size) == (comm.rank, 3)
        other = 2 - comm.rank
        window.put(np.full(1, 9, "int32"), other)
        window.signal(other)
        window.wait_signal(other)
        assert array[0] == 9
        with pytest.raises(unisono.InvalidArgumentError, match="rank 1 is gone"):
            window.signal(1)
