"""Operations that compute: allreduce and reducescatter, alone and in groups.

The functions without ``async`` and without a final underscore are differentiable, as Horovod
defines it: the gradient of a sum or an average over ranks is the same sum or average of the
gradients, scaled alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.horovod.torch._call import TORCH_OPS, Average, Call, ReduceOp, Sum, call_of, chosen_op
from unisono.horovod.torch._calls import Handle, reduce_all, scale, start, together
from unisono.horovod.torch._compression import Compression
from unisono.horovod.torch._world import ProcessSet, global_process_set

if TYPE_CHECKING:
    from collections.abc import Sequence


def reduce_together(tensors: Sequence[Tensor], call: Call, process_set: ProcessSet) -> Handle:
    """Start an all_reduce of `tensors` in place; the handle gives the list of them."""
    given = [tensor.detach() for tensor in tensors]
    device = given[0].device if given else torch.device("cpu")

    def launch(group: Any) -> Handle:
        works, finish = reduce_all(given, call, group)

        def result() -> list[Tensor]:
            finish()
            return list(tensors)

        return Handle(works, result, device)

    return start(call, process_set, launch)


def _only(handle: Handle) -> Handle:
    """Return a handle that gives the first of the tensors that `handle` gives."""
    return Handle(handle._works, lambda: handle.result()[0], handle._device)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


def _call(
    tensors: Sequence[Tensor],
    average: bool | None,
    op: ReduceOp | int | None,
    prescale: float,
    postscale: float,
) -> Call:
    return call_of(
        "allreduce",
        tensors,
        op=chosen_op(op, average),
        prescale=float(prescale),
        postscale=float(postscale),
    )


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce`; the handle gives its result."""
    return _only(
        grouped_allreduce_async(
            [tensor], average, name, op, prescale_factor, postscale_factor, process_set
        )
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce_`; the handle gives `tensor`."""
    return _only(
        grouped_allreduce_async_(
            [tensor], average, name, op, prescale_factor, postscale_factor, process_set
        )
    )


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks.

    Parameters
    ----------
    tensor
        Of the same shape and type on every rank.
    average
        The older form of `op`: True for Average, False for Sum.
    name
        Not used: the order of the calls says which belong together.
    compression
        A member of :class:`Compression`.
    op
        Average (also for None), Sum, Min, Max or Product. Averages of integers are rounded
        toward zero.
    prescale_factor, postscale_factor
        What the tensor is multiplied by before and after.
    process_set
        The ranks that take part.

    Returns
    -------
    Tensor
        A new tensor of the shape and type of `tensor`, with the same bits on every rank.

    Raises
    ------
    NotImplementedError
        `op` is Adasum.
    ValueError
        Both `op` and `average` are given, or this rank is not in `process_set`.
    HorovodInternalError
        A rank is gone, late, or called something else.
    """
    return grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )[0]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Do :func:`allreduce` in place, and return `tensor`."""
    return allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ).result()


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce`; the handle gives its result."""
    copies = _copies(tensors)
    return grouped_allreduce_async_(
        copies, average, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,  # noqa: ARG001
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce_`; the handle gives the list of `tensors`."""
    call = _call(tensors, average, op, prescale_factor, postscale_factor)
    return reduce_together(tensors, call, process_set)


class _AllReduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: Call, process_set: ProcessSet, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.process_set = process_set
        return tuple(reduce_together(_copies(tensors), call, process_set).result())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.call.op not in (Average, Sum):
            raise NotImplementedError(f"allreduce with op={ctx.call.op.name} has no gradient")
        return (None, None, *_AllReduce.apply(ctx.call, ctx.process_set, *gradients))


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,  # noqa: ARG001
    compression: Any = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in one operation; for the parameters see :func:`allreduce`.

    Returns
    -------
    list of Tensor
        A new tensor for each of `tensors`.
    """
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    call = _call(sent, average, op, prescale_factor, postscale_factor)
    reduced = _AllReduce.apply(call, process_set, *sent)
    pairs = zip(reduced, compressed, strict=True)
    return [compression.decompress(tensor, context) for tensor, (_, context) in pairs]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Do :func:`grouped_allreduce` in place, and return the list of `tensors`."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return handle.result()  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,  # noqa: ARG001
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start the Sum or Average of a sparse tensor; the handle gives a new one, coalesced.

    Raises
    ------
    ValueError
        `op` is neither Sum nor Average.
    """
    chosen = chosen_op(op)
    if chosen not in (Average, Sum):
        raise ValueError(f"sparse tensors are summed or averaged, not reduced by {chosen.name}")
    # The number of entries differs between ranks, so no rank can stand in for another.
    call = call_of("sparse_allreduce", [tensor], op=chosen, can_join=False)
    summed = tensor.detach().clone().coalesce()

    def launch(group: Any) -> Handle:
        work = dist.all_reduce(summed, dist.ReduceOp.SUM, group, async_op=True)

        def result() -> Tensor:
            total = summed.coalesce()
            return total / process_set.size() if chosen is Average else total

        return Handle([work], result, tensor.device)

    return start(call, process_set, launch)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,  # noqa: ARG001
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`reducescatter`; the handle gives its result."""
    call = call_of(
        "reducescatter",
        [tensor],
        op=chosen_op(op),
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )
    return scatter_sum(tensor, call, process_set)


def scatter_sum(tensor: Tensor, call: Call, process_set: ProcessSet) -> Handle:
    """Start a reduce_scatter; every rank's part has as many rows, the first ranks' one more."""
    if tensor.dim() == 0:
        raise ValueError("reducescatter needs at least one dimension; use tensor.reshape(1)")
    size = process_set.size()
    rows, more = divmod(tensor.shape[0], size)
    counts = [rows + (place < more) for place in range(size)]
    given = tensor.detach().clone(memory_format=torch.contiguous_format)
    place = process_set.rank()

    def launch(group: Any) -> Handle:
        if more == 0 and rows > 0:
            return _even(given, call, group, size)
        # One part is as good as all where parts differ: torch scatters equal ones alone.
        works, finish = reduce_all([given], call, group)

        def result() -> Tensor:
            finish()
            return given.split(counts)[place].clone()

        return Handle(works, result, given.device)

    return start(call, process_set, launch)


def _even(given: Tensor, call: Call, group: Any, size: int) -> Handle:
    scale(given, call.prescale)
    part = given.new_empty((given.shape[0] // size, *given.shape[1:]))
    work = dist.reduce_scatter_tensor(part, given, TORCH_OPS[call.op], group, async_op=True)

    def result() -> Tensor:
        scale(part, call.postscale)
        return part

    return Handle([work], result, given.device)


class _ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: Call, process_set: ProcessSet) -> Tensor:
        ctx.call = call
        ctx.process_set = process_set
        return scatter_sum(tensor, call, process_set).result()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from unisono.horovod.torch._exchanges import allgather

        call = ctx.call
        if call.op not in (Average, Sum):
            raise NotImplementedError(f"reducescatter with op={call.op.name} has no gradient")
        # Horovod's definition, which counts the ranks for a sum and not for an average.
        whole = allgather(gradient, process_set=ctx.process_set)
        factor = call.prescale * call.postscale
        if call.op is Sum:
            factor *= ctx.process_set.size()
        return whole * factor, None, None


def reducescatter(
    tensor: Tensor,
    name: str | None = None,  # noqa: ARG001
    compression: Any = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks and give each rank its rows of the result.

    Parameters
    ----------
    tensor
        Of the same shape and type on every rank, with at least one dimension.
    name, compression, op, process_set, prescale_factor, postscale_factor
        As in :func:`allreduce`.

    Returns
    -------
    Tensor
        A new tensor of the next ``tensor.shape[0] / size`` rows for each rank in turn. Where that
        leaves a rest, the first ranks get one row more.
    """
    sent, context = compression.compress(tensor)
    call = call_of(
        "reducescatter",
        [sent],
        op=chosen_op(op),
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )
    part = _ReduceScatter.apply(sent, call, process_set)
    return compression.decompress(part, context)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`grouped_reducescatter`; the handle gives its result."""
    return together(
        reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor)
        for tensor in tensors
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Do :func:`reducescatter` for each of `tensors`, and return the list of the results."""
    return [
        reducescatter(tensor, name, compression, op, process_set, prescale_factor, postscale_factor)
        for tensor in tensors
    ]
