"""Collectives and messages of CUDA tensors on unisono beside gloo and NCCL, interleaved in one run.

    python benchmarks/cuda.py               1, 2, 4 and 8 ranks that share one GPU
    python benchmarks/cuda.py --ranks 2 --sizes 8,64M --collectives all_reduce
    python benchmarks/cuda.py --window 64M  unisono with windows of another size
    python benchmarks/cuda.py --in-place    with tensors from unisono's pool of memory
    python benchmarks/cuda.py --spread      ranks on the GPUs of this host in turn

The groups of all backends live in the same processes and are measured in turn, round by round. A
round is a number of calls one after the other, until the device has done them all, and some more
that are each waited for. Its times are those of the slowest rank, a cell's the medians over the
rounds: *unisono*, *gloo* and *nccl* are a call's at the rate of many; *alone* is a call of unisono
that is waited for, which is what the mark for 8 B is held against; *host* is how long a call takes
to return, before the device has done anything. A backend that fails in a cell, or takes some
seconds for a call, is left out from there on, and the output says why.

*of bound* compares with the measured rate of copies within one device's memory, which ranks that
share the device share. In a large all_reduce one rank makes the sum, or each rank a slice of it:
the others' contributions are read and the sum is stored in their place, both once. With --in-place
that is all: 2 times the tensor for each rank. Else all but one contribution also go into a window
and the result out of it: 6 - 4/n times for each of n ranks.

NCCL takes part where it accepts several ranks on a device: 2.30 and newer, with a setting that is
made here unless the environment has another; the header says which. The exit status is 1 where
unisono was not measured in a cell, and says nothing about the marks.
"""

# ruff: noqa: E402
from __future__ import annotations

if __name__ == "cuda":  # torch asks for NVIDIA's package of that name
    raise ImportError("this is a benchmark of unisono, not NVIDIA's package cuda")

import argparse
import contextlib
import datetime
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # read when torch is imported, and by the spawned ranks
# torch imports NVIDIA's package `cuda`, for which it must not take this file.
HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [folder for folder in sys.path if str(Path(folder).resolve()) != HERE]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from unisono import _queues

sys.path.insert(0, HERE)
from harness.arguments import list_of, one_of, size, size_name
from harness.gpu import Setting, heading, row, summary

sys.path.remove(HERE)

WAIT = datetime.timedelta(seconds=60)
BACKENDS = ("unisono", "gloo", "nccl")
# With what takes only some backends at the end: one that fails is left out from there on.
COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"),
    "exchange",
)
SIZES = (8, 16 << 10, 1 << 20, 64 << 20, 256 << 20)
# For ranks that share a device: what lets NCCL accept them, and leaves each of them room on it.
NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"

ROUND = 0.05  # seconds that the calls at the rate of many should take, at the most calls
MOST_CALLS = 200
FEW_CALLS = 32  # that are waited for one by one; whose commands a stream takes without a pause
SLOW = 0.2  # seconds of a call from which on three rounds do
TOO_SLOW = 2.0  # seconds of a call from which on a backend is left out


def pool() -> contextlib.AbstractContextManager:
    """Return where tensors come from that unisono's ranks read in place."""
    import unisono.torch

    return torch.cuda.use_mem_pool(unisono.torch.mem_pool())


