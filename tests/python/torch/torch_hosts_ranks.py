"""The rank functions of `test_torch_hosts.py`: train over two hosts with DDP."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono.torch

STEPS = 3
ROWS = 4
WIDTH = 512


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def batches(world: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (world * ROWS, WIDTH)
    return [torch.randn(shape, generator=generator).double() for _ in range(STEPS)]


def agreed(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Check that the weights of all ranks have the same bits."""
    for weight in weights:
        first = weight.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weight)
    return weights


def train(model: nn.Module, rows: slice, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(dist.get_world_size()):
        mine = batch[rows].to(dtype)
        optimizer.zero_grad()
        (model(mine) - mine).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def ddp() -> float:
    """Train on this rank's rows; return the largest difference from training on all in one process.

    The weights of all ranks must have the same bits.
    """
    dist.init_process_group("unisono")
    rank = dist.get_rank()
    trained = train(DistributedDataParallel(network()), slice(rank * ROWS, (rank + 1) * ROWS))
    alone = train(network(), slice(None))
    return difference(agreed(trained), alone)


def difference(these: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(these, others, strict=True))


def ddp_in_8_bits() -> dict[str, float]:
    """The same with gradients that travel in 8 bits, of several types; the largest differences.

    Relative to how far the weights have moved. A bucket holds several parameters, so that blocks
    of 128 cross their borders.
    """
    dist.init_process_group("unisono")
    rank = dist.get_rank()
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        start = [parameter.detach() for parameter in network().to(dtype).parameters()]
        model = DistributedDataParallel(network().to(dtype), bucket_cap_mb=0.5)
        model.register_comm_hook(None, unisono.torch.int8_hook)
        trained = agreed(train(model, slice(rank * ROWS, (rank + 1) * ROWS), dtype))
        alone = train(network().to(dtype), slice(None), dtype)
        found[str(dtype)] = difference(trained, alone) / difference(alone, start)
    refuses()
    return found


def ddp_in_8_bits_beside_the_map_of_unused_parameters() -> None:
    """DDP sums that map in its group, from another thread than the hook's."""
    dist.init_process_group("unisono")
    rank = dist.get_rank()
    model = DistributedDataParallel(network(), bucket_cap_mb=0.5, find_unused_parameters=True)
    model.register_comm_hook(None, unisono.torch.int8_hook)
    for _ in range(5):
        agreed(train(model, slice(rank * ROWS, (rank + 1) * ROWS)))


def death_in_8_bits() -> tuple[str, float]:
    """The error of the others when the last rank is killed, and the seconds until it comes."""
    dist.init_process_group("unisono")
    rank = dist.get_rank()
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    model = DistributedDataParallel(network(), bucket_cap_mb=0.5)
    model.register_comm_hook(None, unisono.torch.int8_hook)
    train(model, rows)
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        train(model, rows)
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return "nothing", 0.0


def refuses() -> None:
    """Values that cannot be sent in 8 bits are refused, and nothing is sent."""
    group = dist.group.WORLD.group_name
    values = torch.ones(256)
    for bad, op, words in [
        (values.double(), "sum", "float32"),
        (values[::2], "sum", "not contiguous"),
        (values, "max", "sum and avg"),
        (values.clone().requires_grad_(), "sum", "requires a gradient"),
    ]:
        with pytest.raises(ValueError, match=words):
            torch.ops.unisono.all_reduce_int8_(bad, group, op)
    torch.ops.unisono.all_reduce_int8_(values, group)
    torch.testing.assert_close(values, torch.full((256,), float(dist.get_world_size())))
