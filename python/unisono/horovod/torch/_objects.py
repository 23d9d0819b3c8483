"""Parameters, the state of optimizers and any object, from one rank to all or from all to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.horovod.torch._exchanges import allgather, broadcast_async_
from unisono.horovod.torch._world import ProcessSet, global_process_set, world


class _Place:
    """Stands for a tensor in what is pickled; the tensor is broadcast by itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int
) -> None:
    """Give every rank the parameters of one, in place.

    Parameters
    ----------
    params
        ``model.state_dict()`` or ``model.named_parameters()``, with the same shapes on all ranks.
        None is passed over.
    root_rank
        The rank that has the values.

    Raises
    ------
    ValueError
        Something in `params` is no tensor.
    """
    pairs = params.items() if isinstance(params, Mapping) else params
    handles = []
    for name, parameter in pairs:
        if parameter is None:
            continue
        if not isinstance(parameter, Tensor):
            raise ValueError(f"{name!r} is a {type(parameter).__name__}, not a tensor")
        handles.append(broadcast_async_(parameter, root_rank))
    for handle in handles:
        handle.result()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,  # noqa: ARG001
) -> None:
    """Give the optimizer of every rank the state of one, with its learning rates and the like.

    Parameters
    ----------
    optimizer
        The same kind of optimizer with the same parameters on every rank. It may be new on some and
        have taken steps on others.
    root_rank
        The rank that has the state.
    model
        Not used.
    """
    tensors: list[Tensor] = []
    is_root = world().rank == root_rank
    skeleton = _take_out(optimizer.state_dict(), tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank)
    if not is_root:
        state = _put_in(skeleton, tensors)
    handles = [broadcast_async_(tensor, root_rank) for tensor in tensors]
    for handle in handles:
        handle.result()
    if not is_root:
        optimizer.load_state_dict(state)


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` with a place for each tensor, and append those to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return _Place(value)
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_take_out(item, tensors) for item in value]
    return value


def _put_in(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` with a new tensor in each place, and append those to `tensors`."""
    if isinstance(value, _Place):
        device = value.device if value.device.type == "cpu" else torch.device(value.device.type)
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=device))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _put_in(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_in(item, tensors) for item in value]
    return value


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank an object of one.

    Parameters
    ----------
    obj
        What pickles; only that of the root counts.
    root_rank
        The rank that has the object.
    name
        Not used: the order of the calls says which belong together.
    process_set
        The ranks that take part.

    Returns
    -------
    object
        On the root `obj` itself, on the others a copy.
    """
    is_root = world().rank == root_rank
    data = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    broadcast_async_(length, root_rank, process_set=process_set).result()
    if not is_root:
        data = torch.empty(int(length.item()), dtype=torch.uint8)
    broadcast_async_(data, root_rank, process_set=process_set).result()
    return obj if is_root else _unpickled(data)


def allgather_object(
    obj: Any,
    name: str | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Give every rank the objects of all.

    Parameters
    ----------
    obj
        What pickles.
    name
        Not used: the order of the calls says which belong together.
    process_set
        The ranks that take part.

    Returns
    -------
    list of object
        Copies, in the order of ranks. Ranks that have joined are left out.
    """
    data = _pickled(obj)
    lengths = allgather(torch.tensor([data.numel()]), process_set=process_set).tolist()
    parts = allgather(data, process_set=process_set).split(lengths)
    return [_unpickled(part) for part in parts]


def _pickled(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
