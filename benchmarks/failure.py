"""How soon the other ranks raise once one was killed, on unisono beside gloo.

    python benchmarks/failure.py                 3 ranks, rank 2 is killed, 10 rounds of every row
    python benchmarks/failure.py --rounds 3      a first look

A round is a group of new processes, forked from one that has imported torch. All but one wait in an
all_reduce when the last is killed by SIGKILL. The result is the time from the signal until the
slower of the others runs its `except`. A backend that waits until the kernel has taken the memory
of the killed process back waits longer where that is more; these processes share most of theirs
with the one they are forked from. Torch's settings are its defaults: its flight recorder writes
what it holds to a file meanwhile.

The rows: the NumPy door; through torch a blocking call, an asynchronous one with `wait()`, and one
whose future is waited for. In the rows "goes on" the result is the time until the ranks that are
left have the sum of a group without the killed one (`comm.shrink()`, `dist.shrink_group`), and in
the row "replaced" until they have one with the process that takes its place (`comm.grow()`), which
is forked at the kill. In the row "closed" no rank is killed: half of the connections over TCP of
the last one are closed, and then it joins the others' call, whose result is waited for; "not
closed" is the same without that. The mark is for unisono's other rows through torch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import report
from harness.jobs import free_port

import unisono
from unisono._chaos import sockets

MEDIAN_MARK, WORST_MARK = 0.01, 0.05  # seconds
LIMIT = 60.0  # seconds for each step of a round
SETTLE = 0.3  # how long the ranks wait before one is killed
ELEMENTS = 1000


def numpy_door(_folder: Path) -> Callable[[], Any]:
    comm = unisono.init()
    return lambda: comm.all_reduce(np.ones(ELEMENTS))


def numpy_again(recover: Callable[[Any], Any]) -> Any:
    def begin(_folder: Path) -> Callable[[], Any]:
        comm = unisono.init()

        def call() -> None:
            try:
                comm.all_reduce(np.ones(ELEMENTS))
            except unisono.Error:
                recover(comm).all_reduce(np.ones(ELEMENTS))
                raise

        return call

    return begin


def numpy_over_tcp(_folder: Path) -> Callable[[], Any]:
    os.environ["UNISONO_TRANSPORT"] = "tcp"
    comm = unisono.init()
    return lambda: comm.all_reduce(np.ones(ELEMENTS))


def torch_goes_on(folder: Path) -> Callable[[], Any]:
    reduce = through_torch("unisono", dist.all_reduce)(folder)

    def call() -> None:
        try:
            reduce()
        except RuntimeError:
            dist.shrink_group([dist.get_world_size() - 1])
            reduce()
            raise

    return call


def through_torch(backend: str, wait: Callable[[torch.Tensor], Any]) -> Any:
    def begin(folder: Path) -> Callable[[], Any]:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = (folder / "rendezvous").as_uri()
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)
        return lambda: wait(torch.ones(ELEMENTS))

    return begin


def asynchronous(tensor: torch.Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


WAITS = {
    "blocking call": dist.all_reduce,
    "wait()": lambda tensor: asynchronous(tensor).wait(),
    "future": lambda tensor: asynchronous(tensor).get_future().wait(),
}
GOES_ON = {
    "unisono, NumPy, goes on": numpy_again(lambda comm: comm.shrink()),
    "unisono, goes on": torch_goes_on,
}
REPLACED = "unisono, NumPy, replaced"
CLOSED, NOT_CLOSED = "unisono, NumPy, closed", "unisono, NumPy, not closed"
ROWS = {
    "unisono, NumPy": numpy_door,
    **{
        f"{backend}, {name}": through_torch(backend, wait)
        for backend in ("unisono", "gloo")
        for name, wait in WAITS.items()
    },
    **GOES_ON,
    REPLACED: numpy_again(lambda comm: comm.shrink().grow()),
    CLOSED: numpy_over_tcp,
    NOT_CLOSED: numpy_over_tcp,
}


def run_rank(row: str, environment: dict[str, str], folder: Path, parent: Connection) -> None:
    """Tell the parent when this rank waits, and when and how its wait ended."""
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    call = ROWS[row](folder)
    call()
    parent.send("waiting")
    if int(environment["RANK"]) == int(environment["WORLD_SIZE"]) - 1:
        signal.sigwait({signal.SIGUSR1})
        if row == CLOSED:
            sockets.close(os.getpid(), random.Random(time.monotonic()))
    try:
        call()
    except RuntimeError as error:
        parent.send((time.monotonic(), str(error)))
    except unisono.Error as error:
        parent.send((time.monotonic(), str(error)))
    else:
        parent.send((time.monotonic(), ""))
    signal.pause()


def receive(connection: Connection, row: str) -> Any:
    if not connection.poll(LIMIT):
        raise TimeoutError(f"{row}: a rank said nothing for {LIMIT:g} s")
    return connection.recv()


def play_round(row: str, ranks: int) -> float:
    """Kill one rank, or what the row says; return the seconds until the slowest of the others."""
    fork = multiprocessing.get_context("fork")
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started: list[tuple[Any, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="failure-") as folder:
        job["TORCH_FR_DUMP_TEMP_FILE"] = str(Path(folder) / "trace_")

        def start(rank: int) -> None:
            ours, theirs = fork.Pipe()
            one = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = fork.Process(target=run_rank, args=(row, one, Path(folder), theirs))
            process.start()
            started.append((process, ours))

        try:
            for rank in range(ranks):
                start(rank)
            for _, connection in started:
                receive(connection, row)
            time.sleep(SETTLE)
            begun = time.monotonic()
            break_in(row, started[-1][0])
            if row == REPLACED:
                start(ranks - 1)
            ends = [receive(connection, row) for _, connection in started[: ranks - 1]]
        finally:
            for process, _ in started:
                process.kill()
                process.join()
    for _, error in ends:
        if not error and row not in (CLOSED, NOT_CLOSED):
            raise AssertionError(f"{row}: a rank's call ended well without its peer")
        if error and row in (CLOSED, NOT_CLOSED):
            raise AssertionError(f"{row}: {error}")
    return max(when for when, _ in ends) - begun


def break_in(row: str, last: Any) -> None:
    if row in (CLOSED, NOT_CLOSED):
        os.kill(last.pid, signal.SIGUSR1)
    else:
        last.kill()


def verdict(row: str, seconds: list[float]) -> str:
    median, worst = statistics.median(seconds), max(seconds)
    line = f"{row:28}{median * 1e3:12.1f}{worst * 1e3:12.1f}"
    if not row.startswith("unisono") or "NumPy" in row or row in GOES_ON:
        return line
    met = median <= MEDIAN_MARK and worst <= WORST_MARK
    marks = f"({MEDIAN_MARK * 1e3:g} and {WORST_MARK * 1e3:g}) {'met' if met else 'MISSED'}"
    return f"{line}   {marks}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=3)
    add("--rounds", type=int, default=10)
    add("--rows", help=f"those whose names contain this: {'; '.join(ROWS)}", default="")
    add("--json", type=Path, metavar="FILE", help="write every round's seconds to FILE")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.rows in row]
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(args.rounds):
        for row in rows:
            seconds[row].append(play_round(row, args.ranks))
    print(f"milliseconds from the SIGKILL of one of {args.ranks} ranks to the errors of the others")
    print(f"{'':28}{'median':>12}{'worst':>12}")
    for row in rows:
        print(verdict(row, seconds[row]))
    if args.json:
        report.write_json(args.json, ranks=args.ranks, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())
