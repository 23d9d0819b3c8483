"""The rank functions of the tests across hosts; `test_hosts.py` starts them."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from failure_ranks import HEAD_START, Ending, ending, reduce_for_ever, signal_oneself
from offers_ranks import read_and_write  # noqa: F401

import unisono

COUNTS = [1, 7, 1003, 300_001]


@dataclass(frozen=True)
class Links:
    """The paths of this rank's bytes: mapped segments, and both addresses of TCP connections."""

    segments: int
    connections: set[tuple[str, str]]


def links() -> Links:
    maps = Path("/proc/self/maps").read_text().splitlines()
    segments = {line.split()[4] for line in maps if "/memfd:unisono" in line}
    connections = {
        (link.laddr.ip, link.raddr.ip)
        for link in psutil.Process().net_connections("tcp4")
        if link.status == psutil.CONN_ESTABLISHED
        and int(os.environ["MASTER_PORT"]) not in (link.laddr.port, link.raddr.port)
    }
    return Links(len(segments), connections)


def contribution(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng([rank, count]).integers(-1000, 1000, count).astype(np.float64)


def everything() -> Links:
    """Collectives and messages between all ranks, against NumPy. Returns what carried them."""
    comm = unisono.init()
    rank, world = comm.rank, comm.size
    for count in COUNTS:
        inputs = [contribution(other, count) for other in range(world)]
        np.testing.assert_array_equal(comm.all_reduce(inputs[rank].copy()), sum(inputs))
        np.testing.assert_array_equal(
            comm.all_reduce(inputs[rank].copy(), "max"), np.max(inputs, 0)
        )
        np.testing.assert_array_equal(comm.all_gather(inputs[rank]), np.stack(inputs))
        root = count % world
        np.testing.assert_array_equal(comm.broadcast(inputs[rank].copy(), root), inputs[root])
        blocks = [
            contribution(10 + other, world * count).reshape(world, count) for other in range(world)
        ]
        np.testing.assert_array_equal(comm.reduce_scatter(blocks[rank]), sum(blocks)[rank])
        swapped = np.stack([block[rank] for block in blocks])
        np.testing.assert_array_equal(comm.all_to_all(blocks[rank]), swapped)
        messages(comm, count)
        comm.barrier()
    found = links()
    comm.barrier()
    return found


def sums_of_fractions(counts: Sequence[int]) -> dict[int, str]:
    """float32 whose sums are rounded, against NumPy; the results' bits, by how many there are."""
    comm = unisono.init()
    found = {}
    for count in counts:
        inputs = [
            np.random.default_rng([rank, count]).standard_normal(count, np.float32)
            for rank in range(comm.size)
        ]
        values = comm.all_reduce(inputs[comm.rank].copy())
        exact = np.sum(inputs, 0, dtype=np.float64)
        assert np.any(values != exact), "nothing was rounded, so any order gives these bits"
        np.testing.assert_allclose(values, exact, rtol=0, atol=1e-5)
        found[count] = hashlib.sha256(values.tobytes()).hexdigest()
    comm.barrier()
    return found


def ways_out() -> list[str]:
    """Return this rank's address in each connection to another host, but that to the store."""
    store = int(os.environ["MASTER_PORT"])
    return [
        link.laddr.ip
        for link in psutil.Process().net_connections("tcp4")
        if link.status == psutil.CONN_ESTABLISHED
        and link.laddr.ip != link.raddr.ip
        and store not in (link.laddr.port, link.raddr.port)
    ]


def long_messages(rounds: int) -> list[str]:
    """Sums and messages of 24 MiB, against NumPy. Returns the ways out at the end."""
    comm = unisono.init()
    count = 3 << 20
    for at in range(rounds):
        inputs = [contribution(other + at, count) for other in range(comm.size)]
        np.testing.assert_array_equal(comm.all_reduce(inputs[comm.rank].copy()), sum(inputs))
        into = np.empty(count)
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        work = comm.irecv(into, left)
        comm.send(inputs[comm.rank], right)
        work.wait()
        np.testing.assert_array_equal(into, inputs[left])
    found = ways_out()
    comm.barrier()
    return found


def long_messages_until_one_dies(rounds: int) -> Ending:
    """Rank 1 ends itself in a call, when long messages go over several connections."""
    comm = unisono.init()
    for _ in range(rounds):
        comm.all_reduce(np.zeros(3 << 20))
    if comm.rank == 1:
        assert len(ways_out()) > 4
        signal_oneself(signal.SIGKILL, HEAD_START)
    return ending(lambda: reduce_for_ever(comm))


def sums_in_8_bits() -> dict[int, str]:
    """float32 that travels in 8 bits, against NumPy; the results' bits, by how many there are."""
    comm = unisono.init()
    rank, world = comm.rank, comm.size
    found = {}
    for count in COUNTS:
        inputs = [contribution(other, count).astype(np.float32) for other in range(world)]
        values = inputs[rank].copy()
        assert comm.all_reduce_int8(values) is values
        # One half of a step for the other host's sum, and one for the result.
        most = (world // 2 + world) * 1000 / 254
        np.testing.assert_allclose(values, sum(inputs), rtol=0, atol=1.01 * most)
        found[count] = hashlib.sha256(values.tobytes()).hexdigest()
    average = comm.all_reduce_int8(np.full((3, 5), rank, np.float32), "avg")
    np.testing.assert_allclose(average, (world - 1) / 2, rtol=1e-2)
    for bad, op, words in [
        (np.zeros(4), "sum", "float32"),
        (np.zeros(4, np.float32), "max", "sum and avg"),
        (np.zeros(17, np.uint8)[1:].view(np.float32), "sum", "multiple of 4 bytes"),
    ]:
        with pytest.raises(unisono.UnsupportedError, match=words):
            comm.all_reduce_int8(bad, op)
    comm.barrier()
    return found


def quickest_round_trip(times: int) -> float:
    """The seconds of the quickest of some messages from rank 0 to rank 1 and back."""
    comm = unisono.init()
    quickest, message = float("inf"), np.zeros(1)
    for _ in range(times):
        begun = time.monotonic()
        if comm.rank == 0:
            comm.send(message, 1)
            comm.recv(message, 1)
            quickest = min(quickest, time.monotonic() - begun)
        else:
            comm.recv(message, 0)
            comm.send(message, 0)
    return quickest


def reduce_for_a_while(seconds: float) -> float:
    """Run all_reduces for `seconds` on rank 0's clock; return the seconds that the longest took."""
    comm = unisono.init()
    begun, longest = time.monotonic(), 0.0
    while True:
        before = time.monotonic()
        goes_on = np.array([comm.rank > 0 or before - begun < seconds])
        if not comm.all_reduce(goes_on, "land").item():
            return longest
        values = comm.all_reduce(np.full(10_000, comm.rank + 1.0))
        np.testing.assert_array_equal(values, comm.size * (comm.size + 1) / 2)
        longest = max(longest, time.monotonic() - before)


def messages(comm: unisono.Communicator, count: int) -> None:
    """Every rank sends to all others at once, and takes one message from any source after that."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [comm.isend(contribution(comm.rank, count), other, tag=5) for other in others]
    for other in others:
        got = np.zeros(count)
        assert comm.recv(got, other, tag=5).source == other
        np.testing.assert_array_equal(got, contribution(other, count))
    for send in sends:
        send.wait()
    if comm.rank == 0:
        sources = {comm.recv(np.zeros(1), unisono.ANY_SOURCE, tag=6).source for _ in others}
        assert sources == set(others)
    else:
        comm.send(np.zeros(1), 0, tag=6)


def meet_in_a_file(path: str) -> set[tuple[str, str]]:
    """One all_reduce of ranks that nothing but a file has brought together."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    comm = unisono.init(f"file://{path}", rank=rank, world_size=world)
    np.testing.assert_array_equal(comm.all_reduce(np.ones(8)), np.full(8, world))
    found = links().connections
    comm.barrier()
    return found


def join_only() -> Ending:
    return ending(unisono.init)


def join_and_reduce() -> Ending:
    comm = unisono.init()
    return ending(lambda: comm.all_reduce(np.zeros(8)))


def meet_in_vain() -> Ending | None:
    """One message between ranks 1 and 2, which cannot reach each other."""
    comm = unisono.init()
    if comm.rank == 0:
        return None
    other = 3 - comm.rank
    return ending(lambda: comm.sendrecv(np.zeros(8), other, np.zeros(8), other))


def cut_off(cutter: int) -> Ending:
    """In the middle of an all_reduce one rank takes the link of its host down."""
    comm = unisono.init()
    comm.barrier()
    if comm.rank == cutter:
        down = ["ip", "link", "set", "eth0", "down"]
        timer = threading.Timer(HEAD_START, subprocess.run, (down,), {"check": True})
        timer.start()
    return ending(lambda: reduce_for_ever(comm))


def die(victim: int, number: int) -> Ending:
    comm = unisono.init()
    comm.barrier()
    if comm.rank == victim:
        signal_oneself(number, HEAD_START)
    return ending(lambda: reduce_for_ever(comm))


def asks_on_all_hosts(hosts: str, ssh: str) -> tuple[list[str], str, str] | None:
    """Rank 0 asks for the state of the ranks of all hosts, which wait for it."""
    comm = unisono.init()
    told = None
    if comm.rank == 0:
        command = [sys.executable, "-m", "unisono", "status", "--ssh", ssh, "--hosts"]

        def ask(*more: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*command, *more], capture_output=True, text=True, timeout=20, check=False
            )

        deadline = time.monotonic() + 20
        while "3 ranks wait" not in (seen := ask(hosts)).stdout and time.monotonic() < deadline:
            time.sleep(0.1)
        lacking = ask(f"{hosts},unknown")
        told = [seen.stdout, lacking.stderr], ask(hosts, "--ras").stdout, lacking.returncode
    comm.all_reduce(np.ones(3))
    return told


def asks_through_the_group(lock: str) -> tuple[str, str, dict] | None:
    """Rank 0 asks for the state of all ranks. Rank 2 holds the GIL, and rank 3 is stopped.

    Returns
    -------
    tuple
        The words before rank 3 is stopped, those while it is, and the form of NCCL's RAS then.
    """
    comm = unisono.init()
    pids = comm.all_gather(np.array([os.getpid()], np.int64)).reshape(-1).tolist()
    told = None
    with Path(lock).open("w") as file:
        if comm.rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        comm.barrier()
        if comm.rank == 0:
            told = _asks_while_one_is_stopped(pids[3])
            fcntl.flock(file, fcntl.LOCK_UN)
        elif comm.rank == 2:
            # A call of PyDLL keeps the GIL.
            ctypes.PyDLL(None).flock(file.fileno(), fcntl.LOCK_EX)
    comm.all_reduce(np.ones(3))
    return told


def _asks_while_one_is_stopped(pid: int) -> tuple[str, str, str, dict]:
    def ask(command: str, *wanted: str) -> str:
        """Ask until the answer has all of it: a rank without a core may be late once."""
        deadline = time.monotonic() + 20
        while True:
            printed = subprocess.run(
                [sys.executable, "-m", "unisono", *command.split()],
                capture_output=True,
                text=True,
                timeout=20,
                check=True,
            ).stdout
            if all(text in printed for text in wanted) or time.monotonic() > deadline:
                return printed
            time.sleep(0.1)

    before = ask("status", "2 ranks wait", "2 of them here, 2 on other hosts")
    shown = ask("top --once --interval 0.2", "2 of them here, 2 on other hosts")
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped = ask("status", "2 of them here, 1 on other hosts")
        return before, shown, stopped, json.loads(ask("status --ras"))
    finally:
        os.kill(pid, signal.SIGCONT)