class Cell:
    """One collective at one size on one backend's group."""

    def __init__(
        self, collective: str, size: int, group: dist.ProcessGroup, *, in_place: bool = False
    ) -> None:
        with pool() if in_place else contextlib.nullcontext():
            self._make(collective, size, group)

    def _make(self, collective: str, size: int, group: dist.ProcessGroup) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.next, self.previous = (rank + 1) % world, (rank - 1) % world
        count = max(size // 4 // world, 1)
        self.group = group
        self.call: Callable[[], object] = getattr(self, collective)
        self.whole = torch.zeros(
            max(size // 4, 1)
            if collective in ("all_reduce", "broadcast", "exchange")
            else count * world,
            device="cuda",
        )
        self.other = torch.zeros_like(self.whole)
        self.shard = torch.zeros(count, device="cuda")

    def all_reduce(self) -> None:
        dist.all_reduce(self.whole, group=self.group)

    def broadcast(self) -> None:
        dist.broadcast(self.whole, 0, group=self.group)

    def all_gather(self) -> None:
        dist.all_gather_into_tensor(self.whole, self.shard, group=self.group)

    def reduce_scatter(self) -> None:
        dist.reduce_scatter_tensor(self.shard, self.whole, group=self.group)

    def all_to_all(self) -> None:
        dist.all_to_all_single(self.other, self.whole, group=self.group)

    def exchange(self) -> None:
        """Send to the next rank, and receive from the one before, as pipelines do."""
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.whole, self.next, self.group),
                dist.P2POp(dist.irecv, self.other, self.previous, self.group),
            ]
        )
        for work in works:
            work.wait()

    def round(self, calls: int) -> tuple[float, float, float]:
        """Return a call's seconds: at the rate of many, until it returns, and waited for."""
        few = min(calls, FEW_CALLS)
        start = time.perf_counter()
        for _ in range(few):
            self.call()
        returned = time.perf_counter()
        for _ in range(calls - few):
            self.call()
        torch.cuda.synchronize()
        done = time.perf_counter()
        for _ in range(few):
            self.call()
            torch.cuda.synchronize()
        alone = time.perf_counter() - done
        return (done - start) / calls, (returned - start) / few, alone / few


class FailedError(Exception):
    """Something failed on a rank. It is raised on all of them."""


def together(step: Callable[[], object]) -> list:
    """Run a step on every rank, and return what it returned on each.

    Ranks agree through gloo, so that where it fails on one all of them raise `FailedError`.
    """
    dist.barrier()
    value, reason = None, ""
    try:
        value = step()
    except Exception as error:
        reason = reason_of(error)
    ended = time.monotonic()
    outcomes: list = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (value, reason, ended))
    failures = [(at, rank, why) for rank, (_, why, at) in enumerate(outcomes) if why]
    if failures:
        # The others waited for the one that failed first.
        _, rank, why = min(failures)
        raise FailedError(f"rank {rank}: {why}")
    return [value for value, _, _ in outcomes]


def failure_of(step: Callable[[], object]) -> str:
    """Return why a step failed; nothing if it did not."""
    try:
        step()
    except FailedError as reason:
        return str(reason)
    return ""


def reason_of(error: Exception) -> str:
    """Return what an exception says, in one line: NCCL says first where, and last what."""
    text = str(error).partition("Exception raised from")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    return f"{type(error).__name__}: {said}"


def slowest(cell: Cell, calls: int) -> list[float]:
    """Return each of a round's times on the rank that took longest."""
    rounds = together(functools.partial(cell.round, calls))
    return [max(times) for times in zip(*rounds, strict=True)]


def group_of(backend: str) -> dist.ProcessGroup:
    """Return a group on a backend that has been seen to add up."""
    if backend == "unisono":
        import unisono.torch

        unisono.torch.register()
    group = dist.new_group(backend=backend, timeout=WAIT)
    total = torch.full((3,), float(dist.get_rank() + 1), device="cuda")
    dist.all_reduce(total, group=group)
    world = dist.get_world_size()
    if total.tolist() != [world * (world + 1) / 2] * 3:
        raise ValueError(f"a wrong sum: {total.tolist()}")
    return group


def groups_of(backends: list[str]) -> tuple[dict[str, dist.ProcessGroup], dict[str, str]]:
    """Return a group of every backend that works here, and why the others do not."""
    groups: dict[str, dist.ProcessGroup] = {}
    missing: dict[str, str] = {}

    def form(backend: str) -> None:
        groups[backend] = group_of(backend)

    for backend in backends:
        reason = failure_of(lambda backend=backend: together(functools.partial(form, backend)))
        if reason:
            groups.pop(backend, None)
            missing[backend] = reason
    return groups, missing


