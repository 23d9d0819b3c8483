"""The rank functions of `test_alive.py`: ranks die, are stopped, and lose their network."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from failure_ranks import HEAD_START, LARGE, WAITS, Ending, ending, signal_oneself

import unisono

# A child that outlives its rank ends after this many seconds if nothing ends it before.
LIFE = 40
CLONE = {"x86_64": 56, "aarch64": 220}


def meet() -> unisono.Communicator:
    """Join, with both links to every other rank open."""
    comm = unisono.init()
    comm.barrier()
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [comm.isend(np.zeros(1), other) for other in others]
    for other in others:
        comm.recv(np.zeros(1), other)
    for send in sends:
        send.wait()
    comm.barrier()
    return comm


def leave_a_child(how: str) -> int:
    """Fork a child that lives on. No library learns of the bare system call."""
    libc = ctypes.CDLL(None)
    if how == "fork":
        child = os.fork()
    else:
        child = libc.syscall(CLONE[platform.machine()], int(signal.SIGCHLD), 0, 0, 0, 0)
    if child == 0:
        libc.alarm(LIFE)
        libc.pause()
        os._exit(0)
    return child


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Bereaved:
    """How a wait ended, and whether the dead rank's child lived then."""

    ending: Ending
    child_lived: bool
    ports_taken: list[tuple[str, int]]


def die_beside_a_child(what: str, victim: int, how: str) -> Bereaved:
    comm = meet()
    child = leave_a_child(how) if comm.rank == victim else 0
    child = int(comm.all_gather(np.array([child])).reshape(-1)[victim])
    ports = listening(comm, victim)
    if comm.rank == victim:
        signal_oneself(signal.SIGKILL, HEAD_START)
        if what == "barrier":
            time.sleep(60)
    try:
        found = ending(lambda: WAITS[what](comm))
        return Bereaved(found, lives(child), [port for port in ports if stays_taken(port)])
    finally:
        if comm.rank == (victim + 1) % comm.size:
            # After the others have looked as well.
            time.sleep(3)
            os.kill(child, signal.SIGKILL)


def listening(comm: unisono.Communicator, rank: int) -> list[tuple[str, int]]:
    """The ports at which ``rank`` listens, its store's among them."""
    ports = np.zeros(8, np.int64)
    if comm.rank == rank:
        own = psutil.Process().net_connections("tcp4")
        mine = [link.laddr.port for link in own if link.status == psutil.CONN_LISTEN]
        ports[: len(mine)] = mine
    comm.broadcast(ports, rank)
    return [("127.0.0.1", int(port)) for port in ports if port]


def stays_taken(address: tuple[str, int]) -> bool:
    """Whether a process listens there still, soon after: sockets are closed one by one."""
    until = time.monotonic() + 2
    while taken := is_taken(address):
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return taken


def is_taken(address: tuple[str, int]) -> bool:
    """Whether a process listens there. Connections that end do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            return True
    return False


def stop_for_a_while(what: str, seconds: float) -> float:
    """Rank 1 is stopped for so long, and nothing else happens. Returns how long it all took."""
    comm = meet()
    pids = comm.all_gather(np.array([os.getpid()])).reshape(-1)
    begun = time.monotonic()

    def stop() -> None:
        time.sleep(HEAD_START)
        os.kill(int(pids[1]), signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(int(pids[1]), signal.SIGCONT)

    stopper = threading.Thread(target=stop)
    if comm.rank == 0:
        stopper.start()
    if what == "recv" and comm.rank == 1:
        # Not before it has been stopped, which the clock does not show.
        while time.monotonic() - begun < HEAD_START + seconds:
            time.sleep(0.05)
        comm.send(np.array([41.0]), 0)
    elif what == "recv":
        got = np.zeros(1)
        comm.recv(got, 1)
        assert got[0] == 41
    else:
        go_on = np.ones(1)
        while go_on[0]:
            array = np.full(LARGE // 8, comm.rank + 1.0, np.float32)
            comm.all_reduce(array)
            assert (array == 3).all()
            go_on[0] = time.monotonic() - begun < HEAD_START + seconds + 0.5
            comm.broadcast(go_on)
    took = time.monotonic() - begun
    if comm.rank == 0:
        stopper.join()
    comm.barrier()
    comm.close()
    return took


def wait_for_one_that_sleeps(seconds: float) -> Ending | None:
    """Rank 1 is in no operation at all. Return the error of rank 0's wait when its time is up."""
    comm = meet()
    if comm.rank == 1:
        time.sleep(seconds)
        return None
    return ending(lambda: comm.recv(np.zeros(1), 1))


def lose_the_network(what: str, down: list[str], seconds: float) -> Ending:
    """Rank 1 takes a network link down while both wait in ``what``, or do so afterwards."""
    if what == "a first recv":
        comm = unisono.init()
        comm.barrier()
    elif what == "a first link":
        comm = unisono.init()
    else:
        comm = meet()
    if comm.rank == 1:
        timer = threading.Timer(HEAD_START, subprocess.run, (down,), {"check": True})
        timer.start()
    if what == "nothing":
        time.sleep(seconds)
        return ending(comm.barrier)
    if what == "a first link":
        # Once the other host is dark, and before its address has been forgotten.
        time.sleep(HEAD_START + 1)
        return ending(lambda: comm.recv(np.zeros(1), 1 - comm.rank))
    if what == "a first recv":
        # Its link cannot be opened any more.
        time.sleep(seconds)
        return ending(lambda: comm.recv(np.zeros(1), 1 - comm.rank))
    if what == "recv":
        return ending(lambda: comm.recv(np.zeros(1), 1 - comm.rank))
    return ending(lambda: WAITS[what](comm))


def idle(seconds: float, before: str) -> tuple[int, int]:
    """How often this process's threads had been put to sleep, before and after idle `seconds`.

    Where no host can be made for it, tests beside this one run `unisono status`, which asks all
    processes here, so it tries thrice.
    """
    comm = meet()
    if before == "an empty exchange":
        # A rank may think otherwise: unisono listens for that, without waking up.
        nothing = [0] * comm.size
        comm.all_to_all_v(np.zeros(0), nothing, nothing)
    time.sleep(1)
    for _ in range(3):
        first = switches()
        time.sleep(seconds)
        last = switches()
        if last - first <= 2:
            break
    comm.barrier()
    return first, last


def switches() -> int:
    """Of the threads that unisono runs."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text().splitlines()
        except OSError:
            # It has just ended.
            continue
        fields = dict(line.split(":", 1) for line in status if ":" in line)
        if fields["Name"].strip().startswith("unisono"):
            count += int(fields["voluntary_ctxt_switches"])
    return count
