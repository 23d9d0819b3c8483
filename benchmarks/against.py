"""Compare this checkout with another commit of the repository, interleaved in one run.

    python benchmarks/against.py v0.1.0                  all collectives, in some ten minutes
    python benchmarks/against.py HEAD --minutes 3        what is not committed yet, beside HEAD
    python benchmarks/against.py 47f1648 --collectives all_reduce --sizes 1M,64M --ranks 2,8
    python benchmarks/against.py HEAD~3 --doors numpy,torch --memories private,heap --hosts 1
    python benchmarks/against.py HEAD --fail-below 0.8 --json bench-results/against.json

Both are built in release, each from its own Cargo.toml; the other commit's sources and build stay
in target/against/. The ranks of both are alive at the same time, run the same program, and take
turns, round by round. A ratio is the other commit's median time by this checkout's: below 1
this checkout is slower. A cell below --bound is measured once more, for twice as long, and
its rounds are all that count then. benchmarks/README.md describes the method.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from compare import NATIVE, WORTH_SAYING
from harness import arguments, commits, report
from harness.build import RANKS, MissingError
from harness.cells import MOST_CALLS, Cell, Effort, measure
from harness.jobs import FailedError, Job, Jobs
from harness.peers import Peer

SIZES = (8, 16 << 10, 1 << 20, 16 << 20)
MEMORIES = ("private", "heap")
STATES = ("hot", "cold")
# The operations that torch_rank.py has.
THROUGH_TORCH = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "ping_pong",
    "barrier",
)
LONGEST = 4.0  # seconds for one cell, however few there are
SHORTEST = 0.2  # and however many
AGAIN = 2.0  # how much longer a cell below the bound is measured once more
COLD_CALLS = 3  # in one round: before each a rank goes over other memory
THIS = commits.THIS


@dataclasses.dataclass(frozen=True)
class Setting:
    """The properties that all cells of one table share."""

    door: str
    memory: str
    hosts: int
    world: int
    state: str

    def text(self) -> str:
        hosts = "one host" if self.hosts == 1 else f"{self.hosts} hosts"
        memory = f"{self.memory} memory"
        return f"{self.door}, {hosts}, {self.world} ranks, {memory}, {self.state}"


@dataclasses.dataclass(frozen=True)
class Group:
    """The ranks that are alive at the same time, of both commits, and their settings."""

    door: str
    hosts: int
    world: int

    def commands(self, program: list[str]) -> list[list[str]]:
        """Return what starts each rank: `program` and its number, on its host."""
        per_host = -(-self.world // self.hosts)
        return [
            ["env", f"UNISONO_HOST=host{rank // per_host}", *program, str(rank)]
            for rank in range(self.world)
        ]

    def start(self, of: commits.Build, jobs: Jobs, memories: tuple[str, ...]) -> Job:
        folder = jobs.folder(of.name)
        program = [sys.executable, str(RANKS / f"{self.door}_rank.py"), str(folder)]
        program.append(str(self.world))
        if self.door == "torch":
            program.append(",".join(BACKENDS[memory] for memory in memories))
        environment = {
            "PYTHONPATH": str(of.package),
            "OMP_NUM_THREADS": "1",
            "TORCH_FR_BUFFER_SIZE": "0",
        }
        return jobs.add(Job(of.name, self.world, self.commands(program), folder, environment))


# The names of memories in commands: torch_rank.py has a backend for each.
BACKENDS = {"private": "unisono", "heap": "unisono-heap"}


class Run:
    """Measures all cells that were asked for, and keeps them by setting."""

    def __init__(self, args: argparse.Namespace, builds: tuple[commits.Build, ...]) -> None:
        self.args, self.builds = args, builds
        self.other = builds[1].name
        self.cells: dict[Setting, list[Cell]] = {}
        self.until = time.monotonic() + args.minutes * 60
        self.left = sum(len(self.wanted(group.door)) for group in self.groups())
        self.left *= len(args.memories) * len(args.states)

    def groups(self) -> Iterator[Group]:
        args = self.args
        for door, hosts, world in itertools.product(args.doors, args.hosts, args.ranks):
            if hosts <= world:
                yield Group(door, hosts, world)

    def wanted(self, door: str) -> list[tuple[str, int]]:
        """Return the collectives that a door has, each with its sizes."""
        return [
            (collective, size)
            for collective in self.args.collectives
            if door != "torch" or collective in THROUGH_TORCH
            for size in ((8,) if collective == "barrier" else self.args.sizes)
        ]

    def all(self) -> None:
        for group in self.groups():
            with Jobs() as jobs:
                both = [group.start(of, jobs, self.args.memories) for of in self.builds]
                for job in both:
                    job.wait_until_ready()
                for memory, state in itertools.product(self.args.memories, self.args.states):
                    setting = Setting(group.door, memory, group.hosts, group.world, state)
                    for job in both:
                        job.command(f"cold {self.args.cold_bytes if state == 'cold' else 0}")
                    self.cells[setting] = [
                        self.cell(setting, both, *wanted) for wanted in self.wanted(group.door)
                    ]
                    report.show("")
                    print(report.title(setting.text()))
                    print(report.ratios_table(self.cells[setting], THIS, self.other), flush=True)

    def cell(self, setting: Setting, both: list[Job], collective: str, size: int) -> Cell:
        report.show(f"{setting.text()}: {collective} {arguments.size_name(size)}")
        seconds = (self.until - time.monotonic()) / max(1, self.left)
        self.left -= 1
        seconds = min(max(seconds, SHORTEST), LONGEST)
        memory = BACKENDS[setting.memory] if setting.door == "torch" else setting.memory
        peers = [Peer(job.name, job.name, job, f"{memory}/") for job in both]
        most = COLD_CALLS if setting.state == "cold" else MOST_CALLS
        cell = measure(collective, size, peers, Effort(seconds, self.args.rounds, most))
        if self.is_below(cell):
            again = Effort(seconds * AGAIN, 2 * self.args.rounds, most)
            cell = measure(collective, size, peers, again)
        return cell

    def is_below(self, cell: Cell) -> bool:
        ratio = cell.ratio(self.other, THIS)
        return ratio is not None and ratio < self.args.bound


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def summary(cells: dict[Setting, list[Cell]], other: str, bound: float) -> str:
    """Return the geometric mean of each setting and of all, and the cells below the bound."""
    lines = [report.title(f"{other} / {THIS}: geometric means, above 1 this checkout is faster")]
    every: list[float] = []
    below: list[tuple[float, str]] = []
    for setting, of_setting in cells.items():
        ratios = [(cell, cell.ratio(other, THIS)) for cell in of_setting]
        compared = [(cell, ratio) for cell, ratio in ratios if ratio]
        if not compared:
            continue
        every += [ratio for _, ratio in compared]
        of_all = mean([ratio for _, ratio in compared])
        lines.append(f"{of_all:6.3f}  {len(compared):4} cells  {setting.text()}")
        for cell, ratio in compared:
            if ratio < bound:
                what = f"{cell.collective} {arguments.size_name(cell.size)}"
                low, high = cell.ratio_range(other, THIS)
                text = f"{ratio:6.2f}  {what}, {setting.text()} ({low:.2f} - {high:.2f})"
                below.append((ratio, text))
    if every:
        lines.append(f"{mean(every):6.3f}  {len(every):4} cells in all")
    lines.append(report.title(f"Cells below {bound}: {len(below)} of {len(every)}"))
    lines += [text for _, text in sorted(below)] or ["  none"]
    return "\n".join(lines)


def worst(cells: dict[Setting, list[Cell]], other: str) -> float:
    """Return the lowest ratio of all cells."""
    every = (cell.ratio(other, THIS) for of_setting in cells.values() for cell in of_setting)
    return min((ratio for ratio in every if ratio), default=math.inf)


def records(cells: dict[Setting, list[Cell]], other: str) -> list[dict[str, object]]:
    """Return one flat record for each cell."""
    return [
        dataclasses.asdict(setting)
        | {
            "collective": cell.collective,
            "bytes": cell.size,
            "seconds": cell.median(THIS),
            "other_seconds": cell.median(other),
            "ratio": cell.ratio(other, THIS),
            "rounds": cell.rounds,
            "calls_per_round": cell.calls,
            "refused": cell.refused,
        }
        for setting, of_setting in cells.items()
        for cell in of_setting
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, list_of, one_of = parser.add_argument, arguments.list_of, arguments.one_of
    add("commit", help="a commit, branch or tag of this repository")
    chosen = list_of(one_of(*commits.DOORS))
    add("--doors", type=chosen, default=("numpy",), help=", ".join(commits.DOORS))
    add("--hosts", type=list_of(int), default=(1, 2), help="as 1,2: over shared memory, over TCP")
    add("--ranks", type=list_of(arguments.ranks), default=(2, 4), help="as 2,4,8")
    chosen = list_of(one_of(*NATIVE))
    add("--collectives", type=chosen, default=NATIVE, help=", ".join(NATIVE))
    add("--sizes", type=list_of(arguments.size), default=SIZES, help="as 8,16K,64M")
    chosen = list_of(one_of(*MEMORIES))
    add("--memories", type=chosen, default=("private",), help=", ".join(MEMORIES))
    add("--states", type=list_of(one_of(*STATES)), default=STATES, help=", ".join(STATES))
    add("--cold-bytes", type=arguments.size, default=16 << 20, help="gone over before a cold call")
    add("--minutes", type=float, default=10.0, help="about how long it measures")
    add("--rounds", type=int, default=9, help="measurements of each commit in a cell")
    add("--bound", type=float, default=0.9, help="cells below it are measured twice, and listed")
    add("--fail-below", type=float, metavar="RATIO", help="end with an error if a cell is below it")
    add("--json", type=Path, metavar="FILE", help="write every round's time to FILE")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    machine = report.machine()
    try:
        builds = (commits.checkout(), commits.commit(args.commit))
        for of in builds:
            report.show(f"building {of.name}")
            commits.build(of, args.doors)
        print(f"this checkout, and {args.commit} ({builds[1].name}); float32")
        print(f"{machine['processor']}, {machine['cores']} cores, {machine['system']}")
        print("microseconds, medians over the rounds")
        if os.getloadavg()[0] > 0.5:
            print(f"load average {os.getloadavg()[0]:.1f}: others use this machine too")
        run, stolen = Run(args, builds), report.Stolen()
        run.all()
    except (FailedError, MissingError) as error:
        sys.exit(f"\n{error}")
    print(summary(run.cells, run.other, args.bound))
    if stolen.share() > WORTH_SAYING:
        print(f"the hypervisor gave {stolen.share():.0%} of the cores' time to others meanwhile")
    if args.json:
        content = {"machine": machine, "commit": run.other, "cells": records(run.cells, run.other)}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.fail_below and worst(run.cells, run.other) < args.fail_below:
        sys.exit(f"a cell is below {args.fail_below}")


if __name__ == "__main__":
    main()