def measure(
    collective: str,
    bytes_: int,
    groups: dict[str, dist.ProcessGroup],
    rounds: int,
    *,
    in_place: bool = False,
) -> dict:
    """Measure a cell on every group. One that fails or is too slow is taken out of `groups`."""
    cells: dict[str, Cell] = {}
    efforts: dict[str, tuple[int, int]] = {}  # calls of a round, and rounds
    seconds: dict[str, list[list[float]]] = {}
    failed: dict[str, str] = {}

    def make(name: str) -> None:
        cells[name] = Cell(collective, bytes_, groups[name], in_place=in_place)

    def warm_up(name: str) -> None:
        together(functools.partial(make, name))
        # No limit here: a backend may set things up at its first call.
        first, *_ = slowest(cells[name], 1)
        taken, *_ = slowest(cells[name], 1 if first > SLOW else 3)
        if taken > TOO_SLOW:
            raise FailedError(f"a call takes {taken:.1f} s")
        calls = min(max(int(ROUND / taken), 1), MOST_CALLS)
        efforts[name] = calls, min(rounds, 3) if taken > SLOW else rounds
        seconds[name] = []

    def measure_round(name: str) -> None:
        seconds[name].append(slowest(cells[name], efforts[name][0]))

    def attempt(step: Callable[[str], None], name: str) -> None:
        reason = failure_of(functools.partial(step, name))
        if reason:
            failed[name] = reason
            del groups[name]
            seconds.pop(name, None)

    for name in list(groups):
        attempt(warm_up, name)
    for number in range(rounds):
        for name in list(seconds):
            if number < efforts[name][1]:
                attempt(measure_round, name)
    return {"collective": collective, "bytes": bytes_, "seconds": seconds, "failed": failed}


def copy_rate() -> float:
    """Return the bytes per second that copies within the device's memory read and write."""
    source = torch.zeros(64 << 20, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 20 * source.nbytes / (time.perf_counter() - start))
    return best


def run_rank(
    rank: int,
    args: argparse.Namespace,
    world: int,
    backends: list[str],
    cells: list[tuple[str, int]],
    folder: str,
) -> None:
    """Measure cells; rank 0 prints each and leaves it in a file of `folder` when it is measured."""
    torch.cuda.set_device(rank % torch.cuda.device_count() if args.spread else 0)
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / "rendezvous").as_uri(),
        rank=rank,
        world_size=world,
        timeout=10 * WAIT,  # a rank on which a call has failed waits here for those that wait in it
    )
    devices = torch.cuda.device_count() if args.spread else 1
    setting = Setting(world, copy_rate() if rank == 0 else 0.0, devices == 1, args.in_place)
    groups, missing = groups_of(backends)
    if rank == 0:
        told = {"copy_rate": setting.copy_rate, "shared": setting.shared, "missing": missing}
        (Path(folder) / "setting.json").write_text(json.dumps(told))
        print(heading(setting, missing), flush=True)
    for collective, bytes_ in cells:
        cell = measure(collective, bytes_, groups, args.rounds, in_place=args.in_place)
        if rank == 0:
            with (Path(folder) / "cells.jsonl").open("a") as file:
                file.write(json.dumps(cell) + "\n")
            print(row(setting, cell), flush=True)
    # Groups that failed may not be able to end in good order.
    sys.stdout.flush()
    os._exit(0)


def measure_world(args: argparse.Namespace, world: int) -> dict:
    """Measure all cells at one world size.

    NCCL ends its process when a call of it hangs; the other backends then go on without it.
    """
    left = [(collective, bytes_) for collective in args.collectives for bytes_ in args.sizes]
    backends = list(args.backends)
    result: dict = {"copy_rate": 0.0, "shared": not args.spread, "missing": {}, "cells": []}
    while left:
        with tempfile.TemporaryDirectory(prefix="cuda-") as name:
            died = ""
            try:
                rest = (args, world, backends, left, name)
                mp.spawn(run_rank, args=rest, nprocs=world)
            except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
                died = reason_of(error)
            folder = Path(name)
            if (folder / "setting.json").exists():
                result |= json.loads((folder / "setting.json").read_text())
            if (folder / "cells.jsonl").exists():
                lines = (folder / "cells.jsonl").read_text().splitlines()
                result["cells"] += [json.loads(line) for line in lines]
                left = left[len(lines) :]
        if not died:
            break
        where = f"in {left[0][0]} of {size_name(left[0][1])}" if left else "at the end"
        print(f"{world} ranks ended {where}: {died}", flush=True)
        if "nccl" not in backends or "nccl" in result["missing"]:
            break
        print("they go on without nccl", flush=True)
        backends.remove("nccl")
    return result


