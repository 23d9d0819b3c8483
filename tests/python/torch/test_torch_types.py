"""Types of torch that unisono has no arithmetic for: moved as the bits that they are."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from test_torch_collectives import dist, start, torch

# Types about which only the size is known.
OPAQUE = [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.float8_e4m3fnuz]
OPAQUE += [torch.float8_e5m2fnuz, torch.int4, torch.uint4, torch.int1, torch.uint7]
OPAQUE += [torch.bits8, torch.bits16, torch.bits2x4, torch.complex32]


def test_types_without_arithmetic_are_moved() -> None:
    run_ranks(3, f"{__name__}:rank_moves_opaque_types", torch=True)


def rank_moves_opaque_types() -> None:
    rank, world = start()
    for dtype in OPAQUE:
        rank_moves_opaque(rank, world, dtype)


def rank_moves_opaque(rank: int, world: int, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    every = [torch.arange(r, r + 12 * size).to(torch.uint8) for r in range(world)]

    def of(r: int) -> torch.Tensor:
        return every[r].clone().view(dtype)

    def same(actual: torch.Tensor, *expected: torch.Tensor) -> None:
        assert actual.dtype == dtype
        assert torch.equal(actual.view(torch.uint8), torch.cat(expected)), dtype

    def empty(count: int = 12) -> torch.Tensor:
        return torch.zeros(count * size, dtype=torch.uint8).view(dtype)

    tensor = of(rank)
    dist.broadcast(tensor, 1)
    same(tensor, every[1])
    outputs = [empty() for _ in range(world)]
    dist.all_gather(outputs, of(rank))
    for r, output in enumerate(outputs):
        same(output, every[r])
    whole = empty(12 * world)
    dist.all_gather_into_tensor(whole, of(rank), async_op=True).wait()
    same(whole, *every)
    dist.gather(of(rank), outputs if rank == 2 else None, 2)
    dist.scatter(tensor, outputs if rank == 2 else None, 2)
    same(tensor, every[rank])
    parts = empty()
    dist.all_to_all_single(parts, of(rank))
    same(parts, *(each.chunk(world)[rank] for each in every))
    before, after = (rank - 1) % world, (rank + 1) % world
    calls = [dist.P2POp(dist.isend, of(rank), after), dist.P2POp(dist.irecv, tensor, before)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    same(tensor, every[before])
    # One that is not contiguous, on both sides.
    rows = torch.zeros(12, 2 * size, dtype=torch.uint8)
    if rank == 0:
        rows[:, :size] = every[0].view(12, size)
    dist.broadcast(rows.view(dtype)[:, 0], 0)
    assert torch.equal(rows[:, :size].reshape(-1), every[0])
    assert not rows[:, size:].any()
    if dtype != torch.complex32:  # torch takes it for pairs of halves.
        with pytest.raises(TypeError, match="does not reduce"):
            dist.all_reduce(tensor)
