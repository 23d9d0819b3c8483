"""CUDA tensors of torch on a real GPU, for ``cuda_scenarios``. All that a rank needs of the device.

``tests/cuda/without_gpu/torch_cuda_device.py`` has the same functions for the emulated driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import unisono.torch

# Expected values are computed there.
PLACE = "cuda"


def own_device() -> torch.device:
    """Return the device of this rank: they take them in turn."""
    return torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())


def start(
    timeout: float = 60.0, *, first_call: bool = True, backend: str = "unisono", **options: Any
) -> tuple[int, int]:
    """Form the default group over CPU and CUDA, and return the rank and the number of ranks."""
    torch.cuda.set_device(own_device())
    # By itself torch finds what is installed, and this may be a checkout.
    unisono.torch.register()
    if backend == "gloo":
        unisono.torch.replace_gloo()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **options)
    if first_call:
        dist.all_reduce(torch.ones(1, device=PLACE))
    return dist.get_rank(), dist.get_world_size()


def statistics() -> dict[str, int]:
    """Return nothing: a real driver counts nothing."""
    return {}


def tensor(source: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the device with these values."""
    return source.to(PLACE, copy=True)


def values(source: torch.Tensor) -> torch.Tensor:
    """Return the content of a tensor once the current stream has got here."""
    return source


def upload(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fill a tensor of the device with these values, in the order of the current stream."""
    target.copy_(source)


def synchronize() -> None:
    """Wait for all streams of the device."""
    torch.cuda.synchronize()


@contextmanager
def stream() -> Iterator[None]:
    """Make a new stream the current one inside the block."""
    made = torch.cuda.Stream()
    # Its tensors have been made in the stream before.
    made.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(made):
        yield


@contextmanager
def capture() -> Iterator[torch.cuda.CUDAGraph]:
    """Calls inside become a graph, whole after the block."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield graph


def answer_for_a_mesh() -> None:
    """Do nothing: torch has its own device here."""