def asked_for(args: argparse.Namespace, results: dict[int, dict]) -> list[tuple[Setting, dict]]:
    """Return a cell for everything that was asked for: without times where it was not measured."""
    cells = []
    for world, result in results.items():
        setting = Setting(world, result["copy_rate"], result["shared"], args.in_place)
        measured = {(cell["collective"], cell["bytes"]): cell for cell in result["cells"]}
        for key in ((name, bytes_) for name in args.collectives for bytes_ in args.sizes):
            nothing = {"collective": key[0], "bytes": key[1], "seconds": {}, "failed": {}}
            cells.append((setting, measured.get(key, nothing)))
    return cells


def header(args: argparse.Namespace) -> str:
    devices = torch.cuda.device_count() if args.spread else 1
    names = ", ".join({torch.cuda.get_device_name(index) for index in range(devices)})
    lines = [f"{devices} x {names}, torch {torch.__version__}, float32"]
    if "nccl" in args.backends and dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        said = " ".join(f"{name}={os.environ[name]}" for name in NCCL if name in os.environ)
        lines.append(f"NCCL {version} {said}".rstrip())
    names = (QUEUES, "UNISONO_WINDOW_BYTES")
    lines += [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return "\n".join(lines)


def world_size(text: str) -> int:
    world = int(text)
    if world < 1:
        raise ValueError("a world has one rank at the least")
    return world


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=list_of(world_size), default=(1, 2, 4, 8), help="world sizes, as 2,4")
    add("--backends", type=list_of(one_of(*BACKENDS)), default=BACKENDS, help="as unisono,gloo")
    add("--collectives", type=list_of(one_of(*COLLECTIVES)), default=COLLECTIVES, help="as a,b")
    add("--sizes", type=list_of(size), default=SIZES, help="of the whole tensor, as 8,16K,64M")
    add("--rounds", type=int, default=7)
    add("--window", metavar="SIZE", help="UNISONO_WINDOW_BYTES, as 64M; 0: through the host")
    add("--in-place", action="store_true", help="tensors that unisono's ranks read where they lie")
    add("--spread", action="store_true", help="rank r on device r modulo their number")
    add("--json", type=Path, metavar="FILE", help="write every round's time to FILE")
    return parser.parse_args()


def prepare_environment(args: argparse.Namespace) -> None:
    """Set the variables that the spawned ranks inherit; those already set stay."""
    # As unisono asks for where it is imported before the process opens the device.
    wanted = _queues.wanted(max(args.ranks))
    for name, value in (wanted if args.spread else wanted | NCCL).items():
        os.environ.setdefault(name, value)
    if args.window is not None:
        os.environ["UNISONO_WINDOW_BYTES"] = args.window


def main() -> None:
    args = parse_arguments()
    prepare_environment(args)
    if not torch.cuda.is_available():
        sys.exit(
            "there is no CUDA device here (torch.cuda.is_available() is False): nothing to measure"
        )
    print(header(args), flush=True)
    results = {world: measure_world(args, world) for world in args.ranks}
    cells = asked_for(args, results)
    print(summary(cells))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    lacking = sum("unisono" not in cell["seconds"] for _, cell in cells)
    if "unisono" in args.backends and lacking:
        sys.exit(f"unisono was not measured in {lacking} of {len(cells)} cells")


if __name__ == "__main__":
    main()
