"""No launcher: torch.multiprocessing starts the ranks, and a file brings them together.

    python examples/torch/spawn_file_init.py --world-size 2

Ranks must find each other before they can talk. torchrun arranges that through environment
variables; with `file://` they meet in a file instead, which must not exist beforehand and, for
ranks on several hosts, must lie in a folder that all of them share.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank: int, world_size: int, backend: str, init_method: str) -> None:
    """Run one rank; `spawn` passes its number as the first argument."""
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == world_size * (world_size + 1) / 2
    sys.stdout.write(f"rank {rank} of {world_size}: the sum is {tensor.item():.0f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The guard matters: every spawned process imports this file again.
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--world-size", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        init_method = (Path(folder) / "rendezvous").as_uri()
        # Returns when all ranks have ended, and raises if one of them failed.
        mp.spawn(run, args=(args.world_size, args.backend, init_method), nprocs=args.world_size)
