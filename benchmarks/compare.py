"""Compare two torch.distributed backends, interleaved in one run on this machine.

    python benchmarks/compare.py             every cell, within five minutes
    python benchmarks/compare.py --quick     within one minute

A cell is one collective at one size and world size. Both backends have their group in the same
processes at the same time and are timed in turn, round by round, so that whatever else the machine
does meets both alike. benchmarks/README.md describes the method and how to read the ratios.
"""

from __future__ import annotations

import abc
import argparse
import csv
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# torch reads these when it is imported, and the spawned ranks inherit them: one thread per rank,
# and no flight recorder, which from torch 2.15 on adds to every call of a plugin but not of gloo.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [8, 64, 512, 4 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20]
ELEMENT = torch.float32.itemsize
MOST_CALLS = 10_000  # in one round
HARD_LIMIT = 10  # times the budget of a world, before its ranks are ended
LEAST_SECONDS = 0.1  # for one cell, however late it is
WAIT = datetime.timedelta(seconds=120)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is to be measured, and for how long."""

    backends: tuple[str, str]
    worlds: tuple[int, ...]
    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    budget: float  # seconds for all of it, shared out evenly over worlds and cells
    longest: float  # seconds for one cell, however few there are


@dataclasses.dataclass(frozen=True)
class Cell:
    """What was measured of one collective at one size and world size, both backends."""

    world: int
    op: str
    size: int
    # Seconds per call, of the slowest rank, one for each round; the n-th rounds were neighbours.
    rounds: tuple[list[float], list[float]]
    calls_per_round: tuple[int, int]
    # Why there are no rounds: what the backend that cannot do this collective said.
    unsupported: str | None = None

    def median(self, which: int) -> float:
        return statistics.median(self.rounds[which])

    def ratio(self) -> float:
        """How many times as long the second backend takes: above 1 the first is faster."""
        return self.median(1) / self.median(0)

    def ratio_range(self) -> tuple[float, float]:
        """Return the lowest and the highest ratio of two neighbouring rounds."""
        ratios = [second / first for first, second in zip(*self.rounds, strict=True)]
        return min(ratios), max(ratios)


class Collective(abc.ABC):
    """One collective on buffers of its own. `size` is that of the whole tensor in bytes."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.shard = max(1, size // ELEMENT // world)
        self.count = max(1, size // ELEMENT)

    @abc.abstractmethod
    def call(self, group: dist.ProcessGroup) -> None:
        """Run once."""

    @abc.abstractmethod
    def check(self, group: dist.ProcessGroup) -> None:
        """Run on known data and compare the result."""

    def expect(self, result: torch.Tensor, expected: torch.Tensor | float) -> None:
        if not bool((result == expected).all()):
            name = type(self).__name__
            raise AssertionError(f"rank {self.rank}: {name} of {self.count} elements is wrong")


class AllReduce(Collective):
    """In place, sum."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        super().__init__(size, rank, world)
        self.tensor = torch.zeros(self.count)

    def call(self, group: dist.ProcessGroup) -> None:
        dist.all_reduce(self.tensor, group=group)

    def check(self, group: dist.ProcessGroup) -> None:
        self.tensor.fill_(self.rank + 1.0)
        self.call(group)
        self.expect(self.tensor, self.world * (self.world + 1) / 2)
        self.tensor.zero_()  # or the sums would grow without end


class Broadcast(Collective):
    """The root moves on by one rank each call, so that no root can run ahead of its receivers."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        super().__init__(size, rank, world)
        self.tensor = torch.zeros(self.count)
        self.root = 0

    def call(self, group: dist.ProcessGroup) -> None:
        dist.broadcast(self.tensor, src=self.root, group=group)
        self.root = (self.root + 1) % self.world

    def check(self, group: dist.ProcessGroup) -> None:
        for _ in range(self.world):
            root = self.root
            self.tensor.fill_(self.rank + 1.0)
            self.call(group)
            self.expect(self.tensor, root + 1.0)


class AllGather(Collective):
    """`all_gather_into_tensor`: every rank brings a shard, everyone gets the whole."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        super().__init__(size, rank, world)
        self.input = torch.zeros(self.shard)
        self.output = torch.zeros(self.shard * world)

    def call(self, group: dist.ProcessGroup) -> None:
        dist.all_gather_into_tensor(self.output, self.input, group=group)

    def check(self, group: dist.ProcessGroup) -> None:
        self.input.fill_(self.rank + 1.0)
        self.output.zero_()
        self.call(group)
        expected = torch.arange(1.0, self.world + 1).unsqueeze(1)
        self.expect(self.output.view(self.world, self.shard), expected)


class ReduceScatter(Collective):
    """`reduce_scatter_tensor`, sum: every rank brings the whole, and gets its shard of the sum."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        super().__init__(size, rank, world)
        self.input = torch.zeros(self.shard * world)
        self.output = torch.zeros(self.shard)

    def call(self, group: dist.ProcessGroup) -> None:
        dist.reduce_scatter_tensor(self.output, self.input, group=group)

    def check(self, group: dist.ProcessGroup) -> None:
        self.input.view(self.world, self.shard).copy_(
            torch.arange(1.0, self.world + 1).unsqueeze(1) * (self.rank + 1)
        )
        self.output.zero_()
        self.call(group)
        self.expect(self.output, (self.rank + 1) * self.world * (self.world + 1) / 2)


OPS: dict[str, type[Collective]] = {
    "all_reduce": AllReduce,
    "broadcast": Broadcast,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
}


def run_rank(rank: int, world: int, settings: Settings, folder: str, until: float) -> None:
    """Measure every cell of one world by about `until`; rank 0 leaves them in `folder`."""
    torch.set_num_threads(1)
    # Gloo's default group carries what the measurement itself needs, in a group apart from both.
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / f"rendezvous-{world}").as_uri(),
        rank=rank,
        world_size=world,
        timeout=WAIT,
    )
    groups = [dist.new_group(backend=backend, timeout=WAIT) for backend in settings.backends]
    cells = []
    wanted = [(op, size) for op in settings.ops for size in settings.sizes]
    for op, size in wanted:
        if rank == 0:
            show(f"{world} ranks: {op} {size_name(size)}")
        # A cell that took longer than its share leaves less for those after it.
        share = (until - time.monotonic()) / (len(wanted) - len(cells))
        share = slowest([min(max(share, LEAST_SECONDS), settings.longest)])[0]
        cells.append(measure(op, size, groups, settings, share))
    if rank == 0:
        text = json.dumps([dataclasses.asdict(cell) for cell in cells])
        (Path(folder) / f"cells-{world}.json").write_text(text)
    dist.destroy_process_group()


