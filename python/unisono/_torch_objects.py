"""Object collectives of torch in one round, for groups on unisono.

torch sends the sizes of the pickled objects first and the objects after them. Schedulers and
checkpoints send small objects, and a round costs more than its bytes. So the first round carries
the size and the bytes of each small object in an envelope of fixed size. A larger object follows by
itself: in a broadcast or all_gather by one more of those, in a gather or scatter as a message
between the two ranks that know of it.

The envelope's size follows from the number of ranks alone, so all ranks agree on it. Groups on
anything else, and objects that torch would send through a GPU, go to torch's own functions.
"""

from __future__ import annotations

import functools
import inspect
import io
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

_HEADER = 8  # bytes of an object's size
_INLINE = 4096  # the largest object that an envelope holds
_ALL_ENVELOPES = 1 << 18  # bytes that a rank gets in envelopes where it gets one of every rank
# Of a message after an envelope. The program's own messages have tags of its choice, mostly 0.
_TAG = 0x6F626A73


def serve(dist: Any, c10d: Any, is_ours: Callable[[Any], bool]) -> None:
    """Replace torch's object collectives for the groups for which `is_ours` is true."""
    for ours in (broadcast_object_list, all_gather_object, gather_object, scatter_object_list):
        function = _in_place_of(getattr(c10d, ours.__name__), ours, c10d, is_ours)
        setattr(c10d, ours.__name__, function)
        setattr(dist, ours.__name__, function)


def _in_place_of(
    original: Any, ours: Any, c10d: Any, is_ours: Callable[[Any], bool]
) -> Callable[..., Any]:
    """Return torch's function `original`, which calls `ours` for the groups that it serves."""
    parameters = list(inspect.signature(original).parameters)
    group_at = parameters.index("group")
    device_at = parameters.index("device") if "device" in parameters else len(parameters)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        device = args[device_at] if len(args) > device_at else kwargs.get("device")
        if (
            c10d._rank_not_in_group(group)
            or not is_ours(group)
            or c10d._get_object_coll_device(group) != "cpu"
            or not _is_cpu(device)
        ):
            return original(*args, **kwargs)
        try:
            return ours(c10d, *args, **kwargs)
        except _RefusedError:
            return original(*args, **kwargs)

    return function


class _RefusedError(Exception):
    """Arguments that torch refuses, in its own words."""


def _is_cpu(device: Any) -> bool:
    return device is None or getattr(device, "type", device) == "cpu"


