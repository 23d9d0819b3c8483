"""Operations that only move data: allgather, broadcast and alltoall, and the barrier.

The functions without ``async`` and without a final underscore are differentiable, as Horovod
defines it: gradients that come back from several ranks are averaged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.horovod.torch._call import Call, call_of
from unisono.horovod.torch._calls import (
    Handle,
    exchange_rows,
    group_of,
    rows_of,
    start,
    together,
    wait,
)
from unisono.horovod.torch._reductions import allreduce
from unisono.horovod.torch._world import ProcessSet, global_process_set, world

if TYPE_CHECKING:
    from collections.abc import Sequence


def allgather_async(
    tensor: Tensor,
    name: str | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allgather`; the handle gives its result.

    The ranks first tell each other how many rows they bring, and wait for that.
    """
    rows = rows_of(tensor, "allgather")
    given = tensor.detach().contiguous()

    def launch(group: Any) -> Handle:
        counts = exchange_rows(rows, given, group)
        gathered = given.new_empty((sum(counts), *given.shape[1:]))
        works = []
        if gathered.numel():
            parts = list(gathered.split(counts))
            works = [dist.all_gather(parts, given, group, async_op=True)]
        return Handle(works, lambda: gathered, given.device)

    return start(call_of("allgather", [tensor]), process_set, launch)


class _AllGather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, process_set: ProcessSet) -> Tensor:
        ctx.rows = rows_of(tensor, "allgather")
        ctx.process_set = process_set
        return allgather_async(tensor, process_set=process_set).result()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        averaged = allreduce(gradient, process_set=ctx.process_set)
        counts = exchange_rows(ctx.rows, gradient, group_of(ctx.process_set))
        first = sum(counts[: ctx.process_set.rank()])
        return averaged.narrow(0, first, ctx.rows), None


def allgather(
    tensor: Tensor,
    name: str | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension.

    Parameters
    ----------
    tensor
        Of the same type and, but for the first dimension, the same shape on every rank.
    name
        Not used: the order of the calls says which belong together.
    process_set
        The ranks that take part.

    Returns
    -------
    Tensor
        The rows of rank 0, then those of rank 1, and so on.

    Raises
    ------
    ValueError
        `tensor` has no dimension, or this rank is not in `process_set`.
    HorovodInternalError
        A rank is gone, late, or called something else.
    """
    return _AllGather.apply(tensor, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allgather`; the handle gives its result."""
    return together([allgather_async(tensor, name, process_set) for tensor in tensors])


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Do :func:`allgather` for each of `tensors`, and return the list of the results."""
    return [allgather(tensor, name, process_set) for tensor in tensors]


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast_`; the handle gives `tensor`."""
    given = tensor.detach()
    whole = given if given.is_contiguous() else given.contiguous()
    if process_set.size() and root_rank not in process_set.ranks:
        raise ValueError(f"root_rank={root_rank} is not in {process_set}")

    def launch(group: Any) -> Handle:
        work = dist.broadcast(whole, root_rank, group, async_op=True)

        def result() -> Tensor:
            if whole is not given:
                given.copy_(whole)
            return tensor

        return Handle([work], result, given.device)

    return start(call_of("broadcast", [tensor], root=root_rank), process_set, launch)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast`; the handle gives its result."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return broadcast_async_(copy, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Do :func:`broadcast` in place, and return `tensor`."""
    return broadcast_async_(tensor, root_rank, name, process_set).result()


class _Broadcast(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, process_set: ProcessSet) -> Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        return broadcast_async(tensor, root_rank, process_set=process_set).result()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        averaged = allreduce(gradient, process_set=ctx.process_set)
        if world().rank != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Give every rank the values of one.

    Parameters
    ----------
    tensor
        Of the same shape and type on every rank; only the values of the root count.
    root_rank
        The rank that has the values, by its number in the job, also for a process set.
    name
        Not used: the order of the calls says which belong together.
    process_set
        The ranks that take part.

    Returns
    -------
    Tensor
        A new tensor.

    Raises
    ------
    ValueError
        `root_rank` or this rank is not in `process_set`.
    HorovodInternalError
        A rank is gone, late, or called something else.
    """
    return _Broadcast.apply(tensor, root_rank, process_set)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`alltoall`; the handle gives its result.

    The ranks first tell each other how many rows they send, and wait for that.
    """
    exchange = _exchange(tensor, splits, process_set)
    if splits is not None:
        return exchange
    return Handle(exchange._works, lambda: exchange.result()[0], exchange._device)


def _exchange(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, process_set: ProcessSet
) -> Handle:
    sent = _splits(tensor, splits, process_set.size())
    given = tensor.detach().contiguous()

    def launch(group: Any) -> Handle:
        mine = torch.tensor(sent, dtype=torch.int64, device=given.device)
        theirs = torch.empty_like(mine)
        wait(dist.all_to_all_single(theirs, mine, group=group, async_op=True), given.device)
        received = [int(count) for count in theirs.tolist()]
        output = given.new_empty((sum(received), *given.shape[1:]))
        work = dist.all_to_all_single(output, given, received, sent, group, async_op=True)
        return Handle([work], lambda: (output, theirs.to(torch.int32)), given.device)

    return start(call_of("alltoall", [tensor]), process_set, launch)


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    rows = rows_of(tensor, "alltoall")
    if splits is None:
        if rows % size:
            raise ValueError(f"{rows} rows do not divide among {size} ranks; give splits=")
        return [rows // size] * size
    counts = [int(count) for count in (splits.tolist() if isinstance(splits, Tensor) else splits)]
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(f"splits={counts} do not divide {rows} rows among {size} ranks")
    return counts


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, process_set: ProcessSet) -> Any:
        output, received = _exchange(tensor, splits, process_set).result()
        ctx.process_set = process_set
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        back, _ = _AllToAll.apply(gradient, ctx.received, ctx.process_set)
        return back, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows to each rank, and receive some from each.

    Parameters
    ----------
    tensor
        The rows for rank 0, then those for rank 1, and so on. Of the same type and, but for the
        first dimension, the same shape on every rank.
    splits
        How many rows go to each rank; None for equal numbers.
    name
        Not used: the order of the calls says which belong together.
    process_set
        The ranks that take part.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        The rows that came, in the order of ranks. With `splits` also how many came from each, as
        int32.

    Raises
    ------
    ValueError
        The rows do not divide as asked, or this rank is not in `process_set`.
    HorovodInternalError
        A rank is gone, late, or called something else.
    """
    output, received = _AllToAll.apply(tensor, splits, process_set)
    return output if splits is None else (output, received)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of `process_set` has called this."""

    def launch(group: Any) -> Handle:
        work = dist.barrier(group, async_op=True)
        return Handle([work], lambda: None, torch.device("cpu"))

    start(Call("barrier"), process_set, launch).result()
