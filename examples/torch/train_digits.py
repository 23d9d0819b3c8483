"""Train a digit classifier with DistributedDataParallel, then compare the epoch time with gloo.

    torchrun --nproc-per-node 2 examples/torch/train_digits.py

The data are scikit-learn's 1,797 scanned digits of 8x8 pixels; they come with the package. Every
process ("rank") trains on its own share of the images, and DDP averages the gradients over all
ranks after each backward pass. The backend named in `init_process_group` is what carries those
averages: that one word is all a program changes to train over unisono.
"""

import argparse
import hashlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SEED = 1
# Over all ranks together, so that the training takes the same steps however many ranks share it.
GLOBAL_BATCH = 64
LEARNING_RATE = 3e-3
REQUIRED_ACCURACY = 0.95


class DigitsNet(nn.Sequential):
    """A small CNN: images of shape (batch, 1, 8, 8) in, ten scores per image out."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Split the digits into a training set and a held-out set, the same way on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=labels, random_state=SEED
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(
    data: Dataset, epochs: int, group: dist.ProcessGroup, label: str
) -> tuple[DistributedDataParallel, list[float]]:
    """Train a fresh model over `group`; return it with the seconds that each epoch took."""
    torch.manual_seed(SEED)
    model = DistributedDataParallel(DigitsNet(), process_group=group)
    # An ordinary optimizer: DDP sees to it that the gradients are the same on every rank.
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    # The sampler deals the images out: each rank gets a different share of every epoch.
    sampler = DistributedSampler(data, group.size(), group.rank(), seed=SEED)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // group.size(), sampler=sampler)

    epoch_seconds = []
    with progress_bar() as progress:
        task = progress.add_task(label, total=epochs * len(loader), loss="")
        for epoch in range(epochs):
            sampler.set_epoch(epoch)  # or every epoch would have the same order
            start = time.perf_counter()
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()  # gradients are averaged over all ranks in here
                optimizer.step()
                progress.update(task, advance=1, loss=f"loss {loss.item():.4f}")
            epoch_seconds.append(time.perf_counter() - start)
    return model, epoch_seconds


def progress_bar() -> Progress:
    """Make a bar for rank 0's terminal; on other ranks, in a file or a pipe it shows nothing."""
    console = Console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        disable=dist.get_rank() != 0 or not console.is_terminal,
    )


def held_out_accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Classify a share of the images on each rank, and sum the counts over the ranks."""
    images, labels = data.tensors
    share = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        predictions = model(images[share]).argmax(dim=1)
    correct = (predictions == labels[share]).sum()
    dist.all_reduce(correct)
    return correct.item() / len(labels)


def parameters_equal(model: nn.Module) -> tuple[bool, str]:
    """Compare the raw bytes of all parameters on every rank with every other rank's.

    Returns the verdict, the same on all ranks, and the SHA-256 of this rank's bytes.
    """
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().view(torch.uint8)
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    equal = torch.tensor(all(torch.equal(flat, other) for other in gathered), dtype=torch.int32)
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)  # equal only where every rank found so
    return bool(equal.item()), hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono", help="what carries the gradients")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--no-compare", action="store_true", help="skip the same run on gloo")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the ranks share this machine's cores
    dist.init_process_group(args.backend)
    rank, world_size, epochs = dist.get_rank(), dist.get_world_size(), args.epochs
    training, held_out = load_data()

    model, seconds = train(training, epochs, dist.group.WORLD, args.backend)
    accuracy = held_out_accuracy(model.module, held_out)
    equal, digest = parameters_equal(model)
    epoch = statistics.median(seconds)
    timing = f"{args.backend} {epoch * 1e3:.1f} ms"
    if not args.no_compare:
        # The same seed, data and steps in the same processes, but over a group of gloo's.
        gloo = dist.new_group(backend="gloo")
        gloo_epoch = statistics.median(train(training, epochs, gloo, "gloo")[1])
        timing += f", gloo {gloo_epoch * 1e3:.1f} ms, {gloo_epoch / epoch:.2f} times as long"

    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        verdict = "bitwise equal on all ranks" if equal else "DIFFERENT between ranks"
        print(f"trained on   {len(training):,} images, {epochs} epochs, world size {world_size}")
        print(f"accuracy     {accuracy:.4f} on {len(held_out)} held-out images")
        print(f"parameters   {count:,}, {verdict}, sha256 {digest[:16]}")
        print(f"epoch time   {timing} (medians)")
        if accuracy < REQUIRED_ACCURACY:
            print(f"FAILED       the accuracy is below {REQUIRED_ACCURACY}")
    dist.destroy_process_group()
    return 0 if equal and accuracy >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
