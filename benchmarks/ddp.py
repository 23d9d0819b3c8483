"""A training step of DistributedDataParallel on unisono beside gloo, interleaved in one run.

    python benchmarks/ddp.py            25 million parameters, 2 ranks
    python benchmarks/ddp.py --quick    few steps of a small model

The models are the same and live in the same processes, each wrapped by DDP over its own backend's
group; they take turns, step by step, with two that do not communicate and show what is left for a
backend to gain: one under DDP whose communication hook hands every bucket back at once, one without
DDP. A step is forward, backward with its all_reduces, and SGD, on a batch small enough that
communication is a good part of it. The time is that of the slowest rank; the ratio is that of the
medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

# torch reads these when it is imported, and the spawned ranks inherit them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import report
from torch import nn

MARK = 2.0  # with 2 ranks: steps on unisono should be this many times as fast as on gloo
DDP_ALONE = "DDP alone"
ALONE = "no DDP"
WAIT = datetime.timedelta(seconds=300)


def hand_back(_, bucket):
    """Reduce a bucket by doing nothing."""
    # No annotations: DDP takes them for types, and they would be strings.
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Trained:
    """A model under DDP over one backend, or under none, with what a step needs."""

    def __init__(
        self, backend: str | None, args: argparse.Namespace, *, alone: bool = False
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
        model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model: nn.Module = model
        if backend is not None:
            self.model = nn.parallel.DistributedDataParallel(
                model,
                process_group=dist.new_group(backend=backend, timeout=WAIT),
                gradient_as_bucket_view=args.bucket_view,
            )
            if alone:
                self.model.register_comm_hook(None, hand_back)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        torch.manual_seed(1 + dist.get_rank())
        self.inputs = torch.randn(args.batch, args.width)

    def step(self) -> float:
        """Return the seconds of one step on this rank."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def checksum(self) -> torch.Tensor:
        return torch.stack([p.detach().double().sum() for p in self.model.parameters()])


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Train both models in turn; rank 0 leaves the steps' times in `folder`."""
    torch.set_num_threads(1)
    # Gloo's default group carries what the measurement itself needs, in a group apart from both.
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / "rendezvous").as_uri(),
        rank=rank,
        world_size=args.ranks,
        timeout=WAIT,
    )
    trained = {backend: Trained(backend, args) for backend in args.backends}
    check = dict(trained)
    trained[DDP_ALONE] = Trained(args.backends[0], args, alone=True)
    trained[ALONE] = Trained(None, args)
    seconds: dict[str, list[float]] = {name: [] for name in trained}
    for step in range(args.warmup + args.steps):
        for backend, training in trained.items():
            taken = torch.tensor([training.step()], dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if step >= args.warmup:
                seconds[backend].append(taken.item())
    check_equal(check)
    if rank == 0:
        parameters = next(iter(trained.values())).parameters
        result = {"parameters": parameters, "seconds": seconds}
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def check_equal(trained: dict[str, Trained]) -> None:
    """Both models have seen the same data, and so must have learned the same, up to rounding."""
    sums = [training.checksum() for training in trained.values()]
    if not all(torch.allclose(sums[0], other, rtol=1e-4, atol=1e-4) for other in sums[1:]):
        raise AssertionError(f"the backends' models differ: {sums}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--backends", type=lambda text: text.split(","), default=["unisono", "gloo"], help="A,B")
    add("--width", type=int, help="of a layer, whose parameters are about its square")
    add("--layers", type=int, default=6)
    add("--batch", type=int, default=8, help="rows on each rank")
    add("--steps", type=int, help="measured on each backend")
    add("--warmup", type=int, default=3, help="steps before")
    add("--bucket-view", action="store_true", help="gradient_as_bucket_view=True")
    add("--quick", action="store_true", help="a small model and few steps")
    add("--json", type=Path, metavar="FILE", help="write every step's time to FILE")
    args = parser.parse_args()
    args.width = args.width or (128 if args.quick else 2048)
    args.steps = args.steps or (5 if args.quick else 25)
    if len(args.backends) != 2 or args.backends[0] == args.backends[1]:
        parser.error("--backends takes two different names")
    return args


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:
        mp.spawn(run_rank, args=(args, folder), nprocs=args.ranks)
        result = json.loads((Path(folder) / "result.json").read_text())
    first, second = (statistics.median(result["seconds"][name]) for name in args.backends)
    ratio = second / first
    pairs = zip(*(result["seconds"][name] for name in args.backends), strict=True)
    ratios = [theirs / ours for ours, theirs in pairs]
    print(f"DDP, {result['parameters'] / 1e6:.1f} million parameters, {args.ranks} ranks, ", end="")
    print(f"{args.batch} rows each, {args.steps} steps on each in turn")
    for name, seconds in result["seconds"].items():
        print(f"{name:18}{statistics.median(seconds) * 1e3:10.1f} ms per step")
    line = f"ratio {ratio:.2f}, of neighbouring steps {min(ratios):.2f} - {max(ratios):.2f}"
    if args.backends == ["unisono", "gloo"] and args.ranks == 2 and not args.quick:
        line += f" (mark {MARK:g}: {'met' if ratio >= MARK else 'MISSED'})"
    print(line)
    bound = second / statistics.median(result["seconds"][DDP_ALONE])
    print(f"with a backend that takes no time it would be {bound:.2f}")
    if args.json:
        report.write_json(args.json, ranks=args.ranks, ratio=ratio, **result)


if __name__ == "__main__":
    sys.exit(main())
