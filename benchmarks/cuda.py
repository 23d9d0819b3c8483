"""Collectives of CUDA tensors on unisono beside gloo and NCCL, interleaved in one run.

    python benchmarks/cuda.py               2 and 4 ranks that share one GPU
    python benchmarks/cuda.py --ranks 2 --sizes 8,64M --collectives all_reduce
    python benchmarks/cuda.py --spread      ranks on the GPUs of this host in turn

The groups of all backends live in the same processes and are measured in turn, round by round. A
round is a barrier and then a number of calls one after the other, until the device has done them
all; its time is that of the slowest rank, a cell's the median over the rounds. *host* is how long
the call itself takes, before the device has done anything.

*of bound* compares with the measured rate of copies within one device's memory: all_reduce of large
tensors must read and write five times the tensor on every rank (into the window 2; the own slice of
all of them 1, its result twice 2/n; the other slices from the peers 2(n - 1)/n), and ranks that
share a device share its memory's rate. NCCL takes part where it accepts several ranks on a device.
"""

# ruff: noqa: E402
from __future__ import annotations

if __name__ == "cuda":  # torch asks for NVIDIA's package of that name
    raise ImportError("this is a benchmark of unisono, not NVIDIA's package cuda")

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # read when torch is imported, and by the spawned ranks
# torch imports NVIDIA's package `cuda`, for which it must not take this file.
sys.path = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).parent]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.append(str(Path(__file__).parent))

from harness.arguments import list_of, one_of, ranks, size, size_name

WAIT = datetime.timedelta(seconds=120)
BACKENDS = ("unisono", "gloo", "nccl")
ROUND = 0.05  # seconds that a round should take, at the most calls
MOST_CALLS = 200
PASSES = 5  # times that a large all_reduce reads or writes the tensor, on every rank

LATENCY_MARK = 60.0  # microseconds: 8 B all_reduce at 2 ranks
HOST_MARK = 15.0  # microseconds: a call of it, until it returns
BOUND_MARK = 0.6  # of what the copy rate allows: 256 MiB all_reduce
GLOO_MARK = 20.0  # times as fast as gloo: 64 MiB all_reduce


