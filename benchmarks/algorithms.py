"""Compare the algorithm that unisono chooses with the best of all that it has.

    python benchmarks/algorithms.py                                 in about ten minutes
    python benchmarks/algorithms.py --ranks 8 --collectives all_reduce --sizes 8,64K,16M
    python benchmarks/algorithms.py --minutes 3 --json cells.json --csv cells.csv

For each world size one job chooses by itself, and one for each algorithm uses that alone
(UNISONO_ALGORITHM). A cell is one collective at one size; in it the jobs whose algorithm serves the
collective take turns, round by round. benchmarks/README.md describes the method.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from compare import NATIVE
from harness import arguments, report
from harness.build import MissingError, rust_bench
from harness.cells import Cell, Effort, measure
from harness.jobs import FailedError, Job, Jobs
from harness.peers import Peer

COLLECTIVES = tuple(name for name in NATIVE if name not in ("ping_pong", "send_recv"))
SIZES = (8, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)
CHOICE = "choice"
LONGEST = 6.0  # seconds for one cell, however few there are


def serving(collectives: Sequence[str], world: int) -> dict[str, list[str]]:
    """Ask the library which algorithms serve each collective in a world of that size."""
    command = [str(rust_bench("collectives")), "--algorithms", "--ranks", str(world)]
    command += ["--collectives", ",".join(collectives)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in printed.splitlines()]
    return {line["collective"]: line["algorithms"] for line in lines}


def start(world: int, names: list[str], jobs: Jobs) -> dict[str, Peer]:
    """Start one job for each name, all at the same time."""
    program = str(rust_bench("collectives"))
    started = []
    for name in names:
        folder = jobs.folder(name)
        common = [program, "--world", str(world), "--channel", str(folder)]
        common += ["--store", f"file://{folder}/store"]
        commands = [[*common, "--rank", str(rank)] for rank in range(world)]
        environment = {"UNISONO_ALGORITHM": "auto" if name == CHOICE else name}
        started.append(jobs.add(Job(name, world, commands, folder, environment)))
    return {job.name: Peer(job.name, job.name, job.wait_until_ready()) for job in started}


def best(cell: Cell) -> tuple[str, float]:
    """Return the algorithm with the least median, and that."""
    medians = {name: cell.median(name) for name in cell.rounds if name != CHOICE}
    name = min(medians, key=lambda name: medians[name] or math.inf)
    return name, medians[name] or math.inf


def excess(cell: Cell) -> float:
    """How many times as long as the best algorithm the choice takes."""
    return (cell.median(CHOICE) or math.inf) / best(cell)[1]


def table(cells: list[Cell]) -> str:
    """Return one world's cells: the choice, the best, their ratio, and the others."""
    lines = [f"{'':16}{'size':>9}{'choice':>12}{'best':>12}  {'':20}{'choice / best':>13}"]
    previous = None
    for cell in cells:
        name = cell.collective if cell.collective != previous else ""
        previous = cell.collective
        fastest, seconds = best(cell)
        line = f"{name:16}{'' if cell.collective == 'barrier' else report.size_name(cell.size):>9}"
        line += f"{report.microseconds(cell.median(CHOICE)):>12}"
        line += f"{report.microseconds(seconds):>12}  {fastest:20}{excess(cell):>13.2f}"
        others = [
            f"{other} {cell.ratio(other, fastest):.2f}"
            for other in cell.rounds
            if other not in (CHOICE, fastest)
        ]
        lines.append(f"{line}   {', '.join(others)}")
    return "\n".join(lines)


def summary(cells: list[Cell]) -> str:
    """Return the geometric mean of what choices cost beyond the best, and the worst."""
    lines = [report.title("The choice's time / the best algorithm's time")]
    for world in sorted({cell.world for cell in cells}):
        of_world = [cell for cell in cells if cell.world == world]
        mean = math.exp(sum(math.log(excess(cell)) for cell in of_world) / len(of_world))
        worst = max(of_world, key=excess)
        lines.append(
            f"{world} ranks: geometric mean {mean:.3f} over {len(of_world)} cells; worst "
            f"{excess(worst):.2f}, {worst.collective} of {report.size_name(worst.size)}"
        )
    lines.append(
        "(the best of several equal ones is faster than each by chance: 1.0 is not reached)"
    )
    return "\n".join(lines)


def measure_world(world: int, args: argparse.Namespace, seconds: float) -> list[Cell]:
    wanted = [
        (collective, size)
        for collective in args.collectives
        for size in ((8,) if collective == "barrier" else args.sizes)
    ]
    algorithms = serving(args.collectives, world)
    names = list(dict.fromkeys([CHOICE, *itertools.chain(*algorithms.values())]))
    cells, begun = [], time.monotonic()
    with Jobs() as jobs:
        peers = start(world, names, jobs)
        for index, (collective, size) in enumerate(wanted):
            report.show(f"{world} ranks: {collective} {report.size_name(size)}")
            left = seconds - (time.monotonic() - begun)
            share = min(max(left / (len(wanted) - index), args.least), LONGEST)
            taking_part = [peers[CHOICE], *(peers[name] for name in algorithms[collective])]
            cells.append(measure(collective, size, taking_part, Effort(share, args.rounds)))
    report.show("")
    return cells


def records(cells: list[Cell]) -> list[dict[str, object]]:
    algorithms = {name for cell in cells for name in cell.rounds if name != CHOICE}
    rows = report.records(cells, dict.fromkeys(algorithms, CHOICE))
    by_key = {(cell.world, cell.collective, cell.size): cell for cell in cells}
    for row in rows:
        cell = by_key[row["ranks"], row["collective"], row["bytes"]]
        row["best"] = best(cell)[0]
        row["choice_to_best"] = excess(cell)
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, list_of, one_of = parser.add_argument, arguments.list_of, arguments.one_of
    known = COLLECTIVES
    add("--ranks", type=list_of(arguments.ranks), default=(2, 4, 8), help="as 2,4,8")
    add("--collectives", type=list_of(one_of(*known)), default=known, help=", ".join(known))
    add("--sizes", type=list_of(arguments.size), default=SIZES, help="as 8,16K,64M")
    add("--minutes", type=float, default=10.0, help="about how long it may take")
    add("--rounds", type=int, default=9, help="measurements of each algorithm in a cell")
    add("--json", type=Path, metavar="FILE", help="write every round's time to FILE")
    add("--csv", type=Path, metavar="FILE", help="write one line for each cell and algorithm")
    args = parser.parse_args()
    args.least = 0.1
    return args


def main() -> None:
    args = parse_arguments()
    machine = report.machine()
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; float32")
    print("microseconds, medians over the rounds; behind the ratio every other algorithm's time")
    print("in units of the best one's")
    if os.getloadavg()[0] > 0.5:
        print(f"load average {os.getloadavg()[0]:.1f}: others use this machine, ratios will vary")
    cells: list[Cell] = []
    try:
        for world in args.ranks:
            of_world = measure_world(world, args, args.minutes * 60 / len(args.ranks))
            print(report.title(f"{world} ranks"))
            print(table(of_world), flush=True)
            cells += of_world
    except (FailedError, MissingError) as error:
        sys.exit(f"\n{error}")
    print(summary(cells))
    if args.csv:
        report.write_csv(args.csv, records(cells))
    if args.json:
        report.write_json(args.json, cells=cells)


if __name__ == "__main__":
    main()
