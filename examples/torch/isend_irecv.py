"""isend and irecv: every rank exchanges with both neighbours at once.

    torchrun --nproc-per-node 2 examples/torch/isend_irecv.py

The calls return at once with a handle (a Work). Until `wait` has returned, leave the tensor of an
isend unchanged and do not read the tensor of an irecv. As no rank blocks before all calls are
started, no order of them can deadlock, and the rank is free to compute meanwhile.
"""

import argparse
import sys

import torch
import torch.distributed as dist

# With two ranks, left and right are the same peer: the tags tell the two messages apart.
RIGHTWARD, LEFTWARD = 1, 2


def run() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size

    mine = torch.full((1000,), float(rank))
    from_left, from_right = torch.empty(1000), torch.empty(1000)

    works = [
        dist.irecv(from_left, src=left, tag=RIGHTWARD),
        dist.irecv(from_right, src=right, tag=LEFTWARD),
        dist.isend(mine, dst=right, tag=RIGHTWARD),
        dist.isend(mine, dst=left, tag=LEFTWARD),
    ]
    meanwhile = mine.square().sum()  # reading what is being sent is fine
    for work in works:
        work.wait()

    assert torch.equal(from_left, torch.full((1000,), float(left)))
    assert torch.equal(from_right, torch.full((1000,), float(right)))
    assert meanwhile.item() == 1000 * rank**2
    sys.stdout.write(f"rank {rank}: exchanged 1000 numbers with ranks {left} and {right}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    dist.init_process_group(parser.parse_args().backend)
    run()
    dist.destroy_process_group()
