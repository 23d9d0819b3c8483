"""Blocking send and recv: a token travels once around all ranks.

    torchrun --nproc-per-node 2 examples/torch/send_recv.py

`send` returns when the tensor may be changed again, `recv` when the data have arrived. The
receiver brings a tensor of the right shape and type, and it is filled in place.
"""

import argparse
import sys

import torch
import torch.distributed as dist


def run() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    next_rank, previous_rank = (rank + 1) % world_size, (rank - 1) % world_size

    token = torch.zeros(1)
    if rank == 0:
        # Someone has to begin: if every rank called recv first, all would wait for ever.
        token += 1
        dist.send(token, dst=next_rank)
        dist.recv(token, src=previous_rank)
        expected = world_size
    else:
        dist.recv(token, src=previous_rank)
        expected = rank
        dist.send(token + 1, dst=next_rank)

    assert token.item() == expected
    # Not print, which writes the end of the line separately: the ranks share one terminal.
    sys.stdout.write(f"rank {rank}: received {token.item():.0f} from rank {previous_rank}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    dist.init_process_group(parser.parse_args().backend)
    run()
    dist.destroy_process_group()
