"""Compare unisono with Open MPI, gloo and the machine's memory, interleaved in one run.

    python benchmarks/compare.py             everything, in about twenty minutes
    python benchmarks/compare.py --quick     the marks and few other cells, in about three
    python benchmarks/compare.py --parts marks --ranks 2 --sizes 8,64M
    python benchmarks/compare.py --peers openmpi --collectives all_to_all,ping_pong
    python benchmarks/compare.py --busy 1 --parts collectives --collectives all_reduce

A cell is one collective at one size and world size. The ranks of all peers are alive at the same
time and are measured in turn, round by round, so that whatever else the machine does meets all
alike; ranks that are not being measured sleep. benchmarks/README.md describes the method and how to
read the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from harness import arguments, marks, report
from harness.build import MissingError
from harness.cells import Cell, Effort, measure, time_calls
from harness.jobs import FailedError, Jobs
from harness.peers import Options, Peer, start

SIZES = (8, 64, 512, 4 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
NATIVE = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "ping_pong",
    "send_recv",
    "barrier",
)
THROUGH_TORCH = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
PEERS = ("openmpi", "c", "bound", "heap", "gloo")
PARTS = ("marks", "collectives", "torch", "idle")
LONGEST = 4.0  # seconds for one cell, however few there are
HEAP_FROM = 1 << 20
IDLE_SECONDS = 2.0
WORTH_SAYING = 0.01  # of the cores' time, which the hypervisor gave to others
REFERENCES = {"openmpi": "unisono", "unisono": "unisono-c", "torch/gloo": "torch/unisono"}

# The program of a neighbour. It ends when this process does, however that ends.
COMPUTE = """
import os, threading
def follow():
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=follow, daemon=True).start()
while True:
    sum(range(100_000))
"""

Key = tuple[int, str, int]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One cell that is to be measured, and on which peers."""

    collective: str
    size: int
    peers: tuple[str, ...]

    @property
    def weight(self) -> float:
        """How much of the time it should have: calls of large buffers are few in any second."""
        return len(self.peers) * (2.0 if self.size >= 1 << 20 else 1.0)


