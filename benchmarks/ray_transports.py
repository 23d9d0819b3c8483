"""Tensors between two actors of Ray: unisono's transport beside Ray's object store and its GLOO.

    python benchmarks/ray_transports.py
    python benchmarks/ray_transports.py --sizes 4K 64M --seconds 10

One actor returns a tensor that it keeps, the driver passes the reference to a method of another
one, and that returns a number of the tensor: a call is all of that, with Ray's own work. The ways:

    store     Ray's object store: the tensor is pickled into shared memory, and unpickled there
    array     the same with an array of NumPy, which Ray does not copy a second time
    gloo      Ray's transport GLOO, over torch.distributed
    unisono   unisono's transport, from ordinary memory of torch
    heap      the same, from memory of `unisono.empty`
    nothing   no tensor: Ray's own work

They take turns, call by call, between the same two actors. A figure is the median time of a call
in milliseconds, and in brackets the time of the object store over it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch
from harness import report
from harness.arguments import size as in_bytes
from ray.experimental.collective import create_collective_group

import unisono
import unisono.ray

unisono.ray.register_transports()

SIZES = ["4K", "64K", "1M", "16M", "64M", "256M"]
WAYS = ["store", "array", "gloo", "unisono", "heap", "nothing"]
WARM = 3  # calls of each way before the first that counts


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Source:
    def keep(self, size: int) -> None:
        self.private = torch.ones(size, dtype=torch.uint8)
        self.numbers = self.private.numpy()
        self.heap = torch.from_numpy(unisono.empty(size, "uint8")).fill_(1)

    def nothing(self) -> None:
        return None

    def store(self) -> torch.Tensor:
        return self.private

    def array(self) -> np.ndarray:
        return self.numbers

    @ray.method(tensor_transport="GLOO")
    def gloo(self) -> torch.Tensor:
        return self.private

    @ray.method(tensor_transport="UNISONO")
    def unisono(self) -> torch.Tensor:
        return self.private

    @ray.method(tensor_transport="UNISONO")
    def in_heap(self) -> torch.Tensor:
        return self.heap


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Target:
    def last(self, tensor: torch.Tensor | np.ndarray | None) -> int:
        return 1 if tensor is None else int(tensor[-1])


def call(way: str, source: Any, target: Any) -> Callable[[], None]:
    method = getattr(source, "in_heap" if way == "heap" else way)

    def once() -> None:
        if ray.get(target.last.remote(method.remote())) != 1:
            raise ValueError(f"{way}: another tensor arrived")

    return once


def measure(ways: list[str], sizes: list[int], seconds: float) -> dict[int, dict[str, float]]:
    """Return the median time of a call by size and way."""
    source, target = Source.remote(), Target.remote()
    if "gloo" in ways:
        create_collective_group([source, target], backend="torch_gloo")
    calls = {way: call(way, source, target) for way in ways}
    found = {}
    for size in sizes:
        ray.get(source.keep.remote(size))
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(WARM):
            for once in calls.values():
                once()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not times[ways[-1]]:
            for way, once in calls.items():
                began = time.perf_counter()
                once()
                times[way].append(time.perf_counter() - began)
        found[size] = {way: statistics.median(each) for way, each in times.items()}
        show(size, found[size])
    return found


def show(size: int, times: dict[str, float]) -> None:
    base = times.get("store")
    cells = [f"{t * 1e3:11.2f}" + (f" ({base / t:5.2f})" if base else "") for t in times.values()]
    print(f"{size:>10}" + "".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", nargs="+", default=SIZES, help="bytes, with K or M")
    add("--seconds", type=float, default=10.0, help="for each size")
    add("--ways", nargs="+", default=WAYS, choices=WAYS)
    add("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    args = parser.parse_args()
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    # A short path, for Ray puts Unix sockets deep under it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
        )
        try:
            print("milliseconds of a call, and the time of Ray's object store over it")
            print(f"{'':>10}" + "".join(f"{way:>19}" for way in args.ways))
            found = measure(args.ways, [in_bytes(size) for size in args.sizes], args.seconds)
        finally:
            ray.shutdown()
    if args.json is not None:
        figures = [{"size": size, "seconds": times} for size, times in found.items()]
        report.write_json(args.json, figures=figures)


if __name__ == "__main__":
    main()
