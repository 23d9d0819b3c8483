"""Objects, pickled, between the ranks of a communicator: the methods `..._object` of it.

Objects travel as bytes, those of collectives after their lengths. A receive probes for the length,
so that an object is one message; two threads must not receive objects of one tag at the same time.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.errors import InvalidArgumentError

Bytes = npt.NDArray[np.uint8]


def all_gather(comm: Any, value: Any) -> list[Any]:
    """Return the objects of all ranks."""
    mine = _pickled(value)
    lengths = comm.all_gather(np.array([mine.size])).ravel().tolist()
    return _apart(comm.all_gather_v(mine, lengths), lengths)


def gather(comm: Any, value: Any, root: int) -> list[Any] | None:
    """Return the objects of all ranks on `root`."""
    mine = _pickled(value)
    lengths = comm.all_gather(np.array([mine.size])).ravel().tolist()
    together = comm.gather_v(mine, lengths, root)
    return _apart(together, lengths) if comm.rank == root else None


def broadcast(comm: Any, value: Any, root: int) -> Any:
    """Return the object of `root`."""
    data = _pickled(value) if comm.rank == root else np.empty(0, np.uint8)
    length = comm.broadcast(np.array([data.size]), root)
    if comm.rank == root:
        comm.broadcast(data.copy(), root)
        return value
    return _value(comm.broadcast(np.empty(length[0], np.uint8), root))


def scatter(comm: Any, values: Sequence[Any] | None, root: int) -> Any:
    """Return this rank's of the objects of `root`."""
    lengths, together = np.zeros(comm.size, np.int64), None
    if comm.rank == root:
        if values is None or len(values) != comm.size:
            there = "None" if values is None else f"{len(values)} objects"
            raise InvalidArgumentError(
                f"scatter_object: the root gives {there} for {comm.size} ranks"
            )
        pickled = [_pickled(value) for value in values]
        lengths[:] = [data.size for data in pickled]
        together = np.concatenate(pickled)
    counts = comm.broadcast(lengths, root).tolist()
    mine = np.empty(counts[comm.rank], np.uint8)
    comm.scatter_v(together, counts, root, out=mine)
    return _value(mine)


def send(comm: Any, value: Any, dest: int, tag: int) -> None:
    """Send an object."""
    comm.send(_pickled(value), dest, tag)


def receive(comm: Any, source: int, tag: int) -> Any:
    """Receive an object."""
    message = comm.probe(source, tag)
    data = np.empty(message.count, message.dtype)
    comm.recv(data, message.source, tag)
    return _value(data)


def _pickled(value: Any) -> Bytes:
    return np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)


def _value(data: Bytes) -> Any:
    return pickle.loads(data.data)


def _apart(together: Bytes, lengths: list[int]) -> list[Any]:
    ends = np.cumsum(lengths)
    return [_value(part) for part in np.split(together, ends[:-1])]
