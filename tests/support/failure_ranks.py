"""What the ranks of the failure tests do; `test_failures.py` and `test_hosts.py` start them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil

import unisono

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
    """Each round is a process per rank, one of which ends without a word after its last call."""
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


def work_among_strangers(seconds: float) -> int:
    """Reduce while a client sends nonsense to the ports of rank 0. Returns how often."""
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
        go_on[0] = time.monotonic() < until
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
    source = comm.recv(got, unisono.ANY_SOURCE)
    assert got[0] == 41
    return source
