"""A sample of collectives on random tensors, each compared with what it must give."""

from __future__ import annotations

import torch
import torch.distributed as dist

LENGTHS = (1, 7, 1000, 300_000)
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.complex64)


def random(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * length + rank)
    # Sums of so small integers are exact in every type.
    return torch.randint(0, 5, (length,), generator=generator).to(dtype)


def check(length: int, dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [random(r, length, dtype) for r in range(size)]
    mine, total = parts[rank], sum(parts[1:], parts[0].clone())

    reduced = mine.clone()
    dist.all_reduce(reduced)
    assert torch.equal(reduced, total)

    received = mine.clone()
    dist.broadcast(received, src=size - 1)
    assert torch.equal(received, parts[-1])

    gathered = [torch.empty_like(mine) for _ in parts]
    dist.all_gather(gathered, mine)
    assert all(map(torch.equal, gathered, parts))

    inputs = torch.cat([random(rank * size + r, length, dtype) for r in range(size)])
    scattered = torch.empty(length, dtype=dtype)
    dist.reduce_scatter_tensor(scattered, inputs)
    wanted = [random(r * size + rank, length, dtype) for r in range(size)]
    assert torch.equal(scattered, sum(wanted[1:], wanted[0].clone()))

    exchanged = torch.empty_like(inputs)
    dist.all_to_all_single(exchanged, inputs)
    assert torch.equal(exchanged, torch.cat(wanted))

    right, left = (rank + 1) % size, (rank - 1) % size
    arrived = torch.empty_like(mine)
    sends = dist.isend(mine, right)
    dist.recv(arrived, left)
    sends.wait()
    assert torch.equal(arrived, parts[left])


dist.init_process_group("unisono")
for length in LENGTHS:
    for dtype in TYPES:
        check(length, dtype)
dist.barrier()
half = dist.new_group([0], backend="unisono")
if dist.get_rank() == 0:
    one = torch.ones(1)
    dist.all_reduce(one, group=half)
    assert one.item() == 1
    print("collectives are right")
dist.destroy_process_group()