def measure(
    op: str, size: int, groups: Sequence[dist.ProcessGroup], settings: Settings, limit: float
) -> Cell:
    """Check that both backends compute the right result, then time them in turn, for `limit`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    collective = OPS[op](size, rank, world)
    for backend, group in zip(settings.backends, groups, strict=True):
        refusal = check_or_refusal(collective, group)
        if refusal:
            return Cell(world, op, size, ([], []), (0, 0), f"{backend}: {refusal}")

    share = limit / len(groups)
    estimates = [estimate(collective, group, share / 10) for group in groups]
    # Two thirds of the time for the rounds; the rest is for the check, the estimate and barriers.
    per_round = share * 2 / 3 / settings.rounds
    calls = [max(1, min(MOST_CALLS, int(per_round / seconds))) for seconds in estimates]
    # Where a single call takes longer than its share of time there are fewer rounds, but three.
    fitting = int(share * 2 / 3 / max(estimates))
    rounds = settings.rounds if fitting >= settings.rounds else max(3, fitting)

    seconds = [[], []]
    for _ in range(rounds):
        for which, group in enumerate(groups):
            seconds[which].append(time_calls(collective, group, calls[which]))
    return Cell(world, op, size, tuple(slowest(of) for of in seconds), tuple(calls))


def check_or_refusal(collective: Collective, group: dist.ProcessGroup) -> str | None:
    """Check the result; if the backend does not have this collective, return what it says."""
    try:
        collective.check(group)
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        if "support" in message.lower() or "implement" in message.lower():
            return message
        raise
    return None


def estimate(collective: Collective, group: dist.ProcessGroup, limit: float) -> float:
    """Warm up, for about `limit` seconds, and return the seconds per call on the slowest rank."""
    calls, spent = 1, 0.0
    while True:
        per_call = slowest([time_calls(collective, group, calls)])[0]
        spent += per_call * calls
        if spent >= limit / 2 or calls >= MOST_CALLS:
            return per_call
        calls = max(calls + 1, min(calls * 10, int((limit - spent) / per_call), MOST_CALLS))


def time_calls(collective: Collective, group: dist.ProcessGroup, calls: int) -> float:
    """Return this rank's seconds per call, over `calls` blocking calls after a barrier."""
    call = collective.call
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call(group)
    return (time.perf_counter() - start) / calls


