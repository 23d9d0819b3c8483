"""Train a digit classifier with PyTorch Lightning over unisono.

    torchrun --nproc-per-node 2 examples/frameworks/lightning_digits.py

Lightning takes the backend's name in its strategy: `DDPStrategy(process_group_backend="unisono")`.
"""

import argparse

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
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


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def test_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        hits = self.network(images).argmax(dim=1) == labels
        # sync_dist averages over the ranks, by the number of images each has seen.
        self.log("accuracy", hits.float().mean(), sync_dist=True, batch_size=len(hits))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def equal_on_all_ranks(model: nn.Module) -> bool:
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono", help="what carries the gradients")
    args = parser.parse_args()

    lightning.seed_everything(1, verbose=False)
    training, held_out = load_data()
    model = Digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=args.backend),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Lightning deals the images out with a DistributedSampler of its own.
    trainer.fit(model, DataLoader(training, batch_size=BATCH, shuffle=True))
    # Before test(), which begins by copying the parameters of rank 0 to every rank.
    parameters = sum(parameter.numel() for parameter in model.parameters())
    equal = "equal" if equal_on_all_ranks(model) else "DIFFERENT"
    results = trainer.test(model, DataLoader(held_out, batch_size=BATCH), verbose=False)

    if trainer.is_global_zero:
        print(f"backend {dist.get_backend()}, {trainer.world_size} ranks")
        print(f"accuracy {results[0]['accuracy']:.4f} on {len(held_out)} held-out images")
        print(f"parameters {parameters:,}, {equal} on all ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