def broadcast_object_list(
    c10d: Any,
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,  # noqa: ARG001 -- looked at by the caller
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """One broadcast: how many objects there are, and their sizes and bytes if it holds them all.

    It is as long whatever the lengths of the lists are, so that a rank with another one hears of it
    in a group that works afterwards.
    """
    group, root, rank = _root(c10d, group, src, group_src)
    header = 2 * _HEADER
    envelope = np.zeros(header + _INLINE, np.uint8)
    if rank == root:
        packed = [_pack(c10d, each, weights_only) for each in object_list]
        lengths = np.array([len(each) for each in packed], np.int64)
        together = lengths.tobytes() + b"".join(packed)
        envelope[:header].view(np.int64)[:] = len(packed), len(together)
        if len(together) <= _INLINE:
            _put(envelope, header, together)
    c10d.broadcast(_tensor(envelope), group_src=root, group=group)
    count, total = (int(each) for each in envelope[:header].view(np.int64))
    data = envelope[header:]
    if total > _INLINE:
        data = np.empty(total, np.uint8)
        if rank == root:
            _put(data, 0, together)
        c10d.broadcast(_tensor(data), group_src=root, group=group)
    if rank == root:
        return
    if len(object_list) != count:
        ranks = [c10d.get_global_rank(group, each) for each in (root, rank)]
        raise ValueError(
            f"broadcast_object_list: rank {ranks[0]} has sent {count} objects, and rank "
            f"{ranks[1]} has a list of {len(object_list)}; pass a list of the same length on every "
            f"rank, [None] * {count} where nothing is known of them"
        )
    sizes = data[: _HEADER * count].view(np.int64)
    ends = _HEADER * count + np.cumsum(sizes)
    for number, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        object_list[number] = _unpack(c10d, data[end - size : end], weights_only)


def all_gather_object(
    c10d: Any, object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False
) -> None:
    """One all_gather: of every rank the size of its object, and the object if it is small."""
    world = c10d.get_world_size(group)
    packed = _pack(c10d, obj, weights_only)
    inline = min(_INLINE, max(_ALL_ENVELOPES // world, 64) // 8 * 8)
    mine = _envelope(packed, inline)
    table = np.empty((world, len(mine)), np.uint8)
    # Its name before torch 2.14.
    gather = getattr(c10d, "all_gather_single", None) or c10d.all_gather_into_tensor
    gather(_tensor(table.reshape(-1)), _tensor(mine), group=group)
    sizes = [_size(row) for row in table]
    data, largest = table[:, _HEADER:], max(sizes)
    if largest > inline:
        whole = np.zeros(largest, np.uint8)
        _put(whole, 0, packed)
        data = np.empty((world, largest), np.uint8)
        gather(_tensor(data.reshape(-1)), _tensor(whole), group=group)
    rows = [data[rank, :size] for rank, size in enumerate(sizes)]
    _fill(c10d, object_list, rows, weights_only, "all_gather_object")


def gather_object(
    c10d: Any,
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """One gather of envelopes; the ranks with a larger object send it to the root after that."""
    group, root, rank = _root(c10d, group, dst, group_dst)
    c10d._validate_output_list_for_rank(rank, root, object_gather_list)
    packed = _pack(c10d, obj, weights_only)
    mine = _tensor(_envelope(packed, _INLINE))
    if rank != root:
        c10d.gather(mine, group_dst=root, group=group)
        if len(packed) > _INLINE:
            c10d.send(_tensor(_array(packed)), group_dst=root, group=group, tag=_TAG)
        return
    table = [np.empty(len(mine), np.uint8) for _ in range(group.size())]
    c10d.gather(mine, [_tensor(row) for row in table], group_dst=root, group=group)
    rows = []
    for other, row in enumerate(table):
        data = row[_HEADER : _HEADER + _size(row)]
        if other == root:
            data = _array(packed)
        elif _size(row) > _INLINE:
            data = _received(c10d, _size(row), other, group)
        rows.append(data)
    assert object_gather_list is not None  # torch's check above
    _fill(c10d, object_gather_list, rows, weights_only, "gather_object")


def scatter_object_list(
    c10d: Any,
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """One scatter of envelopes; a larger object follows as a message to the rank that it is for."""
    group, root, rank = _root(c10d, group, src, group_src)
    if (
        not isinstance(scatter_object_output_list, list)
        or not scatter_object_output_list
        or (rank == root and scatter_object_input_list is None)
    ):
        raise _RefusedError
    mine = np.empty(_HEADER + _INLINE, np.uint8)
    if rank == root:
        packed = [_pack(c10d, each, weights_only) for each in scatter_object_input_list or ()]
        rows = [_tensor(_envelope(each, _INLINE)) for each in packed]
        c10d.scatter(_tensor(mine), rows, group_src=root, group=group)
        works = [
            c10d.isend(_tensor(_array(each)), group_dst=other, group=group, tag=_TAG)
            for other, each in enumerate(packed)
            if other != root and len(each) > _INLINE
        ]
        for work in works:
            work.wait()
        data = _array(packed[rank])
    else:
        c10d.scatter(_tensor(mine), group_src=root, group=group)
        size = _size(mine)
        data = mine[_HEADER : _HEADER + size]
        if size > _INLINE:
            data = _received(c10d, size, root, group)
    scatter_object_output_list[0] = _unpack(c10d, data, weights_only)


def _root(c10d: Any, group: Any, root: int | None, group_root: int | None) -> tuple[Any, int, int]:
    """Return the group, and in it the root's rank and this one."""
    group = c10d._group_or_default_group(group)
    if root is None and group_root is None:
        root = 0
    group_root = c10d._canonicalize_group_rank(group, root, group_root, return_global=False)
    return group, group_root, group.rank()


def _fill(
    c10d: Any, object_list: list[Any], rows: list[Bytes], weights_only: bool, operation: str
) -> None:
    """Put what every rank has sent into the caller's list."""
    if len(object_list) < len(rows):
        raise ValueError(
            f"{operation}: the list has {len(object_list)} entries for a group of {len(rows)} "
            f"ranks; pass [None] * {len(rows)}"
        )
    for rank, row in enumerate(rows):
        object_list[rank] = _unpack(c10d, row, weights_only)


def _received(c10d: Any, size: int, source: int, group: Any) -> Bytes:
    data = np.empty(size, np.uint8)
    c10d.recv(_tensor(data), group_src=source, group=group, tag=_TAG)
    return data


def _envelope(packed: bytes, inline: int) -> Bytes:
    envelope = np.zeros(_HEADER + inline, np.uint8)
    envelope[:_HEADER].view(np.int64)[0] = len(packed)
    if len(packed) <= inline:
        _put(envelope, _HEADER, packed)
    return envelope


def _size(envelope: Bytes) -> int:
    return int(envelope[:_HEADER].view(np.int64)[0])


def _put(array: Bytes, at: int, data: bytes) -> None:
    array[at : at + len(data)] = np.frombuffer(data, np.uint8)


def _array(data: bytes) -> Bytes:
    return np.frombuffer(bytearray(data), np.uint8)


def _tensor(array: Bytes) -> Any:
    import torch

    return torch.from_numpy(array)


def _pack(c10d: Any, obj: Any, weights_only: bool) -> bytes:
    """Pickle as torch does."""
    stream = io.BytesIO()
    if weights_only:
        import torch

        torch.save(obj, stream)
    else:
        c10d._pickler(stream).dump(obj)
    return stream.getvalue()


def _unpack(c10d: Any, data: Bytes, weights_only: bool) -> Any:
    stream = io.BytesIO(data.tobytes())
    if weights_only:
        import torch

        return torch.load(stream, weights_only=True)
    return c10d._unpickler(stream).load()
