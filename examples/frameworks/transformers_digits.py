"""Train a small vision transformer with Hugging Face's Trainer over unisono.

    torchrun --nproc-per-node 2 examples/frameworks/transformers_digits.py

The model is made from a configuration, so nothing is downloaded. `install` is the extra line:
without it Accelerate, which starts the Trainer's processes, takes no backend but gloo and MPI by
name on CPUs.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

import unisono.accelerate

EPOCHS = 16
BATCH = 32  # on each rank


def load_data() -> tuple[list[dict], list[dict]]:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    pairs = [
        {"pixel_values": image, "labels": int(label)}
        for image, label in zip(images, labels, strict=True)
    ]
    return train_test_split(pairs, test_size=0.2, random_state=1)


def equal_on_all_ranks(model: nn.Module) -> bool:
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono", help="what carries the gradients")
    args = parser.parse_args()

    unisono.accelerate.install()
    training, held_out = load_data()
    set_seed(1)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=10,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            ViTForImageClassification(config),
            TrainingArguments(
                folder,
                use_cpu=True,
                ddp_backend=args.backend,
                ddp_find_unused_parameters=False,
                num_train_epochs=EPOCHS,
                per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=BATCH,
                learning_rate=2e-3,
                warmup_steps=20,
                logging_strategy="epoch",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=training,
            eval_dataset=held_out,
            compute_metrics=lambda all_: {
                "accuracy": float((all_.predictions.argmax(-1) == all_.label_ids).mean()),
                "images": len(all_.label_ids),
            },
        )
        trainer.train()
        found = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    equal = "equal" if equal_on_all_ranks(trainer.model) else "DIFFERENT"
    if trainer.is_world_process_zero():
        print(f"backend {dist.get_backend()}, {dist.get_world_size()} ranks")
        print(f"accuracy {found['eval_accuracy']:.4f} on {found['eval_images']} held-out images")
        print(f"parameters {parameters:,}, {equal} on all ranks")
        print(f"losses {losses}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
