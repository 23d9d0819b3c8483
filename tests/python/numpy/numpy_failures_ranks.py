"""The rank functions of `test_numpy_failures.py`."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import own_threads
import pytest

import unisono


def bad_arguments() -> None:
    """Each is refused before anything is sent, naming the argument; the group works afterwards."""
    comm = unisono.init(timeout=30)
    other = (comm.rank + 1) % comm.size
    a = np.ones(6, np.float32)
    frozen = a.copy()
    frozen.flags.writeable = False
    gaps = np.ones(12, np.float32)[::2]
    blocks = np.ones((comm.size, 2), np.float32)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.all_reduce(frozen), "array is read-only"),
        (lambda: comm.all_reduce(gaps), "array is written to, but is not contiguous"),
        (lambda: comm.all_reduce(b"bytes"), "array is read-only"),
        (lambda: comm.all_reduce(np.float32(1)), "array is a NumPy scalar"),
        (lambda: comm.all_reduce([1.0]), "array is a list"),
        (lambda: comm.all_reduce(a.astype(">f4")), "byte order"),
        (lambda: comm.all_reduce(a.astype("M8[s]")), "array is datetime64"),
        (lambda: comm.all_reduce(a, "summ"), "no operator"),
        (lambda: comm.all_reduce(a, "band"), "band has no meaning for float32"),
        (lambda: comm.all_reduce(a.astype("c8"), "min"), "min has no meaning for complex64"),
        (lambda: comm.all_reduce(a, out=np.ones(6)), "out is float64, but array is float32"),
        (lambda: comm.all_reduce(a, out=np.ones(5, "f4")), "out has 5 elements"),
        (lambda: comm.all_reduce(a, out=frozen), "out is read-only"),
        (lambda: comm.all_reduce(a[:4], out=a[2:]), "overlap"),
        (lambda: comm.all_reduce(a, timeout=0), "timeout"),
        (lambda: comm.all_reduce(a, timeout=float("inf")), "timeout"),
        (lambda: comm.broadcast(a, comm.size), f"root {comm.size} is out of range"),
        (lambda: comm.broadcast(a, -1), "root -1 is out of range"),
        # Alike on the root and on the others, so that none is left waiting.
        *[
            (lambda root=root, array=array: comm.broadcast(array, root), text)
            for root in (0, 1)
            for array, text in (
                (frozen, "array is read-only"),
                (gaps, "array is written to, but is not contiguous"),
                (np.ones((2, 3), order="F"), "array is written to, but is not contiguous"),
                (b"bytes", "array is read-only"),
                (np.float32(1), "array is a NumPy scalar"),
            )
        ],
        (lambda: comm.reduce(a, root=other, out=a.copy()), "only the root gets a result"),
        (lambda: comm.gather(a, other, out=a.copy()), "only the root gets a result"),
        (lambda: comm.scatter(blocks, other), "array is given on rank"),
        (lambda: comm.scatter(None, comm.rank), "array is missing"),
        (lambda: comm.scatter(root=other), "out is missing"),
        (lambda: comm.scatter_v(a, root=comm.rank), "counts are missing"),
        (lambda: comm.gather_v(a, root=comm.rank), "counts are missing"),
        (lambda: comm.reduce_scatter(np.ones(comm.size + 1, "f4")), "first extent"),
        (lambda: comm.all_to_all(np.ones(comm.size + 1, "f4")), "first extent"),
        (lambda: comm.all_gather_v(a, [6]), "counts has 1 entries"),
        (lambda: comm.all_gather_v(a, [5] * comm.size), "input has"),
        (lambda: comm.all_gather_v(a, [-1] * comm.size), "below 0"),
        (lambda: comm.all_gather_v(np.float32(1), [1] * comm.size), "no axes"),
        (lambda: comm.all_to_all_v(a, [1] * comm.size, [1] * comm.size), "input has"),
        (lambda: comm.all_to_all_v(a, [6], [6]), "send_counts has 1 entries"),
        (lambda: comm.all_gather(a, out=a), "out has 6 elements"),
        (lambda: comm.send(a, comm.size), f"dest {comm.size} is out of range"),
        (lambda: comm.send(a, other, tag=-1), "tag -1"),
        (lambda: comm.recv(a, comm.size), f"source {comm.size} is out of range"),
        (lambda: comm.recv(frozen, other), "array is read-only"),
    ]
    for call, text in cases:
        with pytest.raises((unisono.InvalidArgumentError, unisono.UnsupportedError)) as caught:
            call()
        assert text in str(caught.value), str(caught.value)
        assert not caught.value.fatal
        assert comm.error is None
    with pytest.raises(TypeError):
        comm.all_reduce(a, 3)
    with pytest.raises(TypeError):
        comm.broadcast(a, "root")
    assert comm.all_reduce(np.ones(3, np.int32)).tolist() == [comm.size] * 3
    comm.close()


def mismatch(field: str) -> tuple[str, str, int | None, bool]:
    """Rank 1 differs from the others in one field; returns what the error says here."""
    comm = unisono.init(timeout=20)
    comm.barrier()
    odd = comm.rank == 1
    a = np.ones(8, np.float32)
    with pytest.raises(unisono.MismatchError) as caught:
        if field == "operation":
            comm.all_gather(a) if odd else comm.all_reduce(a)
        elif field == "prefix":
            comm.exscan(a) if odd else comm.scan(a)
        elif field == "dtype":
            comm.all_reduce(a.astype(np.int32) if odd else a)
        elif field == "count":
            comm.all_reduce(a[:5] if odd else a)
        elif field == "op":
            comm.all_reduce(a, "max" if odd else "sum")
        elif field == "root":
            comm.broadcast(a, 1 if odd else 0)
        elif field == "root of reduce":
            comm.reduce(a, root=1 if odd else 0)
        elif field == "root of gather":
            comm.gather(a, 1 if odd else 0)
        # A rank that was through before the others noticed hears of it in its next operation.
        comm.barrier()
    error = comm.error
    assert isinstance(error, unisono.MismatchError)
    with pytest.raises(unisono.MismatchError, match="dead"):
        comm.barrier()
    comm.close()
    return str(caught.value), type(error).__name__, caught.value.peer, caught.value.fatal


def message_mismatch() -> str:
    comm = unisono.init(timeout=20)
    with pytest.raises(unisono.MismatchError) as caught:
        if comm.rank == 0:
            comm.send(np.ones(4, np.float32), 1, tag=3)
        else:
            comm.recv(np.ones(3, np.float32), 0, tag=3)
        comm.barrier()
    comm.close()
    return str(caught.value)


def peer_dies(victim: int, waiting_in: str) -> tuple[float, str, int | None, str | None]:
    """The victim is killed while the others wait for it; returns when and how they learn of it."""
    comm = unisono.init(timeout=60)
    comm.barrier()
    if comm.rank == victim:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    a = np.ones(1000, np.float32)
    begun = time.monotonic()
    with pytest.raises(unisono.PeerLostError) as caught:
        if waiting_in == "all_reduce":
            comm.all_reduce(a)
        elif waiting_in == "async":
            work = comm.all_reduce(a, async_op=True)
            try:
                work.wait()
            finally:
                assert isinstance(work.exception(), unisono.PeerLostError)
        else:
            comm.recv(a, victim)
    took = time.monotonic() - begun
    assert isinstance(caught.value, ConnectionError)
    with pytest.raises(unisono.PeerLostError):
        comm.barrier()
    comm.close()
    return took, str(caught.value), caught.value.peer, caught.value.operation


def timeouts() -> None:
    """A wait ends in time and names the ranks it waited for; a Work goes on after that."""
    comm = unisono.init(timeout=30)
    assert comm.timeout == 30
    a = np.ones(4, np.float32)
    if comm.rank == 0:
        work = comm.irecv(a, 1)
        with pytest.raises(unisono.TimeoutError, match="goes on") as caught:
            work.wait(timeout=0.2)
        assert isinstance(caught.value, TimeoutError)
        assert not work.done()
        assert work.source is None
        comm.barrier()
        work.wait(timeout=10)
        assert work.source == 1
    else:
        comm.barrier()
        comm.send(a, 0)
    comm.timeout = 0.5
    begun = time.monotonic()
    if comm.rank == 0:
        with pytest.raises(unisono.TimeoutError, match="rank 1") as caught:
            comm.all_reduce(a)
        assert 0.4 < time.monotonic() - begun < 5
        assert caught.value.code == "Timeout"
        assert "all_reduce" in str(caught.value.operation)
        assert any("all_reduce" in line for line in comm.recent_operations())
    else:
        time.sleep(2)
        # Data that rank 0 sent before it gave up may have been enough for the operation it left.
        with pytest.raises(unisono.Error, match="rank 0"):
            comm.all_reduce(a)
            comm.barrier()
    comm.close()


def monitored_barrier_names_the_missing() -> str:
    comm = unisono.init(timeout=30)
    comm.monitored_barrier()
    if comm.rank in (1, 3):
        time.sleep(2)
        comm.close()
        return ""
    with pytest.raises(unisono.Error) as caught:
        comm.monitored_barrier(timeout=0.7)
    comm.close()
    return str(caught.value)


def interrupted(waiting_in: str) -> float:
    """Ctrl-C ends a wait of the main thread; returns how long after it."""
    comm = unisono.init(timeout=60)
    comm.barrier()
    a = np.ones(1000, np.float32)
    if comm.rank == 1:
        with pytest.raises((unisono.AbortedError, unisono.PeerLostError)):
            comm.recv(a, 0, tag=99)
        comm.close()
        return 0
    sent: list[float] = []

    def press() -> None:
        time.sleep(0.5)
        sent.append(time.monotonic())
        _thread.interrupt_main()

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        if waiting_in == "all_reduce":
            comm.all_reduce(a)
        elif waiting_in == "recv":
            comm.recv(a, 1)
        elif waiting_in == "split":
            comm.split(0)
        elif waiting_in == "monitored_barrier":
            comm.monitored_barrier()
        else:
            comm.irecv(a, 1).wait()
    took = time.monotonic() - sent[0]
    if waiting_in == "work":
        # Only the wait has ended.
        assert comm.error is None
        comm.abort("done with it")
    assert isinstance(comm.error, unisono.AbortedError)
    # Nothing writes to the array any more.
    a[:] = 3
    time.sleep(0.1)
    assert (a == 3).all()
    comm.close()
    return took


def interrupted_while_joining() -> None:
    threading.Timer(0.5, _thread.interrupt_main).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        unisono.init(rank=0, world_size=2)
    assert time.monotonic() - begun < 5


def aborted() -> str:
    comm = unisono.init(timeout=30)
    comm.barrier()
    if comm.rank == 0:
        time.sleep(0.2)
        comm.abort("out of luck")
    with pytest.raises(unisono.AbortedError) as caught:
        comm.all_reduce(np.ones(3, np.float32))
    comm.close()
    return str(caught.value)


def left_by_an_exception() -> str:
    """A context manager that ends by an exception ends the waits of the others."""
    if os.environ["RANK"] == "0":
        with pytest.raises(ZeroDivisionError), unisono.init(timeout=30) as comm:
            comm.barrier()
            raise ZeroDivisionError
        return ""
    with pytest.raises(unisono.Error) as caught, unisono.init(timeout=30) as comm:
        comm.barrier()
        comm.barrier()
    return str(caught.value)


def join(rank: int | None, world: int | None, seconds: float) -> tuple[str, str]:
    """Try to join as something else than the environment says."""
    try:
        with unisono.init(rank=rank, world_size=world, timeout=seconds):
            return "", ""
    except unisono.Error as error:
        return type(error).__name__, str(error)


def join_as(ranks: list[tuple[int, int]], seconds: float) -> tuple[str, str]:
    rank, world = ranks[int(os.environ["RANK"])]
    return join(rank, world, seconds)


def join_with_settings() -> tuple[str, str]:
    size = ["64K", "128K"][int(os.environ["RANK"])]
    try:
        unisono.init(timeout=20, options=unisono.Options(ring_bytes=size)).close()
    except unisono.Error as error:
        return type(error).__name__, str(error)
    return "", ""


def closed() -> None:
    """A closed communicator says so; closing twice is fine; what is open at exit is closed then."""
    own_threads.look_at_exit()
    comm = unisono.init(timeout=30)
    part = comm.split(0)
    assert part is not None
    comm.barrier()
    comm.close()
    comm.close()
    with pytest.raises(unisono.InvalidArgumentError, match="closed"):
        comm.barrier()
    part.all_reduce(np.ones(3))
    del comm
    gc.collect()
    # `part` stays open, with an operation under way.
    globals()["kept"] = (part, part.irecv(np.ones(3), (part.rank + 1) % part.size))


def threads_without_a_group(folder: str) -> list[str]:
    """The threads of unisono that are left when every communicator has been closed, twice."""
    me = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    for turn in range(2):
        # Rank 0 may still serve the store of the first turn when others begin the second.
        url = f"file://{folder}/{turn}"
        with unisono.init(url, timeout=30, **me) as comm, comm.split(0) as part:
            work = part.all_reduce(np.ones(3), async_op=True)
            comm.barrier()
            work.wait()
            assert own_threads.names()
        left = own_threads.left_after(10)
        if left:
            break
    return left


def left_early() -> int:
    """Rank 0, which serves the store, ends at once; the others may come as late as they like."""
    if os.environ["RANK"] == "2":
        time.sleep(1)
    comm = unisono.init(timeout=30)
    return comm.rank


def forked() -> None:
    """A child made by fork gets an error, not a hang, and does not disturb its parent."""
    comm = unisono.init(timeout=30)
    comm.barrier()
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(np.ones(3))
        except unisono.Error as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    child = os.fork()
    if child == 0:
        # Dropped with all that belongs to it, and ended as a Python process ends.
        del comm
        gc.collect()
        raise SystemExit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3
    # Large arrays of the heap, in which ranks read and write each other's memory.
    array = unisono.empty(1 << 20, "float32")
    for closes in (False, True):
        array[:] = 1
        assert set(comm.all_reduce(array).tolist()) == {comm.size}
        child = os.fork()
        if child == 0:
            if closes:
                comm.close()
            del comm, array
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        array[:] = 1
        assert set(comm.all_reduce(array).tolist()) == {comm.size}
    comm.close()


def killed_beside_a_split() -> str:
    """The end of a process ends the waits of every group that it was in."""
    comm = unisono.init(timeout=60)
    part = comm.split(0)
    assert part is not None
    part.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(unisono.PeerLostError) as caught:
        part.all_reduce(np.ones(3))
    comm.close()
    return str(caught.value)


def meets_again() -> None:
    """A rank may be at the address of the last meeting while that is about to end."""
    for _ in range(20):
        unisono.init(timeout=20).close()
