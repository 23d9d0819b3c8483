"""Cells: one collective at one size and world size, measured on several peers in turn."""

from __future__ import annotations

import dataclasses
import statistics
import time

from harness.jobs import FailedError, RefusedError
from harness.peers import Peer

MOST_CALLS = 20_000  # in one round, where nothing else is asked for
LEAST_ROUNDS = 3
ROOTED = ("reduce", "broadcast", "gather", "scatter")
CHECKED_UP_TO = 64 << 20  # bytes; above, comparing takes longer than measuring


@dataclasses.dataclass(frozen=True)
class Cell:
    """The measurements of one collective at one size and world size, on every peer."""

    world: int
    collective: str
    size: int
    # By peer: seconds of one call on the slowest rank, one for each round. The n-th rounds of all
    # peers were neighbours in time.
    rounds: dict[str, list[float]]
    calls: dict[str, int]
    # By peer: why it was not measured.
    refused: dict[str, str]

    def median(self, peer: str) -> float | None:
        return statistics.median(self.rounds[peer]) if peer in self.rounds else None

    def bound(self, family: str = "bound") -> tuple[str, float] | None:
        """Return the fastest way to go over the memory, by name, and its median."""
        peers = [peer for peer in self.rounds if peer.startswith(f"{family}/")]
        medians = [(self.median(peer), peer.removeprefix(f"{family}/")) for peer in peers]
        best = min(((median, name) for median, name in medians if median), default=None)
        return (best[1], best[0]) if best else None

    def ratio(self, peer: str, reference: str) -> float | None:
        """How many times as long `peer` takes: above 1 the reference is faster."""
        ours, theirs = self.median(reference), self.median(peer)
        return theirs / ours if ours and theirs else None

    def ratio_range(self, peer: str, reference: str) -> tuple[float, float]:
        """Return the lowest and the highest ratio of two neighbouring rounds."""
        pairs = zip(self.rounds[peer], self.rounds[reference], strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        return min(ratios), max(ratios)


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long one cell is measured."""

    seconds: float  # for all its peers
    rounds: int
    most_calls: int = MOST_CALLS  # in one round


def measure(collective: str, size: int, peers: list[Peer], effort: Effort) -> Cell:
    """Check that every peer computes the right result, then time them in turn."""
    world = peers[0].job.world
    refused: dict[str, str] = {}
    taking_part: list[tuple[Peer, str]] = []
    for peer in peers:
        word = peer.word(collective)
        if word is None:
            continue
        try:
            if size <= CHECKED_UP_TO:
                peer.job.command(f"check {word} {size}")
            # The root moves on with every call; what a root does once is no part of the time.
            time_calls(peer, word, size, world if collective in ROOTED else 1)
            taking_part.append((peer, word))
        except RefusedError as reason:
            refused[peer.name] = str(reason)

    share = effort.seconds / max(1, len(taking_part))
    most = effort.most_calls
    estimates = {
        peer.name: estimate(peer, word, size, share / 8, most) for peer, word in taking_part
    }
    per_round = share * 3 / 4 / effort.rounds
    calls = {
        name: max(1, min(most, int(per_round / seconds))) for name, seconds in estimates.items()
    }
    # Where a single call takes longer than its share of time there are fewer rounds.
    slowest = max(estimates.values(), default=1.0)
    rounds = max(LEAST_ROUNDS, min(effort.rounds, int(share * 3 / 4 / slowest)))

    seconds: dict[str, list[float]] = {peer.name: [] for peer, _ in taking_part}
    for turn in range(rounds):
        # No peer always comes after the same other one.
        first = turn % max(1, len(taking_part))
        for peer, word in taking_part[first:] + taking_part[:first]:
            seconds[peer.name].append(time_calls(peer, word, size, calls[peer.name]))
    for job in {peer.job.name: peer.job for peer, _ in taking_part}.values():
        job.command("free")
    return Cell(world, collective, size, seconds, calls, refused)


def estimate(peer: Peer, word: str, size: int, limit: float, most: int) -> float:
    """Warm up for about `limit` seconds, and return the seconds of one call."""
    calls, until = 1, time.monotonic() + limit
    while True:
        per_call = time_calls(peer, word, size, calls)
        left = until - time.monotonic()
        if left <= per_call or calls >= most:
            return per_call
        calls = max(calls + 1, min(calls * 10, int(left / 2 / per_call), most))


def time_calls(peer: Peer, word: str, size: int, calls: int) -> float:
    """Return the seconds of one call on the slowest rank."""
    seconds = max(peer.job.command(f"time {word} {size} {calls}"))
    if seconds <= 0:
        raise FailedError(f"{peer.name} took no time at all for {word} of {size} bytes")
    return seconds / calls
