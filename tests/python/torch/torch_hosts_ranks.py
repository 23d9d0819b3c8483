"""What the ranks of `test_torch_hosts.py` do: train over two hosts with DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def train(model: nn.Module, rows: slice) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(dist.get_world_size()):
        mine = batch[rows]
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
    for weight in trained:
        first = weight.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weight)
    return max(float((a - b).abs().max()) for a, b in zip(trained, alone, strict=True))
