"""Train torchtitan's Llama over unisono, by FSDP2 and tensor parallelism at once, on CPUs.

    torchrun --nproc-per-node 4 examples/frameworks/torchtitan_llama.py --tensor-parallel 2

The model, its parallel forms, its loss and its optimizer are torchtitan's. Its `Trainer` needs an
accelerator, and so does its attention over several documents, so the loop is written here and each
text is one document. One process trains on the same texts to the same losses, but for rounding.
"""

import argparse

import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch import nn
from torch.distributed.tensor import distribute_tensor

# torchtitan takes CUDA where it finds no accelerator, and reads this when its parts are imported.
torchtitan.tools.utils.device_type = "cpu"
torchtitan.tools.utils.device_module = torch.cpu

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

STEPS = 8
TEXTS = 8  # of all ranks
LENGTH = 64


def parallel_model(config: Trainer.Config, dims: ParallelDims) -> tuple[nn.Module, int]:
    """Return this rank's parts of the model, and the number of its parameters on all ranks."""
    spec = config.model_spec
    # The same weights for any number of ranks.
    torch.manual_seed(1)
    whole = spec.model.build()
    with torch.no_grad():
        whole.init_weights(buffer_device=None)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for part, full in zip(model.parameters(), whole.parameters(), strict=True):
            part.copy_(distribute_tensor(full, part.device_mesh, part.placements))
    return model, sum(each.numel() for each in whole.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono", help="what carries all of it")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share a layer")
    args = parser.parse_args()

    # torchtitan takes a group that exists.
    dist.init_process_group(args.backend)
    config = llama3_debugmodel()
    config.parallelism.tensor_parallel_degree = args.tensor_parallel
    config.training.seq_len = LENGTH
    config.training.mixed_precision_param = "float32"
    spec = config.model_spec
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()

    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    distributed.set_spmd_backend(config.parallelism.spmd_backend)
    spec.model.update_from_config(config=config)
    model, parameters = parallel_model(config, dims)
    optimizers = config.optimizer.build(model_parts=[model])
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size).build(
        compile_config=config.compile
    )
    context = distributed.get_spmd_context(parallel_dims=dims)

    # Each of the ranks that share layers has the same texts.
    batch = dims.get_mesh("batch") if dims.dp_enabled else None
    number, of = (batch.get_local_rank(), batch.size()) if batch else (0, 1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        first = torch.randint(spec.model.vocab_size, (TEXTS, 1), generator=generator)
        texts = ((first + torch.arange(LENGTH + 1)) % spec.model.vocab_size)[number::of]
        tokens = torch.tensor(TEXTS * LENGTH)
        optimizers.zero_grad()
        with context():
            loss, _ = loss_fn(model(texts[:, :-1]), texts[:, 1:], tokens)
            loss.backward()
        distributed.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizers.step()
        loss = loss.detach()
        losses.append(float(distributed.dist_sum_tensor(loss, batch) if batch else loss))
    if dist.get_rank() == 0:
        print(f"backend {dist.get_backend()}, {dist.get_world_size()} ranks")
        print(
            f"parameters {parameters:,}, data parallel {dims.dp_shard}, tensor parallel {dims.tp}"
        )
        print(f"losses {losses}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
