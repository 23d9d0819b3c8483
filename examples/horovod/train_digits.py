"""Train a digit classifier with a program for Horovod, over unisono.

    unisono launch -n 2 examples/horovod/train_digits.py
    mpirun -n 2 python examples/horovod/train_digits.py
    torchrun --nproc-per-node 2 examples/horovod/train_digits.py
    python examples/horovod/train_digits.py --num-proc 2

For Horovod itself the imports are `import horovod` and `import horovod.torch as hvd`; nothing else
differs. `--compare` trains once more with DistributedDataParallel, from the same parameters on the
same batches, and checks that the losses are the same.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import unisono.horovod as horovod
import unisono.horovod.torch as hvd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, kernel_size=3)
        self.hidden = nn.Linear(16 * 3 * 3, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = F.relu(F.max_pool2d(self.convolution(images), 2))
        return F.log_softmax(self.output(F.relu(self.hidden(maps.flatten(1)))), dim=1)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    split = train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=1)
    return TensorDataset(split[0], split[2]), TensorDataset(split[1], split[3])


def loader(data: TensorDataset, batch_size: int, shuffle: bool = True) -> DataLoader:
    sampler = DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle, seed=1
    )
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader, epochs: int
) -> list[float]:
    model.train()
    losses = []
    for epoch in range(epochs):
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}, loss {losses[-1]:.4f}")
    return losses


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def accuracy(model: nn.Module, batches: DataLoader) -> float:
    model.eval()
    correct, count = 0, 0
    with torch.no_grad():
        for images, labels in batches:
            correct += int((model(images).argmax(dim=1) == labels).sum())
            count += len(labels)
    return metric_average(correct / count, "accuracy")


def losses_of_ddp(start: dict[str, torch.Tensor], batches: DataLoader, args) -> list[float]:
    model = Net()
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    return train(nn.parallel.DistributedDataParallel(model), optimizer, batches, args.epochs)


def main(args: argparse.Namespace) -> None:
    hvd.init()
    torch.manual_seed(1 + hvd.rank())
    torch.set_num_threads(1)
    training, held_out = load_data()
    batches = loader(training, args.batch_size)

    model = Net()
    # Average gradients of more images, so take larger steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

    losses = train(model, optimizer, batches, args.epochs)
    score = accuracy(model, loader(held_out, 64, shuffle=False))
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = hvd.allgather(mine[None])
    equal = "equal" if torch.equal(everyone, mine.expand_as(everyone)) else "DIFFERENT"
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {hvd.local_size()} on this host")
        print(f"accuracy {score:.4f} on {len(held_out)} held-out images")
        print(f"parameters {equal} on all ranks")

    if args.compare:
        expected = losses_of_ddp(start, batches, args)
        worst = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
        assert worst <= 1e-5, f"the losses differ from those of DDP by {worst}"
        if hvd.rank() == 0:
            same = "the same" if worst == 0 else f"within {worst:.1e}"
            print(f"losses of DDP {same}, {len(losses)} steps")
    hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=32, help="images for each rank")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.02, help="for one rank")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--compare", action="store_true", help="train with DDP as well")
    parser.add_argument("--num-proc", type=int, help="start so many ranks here, without a launcher")
    chosen = parser.parse_args()
    if chosen.num_proc:
        horovod.run(main, args=(chosen,), np=chosen.num_proc)
    else:
        main(chosen)
