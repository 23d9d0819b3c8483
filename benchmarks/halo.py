"""A halo exchange by windows and by messages, in turn, on the ranks of one host.

    python benchmarks/halo.py
    python benchmarks/halo.py --ranks 2 8 --sizes 64K --seconds 5

The ranks form a ring. In each exchange a rank gives one edge to its left neighbour and one to its
right one, and gets theirs. `messages` are two calls of `sendrecv`, `window` two puts, two signals
and two waits, where each rank writes into one of two halos by turns: a neighbour that has
signalled the next exchange has read the one before. `mapped` writes nothing: a rank copies the
edges from its neighbours' arrays, which it has mapped, after their signals.

They take turns, block by block, in one set of processes. A figure is the median over blocks of the
time of an exchange on the slowest rank, and in brackets how many times that of messages takes as
long. Every exchange is checked once before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from harness import report
from harness.arguments import ranks, size, size_name
from harness.jobs import free_port

import unisono

SIZES = [8, 4 << 10, 64 << 10, 1 << 20]
WAYS = ("messages", "window", "mapped")
BLOCK = 0.02  # seconds of exchanges before another way's turn
LIMIT = 60.0  # seconds in which the ranks answer


class Rank:
    """One rank's edges, halos, and ways to exchange them."""

    def __init__(self, comm: unisono.Communicator, edge: int) -> None:
        self.comm, self.size = comm, edge
        self.left, self.right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        # Two of each: an edge is read, and a halo written, while the other one is worked on.
        self.edges = unisono.empty((2, 2, edge), "uint8")
        self.halos = unisono.empty((2, 2, edge), "uint8")
        self.edges[:], self.halos[:] = 0, 0
        self.window = comm.window(self.halos)
        self.exposed = comm.window(self.edges)
        self.theirs = {rank: self.exposed.map(rank) for rank in {self.left, self.right}}
        self.turns = {"window": 0, "mapped": 0}
        ways = (self.messages, self.by_window, self.by_mapping)
        self.ways: dict[str, Callable[[], np.ndarray]] = dict(zip(WAYS, ways, strict=True))

    def messages(self) -> np.ndarray:
        comm, edge, halo = self.comm, self.edges[0], self.halos[0]
        comm.sendrecv(edge[0], self.left, halo[1], self.right, 1)
        comm.sendrecv(edge[1], self.right, halo[0], self.left, 2)
        return halo

    def by_window(self) -> np.ndarray:
        turn = self.turn("window")
        window, edge, start = self.window, self.edges[0], 2 * turn * self.size
        window.put(edge[0], self.left, start + self.size)
        window.signal(self.left)
        window.put(edge[1], self.right, start)
        window.signal(self.right)
        window.wait_signal(self.right)
        window.wait_signal(self.left)
        return self.halos[turn]

    def by_mapping(self) -> np.ndarray:
        turn = self.turn("mapped")
        halo = self.halos[0]
        self.exposed.signal(self.left)
        self.exposed.signal(self.right)
        self.exposed.wait_signal(self.left)
        halo[0] = self.theirs[self.left][turn, 1]
        self.exposed.wait_signal(self.right)
        halo[1] = self.theirs[self.right][turn, 0]
        return halo

    def turn(self, way: str) -> int:
        self.turns[way] ^= 1
        return self.turns[way]

    def check(self) -> None:
        """Raise unless each way brings the neighbours' edges."""
        for number, (name, way) in enumerate(self.ways.items()):
            self.edges[:, 0] = 10 * self.comm.rank + number
            self.edges[:, 1] = 10 * self.comm.rank + number + 100
            self.halos[:] = 255
            self.comm.barrier()
            halo = way()
            expected = (10 * self.left + number + 100, 10 * self.right + number)
            if any((halo[side] != edge).any() for side, edge in enumerate(expected)):
                raise ValueError(f"{name}: what came is not what was sent")
            self.comm.barrier()


def timed(rank: Rank, way: Callable[[], object], count: int) -> float:
    rank.comm.barrier()
    began = time.perf_counter()
    for _ in range(count):
        way()
    took = np.array([(time.perf_counter() - began) / count])
    return float(rank.comm.all_reduce(took, "max")[0])


def measure(comm: unisono.Communicator, edge: int, seconds: float) -> dict[str, float]:
    """Return the median time of an exchange by each way."""
    rank = Rank(comm, edge)
    rank.check()
    counts = {
        name: max(1, min(2000, round(BLOCK / min(timed(rank, way, 5) for _ in range(3)))))
        for name, way in rank.ways.items()
    }
    blocks: dict[str, list[float]] = {name: [] for name in rank.ways}
    for _ in range(max(3, round(seconds / BLOCK / len(counts)))):
        for name, way in rank.ways.items():
            blocks[name].append(timed(rank, way, counts[name]))
    rank.window.fence()
    rank.exposed.fence()
    return {name: statistics.median(times) for name, times in blocks.items()}


def play(
    rank: int, world: int, port: int, sizes: list[int], seconds: float, to: Connection
) -> None:
    """Be one rank, and send the times of each size."""
    url = f"tcp://127.0.0.1:{port}"
    with unisono.init(url, rank=rank, world_size=world, timeout=120) as comm:
        for size in sizes:
            to.send(measure(comm, size, seconds))


def run(world: int, sizes: list[int], seconds: float) -> list[dict[str, float]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    given = (world, free_port(), sizes, seconds, theirs)
    ranks = [spawn.Process(target=play, args=(rank, *given)) for rank in range(world)]
    try:
        for process in ranks:
            process.start()
        found = []
        for _ in range(world * len(sizes)):
            if not ours.poll(LIMIT + 3 * seconds):
                raise TimeoutError("a rank said nothing")
            found.append(ours.recv())
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    # All ranks have the same times.
    return found[::world]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=ranks, nargs="+", default=[2, 4])
    add("--sizes", type=size, nargs="+", default=SIZES, help="bytes of an edge, with K or M")
    add("--seconds", type=float, default=2.0, help="for each size")
    add("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    args = parser.parse_args()
    figures = []
    print("microseconds of an exchange, and the time by messages over it")
    print(f"{'ranks':>5}{'edge':>10}" + "".join(f"{name:>20}" for name in WAYS))
    for world in args.ranks:
        for edge, times in zip(args.sizes, run(world, args.sizes, args.seconds), strict=True):
            cells = (
                f"{seconds * 1e6:12.1f} ({times['messages'] / seconds:5.2f})"
                for seconds in times.values()
            )
            print(f"{world:5}{size_name(edge):>10}" + "".join(cells), flush=True)
            figures.append({"ranks": world, "bytes": edge, "seconds": times})
    if args.json is not None:
        report.write_json(args.json, figures=figures)


if __name__ == "__main__":
    main()
