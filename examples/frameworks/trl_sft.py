"""Fine-tune a small language model with TRL's SFTTrainer and PEFT's LoRA over unisono.

    torchrun --nproc-per-node 2 examples/frameworks/trl_sft.py

The model is made from a configuration and its tokens are bytes, so nothing is downloaded. It learns
to count. `install` is the extra line: without it Accelerate, which starts the trainer's processes,
takes no backend but gloo and MPI by name on CPUs.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

import unisono.accelerate

STEPS = 40
BATCH = 8  # on each rank


def load_data() -> Dataset:
    return Dataset.from_dict(
        {"text": [" ".join(str(first + step) for step in range(8)) for first in range(200)]}
    )


def equal_on_all_ranks(parameters: list[nn.Parameter]) -> bool:
    mine = nn.utils.parameters_to_vector(parameters).detach()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono", help="what carries the gradients")
    args = parser.parse_args()

    unisono.accelerate.install()
    set_seed(1)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            LlamaForCausalLM(config),
            args=SFTConfig(
                folder,
                use_cpu=True,
                ddp_backend=args.backend,
                ddp_find_unused_parameters=False,
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                learning_rate=1e-2,
                logging_steps=5,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                bf16=False,
            ),
            train_dataset=load_data(),
            processing_class=tokenizer,
            # The output layer, which is random here, learns as a whole.
            peft_config=LoraConfig(
                task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=["lm_head"]
            ),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    learned = [each for each in trainer.model.parameters() if each.requires_grad]
    equal = "equal" if equal_on_all_ranks(learned) else "DIFFERENT"
    if trainer.is_world_process_zero():
        print(f"backend {dist.get_backend()}, {dist.get_world_size()} ranks")
        print(f"loss {losses[0]:.2f} in the first 5 steps, {losses[-1]:.2f} in the last")
        print(f"parameters {sum(map(torch.numel, learned)):,}, {equal} on all ranks")
        print(f"losses {losses}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
