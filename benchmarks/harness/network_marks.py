"""The marks between hosts: what unisono is to reach on which links, and how far it is from that."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

from harness import report
from harness.arguments import size_name
from harness.beds import CHOICE, ONE_HOST, OPEN_MPI, Bed, start
from harness.cells import Cell, Effort, measure
from harness.jobs import Jobs

KIB, MIB = 1 << 10, 1 << 20

OF_LINE = 0.92  # of the link's rate, all_reduce
OF_LINE_OTHERS = 0.90
OF_LINE_FAR = 0.80
ROUND_TRIPS = 1.3
BRIEF = (10 * KIB, 150e-6)  # bytes, and seconds of an all_reduce
BESIDE_SOCKETS = 1.1
LOOPBACK_SMALL, LOOPBACK_LARGE = 10.0, 1.3  # times as fast as gloo


@dataclasses.dataclass(frozen=True)
class Mark:
    """One number, not a number where it could not be measured, beside what it is to be."""

    what: str
    measured: float
    wanted: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        if self.at_least:
            return self.measured >= self.wanted
        return self.measured <= self.wanted

    def text(self) -> str:
        limit = "at least" if self.at_least else "at most"
        verdict = "met" if self.met else "MISSED"
        measured = "-" if math.isnan(self.measured) else f"{self.measured:.2f}"
        number = f"{measured} ({limit} {self.wanted:g})"
        return f"  {self.what:44}{number:36}{verdict}"


Judge = Callable[[Bed, Cell], Iterator[Mark]]


@dataclasses.dataclass(frozen=True)
class Part:
    """Cells of one bed, and what is asked of each."""

    bed: Bed
    wanted: Sequence[tuple[str, int]]
    jobs: Sequence[str]
    judges: Sequence[Judge]
    seconds: float = 8.0  # for a cell; one whose calls take long takes longer
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def reaches(of_line: float) -> Judge:
    """Judge by the share of the link's rate."""

    def judge(bed: Bed, cell: Cell) -> Iterator[Mark]:
        seconds = cell.median(CHOICE)
        share = seconds and bed.share(cell.collective, cell.size, seconds)
        yield Mark("share of the line", share or math.nan, of_line)

    return judge


def times_gloo(wanted: float) -> Judge:
    """Judge by gloo's time in that of unisono, both through torch."""

    def judge(_: Bed, cell: Cell) -> Iterator[Mark]:
        ratio = cell.ratio("torch/gloo", "torch/unisono")
        yield Mark("times as fast as gloo", ratio or math.nan, wanted)

    return judge


def beside_sockets(_: Bed, cell: Cell) -> Iterator[Mark]:
    """Judge by what sockets take to exchange the same bytes."""
    ratio = cell.ratio(CHOICE, "exchange")
    yield Mark("of the time of plain sockets", ratio or math.nan, BESIDE_SOCKETS, at_least=False)


def beside_round_trips(_: Bed, cell: Cell) -> Iterator[Mark]:
    """Judge by a round trip of sockets and what the same ranks take on one host."""
    medians = (cell.median(name) for name in (CHOICE, "round_trip", ONE_HOST))
    ours, trip, inside = (1e6 * seconds if seconds else math.nan for seconds in medians)
    what = f"us; round trip {trip:.0f}, one host {inside:.0f}"
    yield Mark(what, ours, round(ROUND_TRIPS * trip + inside, 1), at_least=False)
    size, seconds = BRIEF
    if cell.size == size:
        yield Mark("us", ours, seconds * 1e6, at_least=False)


def loopback(_: Bed, cell: Cell) -> Iterator[Mark]:
    """Judge by gloo's time on loopback, short and long."""
    ratio = cell.ratio("torch/gloo", "torch/unisono")
    wanted = LOOPBACK_SMALL if cell.size <= 16 * KIB else LOOPBACK_LARGE
    yield Mark("times as fast as gloo", ratio or math.nan, wanted)


def of(collectives: str, *sizes: int) -> list[tuple[str, int]]:
    return [(collective, size) for collective in collectives.split() for size in sizes]


