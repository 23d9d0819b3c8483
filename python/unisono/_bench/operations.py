"""The operations that are measured: their buffers, bus bandwidth, known values and calls.

Sizes are those of the whole, as in nccl-tests: the size of an all_gather is that of its result, and
its count is that of one rank's block. Values are small integers with a period, different on each
rank, so that every sum is exact and an element in the wrong place is a wrong element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unisono

OUT_OF_PLACE, IN_PLACE = "out_of_place", "in_place"
REDUCTIONS = ("sum", "prod", "min", "max", "avg")
#: Bytes of a cache line, where buffers begin.
_LINE = 64
#: The longest period of known values, a prime.
_PERIOD = 251
#: The largest integers up to which all are exact.
_EXACT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}

#: One call; the argument is the root, for operations that have one.
Call = Callable[[int], object]


@dataclass(frozen=True)
class Operation:
    """A collective, or messages between neighbours."""

    name: str
    #: Bus bandwidth / algorithm bandwidth for a number of ranks, as nccl-tests has it.
    factor: Callable[[int], float] = field(default=lambda world: (world - 1) / world)
    #: A rank gives, or takes, a block for each rank.
    gives_blocks: bool = False
    takes_blocks: bool = False
    reduces: bool = False
    is_rooted: bool = False
    #: The root alone has a result.
    is_to_root: bool = False
    #: The ranks whose values are in the result of a rank, from 0 on, by that rank and their number.
    contributors: Callable[[int, int], int] = field(default=lambda _rank, world: world)
    forms: tuple[str, ...] = (OUT_OF_PLACE,)

    def count(self, size: int, world: int, dtype: np.dtype[Any]) -> int:
        """Return the elements in a whole of about `size` bytes, or in one rank's block of it."""
        if self.name == "barrier":
            return 0
        return max(1, size // dtype.itemsize // self.parts(world))

    def parts(self, world: int) -> int:
        """Return in how many blocks the whole is divided."""
        return world if self.gives_blocks or self.takes_blocks else 1


def _once(_world: int) -> float:
    return 1.0


def _twice(world: int) -> float:
    return 2 * (world - 1) / world


_BOTH = (OUT_OF_PLACE, IN_PLACE)
OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", _twice, reduces=True, forms=_BOTH),
        # It has one array on each rank, so it is in place.
        Operation("broadcast", _once, is_rooted=True, forms=(IN_PLACE,)),
        Operation("all_gather", takes_blocks=True, forms=_BOTH),
        Operation("reduce_scatter", gives_blocks=True, reduces=True),
        Operation("all_to_all", gives_blocks=True, takes_blocks=True),
        Operation("reduce", _once, reduces=True, is_rooted=True, is_to_root=True, forms=_BOTH),
        Operation("gather", takes_blocks=True, is_rooted=True, is_to_root=True),
        Operation("scatter", gives_blocks=True, is_rooted=True),
        Operation("scan", _once, reduces=True, contributors=lambda rank, _: rank + 1, forms=_BOTH),
        Operation("exscan", _once, reduces=True, contributors=lambda rank, _: rank, forms=_BOTH),
        Operation("send_recv", _once),
        Operation("barrier", lambda _world: 0.0),
    )
}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the type of that name, whose sums can be checked.

    Raises
    ------
    ValueError
        There is no such type, or it is not one of numbers, or bfloat16 lacks its package.
    """
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ValueError("bfloat16 needs a package: pip install ml_dtypes") from None
        name = ml_dtypes.bfloat16
    try:
        dtype: np.dtype[Any] = np.dtype(name)
    except TypeError:
        raise ValueError(f"there is no type {name!r}") from None
    if dtype.kind not in "iu" and dtype.name not in _EXACT:
        raise ValueError(f"{name}: the types are {', '.join(_EXACT)} and integers")
    return dtype


class Known:
    """The values that each rank gives, and those that it must get.

    Each is a pattern: the first elements of an array that repeats them.
    """

    def __init__(self, world: int, dtype: np.dtype[Any], reduction: str) -> None:
        self.world, self.dtype, self.reduction = world, dtype, reduction
        exact = _EXACT.get(dtype.name) or np.iinfo(dtype).max
        self.period = max(2, min(_PERIOD, exact // world))

    def given(self, rank: int) -> NDArray[np.int64]:
        """Return the pattern that a rank gives."""
        index = np.arange(self.period)
        if self.reduction == "prod":
            # One rank alone has a 2 at an index, so that no product outgrows its type.
            return np.where(index % (self.world + 1) == rank, 2, 1)
        if self.reduction == "avg":
            # Every other rank has 2 less than the one before it, so the mean is exact.
            is_alone = rank == self.world - 1 and rank % 2 == 0
            return 1 + index % max(1, self.period - 2) + (0 if is_alone else 1 - 2 * (rank % 2))
        return (index + 31 * rank) % self.period

    def reduced(self, ranks: int) -> NDArray[Any]:
        """Return the pattern of the reduction over the first `ranks` ranks."""
        how: dict[str, np.ufunc] = {
            "sum": np.add,
            "avg": np.add,
            "prod": np.multiply,
            "min": np.minimum,
            "max": np.maximum,
        }
        result = self.given(0)
        for rank in range(1, ranks):
            result = how[self.reduction](result, self.given(rank))
        return result / ranks if self.reduction == "avg" else result

    def at(self, pattern: NDArray[Any], offset: int) -> NDArray[Any]:
        """Return a pattern as it goes on from an element of its array, in the type measured."""
        return np.roll(pattern, -(offset % self.period)).astype(self.dtype)


def fill(array: NDArray[Any], pattern: NDArray[Any]) -> None:
    """Repeat a pattern over an array of one dimension."""
    whole = len(array) // len(pattern) * len(pattern)
    array[:whole].reshape(-1, len(pattern))[:] = pattern
    array[whole:] = pattern[: len(array) - whole]


def wrong_values(array: NDArray[Any], pattern: NDArray[Any]) -> int:
    """Count the elements of an array of one dimension that do not repeat a pattern."""
    whole = len(array) // len(pattern) * len(pattern)
    rows = array[:whole].reshape(-1, len(pattern)) != pattern
    rest = array[whole:] != pattern[: len(array) - whole]
    return int(np.count_nonzero(rows)) + int(np.count_nonzero(rest))


@dataclass
class Cell:
    """One rank's part in an operation of one size, in one form, with buffers of its own."""

    operation: Operation
    form: str
    rank: int
    world: int
    count: int
    known: Known
    is_in_heap: bool = False

    def __post_init__(self) -> None:
        blocks = self.count * self.world
        given = blocks if self.operation.gives_blocks else self.count
        taken = blocks if self.operation.takes_blocks else self.count
        self.taken = self._buffer(taken)
        if self.form == OUT_OF_PLACE:
            self.given = self._buffer(given)
        else:
            own = self.rank * self.count if self.operation.takes_blocks else 0
            self.given = self.taken[own : own + given]
        self.clear()

    def _buffer(self, count: int) -> NDArray[Any]:
        dtype = self.known.dtype
        if self.is_in_heap:
            return unisono.empty(count, dtype=dtype)
        room = np.empty(count * dtype.itemsize + _LINE, np.uint8)
        start = -room.ctypes.data % _LINE
        return room[start : start + count * dtype.itemsize].view(dtype)

    def clear(self) -> None:
        """Write zeros: their sums in place stay finite."""
        self.given[:] = 0
        self.taken[:] = 0

    def prepare(self) -> None:
        """Write the values that this rank gives."""
        # A result that does not come must not be right by what was there before.
        if self.form == OUT_OF_PLACE or self.operation.takes_blocks:
            self.taken[:] = np.asarray(self.known.period + 1).astype(self.known.dtype)
        fill(self.given, self.known.at(self.known.given(self.rank), 0))

    def wrong(self, root: int) -> int:
        """Count the elements of the result on this rank that are not as they must be."""
        has_result = self._contributors() > 0
        if self.count == 0 or not has_result or (self.operation.is_to_root and self.rank != root):
            return 0
        offset = self.rank * self.count if self.operation.gives_blocks else 0
        return sum(
            wrong_values(part, self.known.at(pattern, offset))
            for part, pattern in zip(
                self.taken.reshape(-1, self.count), self._expected(root), strict=True
            )
        )

    def _contributors(self) -> int:
        return self.operation.contributors(self.rank, self.world)

    def _expected(self, root: int) -> Iterable[NDArray[Any]]:
        if self.operation.reduces:
            return [self.known.reduced(self._contributors())]
        if self.operation.takes_blocks:
            return (self.known.given(rank) for rank in range(self.world))
        source = root if self.operation.is_rooted else (self.rank - 1) % self.world
        return [self.known.given(source)]


