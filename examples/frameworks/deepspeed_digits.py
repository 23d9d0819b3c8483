"""Train a digit classifier with DeepSpeed's ZeRO over unisono, at stages 1, 2 and 3.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/frameworks/deepspeed_digits.py

ZeRO deals out among the ranks what each would otherwise hold in full: the optimizer's state
(stage 1), the gradients as well (stage 2), and the parameters too (stage 3). The backend is named
in `init_distributed`.
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 12
BATCH = 32  # on each rank


def load_data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32) / 16
    split = train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=1)
    return TensorDataset(split[0], split[2]), TensorDataset(split[1], split[3])


def train(training: TensorDataset, stage: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {
            "stage": stage,
            # Or stage 3 would leave parameters as small as these whole on every rank.
            "stage3_param_persistence_threshold": 0,
        },
    }
    # DeepSpeed's own optimizers compile C++ at their first use; torch's need no compiler.
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    sampler = DistributedSampler(training, seed=1)
    loader = DataLoader(training, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(engine(images), labels)
            engine.backward(loss)
            engine.step()
    return engine


def held_out_accuracy(engine: deepspeed.DeepSpeedEngine, data: TensorDataset) -> float:
    images, labels = data.tensors
    share = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        correct = (engine(images[share]).argmax(dim=1) == labels[share]).sum()
    dist.all_reduce(correct)
    return correct.item() / len(labels)


def all_parameters(model: nn.Module) -> torch.Tensor:
    # At stage 3 a rank holds a part of each; in here it has all. Below 3 this does nothing.
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return nn.utils.parameters_to_vector(model.parameters()).detach()


def equal_on_all_ranks(mine: torch.Tensor) -> bool:
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono", help="what carries the gradients")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()

    # Or DeepSpeed would first compile an all_reduce of its own, which training never calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=args.backend)
    training, held_out = load_data()
    for stage in args.stages:
        engine = train(training, stage)
        accuracy = held_out_accuracy(engine, held_out)
        parameters = all_parameters(engine.module)
        equal = "equal" if equal_on_all_ranks(parameters) else "DIFFERENT"
        if dist.get_rank() == 0:
            print(f"stage {stage}, backend {dist.get_backend()}, {dist.get_world_size()} ranks")
            print(f"accuracy {accuracy:.4f} on {len(held_out)} held-out images")
            print(f"parameters {len(parameters):,}, {equal} on all ranks")
        engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
