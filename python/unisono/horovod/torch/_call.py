"""The description of an operation: all that the ranks have in common.

Horovod matches the calls of different ranks by their names; here the order decides, as everywhere
in unisono.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class HorovodInternalError(RuntimeError):
    """An operation failed for a reason that is not in its arguments; the group is dead."""


class ReduceOp(enum.IntEnum):
    """How values of different ranks become one."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average: Final = ReduceOp.AVERAGE
Sum: Final = ReduceOp.SUM
Adasum: Final = ReduceOp.ADASUM
Min: Final = ReduceOp.MIN
Max: Final = ReduceOp.MAX
Product: Final = ReduceOp.PRODUCT

TORCH_OPS = {
    ReduceOp.AVERAGE: dist.ReduceOp.AVG,
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


def chosen_op(op: ReduceOp | int | None, average: bool | None = None) -> ReduceOp:
    """Return the operator that `op` and the older `average` ask for; Average if neither is given.

    Raises
    ------
    ValueError
        Both are given, or there is no such operator.
    NotImplementedError
        It is Adasum.
    """
    if average is not None:
        if op is not None:
            raise ValueError("average= is the older form of op=; give one of them")
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    chosen = ReduceOp.AVERAGE if op is None else ReduceOp(op)
    if chosen is ReduceOp.ADASUM:
        raise NotImplementedError("unisono has no Adasum; use op=Average or op=Sum")
    return chosen


@dataclass(frozen=True)
class Call:
    """The parameters of an operation that all ranks must give alike when they start it.

    ``shapes`` and ``dtypes`` have an entry for each tensor; of an operation to which ranks bring
    different numbers of rows, the first dimension is this rank's own.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    can_join: bool = True


def call_of(kind: str, tensors: Sequence[Tensor], **parameters: Any) -> Call:
    """Return the call of an operation on `tensors`."""
    return Call(
        kind,
        tuple(tuple(tensor.shape) for tensor in tensors),
        tuple(tensor.dtype for tensor in tensors),
        **parameters,
    )
