"""How a call of this module becomes operations of ``torch.distributed``, and a handle.

Calls that the ranks of the job have started together are remembered, so that a rank which has run
out of data can take part in the calls of the others (see ``_join``).
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.horovod.torch import _announcements
from unisono.horovod.torch._call import TORCH_OPS, Call, HorovodInternalError, ReduceOp
from unisono.horovod.torch._world import ProcessSet, World, global_process_set, world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# How long a rank waits before it asks whether the one it waits for has joined.
_PATIENCE = timedelta(milliseconds=200)


class Handle:
    """An operation under way; :func:`synchronize` waits for its result.

    The tensors of the operation are kept alive, and must not be changed until it is done.
    """

    def __init__(
        self, works: Sequence[Any], finish: Callable[[], Any], device: torch.device
    ) -> None:
        self._works = list(works)
        self._device = device
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        """Return whether the operation has ended, well or not."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> Any:
        """Wait for the end and return the result; of a second call the same one."""
        for work in self._works:
            wait(work, self._device)
        self._works = []
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


def together(handles: Iterable[Handle]) -> Handle:
    """Return one handle for several, which gives the list of what they give."""
    started = list(handles)
    device = started[0]._device if started else torch.device("cpu")
    works = [work for handle in started for work in handle._works]
    return Handle(works, lambda: [handle.result() for handle in started], device)


def poll(handle: Handle) -> bool:
    """Return whether an operation has ended, so that ``synchronize`` does not block."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return what it gives: a tensor, a list of them, or a pair.

    Raises
    ------
    HorovodInternalError
        The operation failed: a rank is gone, late, or called something else.
    """
    return handle.result()


def wait(work: Any, device: torch.device) -> None:
    """Wait for `work` of torch, and serve ranks that have joined while it takes long.

    On a device a wait only orders streams and a limit would block the host, so there is none.
    """
    here = world()
    limits = (_PATIENCE,) if device.type == "cpu" else ()
    while True:
        # Looked at before: an operation may end between the end of a wait and a look.
        has_ended = work.is_completed()
        try:
            work.wait(*limits)
            return
        except dist.DistError as error:
            # Where the operation goes on, only the patience of this call has ended.
            if not limits or has_ended:
                raise HorovodInternalError(str(error)) from error
        if not work.is_completed():
            _announcements.announce(here)


def group_of(process_set: ProcessSet) -> Any:
    """Return torch's process group of a set.

    Raises
    ------
    ValueError
        The set is not known, or this rank does not belong to it.
    """
    if not process_set.included():
        raise ValueError(f"rank {world().rank} is not in {process_set}")
    return process_set._group


def start(call: Call, process_set: ProcessSet, launch: Callable[[Any], Handle]) -> Handle:
    """Start an operation: `launch` gets torch's group and returns the handle."""
    here = world()
    group = group_of(process_set)
    with here.lock:
        if process_set is global_process_set:
            remember(here, call)
            _announcements.publish(here)
        try:
            return launch(group)
        except dist.DistError as error:
            raise HorovodInternalError(str(error)) from error


def remember(here: World, call: Call) -> None:
    """Count a call of all ranks."""
    here.recent.append((here.sequence, call))
    here.sequence += 1


def scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place; integers are rounded toward zero."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))


def reduce_all(
    tensors: list[Tensor], call: Call, group: Any
) -> tuple[list[Any], Callable[[], None]]:
    """Reduce `tensors` in place, all in one operation.

    Returns the works to wait for, and what to do after them.
    """
    flat = []
    for tensor in tensors:
        scale(tensor, call.prescale)
        flat.append(tensor.contiguous())
    works = _launch_reduce(flat, TORCH_OPS[call.op], group)

    def finish() -> None:
        for tensor, reduced in zip(tensors, flat, strict=True):
            if reduced is not tensor:
                tensor.copy_(reduced)
            scale(tensor, call.postscale)

    return works, finish


def _launch_reduce(tensors: list[Tensor], op: Any, group: Any) -> list[Any]:
    if len(tensors) == 1:
        return [dist.all_reduce(tensors[0], op, group, async_op=True)]
    if not tensors:
        return []
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op
    options.asyncOp = True
    chosen = group if group is not None else dist.group.WORLD
    return [chosen.allreduce_coalesced(tensors, options)]


def exchange_rows(rows: int, like: Tensor, group: Any) -> list[int]:
    """Tell all ranks of `group` how many rows this one brings; return how many each does."""
    mine = torch.tensor([rows], dtype=torch.int64, device=like.device)
    counts = mine.new_empty(dist.get_world_size(group))
    wait(dist.all_gather_into_tensor(counts, mine, group, async_op=True), like.device)
    return [int(count) for count in counts.tolist()]


def rows_of(tensor: Tensor, what: str) -> int:
    """Return the first dimension. ValueError for a tensor without dimensions."""
    if tensor.dim() == 0:
        raise ValueError(f"{what} needs at least one dimension; use tensor.reshape(1)")
    rows: int = tensor.shape[0]
    return rows


def neutral(shape: tuple[int, ...], dtype: torch.dtype, op: ReduceOp) -> Tensor:
    """Return the tensor that changes nothing when it is reduced with others."""
    if op is ReduceOp.PRODUCT:
        return torch.ones(shape, dtype=dtype)
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return torch.zeros(shape, dtype=dtype)
    if dtype.is_floating_point:
        return torch.full(shape, math.inf if op is ReduceOp.MIN else -math.inf, dtype=dtype)
    if dtype is torch.bool:
        return torch.full(shape, op is ReduceOp.MIN)
    limits = torch.iinfo(dtype)
    return torch.full(shape, limits.max if op is ReduceOp.MIN else limits.min, dtype=dtype)
