"""Measurements between ranks: the latency and rate of a pair, and the offset of a clock.

All ranks go through the same list of pairs, one after the other, with a barrier before each, so
that no pair is disturbed by another. The first rank of a pair chooses the number of rounds by a
first one, so that a slow link takes no longer than a fast one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unisono import Communicator

# Up to this world every pair is measured, and up to these hosts every pair of hosts.
FEW_RANKS = 8
FEW_HOSTS = 32
# Seconds for each number, about.
BUDGET = 0.2
# And no less than these times the latency, within which a connection is slow.
_LATENCIES = 20
# Bytes of a message, of all at first and at most.
MESSAGE = 4 << 20
_FIRST, _MOST = 128 << 10, 128 << 20
_MOST_ROUNDS, _LEAST_ROUNDS = 300, 5
_CLOCK_ROUNDS = 9


@dataclass
class Measured:
    """The numbers of a pair."""

    first: int
    second: int
    # Seconds one way: half of the median of the rounds.
    latency: float
    # Bytes in a second, from the first to the second, and back.
    there: float
    back: float
    # The ways of the link, as each end tells it.
    ways: tuple[str, str] = ("", "")

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def chosen(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs to measure, for the host of each rank, by a number.

    All where ranks are few; else one pair in each host, and one between each two hosts. With very
    many hosts that is one between the first and each other one, and between neighbours.
    """
    world = len(hosts)
    if world <= FEW_RANKS:
        return list(itertools.combinations(range(world), 2))
    ranks: dict[int, list[int]] = {}
    for rank, number in enumerate(hosts):
        ranks.setdefault(number, []).append(rank)
    pairs = {(here[0], here[1]) for here in ranks.values() if len(here) > 1}
    first = [here[0] for here in ranks.values()]
    if len(first) <= FEW_HOSTS:
        pairs.update(itertools.combinations(first, 2))
    else:
        pairs.update((first[0], other) for other in first[1:])
        pairs.update(itertools.pairwise(first))
    return sorted(pairs)


def measure(comm: Communicator, pairs: Sequence[tuple[int, int]]) -> list[Measured]:
    """Measure the pairs; returns those that this rank is the first of."""
    found = []
    for first, second in pairs:
        comm.barrier()
        if comm.rank == first:
            latency = _latency(comm, second)
            there = _rate(comm, second, latency)
            back = _answer_rate(comm, second)
            found.append(Measured(first, second, latency, there, back))
        elif comm.rank == second:
            latency = _answer_latency(comm, first)
            _answer_rate(comm, first)
            _rate(comm, first, latency)
    comm.barrier()
    return found


def _rounds(comm: Communicator, peer: int, count: int) -> list[float]:
    """The seconds of rounds of eight bytes to the peer and back, each."""
    word, seconds = np.zeros(1, np.int64), []
    for _ in range(count):
        begin = time.perf_counter()
        comm.send(word, peer)
        comm.recv(word, peer)
        seconds.append(time.perf_counter() - begin)
    return seconds


def _answer(comm: Communicator, peer: int, count: int) -> None:
    word = np.zeros(1, np.int64)
    for _ in range(count):
        comm.recv(word, peer)
        comm.send(word, peer)


def _latency(comm: Communicator, peer: int) -> float:
    # The first one opens the link.
    known = min(_rounds(comm, peer, _LEAST_ROUNDS)[1:])
    count = int(np.clip(BUDGET / known, _LEAST_ROUNDS, _MOST_ROUNDS))
    comm.send(np.array([count], np.int64), peer)
    latency = statistics.median(_rounds(comm, peer, count)) / 2
    comm.send(np.array([latency]), peer)
    return latency


def _answer_latency(comm: Communicator, peer: int) -> float:
    _answer(comm, peer, _LEAST_ROUNDS)
    comm.recv(count := np.zeros(1, np.int64), peer)
    _answer(comm, peer, int(count[0]))
    comm.recv(latency := np.zeros(1), peer)
    return float(latency[0])


def _rate(comm: Communicator, peer: int, latency: float) -> float:
    """Send to the peer, twice as much each time until that takes long; returns the last rate.

    By then the memory is touched, and a connection has come up to its speed.
    """
    array, done = np.ones(MESSAGE, np.uint8), np.zeros(1, np.int64)
    total, enough = _FIRST, max(BUDGET, _LATENCIES * latency)
    while True:
        size = min(total, MESSAGE)
        comm.send(np.array([size, total // size], np.int64), peer)
        begin = time.perf_counter()
        for _ in range(total // size):
            comm.send(array[:size], peer)
        comm.recv(done, peer)
        seconds = time.perf_counter() - begin
        if seconds > enough or total >= _MOST:
            break
        total *= 2
    rate = total / max(seconds - latency, 1e-9)
    comm.send(np.zeros(2, np.int64), peer)
    comm.send(np.array([rate]), peer)
    return rate


def _answer_rate(comm: Communicator, peer: int) -> float:
    array, done = np.empty(MESSAGE, np.uint8), np.zeros(1, np.int64)
    while True:
        comm.recv(about := np.zeros(2, np.int64), peer)
        size, count = map(int, about)
        if not count:
            break
        for _ in range(count):
            comm.recv(array[:size], peer)
        comm.send(done, peer)
    comm.recv(rate := np.zeros(1), peer)
    return float(rate[0])


def offsets(comm: Communicator, ranks: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return on rank 0, for each of these ranks, how far its clock is ahead, and how sure that is.

    Both in seconds. The clock of a rank is compared with the middle of a round, the shortest of
    some, and the half of that round is the most by which it can be wrong.
    """
    found = {}
    for peer in ranks:
        if comm.rank == 0:
            looks = []
            for _ in range(_CLOCK_ROUNDS):
                clock = np.zeros(1, np.float64)
                begin, since = time.time(), time.perf_counter()
                comm.send(clock, peer)
                comm.recv(clock, peer)
                half = (time.perf_counter() - since) / 2
                looks.append((half, float(clock[0]) - begin - half))
            half, ahead = min(looks)
            found[peer] = (ahead, half)
        elif comm.rank == peer:
            for _ in range(_CLOCK_ROUNDS):
                comm.recv(clock := np.zeros(1, np.float64), 0)
                comm.send(np.array([time.time()]), 0)
    return found
