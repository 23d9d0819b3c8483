"""The sums of tensor-parallel inference on CPUs: unisono's operator beside DeepSpeed's.

    python benchmarks/inference.py                         2 and 4 ranks, bfloat16 and float32
    python benchmarks/inference.py --ranks 2 --sizes 10K 64K --seconds 2

A layer that is split over ranks adds up the activations of all of them: one tensor, in place, a few
KiB for a token and some MiB for a prompt. DeepSpeed compiles an operator for that, which sums in
shared memory (`ShareMemCommBuilder`, compiled at its first use). All of them are in the same
processes and take turns, block by block, so that a slow second of the machine meets all. A figure
is the median over blocks of rank 0's time for a call.

Where DeepSpeed or its compiler is missing, it is left out, and the program says so.
"""

from __future__ import annotations

import argparse
import contextlib
import io
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
from harness.arguments import size as in_bytes
from harness.jobs import free_port

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SIZES = ["4K", "10K", "16K", "64K", "256K", "1M", "4M", "32M"]
LIMIT = 1800.0  # seconds for everything that one job measures
BLOCK = 0.02  # seconds of calls before another operator's turn
Call = Callable[[torch.Tensor], Any]


def deepspeed_operator(ranks: int, rank: int) -> Call:
    """Return DeepSpeed's operator, made ready for this rank."""
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

        ShareMemCommBuilder().load(verbose=False).initialize(ranks, rank)
    return torch.ops.deepspeed.inference_all_reduce_


def operators(ranks: int, rank: int, wanted: list[str]) -> dict[str, Call]:
    """Return what is measured, by name."""
    name = dist.group.WORLD.group_name
    ready: dict[str, Call] = {
        "unisono": lambda tensor: torch.ops.unisono.all_reduce_(tensor, name),
        "through c10d": dist.all_reduce,
    }
    if "deepspeed" in wanted:
        ready["deepspeed"] = deepspeed_operator(ranks, rank)
    if "gloo" in wanted:
        gloo = dist.new_group(backend="gloo")
        ready["gloo"] = lambda tensor: dist.all_reduce(tensor, group=gloo)
    return {name: ready[name] for name in wanted}


def run_rank(environment: dict[str, str], args: argparse.Namespace, parent: Connection) -> None:
    """Time every operator on every size and type, and send the parent the seconds of a call."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    with torch.inference_mode():
        ready = operators(ranks, rank, args.operators)
        for dtype in args.dtypes:
            for size in args.sizes:
                count = in_bytes(size) // DTYPES[dtype].itemsize
                tensor = torch.zeros(count, dtype=DTYPES[dtype])
                found[dtype, size] = take_turns(ready, tensor, args.seconds)
    parent.send(found)
    dist.barrier()
    dist.destroy_process_group()


def take_turns(
    ready: dict[str, Call], tensor: torch.Tensor, seconds: float
) -> dict[str, list[float]]:
    """Return the seconds of a call in each block. All ranks make the same calls."""
    calls = {}
    for name, call in ready.items():
        check(name, call, tensor)
        once = min(timed(call, tensor, 3) for _ in range(3))
        longest = torch.tensor([once], dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        calls[name] = max(1, min(2000, round(BLOCK / longest.item())))
    blocks: dict[str, list[float]] = {name: [] for name in ready}
    going = torch.ones(1)
    began = time.perf_counter()
    while going.item():
        for name, call in ready.items():
            blocks[name].append(timed(call, tensor, calls[name]))
        if dist.get_rank() == 0:
            going[0] = time.perf_counter() - began < seconds * len(ready)
        dist.broadcast(going, 0)
    return blocks


def check(name: str, call: Call, tensor: torch.Tensor) -> None:
    """Raise unless the operator adds up."""
    tensor.fill_(dist.get_rank() + 1)
    call(tensor)
    ranks = dist.get_world_size()
    if not torch.all(tensor == ranks * (ranks + 1) / 2):
        raise ValueError(f"{name} does not add up: {tensor[:4].tolist()}")
    tensor.zero_()


def timed(call: Call, tensor: torch.Tensor, calls: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call(tensor)
    return (time.perf_counter() - began) / calls


def measure(ranks: int, args: argparse.Namespace) -> Any:
    """Return rank 0's seconds, by type and size and operator."""
    spawn = multiprocessing.get_context("spawn")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = {**address, "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    started = []
    try:
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            one = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = spawn.Process(target=run_rank, args=(one, args, theirs))
            process.start()
            theirs.close()
            started.append((process, ours))
        if not started[0][1].poll(LIMIT):
            raise TimeoutError(f"rank 0 said nothing for {LIMIT:g} s")
        found = started[0][1].recv()
        for process, _ in started:
            process.join(10)
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    return found


def compile_deepspeed() -> str:
    """Compile DeepSpeed's operator once, before the ranks load it; return why it is left out."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

            ShareMemCommBuilder().load(verbose=False)
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else repr(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4])
    add("--sizes", nargs="+", default=SIZES, help="bytes, with K or M")
    add("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    add("--seconds", type=float, default=2.0, help="for each operator, size and type")
    add("--operators", nargs="+", default=["unisono", "through c10d", "deepspeed"])
    add("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    args = parser.parse_args()
    if "deepspeed" in args.operators and (why := compile_deepspeed()):
        print(f"DeepSpeed's operator is left out: {why}")
        args.operators.remove("deepspeed")
    figures = []
    print("microseconds of a call, and how many times as long it takes as unisono's operator")
    print(f"{'':22}{'ranks':>6}" + "".join(f"{name:>20}" for name in args.operators))
    for ranks in args.ranks:
        for (dtype, size), blocks in measure(ranks, args).items():
            medians = {name: statistics.median(seconds) for name, seconds in blocks.items()}
            base = medians[args.operators[0]]
            cells = (f"{s * 1e6:12.1f} ({s / base:4.2f})" for s in medians.values())
            print(f"{dtype:12}{size:>10}{ranks:6}" + " ".join(cells), flush=True)
            figures.append({"dtype": dtype, "size": size, "ranks": ranks, "seconds": medians})
    if args.json:
        report.write_json(args.json, figures=figures)


if __name__ == "__main__":
    main()
