"""Times of calls: all contestants of a row take turns, and the slowest rank counts.

A batch is a barrier and then a number of calls one after the other, timed as one: its time is the
mean of its calls on the slowest rank. A row's time is the median over its batches. The batches of
the contestants of a row (out of place, in place, other runtimes) alternate, each time beginning
with another one, so that a slow moment of the machine meets all. Every decision is made from times
that all ranks agree on, so all ranks make the same calls.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

import unisono
from unisono._bench.operations import Call

#: The fewest calls of a time, and the batches that they are made in.
FEWEST = 5
BATCHES = 5
#: The part of the time that goes into calls that do not count.
_WARM_UP = 0.2
_MOST = 1_000_000


@dataclass
class Contestant:
    """A call that is measured."""

    name: str
    call: Call
    #: The calls of each batch, and the seconds of one of them on this rank.
    batches: Sequence[int] = ()
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Effort:
    """How long a row is measured."""

    seconds: float
    #: Calls of each time; None: as many as fit.
    iterations: int | None = None


class Clock:
    """Times calls on all ranks of a group."""

    def __init__(self, comm: unisono.Communicator, root: int | None) -> None:
        self.comm = comm
        #: The root of the next call; it moves on unless it is given.
        self.roots: Iterator[int] = (
            itertools.cycle(range(comm.world_size)) if root is None else itertools.repeat(root)
        )

    def batch(self, call: Call, calls: int) -> float:
        """Make calls one after the other; returns their seconds on this rank."""
        roots = list(itertools.islice(self.roots, calls))
        self.comm.barrier()
        began = time.perf_counter()
        for root in roots:
            call(root)
        return time.perf_counter() - began

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the longest of the ranks' seconds, for each number."""
        longest: list[float] = self.comm.all_reduce(np.array(seconds, np.float64), "max").tolist()
        return longest

    def measure(self, contestants: Sequence[Contestant], effort: Effort) -> dict[str, float]:
        """Return the seconds of one call of each contestant on the slowest rank, by name."""
        share = effort.seconds / len(contestants)
        for one in contestants:
            one.batches, one.seconds = self._plan(one.call, share, effort.iterations), []
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            for turn in range(BATCHES):
                first = turn % len(contestants)
                for one in [*contestants[first:], *contestants[:first]]:
                    if calls := one.batches[turn]:
                        one.seconds.append(self.batch(one.call, calls) / calls)
        finally:
            if was_collecting:
                gc.enable()
        return {one.name: statistics.median(self.slowest(one.seconds)) for one in contestants}

    def _plan(self, call: Call, seconds: float, iterations: int | None) -> list[int]:
        """Warm up, and return how many calls each batch has."""
        calls, spent = self.comm.world_size, 0.0
        while True:
            [took] = self.slowest([self.batch(call, calls)])
            spent += took
            per_call = max(took / calls, 1e-9)
            if iterations is not None or spent >= _WARM_UP * seconds:
                break
            left = _WARM_UP * seconds - spent
            calls = max(1, min(4 * calls, int(left / per_call) + 1))
        total = iterations or int((1 - _WARM_UP) * seconds / per_call)
        total = max(iterations or FEWEST, min(total, _MOST))
        return [total * (n + 1) // BATCHES - total * n // BATCHES for n in range(BATCHES)]

    def next_root(self) -> int:
        """Return the root of a single call, the same on all ranks."""
        return next(self.roots)
