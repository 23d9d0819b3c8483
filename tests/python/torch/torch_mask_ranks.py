"""The rank functions of ``test_torch_mask``: groups that go on without ranks that are gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono.torch

STEPS, DEATH, RATE = 8, 3, 0.1


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(6, 4, generator=generator)
    return inputs, inputs @ torch.arange(4.0) + rank


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(network: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs, wanted = batch(step, rank)
    return nn.functional.mse_loss(network(inputs).squeeze(1), wanted)


def wrap(network: nn.Module, *, begins: bool) -> DistributedDataParallel:
    # Looking for unused parameters it does not ask rank 0 for the order of its buckets.
    alone = {} if begins else {"init_sync": False, "find_unused_parameters": True}
    wrapped = DistributedDataParallel(network, **alone)
    wrapped.register_comm_hook(None, unisono.torch.average_hook)
    return wrapped


def train(gone: Sequence[int]) -> list[float]:
    """Train on when ranks have died; return the parameters."""
    dist.init_process_group("unisono", timeout=timedelta(seconds=30))
    me = dist.get_rank()
    network = model()
    wrapped = wrap(network, begins=True)
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    step = 0
    while step < STEPS:
        if step == DEATH and me in gone:
            # All have what it has sent.
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.zero_grad()
            loss(wrapped, step, me).backward()
        except RuntimeError:
            left = unisono.torch.mask()
            assert left == [rank for rank in range(dist.get_world_size()) if rank not in gone]
            wrapped = wrap(network, begins=False)
            continue
        optimizer.step()
        step += 1
    collectives(gone)
    dist.destroy_process_group()
    return [float(value) for one in network.parameters() for value in one.detach().flatten()]


def alone(world: int, gone: Sequence[int]) -> list[float]:
    """The same by one process."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    for step in range(STEPS):
        ranks = [rank for rank in range(world) if step < DEATH or rank not in gone]
        optimizer.zero_grad()
        torch.stack([loss(network, step, rank) for rank in ranks]).mean().backward()
        optimizer.step()
    return [float(value) for one in network.parameters() for value in one.detach().flatten()]


def collectives(gone: Sequence[int]) -> None:
    me, world = dist.get_rank(), dist.get_world_size()
    left = [rank for rank in range(world) if rank not in gone]
    blocks = [torch.full((3,), -1.0) for _ in range(world)]
    dist.all_gather(blocks, torch.full((3,), float(me)))
    for rank, block in enumerate(blocks):
        assert block.tolist() == [float(rank) if rank in left else -1.0] * 3
    whole = torch.full((world, 2), -1.0)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(me)))
    assert whole[:, 0].tolist() == [float(rank) if rank in left else -1.0 for rank in range(world)]
    value = torch.tensor([float(me)])
    dist.broadcast(value, left[-1])
    assert value.item() == left[-1]
    own = torch.empty(2)
    dist.reduce_scatter_tensor(own, torch.arange(2.0 * world))
    assert own.tolist() == [len(left) * (2.0 * me + place) for place in range(2)]
    # Results by way of another tensor: this one has gaps.
    gaps = torch.full((world, 2, 3), -1.0)
    dist.all_gather([gaps[rank, :, 1] for rank in range(world)], torch.full((2,), float(me)))
    assert gaps[:, 0, 1].tolist() == whole[:, 0].tolist()
    entries = torch.sparse_coo_tensor([[me]], [1.0], (world,))
    dist.all_reduce(entries)
    assert entries.to_dense().tolist() == [float(rank in left) for rank in range(world)]
    ones = torch.ones(world, 2, requires_grad=True)
    name = dist.group.WORLD.group_name
    torch.ops.unisono.reduce_scatter(ones, name, "avg").sum().backward()
    share = [1 / len(left) if rank in left else 0.0 for rank in range(world)]
    assert ones.grad is not None
    assert ones.grad[:, 0].tolist() == pytest.approx(share)
    with pytest.raises(ValueError, match=f"rank {gone[0]} is gone"):
        dist.broadcast(value, gone[0])
    with pytest.raises(ValueError, match="exclude"):
        unisono.torch.mask(exclude=[world])
    dist.barrier()
