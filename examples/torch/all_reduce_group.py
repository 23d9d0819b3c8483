"""all_reduce on a group: only some of the ranks add up their tensors.

    torchrun --nproc-per-node 4 examples/torch/all_reduce_group.py

A collective runs in a group, by default in that of all ranks. Here ranks 0 and 1 form a group of
their own.
"""

import argparse
import sys

import torch
import torch.distributed as dist


def run() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    members = [0, 1]

    # Every rank calls new_group, members or not, and in the same order.
    group = dist.new_group(members)
    tensor = torch.full((3,), float(rank + 1))
    if rank in members:
        # The result replaces the tensor on every member. SUM is the default op.
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        expected = sum(member + 1 for member in members)
    else:
        expected = rank + 1
    assert tensor.tolist() == [expected] * 3

    # The group of all ranks is still there.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size

    role = "a member" if rank in members else "no member"
    counted = f"{total.item():.0f} ranks in all"
    sys.stdout.write(f"rank {rank}: {role}, {tensor.tolist()}, {counted}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    dist.init_process_group(parser.parse_args().backend)
    run()
    dist.destroy_process_group()
