"""Calls with several tensors for each rank, and with one tensor twice, side by side with gloo.

Gloo is the only backend of torch that takes them, so what it computes is what they mean.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable

from ranks import run_ranks
from test_torch_collectives import check, data, dist, start, torch
from test_torch_errors import refused

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TYPES += [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
INTEGERS = [torch.uint8, torch.int32, torch.int64]
COUNTS = [1, 3, 50_001]
ARITHMETIC = ["SUM", "PRODUCT", "MIN", "MAX"]
BITWISE = ["BAND", "BOR", "BXOR"]

Tensors = list[torch.Tensor]
# In each rank: a group on unisono, and one on gloo.
GROUPS: list[object] = []


def own(number: int, count: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """`number` tensors of this rank, all different."""
    rank = dist.get_rank()
    return [data(3 * rank + i, count, dtype) for i in range(number)]


def side_by_side(call: Callable[[object], Tensors], *context: object) -> None:
    """Make the call on a group of each backend; they must compute the same."""
    ours, theirs = (call(group) for group in GROUPS)
    assert len(ours) == len(theirs) > 0, context
    for mine, other in zip(ours, theirs, strict=True):
        check(mine, other, context)


def start_both() -> tuple[int, int]:
    rank, world = start()
    GROUPS[:] = [dist.new_group(backend=name) for name in ("unisono", "gloo")]
    # gloo's threads do not outlive the end of the interpreter well.
    atexit.register(GROUPS.clear)
    return rank, world


def all_reduced(group: object, tensors: Tensors, op: str = "SUM", *, wait: bool = True) -> Tensors:
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, op)
    options.asyncOp = wait
    work = group.allreduce(tensors, options)
    if work is not None:
        work.wait()
    return tensors


def test_all_reduce_of_several_tensors() -> None:
    run_ranks(2, f"{__name__}:rank_all_reduces_several", torch=True, timeout=120)


def rank_all_reduces_several() -> None:
    rank, _ = start_both()
    cases = [*itertools.product(TYPES, ARITHMETIC), *itertools.product(INTEGERS, BITWISE)]
    for (dtype, op), count in itertools.product(cases, COUNTS):
        side_by_side(lambda g: all_reduced(g, own(2, count, dtype), op), dtype, op, count)  # noqa: B023
    for wait in (False, True):
        side_by_side(lambda g: all_reduced(g, own(3, 17), wait=wait), "three")  # noqa: B023
    side_by_side(lambda g: all_reduced(g, own(1 + rank, 5)), "one here, two there")

    def one_twice(group: object) -> Tensors:
        (tensor,) = own(1, 5)
        return all_reduced(group, [tensor, tensor])

    side_by_side(one_twice, "one twice")

    def scattered(group: object) -> Tensors:
        grids = [tensor.reshape(3, 4) for tensor in own(2, 12)]
        # Gloo takes contiguous tensors alone.
        given = [grid.t() for grid in grids] if group is GROUPS[0] else grids
        all_reduced(group, given)
        return grids

    side_by_side(scattered, "not contiguous")

    def sparse(group: object) -> Tensors:
        places = torch.tensor([[0, 2]])
        tensors = [
            torch.sparse_coo_tensor(places + i, torch.full((2,), rank + i + 1.0), (4,))
            for i in range(2)
        ]
        return [tensor.to_dense() for tensor in all_reduced(group, tensors)]

    side_by_side(sparse, "sparse")

    # Types that gloo does not know.
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2):
        for tensor in all_reduced(GROUPS[0], [torch.full((3,), 2.0).to(dtype) for _ in range(2)]):
            check(tensor, torch.full((3,), 8.0).to(dtype), dtype)

    ours = GROUPS[0]
    one = torch.ones(2)
    refused(ValueError, "no average", all_reduced, ours, [one, one], "AVG")
    refused(ValueError, "must be alike", all_reduced, ours, [one, torch.ones(3)])
    refused(TypeError, "one type", all_reduced, ours, [one, one.double()])
    refused(ValueError, "not implemented", all_reduced, ours, [one, one], "BAND")
    refused(ValueError, "no tensor was given", ours._get_backend(one.device).allreduce, [])


def test_broadcast_of_several_tensors() -> None:
    run_ranks(2, f"{__name__}:rank_broadcasts_several", torch=True)


def broadcast(group: object, tensors: Tensors, root: int, index: int) -> Tensors:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, index
    group.broadcast(tensors, options).wait()
    return tensors


def rank_broadcasts_several() -> None:
    start_both()
    for root, index, dtype, count in itertools.product(range(2), range(3), TYPES, COUNTS):
        side_by_side(
            lambda g: broadcast(g, own(3, count, dtype), root, index),  # noqa: B023
            *(root, index, dtype, count),
        )
    ours, one = GROUPS[0], torch.ones(2)
    refused(ValueError, "rootTensor is 2", broadcast, ours, [one, one], 0, 2)
    refused(ValueError, "rootTensor is 1", broadcast, ours, [one], 0, 1)
    refused(ValueError, "must be alike", broadcast, ours, [one, torch.ones(3)], 0, 0)


def test_all_gather_of_several_tensors() -> None:
    run_ranks(2, f"{__name__}:rank_gathers_several", torch=True)


def gathered(group: object, number: int, inputs: Tensors, length: int) -> Tensors:
    outputs = [[torch.zeros_like(inputs[0]) for _ in range(length)] for _ in range(number)]
    group.allgather(outputs, inputs).wait()
    return [tensor for tensors in outputs for tensor in tensors]


def rank_gathers_several() -> None:
    rank, world = start_both()
    for number, dtype, count in itertools.product([2, 3], TYPES, COUNTS):
        side_by_side(
            lambda g: gathered(g, number, own(number, count, dtype), number * world),  # noqa: B023
            *(number, dtype, count),
        )
    ours = GROUPS[0]

    # An input that is also the output's place.
    whole = torch.zeros(world, 2, 3)
    whole[rank] = torch.stack(own(2, 3))
    lists = [list(whole.reshape(-1, 3)), [torch.zeros(3) for _ in range(2 * world)]]
    ours.allgather(lists, list(whole[rank])).wait()
    expected = [data(3 * r + i, 3) for r in range(world) for i in range(2)]
    for tensor, value in zip(itertools.chain(*lists), expected * 2, strict=True):
        check(tensor, value, "in place")

    refused(ValueError, "1 lists were given for 2", gathered, ours, 1, own(2, 3), 2 * world)
    refused(ValueError, "ranks times 2 input", gathered, ours, 2, own(2, 3), world)
    uneven = [torch.ones(3), torch.ones(2)]
    refused(ValueError, "must be alike", gathered, ours, 2, uneven, 2 * world)


def test_one_tensor_twice_in_a_coalesced_call() -> None:
    run_ranks(2, f"{__name__}:rank_gives_one_twice", torch=True)


def rank_gives_one_twice() -> None:
    rank, _ = start_both()

    def coalesced(group: object, tensors: Tensors) -> Tensors:
        options = dist.AllreduceCoalescedOptions()
        group._get_backend(torch.device("cpu")).allreduce_coalesced(tensors, options).wait()
        return tensors

    def twice(group: object) -> Tensors:
        (tensor,) = own(1, 1000)
        return coalesced(group, [tensor, torch.full((3,), 2.0), tensor])

    side_by_side(twice, "twice")

    def overlapping(group: object) -> Tensors:
        (tensor,) = own(1, 10)
        coalesced(group, [tensor[2:9], tensor[:4], tensor[8:], tensor[5:6], tensor[:0]])
        return [tensor]

    side_by_side(overlapping, "overlapping")

    def twice_here_alone(group: object) -> Tensors:
        first, second = own(2, 5)
        # The later result stays.
        return coalesced(group, [first, first] if rank == 0 else [first, second])

    side_by_side(twice_here_alone, "twice on one rank")

    def through_the_manager(group: object) -> Tensors:
        (tensor,) = own(1, 5)
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as works:
            for _ in range(2):
                dist.all_reduce(tensor, group=group)
        works.wait()
        return [tensor]

    side_by_side(through_the_manager, "coalescing manager")
