"""DDP over a model that is itself split in two parts, each on its own device.

    torchrun --nproc-per-node 2 examples/torch/ddp_model_parallel.py

A model too large for one device is cut in two, and `forward` carries the activations across. DDP
does not mind: leave its `device_ids` out and it averages the gradients wherever they are. Here
both parts live on the CPU, so the example runs anywhere.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoPartModel(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.part1 = nn.Sequential(nn.Linear(10, 32), nn.ReLU()).to(first)
        self.part2 = nn.Linear(32, 5).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.part1(x.to(self.first))
        return self.part2(hidden.to(self.second))


def run() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first, second = torch.device("cpu"), torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoPartModel(first, second))

    # A task to learn, the same for all ranks, and examples of it that differ from rank to rank.
    weights = torch.randn(10, 5)
    torch.manual_seed(100 + rank)
    inputs = torch.randn(64, 10)
    targets = (inputs @ weights).to(second)  # the labels belong where the outputs come out

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0] / 10, (losses[0], losses[-1])
    for part in (model.module.part1, model.module.part2):
        flat = nn.utils.parameters_to_vector(part.parameters()).detach()
        everyone = [torch.empty_like(flat) for _ in range(world_size)]
        dist.all_gather(everyone, flat)
        assert all(torch.equal(flat, other) for other in everyone)
    learned = f"loss {losses[0]:.2f} -> {losses[-1]:.2f}"
    sys.stdout.write(f"rank {rank}: {learned}, both parts equal on all ranks\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    run()
    dist.destroy_process_group()