class Run:
    """Measures what was asked for, world by world, within about the time that was given."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.native: dict[Key, Cell] = {}
        self.torch: dict[Key, Cell] = {}
        self.loops: dict[int, dict[str, float]] = {}
        self.idle: dict[str, float] = {}
        self.missing: dict[str, str] = {}
        self.late = 0  # cells that there was no time for

    def wanted_native(self) -> list[Wanted]:
        """From C and Rust: all_reduce for the marks, the others for the table of collectives."""
        cells = []
        for collective in (name for name in NATIVE if name in self.args.collectives):
            sizes = [8] if collective == "barrier" else self.args.sizes
            if "collectives" not in self.args.parts:
                sizes = [size for size in sizes if self.is_for_marks(collective, size)]
            cells += [Wanted(collective, size, self.peers_of(collective, size)) for size in sizes]
        return cells

    def is_for_marks(self, collective: str, size: int) -> bool:
        is_mark = size in marks.SIZES or size >= marks.BOUND_FROM
        return "marks" in self.args.parts and (
            collective == "barrier" or (collective == "all_reduce" and is_mark)
        )

    def peers_of(self, collective: str, size: int) -> tuple[str, ...]:
        names = {"unisono": True}
        names["unisono-c"] = "c" in self.args.peers
        names["openmpi"] = "openmpi" in self.args.peers
        if collective == "all_reduce":
            names["unisono-heap"] = size >= HEAP_FROM and "heap" in self.args.peers
            names["unisono-c-heap"] = names["unisono-heap"] and names["unisono-c"]
            names["bound"] = size >= marks.BOUND_FROM and "bound" in self.args.peers
        return tuple(name for name, wanted in names.items() if wanted)

    def wanted_torch(self) -> list[Wanted]:
        """Through torch: all_reduce for the marks, the others for the table of gloo."""
        cells, args = [], self.args
        for collective in (name for name in THROUGH_TORCH if name in args.collectives):
            for size in args.sizes if "gloo" in args.peers else ():
                if "torch" not in args.parts and not self.is_for_marks(collective, size):
                    continue
                names = ["torch/unisono", "torch/gloo"]
                if collective == "all_reduce" and size >= HEAP_FROM and "heap" in args.peers:
                    names.append("torch/unisono-heap")
                if collective == "all_reduce" and size in marks.SMALL:
                    names.append("torch/fake")
                cells.append(Wanted(collective, size, tuple(names)))
        return cells

    def world(
        self, world: int, wanted: list[Wanted], into: dict[Key, Cell], seconds: float
    ) -> None:
        """Start every peer of one world and measure its cells, in about `seconds` seconds."""
        until, weight_left = time.monotonic() + seconds, sum(cell.weight for cell in wanted)
        options = Options(most_bytes=max((cell.size for cell in wanted), default=8))
        names = list(dict.fromkeys(name for cell in wanted for name in cell.peers))
        report.show(f"{world} ranks: starting {', '.join(names)}")
        with Jobs() as jobs:
            peers, missing = start(names, world, jobs, options)
            self.missing |= missing
            for cell in wanted:
                report.show(f"{world} ranks: {cell.collective} {arguments.size_name(cell.size)}")
                left = until - time.monotonic()
                share = left * cell.weight / weight_left
                weight_left -= cell.weight
                if left < -seconds / 4 and not self.is_for_marks(cell.collective, cell.size):
                    self.late += 1
                    continue
                effort = Effort(min(max(share, self.args.least), LONGEST), self.args.rounds)
                taking_part = [peer for peer in peers if peer.asked_as in cell.peers]
                if taking_part:
                    measured = measure(cell.collective, cell.size, taking_part, effort)
                    into[world, cell.collective, cell.size] = measured
            self.measure_loops(world, peers)
            if world == min(self.args.ranks) and "idle" in self.args.parts:
                for job in jobs:
                    if job.name in ("unisono", "openmpi"):
                        self.idle[job.name] = max(job.command(f"idle {IDLE_SECONDS}"))
        report.show("")

    def measure_loops(self, world: int, peers: list[Peer]) -> None:
        """Measure the rates at which one core adds and copies while the others do the same."""
        bound = next((peer for peer in peers if peer.asked_as == "bound"), None)
        if bound is None:
            return
        size = 64 << 20
        self.loops[world] = {
            name: size / min(time_calls(bound, name, size, 2) for _ in range(3))
            for name in ("add", "copy")
        }

    def all(self) -> None:
        native, through_torch = self.wanted_native(), self.wanted_torch()
        weight = len(self.args.ranks) * sum(cell.weight for cell in native + through_torch)
        for world in self.args.ranks:
            stolen = report.Stolen()
            for wanted, into in ((native, self.native), (through_torch, self.torch)):
                if wanted:
                    share = sum(cell.weight for cell in wanted) / weight
                    self.world(world, wanted, into, share * self.args.minutes * 60)
            print(self.tables(world), flush=True)
            if stolen.share() > WORTH_SAYING:
                share = f"{stolen.share():.0%}"
                print(f"\nmeanwhile the hypervisor gave {share} of the cores' time to others")

    def tables(self, world: int) -> str:
        """Return every ratio of one world."""
        texts = []
        for cells, door, reference, peer in (
            (self.native, "from C and Rust", "unisono", "openmpi"),
            (self.torch, "through torch", "torch/unisono", "torch/gloo"),
        ):
            of_world = [cell for key, cell in cells.items() if key[0] == world]
            if of_world:
                texts.append(report.title(f"{world} ranks, {door}: microseconds"))
                texts.append(report.ratios_table(of_world, reference, peer))
        return "\n".join(texts)

    def summary(self) -> str:
        texts = []
        if "marks" in self.args.parts:
            texts.append(report.marks_table(self.native, self.torch))
        native, through_torch = list(self.native.values()), list(self.torch.values())
        barriers = [cell for cell in native if cell.collective == "barrier"]
        if any("torch/fake" in cell.rounds for cell in through_torch):
            texts.append(report.torch_table(through_torch))
        if any(cell.median("unisono-c") for cell in native):
            texts.append(report.c_table(native))
        if any(cell.bound() for cell in native):
            texts.append(report.bound_table(native, self.loops, self.torch))
        if barriers:
            texts.append(report.barrier_table(barriers))
        if self.idle:
            text = f"A wait of {IDLE_SECONDS:g} s for a late peer takes this much time of a core"
            texts.append(report.title(text))
            for name, seconds in self.idle.items():
                texts.append(f"{report.LABELS[name]:10} {seconds * 1e3:9.1f} ms")
        texts.append(report.title("In sum"))
        if native and "openmpi" not in self.missing and "openmpi" in self.args.peers:
            texts.append(report.behind(native, "unisono", "openmpi"))
        if through_torch:
            texts.append(report.behind(through_torch, "torch/unisono", "torch/gloo"))
        refusals = [list(cell.refused.items()) for cell in native + through_torch]
        reasons = dict.fromkeys([*self.missing.items(), *itertools.chain(*refusals)])
        texts += [f"not measured: {name}: {reason}" for name, reason in reasons]
        if self.late:
            texts.append(f"not measured for want of time: {self.late} cells (--minutes)")
        return "\n".join(texts)


def header(args: argparse.Namespace) -> str:
    machine = report.machine()
    text = f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; float32"
    text += "\nmedians over the rounds of the slowest rank's time of one call"
    text += "\nratio = peer / unisono: above 1, unisono is faster; < marks where it is not"
    if os.getloadavg()[0] > 0.5:
        text += (
            f"\nload average {os.getloadavg()[0]:.1f}: others use this machine, ratios will vary"
        )
    crowded = [str(world) for world in args.ranks if world > len(os.sched_getaffinity(0))]
    if crowded:
        text += f"\nwith {' and '.join(crowded)} ranks there are more ranks than cores"
    if args.busy:
        text += f"\nbeside {args.busy} processes that do nothing but compute"
    return text


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep `count` processes computing meanwhile, and yield them."""
    neighbours = [
        subprocess.Popen([sys.executable, "-c", COMPUTE], stdin=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        yield neighbours
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, list_of, one_of = parser.add_argument, arguments.list_of, arguments.one_of
    add("--peers", type=list_of(one_of(*PEERS)), default=PEERS, help=", ".join(PEERS))
    add("--parts", type=list_of(one_of(*PARTS)), default=PARTS, help=", ".join(PARTS))
    add("--ranks", type=list_of(arguments.ranks), default=(2, 4, 8), help="as 2,4,8")
    add("--collectives", type=list_of(one_of(*NATIVE)), default=NATIVE, help=", ".join(NATIVE))
    add("--sizes", type=list_of(arguments.size), help="as 8,16K,64M")
    add("--minutes", type=float, help="about how long it may take")
    add("--rounds", type=int, help="measurements of each peer in a cell")
    add("--quick", action="store_true", help="fewer sizes and rounds, within about three minutes")
    add("--busy", type=int, default=0, metavar="N", help="beside N processes that compute")
    add("--json", type=Path, metavar="FILE", help="write every round's time to FILE")
    add("--csv", type=Path, metavar="FILE", help="write one line for each cell and peer to FILE")
    args = parser.parse_args()
    args.sizes = args.sizes or (marks.SIZES if args.quick else SIZES)
    args.minutes = args.minutes or (3.0 if args.quick else 20.0)
    args.rounds = args.rounds or (5 if args.quick else 11)
    args.least = 0.1 if args.quick else 0.3
    return args


def main() -> None:
    args = parse_arguments()
    print(header(args), flush=True)
    run = Run(args)
    try:
        with busy(args.busy):
            run.all()
    except (FailedError, MissingError) as error:
        sys.exit(f"\n{error}")
    print(run.summary())
    cells = [*run.native.values(), *run.torch.values()]
    if args.csv:
        report.write_csv(args.csv, report.records(cells, REFERENCES))
    if args.json:
        more = {"loops": run.loops, "idle": run.idle, "missing": run.missing}
        report.write_json(args.json, **more, cells=cells)


if __name__ == "__main__":
    main()
