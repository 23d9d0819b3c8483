"""Train a digit classifier with Ray Train over unisono.

    python examples/frameworks/ray_train_digits.py

Ray starts the worker processes itself, here or on the hosts of a cluster, and joins them in a
process group of the backend that `TorchConfig` names.
"""

import argparse
import os
import tempfile

# Read when Ray is imported: it would report its use to its makers.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 12
BATCH = 32  # on each rank


def load_data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32) / 16
    split = train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=1)
    return TensorDataset(split[0], split[2]), TensorDataset(split[1], split[3])


def held_out_accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    share = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        correct = (model(images[share]).argmax(dim=1) == labels[share]).sum()
    dist.all_reduce(correct)
    return correct.item() / len(labels)


def equal_on_all_ranks(model: nn.Module) -> bool:
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def train_on_one_worker() -> list[str]:
    training, held_out = load_data()
    torch.manual_seed(1)
    # The model is wrapped in DistributedDataParallel, and each rank gets its own images.
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    loader = prepare_data_loader(DataLoader(training, batch_size=BATCH, shuffle=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    accuracy = held_out_accuracy(model, held_out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    equal = "equal" if equal_on_all_ranks(model) else "DIFFERENT"
    return [
        f"backend {dist.get_backend()}, {dist.get_world_size()} ranks",
        f"accuracy {accuracy:.4f} on {len(held_out)} held-out images",
        f"parameters {parameters:,}, {equal} on all ranks",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono", help="what carries the gradients")
    args = parser.parse_args()

    ray.init(num_cpus=2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_on_one_worker,
            torch_config=TorchConfig(backend=args.backend),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        # The value that the function returned on rank 0.
        print("\n".join(trainer.fit().return_value))
    ray.shutdown()


if __name__ == "__main__":
    main()
