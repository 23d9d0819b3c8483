"""One-sided transfers: unisono's transport beside a plain copy and, where it is there, NIXL.

    python benchmarks/one_sided.py
    python benchmarks/one_sided.py --sizes 4K 64M --seconds 3

One process reads and writes tensors that another has registered, through torch's
`torch.distributed._transport` (torch 2.15 and newer), while the other one sleeps. `private` is
ordinary memory of torch, `heap` lies in unisono's shared heap; `copy` is `Tensor.copy_` between two
tensors of the same size inside the process. They take turns, block by block, in one pair of
processes. A figure is the median over blocks of the time for a call, and in brackets the time of a
copy over it: 1.00 is as fast as copying.

`pip install nixl` brings NVIDIA's NIXL, whose transport is part of torch (by UCX, over what UCX
chooses). A thread of it polls in each process, and would slow the others down, so it has a pair of
processes of its own, after the others and with a copy of its own. Where it is missing it is left
out, and the program says so.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from harness import report
from torch.distributed._transport import Transport, new_transport

import unisono

SIZES = ["8", "4K", "64K", "1M", "16M", "64M"]
BLOCK = 0.02  # seconds of calls before another one's turn
LIMIT = 60.0  # seconds in which the other process answers
Call = Callable[[], Any]


def tensors(kind: str, size: int) -> torch.Tensor:
    """Return a tensor of that many bytes which was written to."""
    if kind == "heap":
        return torch.from_numpy(unisono.empty(size, "uint8")).fill_(1)
    return torch.ones(size, dtype=torch.uint8)


def serve(names: list[str], sizes: list[int], pipe: Connection) -> None:
    """Be the target: register a tensor of each size and kind, and sleep until the end."""
    ends: dict[str, Transport] = {}
    kept, buffers = [], {}
    for name in names:
        ends.setdefault(backend(name), new_transport(backend(name), "cpu"))
        for size in sizes:
            kept.append(tensors(name, size))
            memory = ends[backend(name)].register_memory(kept[-1])
            buffers[name, size] = memory.to_remote_buffer()
    pipe.send({name: end.bind() for name, end in ends.items()})
    for name, url in pipe.recv().items():
        # NIXL's peers both connect; unisono's need not.
        ends[name].connect(url)
    pipe.send({key: (type(buffer), buffer.serialize()) for key, buffer in buffers.items()})
    pipe.recv()
    for end in ends.values():
        end.close()


def backend(name: str) -> str:
    return "nixl" if name == "nixl" else "unisono"


def calls(
    name: str, ends: dict[str, Transport], remote: Any, size: int
) -> tuple[dict[str, Call], torch.Tensor]:
    """Return the write and the read of one kind of memory, and the local tensor."""
    end = ends[backend(name)]
    local = tensors(name, size)
    memory = end.register_memory(local)
    view, mutable = memory.to_view(), memory.to_mutable_view()
    check(end, local, view, mutable, remote)
    return {
        "write": lambda: end.write(view, remote),
        "read": lambda: end.read(mutable, remote),
    }, local


def check(end: Transport, local: torch.Tensor, view: Any, mutable: Any, remote: Any) -> None:
    """Raise unless what is written can be read again."""
    local.copy_(torch.arange(local.numel()) % 251)
    end.write(view, remote)
    local.zero_()
    end.read(mutable, remote)
    if not torch.equal(local, (torch.arange(local.numel()) % 251).to(torch.uint8)):
        raise ValueError("what was read is not what was written")


def timed(call: Call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def take_turns(ready: dict[str, Call], seconds: float) -> dict[str, float]:
    """Return the median time of each call."""
    counts = {}
    for name, call in ready.items():
        once = min(timed(call, 3) for _ in range(3))
        counts[name] = max(1, min(2000, round(BLOCK / once)))
    blocks: dict[str, list[float]] = {name: [] for name in ready}
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for name, call in ready.items():
            blocks[name].append(timed(call, counts[name]))
    return {name: statistics.median(times) for name, times in blocks.items()}


def measure(names: list[str], sizes: list[int], seconds: float) -> dict[int, dict[str, float]]:
    """Return the median times by size and by what was done."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(names, sizes, theirs))
    process.start()
    theirs.close()
    ends = {name: new_transport(name, "cpu") for name in dict.fromkeys(map(backend, names))}
    try:
        urls = answer(ours)
        for name, url in urls.items():
            ends[name].connect(url)
        ours.send({name: end.bind() for name, end in ends.items()})
        remote = {key: kind.deserialize(data) for key, (kind, data) in answer(ours).items()}
        found = {}
        for size in sizes:
            source, target = tensors("private", size), tensors("private", size)
            ready: dict[str, Call] = {"copy": lambda to=target, of=source: to.copy_(of)}
            for name in names:
                both, _ = calls(name, ends, remote[name, size], size)
                ready.update({f"{name} {what}": call for what, call in both.items()})
            found[size] = take_turns(ready, seconds)
        ours.send("done")
        process.join(LIMIT)
        for end in ends.values():
            end.close()
        return found
    finally:
        process.kill()
        process.join()


def answer(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT):
        raise TimeoutError(f"the other process said nothing for {LIMIT:g} s")
    return pipe.recv()


def in_bytes(size: str) -> int:
    factors = {"K": 1 << 10, "M": 1 << 20}
    return int(size.rstrip("KM")) * factors.get(size[-1], 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", nargs="+", default=SIZES, help="bytes, with K or M")
    add("--seconds", type=float, default=2.0, help="for each size")
    add("--kinds", nargs="+", default=["private", "heap", "nixl"])
    add("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "nixl" in args.kinds:
        try:
            importlib.import_module("nixl")
        except ImportError as error:
            print(f"NIXL is left out: {error}")
            args.kinds.remove("nixl")
    figures = []
    for names in together(args.kinds):
        found = measure(names, [in_bytes(size) for size in args.sizes], args.seconds)
        show(found)
        figures += [{"size": size, "seconds": times} for size, times in found.items()]
    if args.json is not None:
        report.write_json(args.json, figures=figures)


def together(kinds: list[str]) -> list[list[str]]:
    """Return the kinds of memory by those that are measured in the same processes."""
    parts = [[kind for kind in kinds if kind != "nixl"], [kind for kind in kinds if kind == "nixl"]]
    return [part for part in parts if part]


def show(found: dict[int, dict[str, float]]) -> None:
    print("microseconds of a call, and the time of a plain copy over it")
    columns = list(next(iter(found.values())))
    print(f"{'':>10}" + "".join(f"{column:>21}" for column in columns))
    for size, times in found.items():
        cells = (f"{t * 1e6:13.1f} ({times['copy'] / t:5.2f})" for t in times.values())
        print(f"{size:>10}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
