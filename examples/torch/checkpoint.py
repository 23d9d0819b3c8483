"""Checkpointing: rank 0 saves, all ranks load.

    torchrun --nproc-per-node 2 examples/torch/checkpoint.py

DDP keeps the ranks' parameters equal, so one copy is enough. The barriers are what makes it
right: without the first, a rank could read a file that is not yet written; without the second,
rank 0 could delete one that is still being read.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(20, 10)).square().mean().backward()
    optimizer.step()


def run() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(10, 5))
    optimizer = torch.optim.Adam(model.parameters())
    train_one_step(model, optimizer)

    # Rank 0 chooses the folder and tells the others. A real job uses one that its hosts share.
    folder = [tempfile.mkdtemp(prefix="checkpoint-") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = Path(folder[0]) / "latest.pt"

    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    dist.barrier()  # the file is complete

    train_one_step(model, optimizer)  # drift away from it
    assert not torch.equal(model.module.weight, saved["module.weight"])

    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    dist.barrier()  # everyone has read it
    if rank == 0:
        shutil.rmtree(path.parent)

    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    train_one_step(model, optimizer)  # and training goes on
    sys.stdout.write(f"rank {rank}: parameters are those that rank 0 saved, to the last bit\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    dist.init_process_group(parser.parse_args().backend)
    run()
    dist.destroy_process_group()
