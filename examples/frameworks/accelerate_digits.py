"""Train a digit classifier with Hugging Face Accelerate over unisono.

    torchrun --nproc-per-node 2 examples/frameworks/accelerate_digits.py

On CPU, Accelerate takes no backend but gloo and MPI by name. A process group that exists already it
uses as it is, so the one extra line is `init_process_group` before `Accelerator`.
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
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


def equal_on_all_ranks(model: nn.Module) -> bool:
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono", help="what carries the gradients")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    training, held_out = load_data()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    # prepare() wraps the model in DistributedDataParallel and gives each rank its own batches.
    model, optimizer, loader, held_out_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(training, batch_size=BATCH, shuffle=True),
        DataLoader(held_out, batch_size=BATCH),
    )

    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()

    correct = []
    with torch.no_grad():
        for images, labels in held_out_loader:
            hits = model(images).argmax(dim=1) == labels
            # Every rank gets everyone's answers, without those that only fill the last batch.
            correct.append(accelerator.gather_for_metrics(hits))
    accuracy = torch.cat(correct).float().mean().item()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    equal = "equal" if equal_on_all_ranks(model) else "DIFFERENT"

    accelerator.print(f"backend {dist.get_backend()}, {accelerator.num_processes} ranks")
    accelerator.print(f"accuracy {accuracy:.4f} on {len(torch.cat(correct))} held-out images")
    accelerator.print(f"parameters {parameters:,}, {equal} on all ranks")
    accelerator.end_training()  # destroys the process group too


if __name__ == "__main__":
    main()