class Cell:
    """One collective at one size on one backend's group."""

    def __init__(self, collective: str, size: int, group: dist.ProcessGroup) -> None:
        world = dist.get_world_size()
        count = max(size // 4 // world, 1)
        self.group = group
        self.call: Callable[[], object] = getattr(self, collective)
        self.whole = torch.zeros(
            max(size // 4, 1) if collective in ("all_reduce", "broadcast") else count * world,
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

    def round(self, calls: int) -> tuple[float, float]:
        """Return the seconds of a call: until the device has done it, and until it returned."""
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            self.call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls, (returned - start) / calls


COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def slowest(values: tuple[float, ...]) -> list[float]:
    """Return the largest of each value over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def groups_of(backends: tuple[str, ...]) -> tuple[dict[str, dist.ProcessGroup], dict[str, str]]:
    """Return a group of every backend that works here, and why the others do not."""
    groups, missing = {}, {}
    for backend in backends:
        reason = ""
        try:
            group = dist.new_group(backend=backend, timeout=WAIT)
            total = torch.full((3,), float(dist.get_rank() + 1), device="cuda")
            dist.all_reduce(total, group=group)
            world = dist.get_world_size()
            if total.tolist() != [world * (world + 1) / 2] * 3:
                reason = f"a wrong sum: {total.tolist()}"
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        failed = next((reason for reason in reasons if reason), None)
        if failed:
            missing[backend] = failed
        else:
            groups[backend] = group
    return groups, missing


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


def run_rank(rank: int, args: argparse.Namespace, world: int, folder: str) -> None:
    """Measure every cell; rank 0 leaves the times in `folder`."""
    torch.cuda.set_device(rank % torch.cuda.device_count() if args.spread else 0)
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / "rendezvous").as_uri(),
        rank=rank,
        world_size=world,
        timeout=WAIT,
    )
    rate = copy_rate() if rank == 0 else 0.0
    groups, missing = groups_of(args.backends)
    cells = [
        measure(collective, bytes_, groups, args.rounds)
        for collective in args.collectives
        for bytes_ in args.sizes
    ]
    if rank == 0:
        result = {"missing": missing, "copy_rate": rate, "cells": cells}
        (Path(folder) / "result.json").write_text(json.dumps(result))
    # Groups that failed may not be able to end in good order.
    sys.stdout.flush()
    os._exit(0)


def measure(
    collective: str, bytes_: int, groups: dict[str, dist.ProcessGroup], rounds: int
) -> dict:
    measured = {name: Cell(collective, bytes_, group) for name, group in groups.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in measured}
    calls = {}
    for name, cell in measured.items():
        cell.round(3)
        taken, _ = slowest(cell.round(3))
        calls[name] = min(max(int(ROUND / taken), 1), MOST_CALLS)
    for _ in range(rounds):
        for name, cell in measured.items():
            times[name].append(slowest(cell.round(calls[name])))
    return {"collective": collective, "bytes": bytes_, "seconds": times}


def report(world: int, result: dict, *, shared: bool) -> None:
    copying = result["copy_rate"] / 1e9
    print(
        f"\n{world} ranks; copies within the device's memory: {copying:,.0f} GB/s read and written"
    )
    for name, reason in result["missing"].items():
        print(f"not measured: {name}: {reason}")
    header = (
        f"{'':16}{'size':>10}{'unisono':>12}{'host':>9}{'gloo':>12}{'nccl':>12}{'of bound':>10}"
    )
    print(header + "  microseconds")
    for cell in result["cells"]:
        medians = {
            name: [statistics.median(times) * 1e6 for times in zip(*rounds, strict=True)]
            for name, rounds in cell["seconds"].items()
        }
        ours, host = medians.get("unisono", (float("nan"), float("nan")))
        line = f"{cell['collective']:16}{size_name(cell['bytes']):>10}{ours:12,.1f}{host:9,.1f}"
        for name in ("gloo", "nccl"):
            line += f"{medians[name][0]:12,.1f}" if name in medians else f"{'-':>12}"
        large = cell["collective"] == "all_reduce" and cell["bytes"] >= 1 << 20
        if large and shared:
            bound = PASSES * world * cell["bytes"] / result["copy_rate"] * 1e6
            line += f"{bound / ours:10.2f}"
        print(line + marks(world, cell, medians, result["copy_rate"], shared=shared))


def marks(world: int, cell: dict, medians: dict, rate: float, *, shared: bool) -> str:
    """Return what the cell's marks say."""
    if cell["collective"] != "all_reduce" or "unisono" not in medians:
        return ""
    ours, host = medians["unisono"]
    said = []

    def mark(what: str, *, met: bool) -> None:
        said.append(f"{what}: {'met' if met else 'MISSED'}")

    if cell["bytes"] == 8 and world == 2:
        mark(f"below {LATENCY_MARK:g} us", met=ours < LATENCY_MARK)
        mark(f"host below {HOST_MARK:g} us", met=host < HOST_MARK)
    if cell["bytes"] == 64 << 20 and "gloo" in medians:
        times = medians["gloo"][0] / ours
        mark(f"{times:.0f} times gloo ({GLOO_MARK:g})", met=times >= GLOO_MARK)
    if cell["bytes"] == 256 << 20 and world in (2, 4) and shared:
        bound = PASSES * world * cell["bytes"] / rate * 1e6
        mark(f"{BOUND_MARK:g} of the bound", met=bound / ours >= BOUND_MARK)
    return "  " + ", ".join(said) if said else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=list_of(ranks), default=(2, 4), help="world sizes, as 2,4")
    add("--backends", type=list_of(one_of(*BACKENDS)), default=BACKENDS, help="as unisono,gloo")
    add("--collectives", type=list_of(one_of(*COLLECTIVES)), default=COLLECTIVES, help="as a,b")
    add("--sizes", type=list_of(size), help="of the whole tensor, as 8,16K,64M")
    add("--rounds", type=int, default=7)
    add("--spread", action="store_true", help="rank r on device r modulo their number")
    add("--json", type=Path, metavar="FILE", help="write every round's time to FILE")
    args = parser.parse_args()
    args.sizes = args.sizes or (8, 16 << 10, 1 << 20, 64 << 20, 256 << 20)
    return args


def main() -> None:
    args = parse_arguments()
    if not torch.cuda.is_available():
        sys.exit(
            "there is no CUDA device here (torch.cuda.is_available() is False): nothing to measure"
        )
    devices = torch.cuda.device_count() if args.spread else 1
    names = ", ".join({torch.cuda.get_device_name(index) for index in range(devices)})
    print(f"{devices} x {names}, torch {torch.__version__}, float32")
    results = {}
    for world in args.ranks:
        with tempfile.TemporaryDirectory(prefix="cuda-") as folder:
            mp.spawn(run_rank, args=(args, world, folder), nprocs=world)
            results[world] = json.loads((Path(folder) / "result.json").read_text())
        report(world, results[world], shared=devices == 1)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
