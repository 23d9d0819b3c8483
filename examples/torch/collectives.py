"""The collectives: broadcast, scatter, gather, reduce and all_gather.

    torchrun --nproc-per-node 4 examples/torch/collectives.py

A collective is one call that all ranks make, in the same order and with tensors of the same shape
and type. The descriptions show three ranks, one per column.
"""

import argparse
import sys

import torch
import torch.distributed as dist

ROOT = 0


def broadcast(rank: int, _world_size: int) -> None:
    """Copy the root's tensor to everyone: `a _ _` becomes `a a a`."""
    tensor = torch.arange(4.0) if rank == ROOT else torch.zeros(4)
    dist.broadcast(tensor, src=ROOT)
    assert tensor.tolist() == [0, 1, 2, 3]


def scatter(rank: int, world_size: int) -> None:
    """Deal the root's list out, one tensor to each rank: `abc _ _` becomes `a b c`."""
    tensor = torch.empty(2)
    if rank == ROOT:
        hand = [torch.full((2,), float(receiver)) for receiver in range(world_size)]
        dist.scatter(tensor, scatter_list=hand, src=ROOT)
    else:
        dist.scatter(tensor, src=ROOT)
    assert tensor.tolist() == [rank, rank]


def gather(rank: int, world_size: int) -> None:
    """Collect everyone's tensor on the root: `a b c` becomes `abc _ _`."""
    tensor = torch.full((2,), float(rank))
    if rank == ROOT:
        collected = [torch.empty(2) for _ in range(world_size)]
        dist.gather(tensor, gather_list=collected, dst=ROOT)
        assert [t.tolist() for t in collected] == [[r, r] for r in range(world_size)]
    else:
        dist.gather(tensor, dst=ROOT)


def reduce(rank: int, world_size: int) -> None:
    """Add up everyone's tensor on the root: `a b c` becomes `a+b+c _ _`."""
    tensor = torch.full((2,), float(rank + 1))
    dist.reduce(tensor, dst=ROOT, op=dist.ReduceOp.SUM)
    if rank == ROOT:  # what other ranks' tensors hold now is unspecified
        total = world_size * (world_size + 1) // 2
        assert tensor.tolist() == [total, total]


def all_gather(rank: int, world_size: int) -> None:
    """Collect everyone's tensor on everyone: `a b c` becomes `abc abc abc`."""
    tensor = torch.full((2,), float(rank))
    collected = [torch.empty(2) for _ in range(world_size)]
    dist.all_gather(collected, tensor)
    assert [t.tolist() for t in collected] == [[r, r] for r in range(world_size)]


def run() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    collectives = [broadcast, scatter, gather, reduce, all_gather]
    for collective in collectives:
        collective(rank, world_size)
    names = ", ".join(collective.__name__ for collective in collectives)
    sys.stdout.write(f"rank {rank}: {names} gave the right result\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    dist.init_process_group(parser.parse_args().backend)
    run()
    dist.destroy_process_group()