def slowest(seconds: list[float]) -> list[float]:
    """Each value's maximum over the ranks, which thereby all go on with the same numbers."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.tolist()


def run_world(world: int, settings: Settings, folder: str) -> list[Cell]:
    """Start the ranks of one world, and end them if they far outlive its part of the budget."""
    budget = settings.budget / len(settings.worlds)
    until, limit = time.monotonic() + budget, HARD_LIMIT * budget
    arguments = (world, settings, folder, until)
    ranks = mp.spawn(run_rank, args=arguments, nprocs=world, join=False)
    while not ranks.join(timeout=1.0):
        if time.monotonic() > until - budget + limit:
            for process in ranks.processes:
                process.kill()
            sys.exit(f"{world} ranks outlived {limit:.0f} s and were ended")
    cells = json.loads((Path(folder) / f"cells-{world}.json").read_text())
    return [Cell(**cell) for cell in cells]


def show(progress: str) -> None:
    """Overwrite the line of progress, where there is a terminal to see it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{progress}")
        sys.stderr.flush()


def size_name(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def labels(settings: Settings) -> tuple[str, str]:
    """Name the two backends in what is printed, also when they are the same one."""
    first, second = settings.backends
    return (first, second) if first != second else (f"{first} (1)", f"{second} (2)")


def header(settings: Settings) -> str:
    cores = len(os.sched_getaffinity(0))
    first, second = labels(settings)
    text = f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores, float32"
    text += "\nmicroseconds per call: medians over the rounds of the slowest rank's time"
    text += f"\nratio = {second} / {first}: above 1, {first} is faster"
    crowded = [str(world) for world in settings.worlds if world > cores]
    if crowded:
        text += f"\nwith {' and '.join(crowded)} ranks there are more ranks than cores"
    return text


def table(cells: list[Cell], settings: Settings) -> str:
    """One world's cells, a line each, with a gap between collectives."""
    first, second = labels(settings)
    lines = [f"\n{cells[0].world} ranks", ""]
    lines.append(f"{'':16}{'size':>9}{first:>14}{second:>14}{'ratio':>9}   lowest - highest")
    previous = None
    for cell in cells:
        if previous not in (None, cell.op):
            lines.append("")
        name = cell.op if cell.op != previous else ""
        previous = cell.op
        line = f"{name:16}{size_name(cell.size):>9}"
        if cell.unsupported:
            lines.append(f"{line}   not compared, {cell.unsupported}")
            continue
        times = "".join(f"{cell.median(which) * 1e6:>14,.1f}" for which in (0, 1))
        low, high = cell.ratio_range()
        lines.append(f"{line}{times}{cell.ratio():>9.2f}   {low:6.2f} - {high:.2f}")
    return "\n".join(lines)


def conclusion(cells: list[Cell], settings: Settings) -> str:
    """Count the cells where the first backend is faster, and name every one where it is not."""
    compared = [cell for cell in cells if not cell.unsupported]
    behind = [cell for cell in compared if cell.ratio() <= 1]
    faster = len(compared) - len(behind)
    text = f"{labels(settings)[0]} is faster in {faster} of {len(compared)} cells"
    if len(compared) < len(cells):
        text += f" ({len(cells) - len(compared)} not compared)"
    if not behind:
        return text
    names = [f"  {c.world} ranks {c.op} {size_name(c.size)}: {c.ratio():.2f}" for c in behind]
    return "\n".join([f"{text}; not in:", *names])


def record(cell: Cell, backends: tuple[str, str]) -> dict[str, object]:
    """One cell as a flat record, for CSV and JSON."""
    fields: dict[str, object] = {"world": cell.world, "op": cell.op, "size": cell.size}
    for which, backend in enumerate(backends):
        seconds = None if cell.unsupported else cell.median(which)
        fields |= {f"backend_{which}": backend, f"seconds_{which}": seconds}
        fields[f"calls_per_round_{which}"] = cell.calls_per_round[which]
    fields["ratio"] = None if cell.unsupported else cell.ratio()
    return fields | {"rounds": len(cell.rounds[0]), "unsupported": cell.unsupported}


def write_csv(path: Path, cells: list[Cell], backends: tuple[str, str]) -> None:
    records = [record(cell, backends) for cell in cells]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def write_json(path: Path, cells: list[Cell], settings: Settings) -> None:
    """Everything, with the seconds of every round."""
    results = [record(cell, settings.backends) | {"round_seconds": cell.rounds} for cell in cells]
    machine = {"torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    machine |= {"python": platform.python_version(), "machine": platform.platform()}
    settings_made = dataclasses.asdict(settings)
    text = json.dumps({"machine": machine, "settings": settings_made, "cells": results}, indent=1)
    path.write_text(text + "\n")


def parse_size(text: str) -> int:
    """Parse 512, 16K or 64M (KiB and MiB) into bytes."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].isalpha() else (text, 1)
    size = int(number) * unit
    if size < ELEMENT or size % ELEMENT:
        raise ValueError(f"a size is a positive multiple of {ELEMENT} bytes")
    return size


def list_of(parse: Callable[[str], object]) -> Callable[[str], tuple]:
    """Parse a list with commas; argparse reports what `parse` refuses."""

    def parse_list(text: str) -> tuple:
        try:
            return tuple(parse(item.strip()) for item in text.split(","))
        except (ValueError, KeyError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error

    return parse_list


def parse_op(name: str) -> str:
    if name not in OPS:
        raise ValueError(f"{name} is not one of {', '.join(OPS)}")
    return name


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backends", type=list_of(str), default=("unisono", "gloo"), help="the two, as A,B")
    add("--worlds", type=list_of(int), default=(2, 4), help="world sizes, as 2,4")
    add("--sizes", type=list_of(parse_size), default=tuple(SIZES), help="as 8,16K,64M")
    add("--ops", type=list_of(parse_op), default=tuple(OPS), help=", ".join(OPS))
    add("--quick", action="store_true", help="a shorter run with fewer rounds")
    add("--json", type=Path, metavar="FILE", help="write every round's time to FILE")
    add("--csv", type=Path, metavar="FILE", help="write one line for each cell to FILE")
    args = parser.parse_args()
    if len(args.backends) != 2:
        parser.error("--backends takes two names, the second is what the first is compared with")
    if min(args.worlds) < 2:
        parser.error("--worlds: a collective needs two ranks or more")
    return args


def main() -> None:
    args = parse_arguments()
    limits = (5, 40.0, 1.0) if args.quick else (11, 240.0, 4.0)
    settings = Settings(args.backends, args.worlds, args.ops, args.sizes, *limits)
    print(header(settings))
    cells = []
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        for world in settings.worlds:
            of_world = run_world(world, settings, folder)
            show("")
            print(table(of_world, settings), flush=True)
            cells += of_world
    print(f"\n{conclusion(cells, settings)}")
    if args.csv:
        write_csv(args.csv, cells, settings.backends)
    if args.json:
        write_json(args.json, cells, settings)


if __name__ == "__main__":
    main()
