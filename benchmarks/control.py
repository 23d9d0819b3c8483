"""How long small calls take that come now and then, on unisono beside gloo.

    python benchmarks/control.py            2 and 4 ranks, alone and beside programs that compute
    python benchmarks/control.py --ranks 2 --calls 500    a first look

Schedulers and checkpoints call so: a few bytes, or an object, some milliseconds after the last
call, on a host whose cores have other work. Every rank sleeps 2 ms, then times one call through
torch. Both backends have a group in the same processes and take turns, block by block, so that a
slow second of the machine meets both. The percentiles are over all calls of all ranks.

The neighbours are processes that compute without a pause, as many as `--neighbours` says.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import report
from harness.jobs import free_port

PAUSE = 0.002  # seconds between calls
BLOCK = 50  # calls before the other backend's turn
LIMIT = 600.0  # seconds for everything that one job measures
BACKENDS = ("unisono", "gloo")


def all_reduce(group: Any) -> Callable[[], Any]:
    numbers = torch.zeros(16)
    return lambda: dist.all_reduce(numbers, group=group)


def barrier(group: Any) -> Callable[[], Any]:
    return lambda: dist.barrier(group=group)


def broadcast_object(group: Any) -> Callable[[], Any]:
    request = {"requests": list(range(20)), "step": 17, "text": "x" * 200}

    def call() -> None:
        objects = [request if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(objects, src=0, group=group)

    return call


def all_gather_object(group: Any) -> Callable[[], Any]:
    mine = {"free": 12, "running": [1, 2, 3]}
    return lambda: dist.all_gather_object([None] * dist.get_world_size(), mine, group=group)


ROWS = {
    "all_reduce 64 B": all_reduce,
    "barrier": barrier,
    "broadcast_object": broadcast_object,
    "all_gather_object": all_gather_object,
}


def run_rank(environment: dict[str, str], rows: list[str], calls: int, parent: Connection) -> None:
    """Time every row on both backends, and send the parent the seconds of each call."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        ready = {backend: ROWS[row](groups[backend]) for backend in BACKENDS}
        seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for done in range(0, calls + BLOCK, BLOCK):
            for backend, call in ready.items():
                for _ in range(BLOCK):
                    time.sleep(PAUSE)
                    began = time.perf_counter()
                    call()
                    if done:  # The first block warms up.
                        seconds[backend].append(time.perf_counter() - began)
        found[row] = seconds
    dist.barrier()
    parent.send(found)
    dist.destroy_process_group()


def compute() -> None:
    while True:
        sum(range(10_000))


def measure(ranks: int, neighbours: int, rows: list[str], calls: int) -> Any:
    """Return the seconds of all calls of all ranks, by row and backend."""
    fork = multiprocessing.get_context("fork")
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    beside = [fork.Process(target=compute) for _ in range(neighbours)]
    started = []
    try:
        for process in beside:
            process.start()
        for rank in range(ranks):
            ours, theirs = fork.Pipe()
            one = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = fork.Process(target=run_rank, args=(one, rows, calls, theirs))
            process.start()
            started.append((process, ours))
        found = []
        for _, connection in started:
            if not connection.poll(LIMIT):
                raise TimeoutError(f"a rank said nothing for {LIMIT:g} s")
            found.append(connection.recv())
        for process, _ in started:
            process.join(10)
    finally:
        for process in [*beside, *(process for process, _ in started)]:
            if process.pid is not None:
                process.kill()
                process.join()
    return {
        row: {name: [s for rank in found for s in rank[row][name]] for name in BACKENDS}
        for row in rows
    }


def figures(seconds: list[float]) -> list[float]:
    """Return the median, the 99th percentile and the worst, in microseconds."""
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    return [hundredths[49] * 1e6, hundredths[98] * 1e6, max(seconds) * 1e6]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4])
    add("--neighbours", type=int, nargs="+", default=[0, 2], help="processes that compute beside")
    add("--calls", type=int, default=2000, help="of each row, on each backend")
    add("--rows", help=f"those whose names contain this: {'; '.join(ROWS)}", default="")
    add("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.rows in row]
    all_figures: list[dict[str, Any]] = []
    print(f"microseconds of a call {PAUSE * 1e3:g} ms after the last one: p50, p99, worst")
    print(f"{'':24}{'ranks':>6}{'beside':>8}{'unisono':>24}{'gloo':>27}")
    for ranks in args.ranks:
        for neighbours in args.neighbours:
            found = measure(ranks, neighbours, rows, args.calls)
            for row in rows:
                line = f"{row:24}{ranks:6}{neighbours:8}"
                for backend in BACKENDS:
                    numbers = figures(found[row][backend])
                    line += "  " + "".join(f"{number:9.0f}" for number in numbers)
                    case = {"row": row, "ranks": ranks, "neighbours": neighbours}
                    named = zip(("p50", "p99", "worst"), numbers, strict=True)
                    all_figures.append(case | {"backend": backend} | dict(named))
                print(line, flush=True)
    if args.json:
        report.write_json(args.json, figures=all_figures)


if __name__ == "__main__":
    sys.exit(main())
