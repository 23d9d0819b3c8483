"""Generate text with a transformer that is split over the ranks: tensor parallelism on CPUs.

    torchrun --nproc-per-node 2 examples/inference/generate.py
    torchrun --nproc-per-node 2 examples/inference/generate.py --sums gloo     # or deepspeed

Every rank has the weights of some attention heads and of a part of each feed-forward layer. The
partial outputs of the ranks are added up twice in each layer, in place, by an operator that
torch.compile keeps in its graph: `torch.ops.unisono.all_reduce_`. The weights are random, so the
text says nothing; but it is the same text that one process generates with all of the weights.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes
LONGEST = 256  # tokens of a text


class Layer(nn.Module):
    """One rank's part of a layer: its heads, and its columns of the feed-forward part."""

    def __init__(self, width: int, heads: int, rank: int, ranks: int) -> None:
        super().__init__()

        def weights(rows: int, columns: int, dim: int) -> nn.Parameter:
            whole = torch.randn(rows, columns) / columns**0.5
            return nn.Parameter(whole.chunk(ranks, dim)[rank].contiguous())

        self.heads, self.size = heads // ranks, width // heads
        self.query, self.key, self.value = (weights(width, width, 0) for _ in range(3))
        self.out = weights(width, width, 1)
        self.up, self.down = weights(4 * width, width, 0), weights(width, 4 * width, 1)
        cache = torch.zeros(2, self.heads, LONGEST, self.size)
        self.register_buffer("cache", cache)

    def attend(self, x: Tensor, place: Tensor, mask: Tensor) -> Tensor:
        """Return this rank's part of what one new token sees in those before it."""
        query, key, value = (
            (weight @ x).view(self.heads, 1, self.size)
            for weight in (self.query, self.key, self.value)
        )
        self.cache[0].index_copy_(1, place, key)
        self.cache[1].index_copy_(1, place, value)
        seen = F.scaled_dot_product_attention(query, self.cache[0], self.cache[1], attn_mask=mask)
        return self.out @ seen.reshape(-1)


class Model(nn.Module):
    """A transformer; `add_up` sums the parts of all ranks in place."""

    def __init__(
        self, args: argparse.Namespace, rank: int, ranks: int, add_up: Callable[[Tensor], object]
    ) -> None:
        super().__init__()
        torch.manual_seed(args.seed)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, args.width))
        self.places = nn.Parameter(torch.randn(LONGEST, args.width) / 4)
        layers = (Layer(args.width, args.heads, rank, ranks) for _ in range(args.layers))
        self.layers = nn.ModuleList(layers)
        self.add_up = add_up

    def forward(self, token: Tensor, place: Tensor) -> Tensor:
        """Return the token that follows `token`, which is at `place`."""
        x = (self.embedding.index_select(0, token) + self.places.index_select(0, place))[0]
        mask = torch.arange(LONGEST) <= place
        for layer in self.layers:
            part = layer.attend(F.layer_norm(x, x.shape), place, mask)
            self.add_up(part)
            x = x + part
            part = layer.down @ torch.relu(layer.up @ F.layer_norm(x, x.shape))
            self.add_up(part)
            x = x + part
        return (self.embedding @ F.layer_norm(x, x.shape)).argmax().view(1)


def summing(how: str) -> Callable[[Tensor], object]:
    """Return what adds up the parts of all ranks: one rank's tensor becomes the sum."""
    group = dist.group.WORLD
    if how == "unisono":
        return lambda part: torch.ops.unisono.all_reduce_(part, group.group_name)
    if how == "deepspeed":
        from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

        operator = ShareMemCommBuilder().load(verbose=False)
        operator.initialize(dist.get_world_size(), dist.get_rank())
        # Its registration does not suffice for torch.compile.
        return torch.compiler.disable(torch.ops.deepspeed.inference_all_reduce_)
    return torch.compiler.disable(dist.all_reduce)


def generate(model: Callable[[Tensor, Tensor], Tensor], tokens: int) -> tuple[list[int], float]:
    """Return the tokens that follow the first one, and how long each took in seconds."""
    token, text = torch.tensor([ord("u")]), []
    began = time.perf_counter()
    for place in range(tokens):
        token = model(token, torch.tensor([place]))
        text.append(token.item())
    return text, (time.perf_counter() - began) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sums", default="unisono", choices=["unisono", "gloo", "deepspeed"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    args = parser.parse_args()

    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_SIZE", os.environ["WORLD_SIZE"])  # DeepSpeed asks for it
    dist.init_process_group("gloo" if args.sums == "gloo" else "unisono")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.inference_mode():
        model = Model(args, rank, ranks, summing(args.sums))
        run = model if args.eager else torch.compile(model, fullgraph=args.sums == "unisono")
        generate(run, 3)
        dist.barrier()
        text, seconds = generate(run, args.tokens)
        if rank == 0:
            whole = Model(args, 0, 1, add_up=id)
            expected, _ = generate(whole, args.tokens)
            same = "the same" if text == expected else "not the same"
            print(
                f"{ranks} ranks, sums by {args.sums}: {1 / seconds:.0f} tokens/s, "
                f"{same} text as one process's",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
