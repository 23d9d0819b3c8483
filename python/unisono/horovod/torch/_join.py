"""``join``: a rank that has run out of data takes part in what the others still call.

Horovod's background threads agree about every operation before it runs. unisono has none, and a
call costs nothing beside the operation itself, so a rank that joins must learn in another way what
the others call. It says in the store of the job how many calls it has made and that it has joined.
A rank that waits for an operation longer than usual looks there, and from then on writes into the
store what it calls (:class:`~unisono.horovod.torch._call.Call`): first what the joined rank has
missed, then each call before it starts. The joined rank reads that and starts the same operations
with tensors that change nothing. Calls are numbered alike on all ranks, so the last rank to join
ends it: no call has a number beyond those that any rank had made by then.
"""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING

from unisono.horovod.torch import _announcements, _exchanges, _reductions
from unisono.horovod.torch._call import Call, HorovodInternalError, ReduceOp
from unisono.horovod.torch._calls import Handle, neutral
from unisono.horovod.torch._world import global_process_set, world

if TYPE_CHECKING:
    from unisono.horovod.torch._world import World

# How often a joined rank looks for the next call: at first, and after a while without one.
_PAUSES = (0.001, 0.05)


def join(device: int = -1) -> int:  # noqa: ARG001
    """Say that this rank has no more data, and take part in what others call until all have joined.

    To sums and averages it contributes zeros, and averages still count it; to minima, maxima and
    products what changes nothing; to gathers no rows. Others keep calling for as long as they have
    data; call it on every rank in the end.

    Parameters
    ----------
    device
        Not used: joining is for tensors of the CPU.

    Returns
    -------
    int
        The last rank that joined, on every rank.

    Raises
    ------
    HorovodInternalError
        Others called what a rank without data cannot take part in: a broadcast from it, a sparse
        allreduce, an operation on a device.
    """
    here = world()
    with here.lock:
        here.store.set(_announcements.key(here, f"rank/{here.rank}"), str(here.sequence))
        if here.store.add(_announcements.key(here, "count"), 1) == here.size:
            here.store.set(_announcements.key(here, "last"), str(here.rank))
        last = _follow(here)
        here.epoch += 1
        here.joined, here.published = 0, -1
        here.recent.clear()
    return last


def _follow(here: World) -> int:
    pause, longest = _PAUSES
    while True:
        _announcements.announce(here)
        key = _announcements.key(here, f"call/{here.sequence}")
        if here.store.check([key]):
            _take_part(pickle.loads(here.store.get(key)))
            pause = _PAUSES[0]
        elif here.joined == here.size and here.sequence >= max(_announcements.positions(here)):
            return int(here.store.get(_announcements.key(here, "last")))
        else:
            time.sleep(pause)
            pause = min(pause * 1.5, longest)


def _take_part(call: Call) -> None:
    """Start the call of another rank with nothing to contribute, and wait for its end."""
    here = world()
    if not call.can_join:
        raise HorovodInternalError(f"a rank that has joined cannot take part in {call.kind}")
    if call.kind == "broadcast" and call.root == here.rank:
        raise HorovodInternalError("a rank that has joined has nothing to broadcast")
    handle = _start(call)
    if handle is not None:
        handle.result()


def _start(call: Call) -> Handle | None:
    op = call.op if call.kind in ("allreduce", "reducescatter") else ReduceOp.SUM
    shapes = call.shapes
    if call.kind in ("allgather", "alltoall"):
        shapes = tuple((0, *shape[1:]) for shape in shapes)
    tensors = [neutral(*both, op) for both in zip(shapes, call.dtypes, strict=True)]
    if call.kind == "allreduce":
        return _reductions.reduce_together(tensors, call, global_process_set)
    if call.kind == "reducescatter":
        return _reductions.scatter_sum(tensors[0], call, global_process_set)
    if call.kind == "allgather":
        return _exchanges.allgather_async(tensors[0])
    if call.kind == "broadcast":
        return _exchanges.broadcast_async_(tensors[0], call.root)
    if call.kind == "alltoall":
        return _exchanges.alltoall_async(tensors[0])
    _exchanges.barrier()
    return None