GIGABIT = 1000
OTHERS = "all_gather reduce_scatter broadcast all_to_all"
SMALL = (8, 64, KIB, 10 * KIB, 16 * KIB, 64 * KIB)
# Open MPI is shown beside, where it is installed.
OF_TORCH = (CHOICE, "torch", OPEN_MPI)
# gloo rings from neighbour to neighbour: round robin, every byte crosses the link for every rank.
TIMES_GLOO = {((4, 4), "blocks"): 1.6, ((4, 4), "round-robin"): 5.0}
LINES = [
    ((4, 4), "blocks"),
    ((4, 4), "round-robin"),
    ((2, 2), "blocks"),
    ((2, 2, 2, 2), "blocks"),
    ((3, 1), "blocks"),
]

PARTS: dict[str, list[Part]] = {
    "line": [
        Part(
            Bed(ranks, numbering, GIGABIT),
            # gloo takes minutes for a longer one, round robin.
            of("all_reduce", MIB, 16 * MIB, *([256 * MIB] if numbering == "blocks" else [])),
            OF_TORCH,
            (reaches(OF_LINE), times_gloo(TIMES_GLOO.get((ranks, numbering), 1.0))),
        )
        for ranks, numbering in LINES
    ],
    "others": [
        Part(
            Bed(ranks, numbering, GIGABIT),
            of(OTHERS, MIB, 16 * MIB),
            OF_TORCH,
            (reaches(OF_LINE_OTHERS), times_gloo(1.0)),
            5.0,
        )
        for ranks, numbering in LINES
    ],
    "brief": [
        Part(
            Bed((2, 2)),
            of("all_reduce", *SMALL),
            (CHOICE, "round_trip", ONE_HOST),
            (beside_round_trips,),
            4.0,
        )
    ],
    "sockets": [
        Part(
            Bed((1,) * count),
            of("all_reduce", *SMALL, MIB, 16 * MIB, 64 * MIB),
            (*OF_TORCH, "exchange"),
            (beside_sockets, times_gloo(1.0)),
            5.0,
        )
        for count in (2, 4)
    ],
    "loopback": [
        Part(
            Bed((world,)),
            of("all_reduce", 8, KIB, 16 * KIB, 64 * MIB),
            ("torch",),
            (loopback,),
            4.0,
            {"UNISONO_TRANSPORT": "tcp"},
        )
        for world in (2, 4)
    ],
    "far": [
        Part(
            Bed((ranks,) * 2, rate=200, delay=20),
            of("all_reduce", 64 * MIB),
            OF_TORCH[:2],
            (reaches(OF_LINE_FAR), times_gloo(1.0)),
        )
        for ranks in (1, 2)
    ],
}


def run(parts: Sequence[str]) -> None:
    """Measure those parts one after the other, and print what each came to."""
    marks: list[Mark] = []
    begun = time.monotonic()
    for name in parts:
        for part in PARTS[name]:
            marks += run_part(name, part)
    met = sum(mark.met for mark in marks)
    print(f"\n{met} of {len(marks)} met, in {(time.monotonic() - begun) / 60:.0f} minutes")
    print("one host: python benchmarks/compare.py --parts marks")


def run_part(name: str, part: Part) -> list[Mark]:
    """Measure the cells of one bed."""
    ranks = " + ".join(map(str, part.bed.ranks))
    numbering = f", {part.bed.numbering}" if max(part.bed.ranks) > 1 < len(part.bed.ranks) else ""
    print(report.title(f"{name}: {ranks} ranks{numbering}, links: {part.bed.link()}"))
    marks = []
    with part.bed.made() as net, Jobs() as jobs:
        peers = start(part.bed, net, part.jobs, jobs, part.environment)
        for collective, size in part.wanted:
            report.show(f"{collective} {size_name(size)}")
            cell = measure(collective, size, peers, Effort(part.seconds, 5))
            report.show("")
            times = ", ".join(
                f"{peer} {report.microseconds(cell.median(peer))}" for peer in cell.rounds
            )
            print(f"{collective} {size_name(size)}: {times} us", flush=True)
            for judge in part.judges:
                for mark in judge(part.bed, cell):
                    print(mark.text(), flush=True)
                    marks.append(mark)
    return marks
