"""The marks: how many times as fast as its peers unisono is to be at all_reduce on one host."""

from __future__ import annotations

import dataclasses
import statistics

from harness.arguments import size_name
from harness.cells import Cell

SMALL = (8, 64, 512, 4 << 10, 16 << 10)
SIZES = (*SMALL, 1 << 20, 64 << 20)
BOUND_FROM = 4 << 20
MARK_OF_BOUND = 1.2  # of shared-heap all_reduce with 2 ranks, from BOUND_FROM on
MARK_OF_BARRIER = 1e-6  # seconds behind Open MPI's with 2 ranks
MARK_OF_C = 0.95  # of all_reduce through the C header, time from Rust / time from C
SIZES_OF_C = (8, 64 << 20)
COLUMNS = ("8 B - 16 KiB", "1 MiB", "64 MiB", "64 MiB, heap")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table: ratios that are to be reached, and what is compared in it."""

    name: str
    peer: str
    reference: str
    world: int
    marks: tuple[float, float, float, float]  # in the order of COLUMNS

    def ratios(self, cells: dict[tuple[int, str, int], Cell]) -> list[Measured | None]:
        """Return what was measured in each column; `None` where cells are missing."""
        small = {size: self.ratio(cells, size) for size in SMALL}
        measured = {size: ratio for size, ratio in small.items() if ratio}
        columns: list[Measured | None] = [None]
        if measured:
            worst = min(measured, key=lambda size: measured[size])
            mean = statistics.geometric_mean(measured.values())
            note = f"{measured[worst]:.2f} at {size_name(worst)}"
            columns = [Measured(mean, self.marks[0], note)]
        heap = f"{self.reference}-heap"
        for size, reference, mark in (
            (1 << 20, self.reference, self.marks[1]),
            (64 << 20, self.reference, self.marks[2]),
            (64 << 20, heap, self.marks[3]),
        ):
            ratio = self.ratio(cells, size, reference)
            columns.append(Measured(ratio, mark) if ratio else None)
        return columns

    def ratio(
        self, cells: dict[tuple[int, str, int], Cell], size: int, reference: str = ""
    ) -> float | None:
        cell = cells.get((self.world, "all_reduce", size))
        return cell.ratio(self.peer, reference or self.reference) if cell else None


@dataclasses.dataclass(frozen=True)
class Measured:
    """A ratio beside its mark."""

    ratio: float
    mark: float
    note: str = ""

    @property
    def met(self) -> bool:
        return self.ratio >= self.mark

    def text(self) -> str:
        return f"{self.ratio:.2f} ({self.mark:g}) {'met' if self.met else 'MISSED'}"


GLOO = ("gloo through torch", "torch/gloo", "torch/unisono")
OPEN_MPI = ("Open MPI 5", "openmpi", "unisono")
OPEN_MPI_FROM_C = ("Open MPI 5, both from C", "openmpi", "unisono-c")

ROWS = (
    Row(*GLOO, 2, (15, 5, 5, 9)),
    Row(*GLOO, 4, (30, 10, 3.5, 6)),
    Row(*GLOO, 8, (60, 20, 3.5, 5.5)),
    Row(*OPEN_MPI, 2, (1.1, 1.1, 2.0, 3.7)),
    Row(*OPEN_MPI, 4, (1.2, 1.2, 2.0, 3.4)),
    Row(*OPEN_MPI, 8, (1.3, 1.4, 2.2, 3.3)),
    Row(*OPEN_MPI_FROM_C, 2, (1.1, 1.1, 2.0, 3.7)),
    Row(*OPEN_MPI_FROM_C, 4, (1.2, 1.2, 2.0, 3.4)),
    Row(*OPEN_MPI_FROM_C, 8, (1.3, 1.4, 2.2, 3.3)),
)
