"""The rank functions of the failure tests; `test_failures.py` and `test_hosts.py` start them."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import unisono
from unisono import _core

# Large enough that a signal sent into it arrives before it is over.
LARGE = 16 << 20
# How long the victim lets the others get into their wait.
HEAD_START = 0.3


@dataclass(frozen=True)
class Ending:
    """How a call ended: the error's class, text and peer, and after how many seconds."""

    kind: str
    message: str
    peer: int | None
    seconds: float


def ending(call: Callable[[], object]) -> Ending:
    """The error that ``call`` must end with."""
    begun = time.monotonic()
    try:
        call()
    except unisono.Error as error:
        return Ending(type(error).__name__, str(error), error.peer, time.monotonic() - begun)
    raise AssertionError("the call ended well, without an error")


def signal_oneself(number: signal.Signals, delay: float) -> None:
    """Send this process a signal from another thread, so that it comes in the middle of a call."""
    timer = threading.Timer(delay, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def reduce_for_ever(comm: unisono.Communicator) -> None:
    array = np.ones(LARGE, np.float32)
    while True:
        comm.all_reduce(array)


def receive_from_anybody(comm: unisono.Communicator) -> None:
    comm.recv(np.zeros(1), unisono.ANY_SOURCE)


WAITS = {
    "all_reduce": reduce_for_ever,
    "barrier": lambda comm: comm.barrier(),
    "recv": receive_from_anybody,
}


def die_in(what: str, victim: int) -> Ending:
    """All ranks wait in ``what``; the victim kills itself, from within where it waits as well."""
    comm = unisono.init()
    comm.barrier()
    if comm.rank == victim:
        signal_oneself(signal.SIGKILL, HEAD_START)
        if what == "barrier":
            time.sleep(60)
    found = ending(lambda: WAITS[what](comm))
    again = ending(comm.barrier)
    assert again.kind == found.kind, again
    return found


def die_while_joining(victim: int, last: int) -> Ending:
    """The victim dies after it came, while the group waits for rank ``last``."""
    rank = int(os.environ["RANK"])
    if rank == victim:
        signal_oneself(signal.SIGKILL, HEAD_START)
    if rank == last:
        time.sleep(4 * HEAD_START)
    kept = []

    def meet() -> None:
        kept.append(unisono.init())
        kept[0].barrier()

    found = ending(meet)
    # A rank that connects a moment later gets the first cause, as long as this rank is there.
    time.sleep(1)
    return found


def stop_one(victim: int) -> Ending:
    """The victim is stopped inside an operation, and killed when the others have given up on it."""
    comm = unisono.init()
    pids = comm.all_gather(np.array([os.getpid()]))
    if comm.rank == victim:
        signal_oneself(signal.SIGSTOP, HEAD_START)
    found = ending(lambda: reduce_for_ever(comm))
    if comm.rank == 0:
        os.kill(int(pids.reshape(-1)[victim]), signal.SIGKILL)
    return found


def exit_early(victim: int) -> Ending:
    comm = unisono.init()
    comm.barrier()
    if comm.rank == victim:
        time.sleep(HEAD_START)
        sys.exit(0)
    return ending(comm.barrier)


def exit_after_the_last_collective(folder: str, rounds: int) -> None:
    """Each round is a process per rank; one of them ends without a word after its last call."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Loaded before the fork, which then costs next to nothing. Nothing native runs in this process.
    assert callable(unisono.init)
    for number in range(rounds):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                url = f"file://{folder}/{number}"
                comm = unisono.init(url, rank=rank, world_size=world)
                count = [1, 1000, 300_000][number % 3]
                for _ in range(number % 2 + 1):
                    array = np.full(count, rank + 1.0)
                    comm.all_reduce(array)
                    if rank == number % world:
                        os._exit(0)
                    assert (array == world * (world + 1) / 2).all()
                    break
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"round {number}: status {status}"


def join_only() -> Ending:
    return ending(unisono.init)


def listening_ports() -> list[int]:
    own = psutil.Process().net_connections("tcp4")
    return [link.laddr.port for link in own if link.status == psutil.CONN_LISTEN]


def work_among_strangers(seconds: float, least: int) -> int:
    """Reduce while a client sends nonsense to the ports of rank 0. Returns how often.

    It does so for as long, and at least that often: on a busy machine each takes a while.
    """
    comm = unisono.init()
    comm.barrier()
    over = threading.Event()
    visits = 0

    def visit() -> None:
        nonlocal visits
        noise = np.random.default_rng(7)
        greetings = [b"", b"GET / HTTP/1.0\r\n\r\n", b"\0" * 4096, noise.bytes(1 << 16)]
        held = []
        while not over.is_set():
            for port in listening_ports():
                stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
                with contextlib.suppress(OSError):
                    stranger.sendall(greetings[visits % len(greetings)])
                visits += 1
                held.append(stranger)
            for stranger in held[:-8]:
                stranger.close()
            del held[:-8]

    stranger = threading.Thread(target=visit, daemon=True)
    if comm.rank == 0:
        stranger.start()
    until = time.monotonic() + seconds
    go_on = np.ones(1)
    while go_on[0]:
        array = np.full(50_000, comm.rank + 1.0)
        comm.all_reduce(array)
        assert (array == comm.size * (comm.size + 1) / 2).all()
        go_on[0] = time.monotonic() < until or visits < least
        comm.broadcast(go_on)
        # Groups that form meanwhile open connections of their own.
        part = comm.split(0)
        part.barrier()
        part.close()
    over.set()
    if comm.rank == 0:
        stranger.join()
    return visits


def receive_after_one_has_left() -> int:
    """Rank 2 leaves in good order; a receive from any source still gets what rank 1 sends."""
    comm = unisono.init()
    comm.barrier()
    if comm.rank == 2:
        comm.close()
        return 2
    if comm.rank == 1:
        time.sleep(4 * HEAD_START)
        comm.send(np.array([41.0]), 0)
        return 1
    time.sleep(2 * HEAD_START)
    got = np.zeros(1)
    source = comm.recv(got, unisono.ANY_SOURCE).source
    assert got[0] == 41
    return source


# Bytes of a message that takes far longer than a victim lives on after it has begun to send it.
LONG = 64 << 20


def kill_oneself(delay: float) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(call: Callable[[], Any]) -> Any:
    """The value of ``call`` in a forked child; None when that is killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as out:
                out.write(pickle.dumps(call()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as source:
        found = source.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return None
    assert status == 0, status
    return pickle.loads(found)


def received(comm: unisono.Communicator, array: np.ndarray, source: int) -> Ending:
    """How the receive of ones from a rank that is killed ends. A message that has come is whole."""
    with contextlib.suppress(unisono.Error):
        begun = time.monotonic()
        comm.recv(array, source)
        assert (array == 1).all(), "other bytes than were sent"
        return ending(lambda: comm.recv(np.zeros(1), 1))
    found = ending(comm.barrier)
    return Ending(found.kind, found.message, found.peer, time.monotonic() - begun)


def die_while_awaited(comm: unisono.Communicator) -> Ending | None:
    """Nothing of the message has been sent."""
    if comm.rank == 1:
        kill_oneself(0.1)
    return received(comm, np.zeros(1), 1)


def die_before_it_is_received(comm: unisono.Communicator) -> Ending | None:
    """It has been announced, or lent."""
    if comm.rank == 1:
        comm.isend(np.ones(LONG // 8), 0)
        kill_oneself(0.1)
    time.sleep(0.2)
    return received(comm, np.zeros(LONG // 8), 1)


def die_amid_the_payload(comm: unisono.Communicator, source: int = 1) -> Ending | None:
    """Some of it has come."""
    array = np.ones(LONG // 8) * comm.rank
    comm.send(array[:1], 0) if comm.rank == 1 else comm.recv(np.zeros(1), 1)
    if comm.rank == 1:
        with contextlib.suppress(unisono.Error):
            comm.isend(array, 0).wait(0.005)
        kill_oneself(0)
    return received(comm, array, source)


def die_amid_what_may_come_from_any(comm: unisono.Communicator) -> Ending | None:
    return die_amid_the_payload(comm, unisono.ANY_SOURCE)


def die_before_it_receives(comm: unisono.Communicator) -> Ending | None:
    if comm.rank == 1:
        kill_oneself(0.1)
    return ending(lambda: comm.send(np.ones(LONG // 8), 1))


def die_amid_a_write(comm: unisono.Communicator) -> Ending | None:
    """A one-sided one: at the target, a thread waits for the rest."""
    if comm.rank == 1:
        port, region, remote, _ = one_sided(comm)
        comm.recv(np.zeros(1), 0)
        port.write(region, 0, LONG, remote).wait(0.005)
        kill_oneself(0)
    _kept = one_sided(comm)
    comm.send(np.zeros(1), 1)
    begun = time.monotonic()
    found = ending(comm.barrier)
    while any(task_name(task) == "unisono-target" for task in Path("/proc/self/task").iterdir()):
        assert time.monotonic() - begun < 10, "the target waits for the dead"
        time.sleep(0.01)
    return Ending(found.kind, found.message, found.peer, time.monotonic() - begun)


def die_amid_a_read(comm: unisono.Communicator) -> Ending | None:
    """A one-sided one, of the memory of the one that dies."""
    if comm.rank == 1:
        _kept = one_sided(comm)
        comm.recv(np.zeros(1), 0)
        kill_oneself(0.005)
    port, region, remote, _ = one_sided(comm)
    # The link is there by then: one that cannot be opened is given up after 10 s.
    assert port.read(region, 0, 8, remote).wait(20)
    comm.send(np.zeros(1), 1)
    begun = time.monotonic()
    with contextlib.suppress(unisono.Error):
        while True:
            read = port.read(region, 0, LONG, remote)
            assert read.wait(10), "it waits for the dead"
            if read.exception():
                break
    found = ending(comm.barrier)
    return Ending(found.kind, found.message, found.peer, time.monotonic() - begun)


def one_sided(comm: unisono.Communicator) -> tuple[Any, Any, Any, np.ndarray]:
    """A port that is connected to the other rank's, its memory, and the other's."""
    array = np.ones(LONG // 8)
    port = _core._Port()
    region = port.register(array.ctypes.data, LONG, array)
    own = np.frombuffer(port.bind() + port.remote(region).to_bytes(), np.uint8)
    other = np.zeros_like(own)
    comm.sendrecv(own, 1 - comm.rank, other, 1 - comm.rank)
    port.connect(other[:-64].tobytes(), 20)
    remote = _core._RemoteRegion.from_bytes(other[-64:].tobytes())
    return port, region, remote, array


def task_name(task: Path) -> str:
    with contextlib.suppress(OSError):
        return (task / "comm").read_text().strip()
    return ""


MOMENTS = [
    die_while_awaited,
    die_before_it_is_received,
    die_amid_the_payload,
    die_amid_what_may_come_from_any,
    die_before_it_receives,
    die_amid_a_write,
    die_amid_a_read,
]


def die_at_every_moment(folder: str) -> dict[str, Ending | None]:
    """A child of each rank for every moment: rank 1's is killed; what the others' found."""
    rank = int(os.environ["RANK"])
    # Loaded before the fork, which then costs next to nothing. Nothing native runs in this process.
    assert callable(unisono.init)

    def at(moment: Callable[[unisono.Communicator], Ending | None]) -> Ending | None:
        comm = unisono.init(f"file://{folder}/{moment.__name__}", rank=rank, world_size=3)
        pair = comm.split(None if rank == 2 else 0)
        comm.barrier()
        if pair is None:
            # It waits for a rank that lives, which tells of the one that does not.
            return ending(lambda: comm.recv(np.zeros(1), 0))
        return moment(comm)

    return {moment.__name__: in_child(lambda moment=moment: at(moment)) for moment in MOMENTS}


def talk_in_a_part() -> list[Ending]:
    """The errors of ranks 1 and 2 about each other in a group where they have other numbers."""
    comm = unisono.init()
    part = comm.split(None if comm.rank == 0 else 0)
    if part is None:
        return []
    array = np.zeros(3 + part.rank, np.float32)
    return [ending(lambda: part.all_reduce(array))]


def leave_before_a_link_is_there() -> Ending | None:
    """Rank 1 leaves a group in which it has exchanged nothing, and lives on."""
    comm = unisono.init()
    if comm.rank == 1:
        comm.close()
        time.sleep(10 * HEAD_START)
        return None
    time.sleep(2 * HEAD_START)
    return ending(lambda: comm.send(np.zeros(3), 1))


def talk_to_oneself(counts: list[int]) -> None:
    """A send to oneself may come before its receive, however long it is."""
    comm = unisono.init()
    rank = comm.rank
    for count in counts:
        array, other = np.full(count, rank + 1.0), np.full(count, rank + 2.0)
        works = [comm.isend(array, rank, tag=5), comm.isend(other, rank, tag=5)]
        comm.send(array, rank, tag=6)
        for work in works:
            work.wait(10)
        # The arrays that were sent may change then.
        works.clear()
        array[:] = other[:] = 0
        for expected in (rank + 1, rank + 2):
            got = np.zeros(count)
            source = [rank, unisono.ANY_SOURCE][expected % 2]
            assert comm.recv(got, source, tag=5).source == rank
            assert (got == expected).all(), (count, expected)
        got = np.zeros(count)
        receive = comm.irecv(got, rank, tag=6)
        receive.wait(10)
        assert (got == rank + 1).all()
    comm.send(np.zeros(3), rank)
    refusal = ending(lambda: comm.recv(np.zeros(2), rank))
    assert refusal.kind == "InvalidArgumentError", refusal
    comm.recv(np.zeros(3), rank)
    comm.barrier()
