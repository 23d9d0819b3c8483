"""DistributedDataParallel on a toy model, and a look at what it does to the gradients.

torchrun --nproc-per-node 2 examples/torch/ddp_toy.py

The model is wrapped once; after that, training looks as it does in one process. DDP hands the
gradients to the backend in buckets while backward is still computing the next ones.
"""

import argparse
import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def run() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # on purpose different: DDP starts all ranks from rank 0's parameters
    model = DistributedDataParallel(ToyModel())
    plain = copy.deepcopy(model.module)  # the same parameters, without DDP

    inputs, targets = torch.randn(20, 10), torch.randn(20, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()

    # DDP has left the average of all ranks' gradients. Work it out without DDP, and compare.
    nn.functional.mse_loss(plain(inputs), targets).backward()
    for ours, own in zip(model.parameters(), plain.parameters(), strict=True):
        average = own.grad.clone()
        dist.all_reduce(average)
        average /= world_size
        torch.testing.assert_close(ours.grad, average)

    optimizer.step()
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(after) for _ in range(world_size)]
    dist.all_gather(everyone, after)
    assert all(torch.equal(after, other) for other in everyone)
    sys.stdout.write(f"rank {rank}: loss {loss.item():.3f}, averaged gradients, equal parameters\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    dist.init_process_group(parser.parse_args().backend)
    run()
    dist.destroy_process_group()
