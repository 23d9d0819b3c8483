"""DistributedDataParallel over two ranks learns what one process learns of all data."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 20, 32


def network() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def train(model: torch.nn.Module, batches: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


dist.init_process_group("unisono")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
data = torch.randn(STEPS, size, BATCH, 16)
model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
train(model, data[:, rank])
alone = network()
train(alone, data.flatten(1, 2))
for ours, theirs in zip(model.module.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(ours, theirs)
if rank == 0:
    print("DDP is right")
dist.destroy_process_group()
