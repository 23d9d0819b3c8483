"""Every operation of torch.distributed on unisono, against values computed without it.

Each test starts its ranks once and has them run many cases, because importing torch costs more
than all of the cases together. A function whose name begins with ``rank_`` runs on every rank.
"""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
TYPES = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]
COUNTS = [0, 1, 3, 1000, 50_001]


def start(timeout: float | None = None, **options: object) -> tuple[int, int]:
    limit = None if timeout is None else timedelta(seconds=timeout)
    dist.init_process_group("unisono", timeout=limit, **options)
    return dist.get_rank(), dist.get_world_size()


def full(count: int, value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.float64).to(dtype)


def data(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's contribution: small numbers that every type holds, different everywhere."""
    return ((torch.arange(count) * 3 + rank * 5) % 7).to(dtype)


def check(actual: torch.Tensor, expected: torch.Tensor, *context: object) -> None:
    """Compare bytes: these values are exact in every type."""
    assert actual.dtype == expected.dtype, context
    wide = torch.complex128 if actual.dtype.is_complex else torch.float64
    assert torch.equal(actual.to(wide), expected.to(wide)), (actual, expected, context)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_moves_data(world: int) -> None:
    run_ranks(world, f"{__name__}:rank_moves_data", torch=True, timeout=120)


def rank_moves_data() -> None:
    rank, world = start()
    for dtype, count in itertools.product(TYPES, COUNTS):
        for root in range(world):
            tensor = data(rank, count, dtype)
            dist.broadcast(tensor, root)
            check(tensor, data(root, count, dtype), "broadcast", root)
        by_rank = [data(r, count, dtype) for r in range(world)]
        outputs = [torch.zeros(count, dtype=dtype) for _ in range(world)]
        dist.all_gather(outputs, by_rank[rank])
        for r in range(world):
            check(outputs[r], by_rank[r], "all_gather", r)
        output = torch.zeros(count * world, dtype=dtype)
        dist.all_gather_into_tensor(output, by_rank[rank])
        check(output, torch.cat(by_rank), "all_gather_into_tensor")

        root = count % world
        outputs = [torch.zeros(count, dtype=dtype) for _ in range(world)]
        dist.gather(by_rank[rank], outputs if rank == root else None, root)
        for r in range(world if rank == root else 0):
            check(outputs[r], by_rank[r], "gather", r)
        output = torch.zeros(count, dtype=dtype)
        dist.scatter(output, by_rank if rank == root else None, root)
        check(output, by_rank[rank], "scatter")

        sent = torch.cat([data(rank * 10 + r, count, dtype) for r in range(world)])
        received = torch.cat([data(r * 10 + rank, count, dtype) for r in range(world)])
        output = torch.zeros_like(sent)
        dist.all_to_all_single(output, sent)
        check(output, received, "all_to_all_single")
        # One rank may say what the others leave unsaid.
        splits = [len(sent) // world] * world if rank == 0 else None
        dist.all_to_all_single(output.zero_(), sent, splits, splits)
        check(output, received, "all_to_all_single, equal splits on one rank")
    dist.barrier()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_reduces(world: int) -> None:
    run_ranks(world, f"{__name__}:rank_reduces", torch=True, timeout=120)


def rank_reduces() -> None:
    rank, world = start()
    total = world * (world + 1) // 2
    for dtype, count in itertools.product([*FLOATS, *INTEGERS, *COMPLEX], COUNTS):
        tensor = full(count, rank + 1, dtype)
        dist.all_reduce(tensor)
        check(tensor, full(count, total, dtype), "all_reduce")
        root = count % world
        tensor = full(count, rank + 1, dtype)
        dist.reduce(tensor, root)
        # On the others the tensor stays as it was.
        check(tensor, full(count, total if rank == root else rank + 1, dtype), "reduce")
        blocks = torch.cat([full(count, r + 1, dtype) for r in range(world)])
        output = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter_tensor(output, blocks)
        check(output, full(count, (rank + 1) * world, dtype), "reduce_scatter_tensor")
        output = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter(output, list(blocks.chunk(world)) if count else [output] * world)
        check(output, full(count, (rank + 1) * world, dtype), "reduce_scatter")
    rank_uses_operators(rank, world)


def rank_uses_operators(rank: int, world: int) -> None:
    ops = dist.ReduceOp
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64):
        by_rank = torch.stack([data(r, 1000, dtype) + 1 for r in range(world)])
        wide = by_rank.to(torch.float64)
        expected = {
            ops.SUM: wide.sum(0),
            ops.PRODUCT: wide.prod(0),
            ops.MIN: wide.min(0).values,
            ops.MAX: wide.max(0).values,
            ops.AVG: wide.mean(0) if dtype.is_floating_point else wide.mean(0).trunc(),
        }
        for op, value in expected.items():
            tensor = by_rank[rank].clone()
            dist.all_reduce(tensor, op)
            torch.testing.assert_close(tensor, value.to(dtype), rtol=1e-2, atol=0)
    for op, function in (
        (ops.BAND, torch.bitwise_and),
        (ops.BOR, torch.bitwise_or),
        (ops.BXOR, torch.bitwise_xor),
    ):
        for dtype in (*INTEGERS[:5], torch.bool):
            tensors = [data(r, 1000, dtype) for r in range(world)]
            tensor = tensors[rank].clone()
            dist.all_reduce(tensor, op)
            expected = tensors[0]
            for other in tensors[1:]:
                expected = function(expected, other)
            check(tensor, expected, op)
    make = getattr(dist, "_make_premul_sum", None) or dist._make_nccl_premul_sum
    for factor in (2.0, torch.tensor([2.0])):
        tensor = torch.full((1000,), rank + 1.0)
        dist.all_reduce(tensor, make(factor))
        check(tensor, torch.full((1000,), world * (world + 1.0)), "premul_sum")


@pytest.mark.parametrize("world", [2, 3])
def test_uneven_and_coalesced(world: int) -> None:
    run_ranks(world, f"{__name__}:rank_uneven_and_coalesced", torch=True)


def rank_uneven_and_coalesced() -> None:
    rank, world = start()
    sizes = [(r * 2 + 1) % 4 * 11 for r in range(world)]
    by_rank = [data(r, sizes[r]) for r in range(world)]
    outputs = [torch.zeros(size) for size in sizes]
    dist.all_gather(outputs, by_rank[rank])
    for r in range(world):
        check(outputs[r], by_rank[r], "all_gather, uneven")
    output = torch.zeros(sizes[rank])
    dist.reduce_scatter(output, [torch.full((size,), rank + 1.0) for size in sizes])
    check(output, torch.full((sizes[rank],), world * (world + 1) / 2), "reduce_scatter, uneven")

    # Rank a sends (a + b) % 3 rows of two to rank b.
    send = [(rank + r) % 3 for r in range(world)]
    rows = torch.cat([torch.full((send[r], 2), rank * 10.0 + r) for r in range(world)])
    output = torch.zeros(sum(send), 2)
    dist.all_to_all_single(output, rows, send, send)
    expected = torch.cat([torch.full((send[r], 2), r * 10.0 + rank) for r in range(world)])
    check(output, expected, "all_to_all_single, splits")
    outputs = [torch.zeros(send[r], 2) for r in range(world)]
    dist.all_to_all(outputs, list(rows.split(send)))
    check(torch.cat(outputs), expected, "all_to_all")

    tensors = [torch.ones(5) * rank, torch.ones(2, 3) * rank, torch.ones(0)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        check(tensor, torch.full(tensor.shape, world * (world - 1) / 2), "all_reduce_coalesced")
    mixed = [torch.ones(5), torch.ones(5, dtype=torch.int64), torch.ones(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in mixed:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in mixed:
        check(tensor, torch.full_like(tensor, world), "several types in one call")
    with dist._coalescing_manager():
        gathered = [torch.zeros(world * 3), torch.zeros(world)]
        for count, output in zip((3, 1), gathered, strict=True):
            dist.all_gather_into_tensor(output, data(rank, count))
    for count, output in zip((3, 1), gathered, strict=True):
        check(output, torch.cat([data(r, count) for r in range(world)]), "gathered together")
    with dist._coalescing_manager():
        reduced = [torch.zeros(4), torch.zeros(1)]
        for output in reduced:
            dist.reduce_scatter_tensor(output, torch.ones(output.numel() * world))
    for output in reduced:
        check(output, torch.full_like(output, world), "reduce_scatter together")
    lists = [[torch.zeros(3), torch.zeros(2)] for _ in range(world)]
    dist.all_gather_coalesced(lists, [data(rank, 3), data(rank, 2)])
    for r in range(world):
        check(lists[r][0], data(r, 3), "all_gather_coalesced")
        check(lists[r][1], data(r, 2), "all_gather_coalesced")


def test_strided_and_aliased_tensors() -> None:
    run_ranks(2, f"{__name__}:rank_strided_and_aliased", torch=True)


def rank_strided_and_aliased() -> None:
    rank, world = start()
    whole = torch.arange(24.0).reshape(4, 6)
    column = (whole.clone() * (rank + 1))[:, 1]
    dist.all_reduce(column)
    check(column, whole[:, 1] * 3, "all_reduce of a column")
    # One rank's strides differ from the other's; elements meet by index, not by address.
    tensor = whole.clone() if rank == 0 else whole.t().contiguous().t()
    dist.all_reduce(tensor)
    check(tensor, whole * 2, "all_reduce, strides differ")
    work = dist.broadcast(target := (whole * rank).t(), 1, async_op=True)
    work.wait()
    check(target, whole.t(), "broadcast into a transposed tensor")
    outputs = [torch.zeros(6, 4).t() for _ in range(world)]
    dist.all_gather(outputs, whole.t().contiguous().t() + rank)
    for r in range(world):
        check(outputs[r], whole + r, "all_gather of transposed tensors")
    parameter = torch.nn.Parameter(torch.full((3, 2), rank + 1.0))
    dist.broadcast(parameter, 0)
    check(parameter.detach(), torch.ones(3, 2), "a leaf that requires a gradient")
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last) * (rank + 1)
    work = dist.all_reduce(image, async_op=True)
    work.get_future().wait()
    check(image, torch.full((2, 3, 4, 4), 3.0), "channels last")
    number = torch.tensor(rank + 1.0)
    dist.all_reduce(number)
    assert number.item() == 3

    # In place, as FSDP does it: the input is a part of the output, or the other way round.
    output = torch.zeros(8)
    mine = output.chunk(world)[rank]
    mine.fill_(rank + 1)
    dist.all_gather_into_tensor(output, mine)
    check(output, torch.tensor([1.0] * 4 + [2.0] * 4), "all_gather in place")
    whole = torch.arange(8.0)
    mine = whole.chunk(world)[rank]
    dist.reduce_scatter_tensor(mine, whole)
    check(mine, torch.arange(8.0).chunk(world)[rank] * 2, "reduce_scatter in place")
    tensors = [torch.full((2,), float(rank)) for _ in range(world)]
    dist.all_gather(tensors, tensors[rank])
    check(torch.cat(tensors), torch.tensor([0.0, 0, 1, 1]), "all_gather, input in the list")
    tensor = torch.arange(4.0) + rank * 10
    dist.all_to_all_single(tensor, tensor)
    first = rank * 2.0
    check(tensor, torch.tensor([first, first + 1, first + 10, first + 11]), "all_to_all in place")


def test_asynchronous_operations() -> None:
    run_ranks(3, f"{__name__}:rank_asynchronous", torch=True)


def rank_asynchronous() -> None:
    rank, world = start()
    total = world * (world + 1) / 2
    tensors = [torch.full((size,), rank + 1.0) for size in (1, 10, 100_000, 3, 1_000_000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in reversed(list(zip(works, tensors, strict=True))):
        assert work.wait() is True
        assert work.is_completed()
        check(tensor, torch.full_like(tensor, total), "all_reduce, waited for in reverse")
    # The work is dropped at once, and so is the tensor.
    for _ in range(20):
        dist.all_reduce(torch.ones(10_000), async_op=True)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    future = work.get_future()
    assert future is not None
    doubled = future.then(lambda done: done.value()[0] * 2)
    check(doubled.wait(), torch.full((2,), 2.0 * world), "future, then")
    check(work.get_future().wait()[0], torch.full((2,), float(world)), "a future after the end")
    outputs = [torch.zeros(2) for _ in range(world)]
    work = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    values = work.get_future().wait()
    assert [value[0].item() for value in values] == list(range(world))
    rank_overlaps_groups(rank, world)


def rank_overlaps_groups(rank: int, world: int) -> None:
    """Operations on several groups, waited for in another order on every rank."""
    groups = [dist.new_group() for _ in range(3)]
    pairs = {pair: dist.new_group(pair) for pair in itertools.combinations(range(world), 2)}
    tensors = [torch.full((1000,), float(rank)) for _ in groups]
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in zip(tensors, groups, strict=True)
    ]
    for index in [(rank + i) % 3 for i in range(3)]:
        works[index].wait()
        check(tensors[index], torch.full((1000,), world * (world - 1) / 2), "groups")
    for pair, group in pairs.items():
        if rank in pair:
            tensor = torch.full((7,), float(rank))
            dist.all_reduce(tensor, group=group)
            check(tensor, torch.full((7,), float(sum(pair))), "a pair")
            tensor = torch.full((7,), float(rank))
            dist.broadcast(tensor, src=pair[1], group=group)
            check(tensor, torch.full((7,), float(pair[1])), "global ranks in a pair")
    dist.destroy_process_group(groups[1])
    dist.barrier()


def test_point_to_point() -> None:
    run_ranks(3, f"{__name__}:rank_point_to_point", torch=True)


def rank_point_to_point() -> None:
    rank, world = start()
    following, preceding = (rank + 1) % world, (rank - 1) % world
    for dtype, count in itertools.product(TYPES, [0, 1, 1000, 300_000]):
        work = dist.isend(data(rank, count, dtype), following)
        received = torch.zeros(count, dtype=dtype)
        dist.recv(received, preceding)
        work.wait()
        check(received, data(preceding, count, dtype), "send")
    # Tags part two streams to one peer, whatever the order of the receives.
    works = [dist.isend(torch.tensor([float(tag)]), following, tag=tag) for tag in (1, 2, 3)]
    for tag in (3, 1, 2):
        received = torch.zeros(1)
        dist.recv(received, preceding, tag=tag)
        assert received.item() == tag
    for work in works:
        work.wait()
    dist.barrier()
    if rank == 0:
        sources = set()
        for _ in range(world - 1):
            received = torch.zeros(3)
            source = dist.recv(received)
            check(received, torch.full((3,), float(source)), "recv from any")
            sources.add(source)
        assert sources == set(range(1, world)), sources
    else:
        dist.send(torch.full((3,), float(rank)), 0)
    # A receive from any rank would take a later message, too.
    dist.barrier()
    strided = torch.zeros(4, 2)
    operations = [
        dist.P2POp(dist.isend, torch.full((2, 4), float(rank)).t(), following),
        dist.P2POp(dist.irecv, strided.t().t(), preceding),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check(strided, torch.full((4, 2), float(preceding)), "batch_isend_irecv")


def test_objects_and_sparse_tensors() -> None:
    run_ranks(3, f"{__name__}:rank_objects_and_sparse", torch=True)


def rank_objects_and_sparse() -> None:
    rank, world = start()
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank * 100})
    assert objects == [{"rank": r, "text": "x" * r * 100} for r in range(world)]
    box = [["from", rank]]
    dist.broadcast_object_list(box, src=1)
    assert box == [["from", 1]]
    rank_gives_lists_of_other_lengths(rank, world)
    for shape, dtype in (((10,), torch.float32), ((10, 4), torch.float64)):
        # Every rank has its own entry, all have entry 9, twice.
        values = torch.ones(3, *shape[1:], dtype=dtype)
        indices = torch.tensor([[rank, 9, 9]])
        tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
        expected = torch.zeros(shape, dtype=dtype)
        expected[:world] = 1
        expected[9] = 2 * world
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        check(tensor.to_dense(), expected, "sparse")
    empty = torch.sparse_coo_tensor(
        torch.zeros(1, rank, dtype=torch.int64), torch.ones(rank), (5,), check_invariants=True
    )
    dist.all_reduce(empty)
    assert empty.to_dense().tolist() == [world * (world - 1) / 2, 0, 0, 0, 0]


def rank_gives_lists_of_other_lengths(rank: int, world: int) -> None:
    """The rank with another list hears of it, and the group works afterwards."""
    group = dist.new_group([2, 1])
    for text in ("x", "x" * 10_000):
        if rank == 2:
            dist.broadcast_object_list([text, 2], src=2, group=group)
            dist.gather_object(text, [None] * 2, dst=2, group=group)
        elif rank == 1:
            box = [None]
            with pytest.raises(ValueError, match=r"rank 2 has sent 2 .* rank 1 has a list of 1;"):
                dist.broadcast_object_list(box, src=2, group=group)
            assert box == [None]
            dist.gather_object(text, dst=2, group=group)
        with pytest.raises(ValueError, match=r"list has 1 entries for a group of 3 ranks.*None"):
            dist.all_gather_object([None], text)
        if rank == 0:
            with pytest.raises(ValueError, match="gather_object: the list has 2 entries"):
                dist.gather_object(text, [None] * 2)
        else:
            dist.gather_object(text)
        box = [text if rank == 0 else None, rank]
        dist.broadcast_object_list(box)
        assert box == [text, 0]
    dist.broadcast_object_list([])


def test_torch_interfaces() -> None:
    run_ranks(2, f"{__name__}:rank_uses_interfaces", torch=True)


def rank_uses_interfaces() -> None:
    rank, world = start()
    assert dist.get_backend() == "unisono"
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert backend.name() == "unisono"
    if backend.options is not None:  # torch 2.11 does not show them to Python
        assert backend.options._timeout.total_seconds() == 1800
    before = backend._get_sequence_number_for_group()
    dist.barrier()
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    assert backend._get_sequence_number_for_group() == before + 2
    if hasattr(dist, "monitored_barrier") and dist.__dict__.get("gather_single"):
        dist.monitored_barrier()
        dist.monitored_barrier(wait_all_ranks=True)

    import torch.distributed._functional_collectives as functional

    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    check(gathered + 0, torch.tensor([0.0, 0.0, 1.0, 1.0]), "functional all_gather")
    reduced = functional.reduce_scatter_tensor(torch.ones(4), "avg", 0, group)
    check(reduced + 0, torch.ones(2), "functional reduce_scatter")
    if hasattr(dist, "gather_single"):
        output = torch.zeros(2 * world)
        dist.gather_single(torch.full((2,), float(rank)), output if rank == 0 else None)
        if rank == 0:
            check(output, torch.tensor([0.0, 0.0, 1.0, 1.0]), "gather_single")

    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))
        dist.barrier()
        dist.send(torch.ones(5), 1) if rank == 0 else dist.recv(torch.ones(5))
    names = [event.name for event in profile.function_events if "unisono:" in event.name]
    last = "unisono:send" if rank == 0 else "unisono:recvAnySource"
    expected = ["all_reduce", "all_reduce", "all_gather", "barrier"]
    assert sorted(names) == sorted([*(f"unisono:{name}" for name in expected), last]), names
    shapes = [e.input_shapes for e in profile.function_events if e.name == "unisono:all_reduce"]
    assert sorted(shapes) == [[[3]], [[4]]], shapes


def test_debug_mode_detail() -> None:
    """In this mode torch wraps the backend to compare calls between ranks."""
    run_ranks(
        2,
        f"{__name__}:rank_debugs",
        torch=True,
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )


def rank_debugs() -> None:
    _, world = start()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    check(tensor, torch.full((3,), float(world)))
    dist.barrier()


def test_transport_from_options() -> None:
    run_ranks(2, f"{__name__}:rank_takes_options", torch=True)


def rank_takes_options() -> None:
    dist.init_process_group("unisono", pg_options={"transport": "tcp"})
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    check(tensor, torch.full((1000,), 2.0))
    with pytest.raises(ValueError, match="transport"):
        dist.new_group(pg_options={"tranport": "tcp"})
