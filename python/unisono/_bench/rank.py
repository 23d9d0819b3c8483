"""One rank of a run: the rows that are asked for, in the same order on all ranks."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import unisono
from unisono._bench import peers, plot
from unisono._bench.measure import Clock, Contestant, Effort
from unisono._bench.operations import IN_PLACE, OPERATIONS, OUT_OF_PLACE, Cell, Known, call
from unisono._bench.results import Figures, Key, Peer, Row, Run, machine, wrong_in
from unisono._bench.table import Table, size_name

#: The longest name of a host.
_NAME = 64


@dataclass(frozen=True)
class Wishes:
    """The command line."""

    operations: Sequence[str]
    sizes: Sequence[int]
    dtype: np.dtype[Any]
    reduction: str
    root: int | None
    effort: Effort
    is_checked: bool
    is_in_heap: bool
    compare: Sequence[str]
    json: str | None
    against: Path | None
    plot: Path | None
    command: Sequence[str]


def _hosts(comm: unisono.Communicator) -> int:
    """Count the hosts of a group, by their names."""
    own = np.zeros(_NAME, np.uint8)
    name = platform.node().encode()[:_NAME]
    own[: len(name)] = np.frombuffer(name, np.uint8)
    return len(np.unique(comm.all_gather(own), axis=0))


class Rank:
    """Measures rows, and prints them on rank 0."""

    def __init__(self, comm: unisono.Communicator, wishes: Wishes) -> None:
        self.comm, self.wishes = comm, wishes
        self.clock = Clock(comm, wishes.root)
        self.known = Known(comm.world_size, wishes.dtype, wishes.reduction)
        is_first, hosts = comm.rank == 0, _hosts(comm)
        self.before = Run.read(wishes.against) if wishes.against and is_first else None
        self.peers, missing = peers.open_all(comm, wishes.compare, hosts == 1)
        self.run = Run(machine(unisono.__version__, hosts), wishes.command, [])
        self.table = Table(
            sys.stdout if is_first and wishes.json != "-" else None,
            sys.stderr if is_first else None,
            [peer.name for peer in self.peers],
            bool(wishes.against),
        )
        self.table.top(self.run, comm.world_size)
        for line in self._notes(missing):
            self.table.line(f"# {line}")

    def _notes(self, missing: Sequence[str]) -> Iterator[str]:
        here, world = self.run.machine, self.comm.world_size
        if here["hosts"] == 1 and world > here["cores"]:
            yield "more ranks than cores: times are also those of the scheduler"
        if self.peers:
            yield "ratio: the other's time / unisono's, in the same form; above 1 unisono is faster"
        yield from missing
        if self.before:
            then, date = self.before.machine, self.before.date
            yield f"against: bus bandwidth / that of {self.wishes.against}, above 1 this is faster"
            yield f"measured {date} on {then['host']} with unisono {then['unisono']}"

    def measure(self) -> Run:
        """Measure all rows, and give them to the table, the file and the plot."""
        earlier = {row.key: row for row in self.before.rows} if self.before else {}
        rows: list[Row] = []
        planned = [(name, sizes) for name in self.wishes.operations if (sizes := self._sizes(name))]
        total, began = sum(len(sizes) for _, sizes in planned), time.monotonic()
        for name, sizes in planned:
            self.table.head(name)
            for size in sizes:
                left = ""
                if rows:
                    per_row = (time.monotonic() - began) / len(rows)
                    left = f", about {per_row * (total - len(rows)):.0f} s left"
                done = f"row {len(rows) + 1} of {total}"
                self.table.progress(f"{name} {size_name(size)}: {done}{left}")
                row = self._against(self.row(name, size), earlier)
                rows.append(row)
                self.table.row(row)
        self.table.end(rows)
        run = replace(self.run, rows=rows)
        if self.comm.rank == 0:
            self._keep(run)
        return run

    def _keep(self, run: Run) -> None:
        if self.wishes.json == "-":
            print(run.text())
        elif self.wishes.json:
            Path(self.wishes.json).write_text(run.text() + "\n", "utf-8")
        if self.wishes.plot:
            plot.draw(run, self.wishes.plot)

    def _sizes(self, name: str) -> list[int]:
        """The sizes of whole blocks, each once."""
        operation, world = OPERATIONS[name], self.comm.world_size
        dtype = self.wishes.dtype
        unit = dtype.itemsize * operation.parts(world)
        counts = [operation.count(size, world, dtype) for size in self.wishes.sizes]
        return list(dict.fromkeys(count * unit for count in counts))

    def _against(self, row: Row, earlier: dict[Key, Row]) -> Row:
        before = earlier.get(row.key)
        return replace(row, against=row.faster_than(before)) if before else row

    def row(self, name: str, size: int) -> Row:
        """Measure and check an operation of one size, in all its forms and on all peers."""
        operation, world, wishes = OPERATIONS[name], self.comm.world_size, self.wishes
        count = operation.count(size, world, wishes.dtype)
        cells = {
            form: Cell(operation, form, self.comm.rank, world, count, self.known, wishes.is_in_heap)
            for form in operation.forms
        }
        calls = {form: call(self.comm, cell) for form, cell in cells.items()}
        contestants = [Contestant(form, one) for form, one in calls.items()]
        for peer in self.peers:
            form = peer.form(operation)
            if one := peers.tried(self.comm, peer, cells[form]):
                cells[form].clear()
                contestants.append(Contestant(peer.name, one))
        seconds = self.clock.measure(contestants, wishes.effort)
        factor = operation.factor(world)
        figures = {
            form: Figures.of(seconds[form], size, factor, self._wrong(cell, calls[form]))
            for form, cell in cells.items()
        }
        root = "all" if wishes.root is None else wishes.root
        return Row(
            name,
            size,
            count,
            wishes.dtype.name if count else "none",
            wishes.reduction if operation.reduces else "none",
            root if operation.is_rooted else -1,
            world,
            figures.get(OUT_OF_PLACE),
            figures.get(IN_PLACE),
            {
                peer.name: Peer(
                    seconds[peer.name] * 1e6, seconds[peer.name] / seconds[peer.form(operation)]
                )
                for peer in self.peers
                if peer.name in seconds
            },
        )

    def _wrong(self, cell: Cell, one: Any) -> int | None:
        """Count the wrong elements on all ranks after a call with known values."""
        if not self.wishes.is_checked:
            return None
        cell.prepare()
        root = self.clock.next_root()
        one(root)
        return int(self.comm.all_reduce(np.array([cell.wrong(root)], np.int64))[0])


def run(wishes: Wishes) -> int:
    """Be one rank of the job that the environment describes; returns the exit status."""
    with unisono.init() as comm:
        if wishes.root is not None and wishes.root >= comm.world_size:
            raise ValueError(f"--root {wishes.root}: there are {comm.world_size} ranks")
        rank = Rank(comm, wishes)
        found = rank.measure()
        peers.close_all(rank.peers)
        # Rank 0 has written its files when the others end: a launcher may end what is left.
        comm.barrier()
    return 1 if wrong_in(found.rows) else 0
