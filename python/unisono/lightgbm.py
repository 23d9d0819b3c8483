"""LightGBM's distributed learning over unisono, through ``LGBM_NetworkInitWithFunctions``.

LightGBM calls two functions that it is given: one gathers blocks of bytes from all ranks, the other
sends each rank its block of a buffer and reduces what arrives. The reduction is a function of
LightGBM's own, over records that only it knows, so blocks travel as bytes, each rank receives its
block from every other at once, and they are reduced in the order of ranks: every training gives the
same bits.

LightGBM keeps its network for each thread; the thread that calls :func:`init` is the one that makes
data sets and trains. Its functions cannot fail. When an operation does, LightGBM goes on to the end
of its call with what this rank has, and then the call raises what happened.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from lightgbm.basic import _LIB

import unisono

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["communicator", "init", "shutdown"]

_Bytes = ctypes.c_void_p
_Size = ctypes.c_int32
_Sizes = ctypes.POINTER(_Size)
# input, output, bytes of a record, bytes in all: adds the input to the output.
_Reducer = ctypes.CFUNCTYPE(None, _Bytes, _Bytes, ctypes.c_int, _Size)
_AllGather = ctypes.CFUNCTYPE(None, _Bytes, _Size, _Sizes, _Sizes, ctypes.c_int, _Bytes, _Size)
# The last one is a reference to a pointer to the reducer.
_ReduceScatter = ctypes.CFUNCTYPE(
    None, _Bytes, _Size, ctypes.c_int, _Sizes, _Sizes, ctypes.c_int, _Bytes, _Size,
    ctypes.POINTER(_Bytes),
)  # fmt: skip
# What communicates, of all that a call of LightGBM's Python package may be.
_CALLS = (
    *("LGBM_BoosterCreate", "LGBM_BoosterAddValidData", "LGBM_BoosterResetTrainingData"),
    *("LGBM_BoosterUpdateOneIter", "LGBM_BoosterUpdateOneIterCustom", "LGBM_BoosterRefit"),
    *("LGBM_BoosterGetEval", "LGBM_BoosterResetParameter", "LGBM_BoosterRollbackOneIter"),
    *("LGBM_DatasetCreateFromMat", "LGBM_DatasetCreateFromMats", "LGBM_DatasetCreateFromCSR"),
    *("LGBM_DatasetCreateFromCSC", "LGBM_DatasetCreateFromFile", "LGBM_DatasetCreateFromArrow"),
    "LGBM_DatasetCreateFromSampledColumn",
)


class _Network:
    """A communicator, and the functions that LightGBM calls."""

    def __init__(self, comm: unisono.Communicator, owned: bool) -> None:
        self.comm = comm
        self.owned = owned
        self.failure: BaseException | None = None
        self.received: NDArray[np.uint8] = np.empty(0, np.uint8)
        # LightGBM keeps no reference.
        self.all_gather = _AllGather(self._all_gather)
        self.reduce_scatter = _ReduceScatter(self._reduce_scatter)

    def _all_gather(
        self,
        source: int,
        length: int,
        starts: Any,
        lengths: Any,
        count: int,
        target: int,
        size: int,
    ) -> None:
        # The input may be the beginning of the output.
        mine = _bytes_at(source, length).copy()
        blocks = _Blocks(starts, lengths, count)

        def gather() -> None:
            whole = _bytes_at(target, size)
            if blocks.are_dense:
                self.comm.all_gather_v(mine, blocks.lengths, out=whole[: blocks.end])
                return
            gathered = self.comm.all_gather_v(mine, blocks.lengths)
            position = 0
            for start, block in zip(blocks.starts, blocks.lengths, strict=True):
                whole[start : start + block] = gathered[position : position + block]
                position += block

        def go_on() -> None:
            whole = _bytes_at(target, size)
            for start, block in zip(blocks.starts, blocks.lengths, strict=True):
                # As if every rank had what this one has, so that LightGBM finds what it can read.
                part = min(block, length)
                whole[start : start + part] = mine[:part]
                whole[start + part : start + block] = 0

        self._do(gather, go_on)

    def _reduce_scatter(
        self, source: int, length: int, record: int, starts: Any, lengths: Any, count: int,
        target: int, size: int, reducer: Any,
    ) -> None:  # fmt: skip
        blocks = _Blocks(starts, lengths, count)
        whole = _bytes_at(source, length)
        rank = self.comm.rank
        own = blocks.lengths[rank]

        def reduce() -> None:
            if blocks.are_dense:
                sent = whole[: blocks.end]
            else:
                pairs = zip(blocks.starts, blocks.lengths, strict=True)
                sent = np.concatenate([whole[start : start + block] for start, block in pairs])
            received = self._room(own * count)
            self.comm.all_to_all_v(sent, blocks.lengths, [own] * count, out=received)
            _bytes_at(target, size)[:own] = received[:own]
            add = _Reducer(reducer[0])
            first = received.ctypes.data
            for place in range(1, count):
                add(first + place * own, target, record, own)

        def go_on() -> None:
            start = blocks.starts[rank]
            _bytes_at(target, size)[:own] = whole[start : start + own]

        self._do(reduce, go_on)

    def _room(self, size: int) -> NDArray[np.uint8]:
        if self.received.size < size:
            # Where peers on this host can write it directly.
            self.received = unisono.empty(size, np.uint8)
        return self.received[:size]

    def _do(self, operation: Callable[[], None], go_on: Callable[[], None]) -> None:
        if self.failure is None:
            try:
                operation()
                return
            except BaseException as failure:
                self.failure = failure
                # At once, for what LightGBM does next may not end well.
                print(f"unisono.lightgbm: {failure}", file=sys.stderr, flush=True)
                # An interrupt is this rank's alone: the others must not wait for it.
                self.comm.abort(f"rank {self.comm.rank} stopped: {failure}")
        go_on()


class _Blocks:
    """Where the block of each rank lies in a buffer, in bytes."""

    def __init__(self, starts: Any, lengths: Any, count: int) -> None:
        self.starts: Sequence[int] = starts[:count]
        self.lengths: Sequence[int] = lengths[:count]
        self.end = sum(self.lengths)
        ends = [start + block for start, block in zip(self.starts, self.lengths, strict=True)]
        self.are_dense = [0, *ends[:-1]] == list(self.starts)


def _bytes_at(address: int | None, size: int) -> NDArray[np.uint8]:
    """Return the memory at an address as an array, which does not own it."""
    if not address or size == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


_network: _Network | None = None


def init(
    comm: unisono.Communicator | None = None, tree_learner: str = "data"
) -> dict[str, str | int | bool]:
    """Have LightGBM's distributed learning run over unisono, in this thread.

    Parameters
    ----------
    comm
        The group that trains together. None makes one of all ranks of the job, by
        ``unisono.init()``. No other operation of it may run while LightGBM trains.
    tree_learner
        How features are chosen: "data" sums the histograms of all, "voting" those of the features
        that most ranks find best. Either way each rank has rows of its own.

    Returns
    -------
    dict
        Parameters to add to one's own, of data sets and of the training:
        ``lightgbm.train({**mine, **added}, data)``. Empty for one rank, which trains by itself.

    Raises
    ------
    ValueError
        There is no such tree learner.
    RuntimeError
        It runs already; :func:`shutdown` ends that.
    unisono.Error
        The other ranks did not come.
    """
    global _network  # noqa: PLW0603
    if tree_learner not in ("data", "voting"):
        # "feature" is refused by LightGBM's own interface for C.
        raise ValueError(f"tree_learner={tree_learner!r} is neither data nor voting")
    if _network is not None:
        raise RuntimeError("unisono.lightgbm runs already; call shutdown() first")
    network = _Network(unisono.init() if comm is None else comm, owned=comm is None)
    size, rank = network.comm.size, network.comm.rank
    if size > 1:
        for name in _CALLS:
            if hasattr(_LIB, name):
                getattr(_LIB, name).errcheck = _raise_failure
        if _LIB.LGBM_NetworkInitWithFunctions(
            ctypes.c_int(size), ctypes.c_int(rank), network.reduce_scatter, network.all_gather
        ):
            raise RuntimeError(f"LightGBM: {_last_error()}")
    _network = network
    if size == 1:
        return {}
    return {
        "num_machines": size,
        "tree_learner": tree_learner,
        "pre_partition": True,
    }


def communicator() -> unisono.Communicator:
    """Return the group that trains together. RuntimeError before ``init``."""
    if _network is None:
        raise RuntimeError("call unisono.lightgbm.init() first")
    return _network.comm


def shutdown() -> None:
    """Take unisono out of LightGBM, in the thread of ``init``; close a group that ``init`` made."""
    global _network
    if _network is None:
        return
    leaving, _network = _network, None
    if leaving.comm.size > 1:
        _LIB.LGBM_NetworkFree()
    if leaving.owned:
        leaving.comm.close()


def _raise_failure(result: Any, _function: Any, _arguments: Any) -> Any:
    """Raise what failed during a call of LightGBM, now that it has returned."""
    if _network is not None and _network.failure is not None:
        raise _network.failure
    return result


def _last_error() -> str:
    _LIB.LGBM_GetLastError.restype = ctypes.c_char_p
    return str(_LIB.LGBM_GetLastError().decode())
