"""Sweep over collectives, sizes and world sizes, and write CSV, JSON and a plot.

    python benchmarks/sweep.py                     unisono, 1 B to 1 GiB, in about ten minutes
    python benchmarks/sweep.py --quick             few sizes up to 16 MiB, in about one minute
    python benchmarks/sweep.py --peers unisono,openmpi --collectives all_reduce,broadcast
    python benchmarks/sweep.py --from bench-results/sweep.json --plot sweep.png    plot again

A size is that of the whole, as nccl-tests define it: what all_reduce is given, what all_gather
returns, what reduce_scatter takes in. Algorithm bandwidth is size / time; bus bandwidth is that
times the collective's factor, so that it can be held against what the memory does. Sizes that would
take more memory or time than there is are skipped, and the output says which and why.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from harness import arguments, report
from harness.build import RESULTS, MissingError
from harness.cells import Cell, Effort, measure
from harness.jobs import FailedError, Jobs
from harness.peers import Options, Peer, start

COLLECTIVES = tuple(report.FACTORS)
PEERS = ("unisono", "unisono-heap", "openmpi", "torch/unisono", "torch/gloo")
SMALLEST, LARGEST = 1, 1 << 30
LONGEST_CELL = 30.0  # seconds that a size is expected to take at the most


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A cell that was not measured, and why."""

    world: int
    collective: str
    size: int
    reason: str

    def text(self) -> str:
        name = arguments.size_name(self.size)
        return f"skipped: {self.world} ranks, {self.collective} {name}: {self.reason}"


class Sweep:
    """Measures every cell that memory and time allow."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cells: list[Cell] = []
        self.skipped: list[Skipped] = []
        self.missing: dict[str, str] = {}
        self.until = time.monotonic() + args.minutes * 60
        self.left = len(args.ranks) * len(args.collectives) * len(args.sizes)

    def all(self) -> None:
        for world in self.args.ranks:
            with Jobs() as jobs:
                peers, missing = start(list(self.args.peers), world, jobs, Options())
                self.missing |= missing
                if not peers:
                    continue
                print(report.title(f"{world} ranks: microseconds (bus bandwidth in GB/s)"))
                print(f"{'':16}{'size':>9}" + "".join(f"{peer.name:>24}" for peer in peers))
                for collective in self.args.collectives:
                    self.collective(collective, world, peers)

    def collective(self, collective: str, world: int, peers: list[Peer]) -> None:
        """Measure from the smallest size on, and skip what would take too much."""
        before: Cell | None = None
        for size in self.args.sizes:
            share = (self.until - time.monotonic()) / self.left
            self.left -= 1
            reason = self.too_much(size, world, len(peers), before)
            if reason:
                self.skipped.append(Skipped(world, collective, size, reason))
                continue
            report.show(f"{world} ranks: {collective} {arguments.size_name(size)}")
            effort = Effort(min(max(share, self.args.least), 2.0), self.args.rounds)
            before = measure(collective, size, peers, effort)
            self.cells.append(before)
            report.show("")
            print(line_of(before, peers), flush=True)

    def too_much(self, size: int, world: int, peers: int, before: Cell | None) -> str | None:
        """Say why this size cannot be measured, or `None`."""
        # An input and an output on every rank; one peer has buffers at a time, another's may go.
        needed, room = 2 * size * world * min(peers, 2), available_memory() * 3 // 4
        if needed > room:
            return f"{needed >> 20:,} MiB of buffers, {room >> 20:,} MiB of memory may be used"
        if before is None or not before.rounds:
            return None
        seconds = sum(before.median(peer) or 0.0 for peer in before.rounds)
        # Some five calls of each peer: one to warm up, one to estimate, three rounds.
        expected = 5 * seconds * size / before.size
        if expected > LONGEST_CELL:
            return f"expected to take {expected:.0f} s"
        return None


def line_of(cell: Cell, peers: list[Peer]) -> str:
    line = f"{cell.collective:16}{arguments.size_name(cell.size):>9}"
    for peer in peers:
        seconds = cell.median(peer.name)
        if seconds is None:
            line += f"{'-':>24}"
            continue
        bus = report.bandwidths(cell, peer.name)[1] or 0.0
        line += f"{seconds * 1e6:>15,.1f} ({bus / 1e9:6.2f})"
    return line


def available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return 4 << 30


def sizes_between(smallest: int, largest: int, step: int) -> tuple[int, ...]:
    sizes = []
    while smallest <= largest:
        sizes.append(smallest)
        smallest *= step
    return tuple(sizes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, list_of, one_of = parser.add_argument, arguments.list_of, arguments.one_of
    add("--peers", type=list_of(one_of(*PEERS)), default=("unisono",), help=", ".join(PEERS))
    add("--ranks", type=list_of(arguments.ranks), help="as 2,4,8")
    chosen = list_of(one_of(*COLLECTIVES))
    add("--collectives", type=chosen, default=COLLECTIVES, help=", ".join(COLLECTIVES))
    add("--smallest", type=arguments.size, default=SMALLEST, help="size, as 1 or 4K")
    add("--largest", type=arguments.size, help="size, as 64M or 1G")
    add("--step", type=int, help="each size is so many times the one before")
    add("--minutes", type=float, help="about how long it may take")
    add("--rounds", type=int, default=7, help="measurements of each cell; the median counts")
    add("--quick", action="store_true", help="2 and 4 ranks, fewer sizes, up to 16 MiB")
    add("--csv", type=Path, default=RESULTS / "sweep.csv", metavar="FILE")
    add("--json", type=Path, default=RESULTS / "sweep.json", metavar="FILE")
    add("--plot", type=Path, default=RESULTS / "sweep.png", metavar="FILE")
    add("--from", type=Path, dest="source", metavar="JSON", help="measure nothing, plot this")
    args = parser.parse_args()
    args.ranks = args.ranks or ((2, 4) if args.quick else (2, 4, 8))
    args.minutes = args.minutes or (1.0 if args.quick else 10.0)
    args.largest = args.largest or (16 << 20 if args.quick else LARGEST)
    args.step = args.step or (16 if args.quick else 4)
    args.least = 0.02 if args.quick else 0.1
    if args.step < 2:
        parser.error("--step: at least 2")
    args.sizes = sizes_between(args.smallest, args.largest, args.step)
    return args


def sweep(args: argparse.Namespace) -> list[Cell]:
    run = Sweep(args)
    try:
        run.all()
    except (FailedError, MissingError) as error:
        sys.exit(f"\n{error}")
    print()
    for skipped in run.skipped:
        print(skipped.text())
    for name, reason in run.missing.items():
        print(f"not measured: {name}: {reason}")
    if not run.cells:
        sys.exit("nothing was measured")
    report.write_csv(args.csv, report.records(run.cells, {}))
    skipped = [dataclasses.asdict(cell) for cell in run.skipped]
    report.write_json(args.json, skipped=skipped, missing=run.missing, cells=run.cells)
    print(f"written: {args.csv}, {args.json}")
    return run.cells


def main() -> None:
    args = parse_arguments()
    if args.source:
        cells = [Cell(**cell) for cell in json.loads(args.source.read_text())["cells"]]
    else:
        cells = sweep(args)
    try:
        from harness import plot
    except ImportError:
        print("no plot: matplotlib is not installed (the extra `bench`)")
        return
    plot.sweep(cells, args.plot)
    print(f"plotted: {args.plot}")


if __name__ == "__main__":
    main()