def call(comm: unisono.Communicator, cell: Cell) -> Call:
    """Return the call of unisono for a cell."""
    rank, world = cell.rank, cell.world
    given, taken, op = cell.given, cell.taken, cell.known.reduction
    is_in_place = cell.form == IN_PLACE
    out = None if is_in_place else taken

    def on(root: int, array: NDArray[Any] | None) -> NDArray[Any] | None:
        return array if rank == root else None

    def reducing(method: Callable[..., object]) -> Call:
        if out is None:
            return lambda _: method(given, op)
        return lambda _: method(given, op, out=out)

    def send_recv(_: int) -> object:
        return comm.sendrecv(given, (rank + 1) % world, taken, (rank - 1) % world)

    calls: dict[str, Call] = {
        "all_reduce": reducing(comm.all_reduce),
        "scan": reducing(comm.scan),
        "exscan": reducing(comm.exscan),
        "broadcast": lambda root: comm.broadcast(taken, root),
        "all_gather": lambda _: comm.all_gather(given, out=taken),
        "reduce_scatter": lambda _: comm.reduce_scatter(given, op, out=taken),
        "all_to_all": lambda _: comm.all_to_all(given, out=taken),
        "reduce": lambda root: comm.reduce(given, op, root, out=on(root, out)),
        "gather": lambda root: comm.gather(given, root, out=on(root, taken)),
        "scatter": lambda root: comm.scatter(on(root, given), root, out=taken),
        "send_recv": send_recv,
        "barrier": lambda _: comm.barrier(),
    }
    return calls[cell.operation.name]
