"""Distributed synchronous SGD by hand: partition the data, average the gradients.

    torchrun --nproc-per-node 2 examples/torch/sync_sgd.py

This is what DistributedDataParallel does for you, in its plainest form. Every rank holds the
whole model and a part of the data. After each backward pass one all_reduce per parameter turns
the ranks' gradients into their average, so that all ranks take the same step and their models
stay equal.
"""

import argparse
import math
import random
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

SEED = 1234
GLOBAL_BATCH = 128
EPOCHS = 10


def partition(data: Dataset, rank: int, world_size: int) -> Subset:
    """Shuffle with the same seed on every rank, then take this rank's slice.

    The parts have equal lengths, or the ranks would make different numbers of collective calls.
    """
    indices = list(range(len(data)))
    random.Random(SEED).shuffle(indices)
    share = len(indices) // world_size
    return Subset(data, indices[rank * share : (rank + 1) * share])


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its average over all ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


def run() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)  # the same seed: the models begin equal

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    loader = DataLoader(
        partition(data, rank, world_size), batch_size=GLOBAL_BATCH // world_size, shuffle=True
    )

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(EPOCHS):
        total = 0.0
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            average_gradients(model)
            optimizer.step()
            total += loss.item()
        losses.append(total / math.ceil(len(loader.dataset) / loader.batch_size))

    # Equal beginnings and equal steps: rank 0's parameters are ours, to the last bit.
    for parameter in model.parameters():
        reference = parameter.detach().clone()
        dist.broadcast(reference, src=0)
        assert torch.equal(parameter, reference)
    assert losses[-1] < losses[0] / 5, losses
    learned = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    sys.stdout.write(f"rank {rank}: {len(loader.dataset)} images, {learned}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    run()
    dist.destroy_process_group()
