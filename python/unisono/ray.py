"""unisono as a backend of ``ray.util.collective``, and as tensor transports of Ray.

Ray makes a group of actors and calls its backend with arrays of NumPy, torch or CuPy; here each
group is a :class:`unisono.Communicator`. Rank 0 publishes where it listens, in Ray's key-value
store, and the others come there.

A tensor transport moves the arrays that actors return, without pickling them: the actor that needs
one reads it in the memory of the actor that made it.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from typing import TYPE_CHECKING, Any

from ray.experimental import internal_kv
from ray.util import collective, get_node_ip_address
from ray.util.collective.collective_group.base_collective_group import BaseGroup

import unisono
from unisono import _offers

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["NAME", "UnisonoGroup", "register", "register_transports"]

# The value of `backend=`.
NAME: str = "UNISONO"

_OPERATORS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVERAGE": "avg"}
_PAUSE = 0.02


def register() -> None:
    """Make ``backend="UNISONO"`` known to Ray in this process. May be called again.

    Ray asks for it in the driver and in every actor, before the group is made.
    """
    from ray.util.collective.backend_registry import _global_registry

    if not _global_registry.is_registered(NAME):
        collective.register_collective_backend(NAME, UnisonoGroup)


def register_transports() -> None:
    """Make the tensor transports ``"UNISONO"`` and ``"UNISONO_NUMPY"`` known to Ray.

    The first moves torch's tensors of the CPU, where torch is installed, and the second NumPy's
    arrays. The driver calls this, once or more, before it defines the methods that name them, and
    Ray tells the actors::

        unisono.ray.register_transports()

        @ray.remote(enable_tensor_transport=True)
        class Trainer:
            @ray.method(tensor_transport="UNISONO")
            def weights(self) -> torch.Tensor: ...

    Raises
    ------
    ImportError
        This version of Ray has no transports of others.
    """
    import numpy as np
    from ray.experimental import register_tensor_transport
    from ray.experimental.rdt.util import transport_manager_info

    from unisono._ray_transports import NumpyTransport, TensorTransport

    kinds: list[tuple[type[TensorTransport], type]] = [(NumpyTransport, np.ndarray)]
    with contextlib.suppress(ImportError):
        import torch

        kinds.append((TensorTransport, torch.Tensor))
    for transport, data_type in kinds:
        if transport.name not in transport_manager_info:
            register_tensor_transport(transport.name, ["cpu"], transport, data_type)


class UnisonoGroup(BaseGroup):  # type: ignore[misc]
    """One group of actors, in one of them; Ray makes it.

    Arrays are of NumPy, of torch or of CuPy; what is written to must be contiguous. Every operation
    takes a list with one array, as Ray passes it, and returns when the result is there.

    Parameters
    ----------
    world_size
        How many actors the group has.
    rank
        The number of this one.
    group_name
        The name of the group, which only one group may have at a time.

    Raises
    ------
    unisono.Error
        The other actors did not come within the limit (``UNISONO_JOIN_TIMEOUT``).
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._comm = _meet(world_size, rank, group_name)

    @classmethod
    def backend(cls) -> str:
        """Return the name of the backend."""
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True: what is imported is there."""
        return True

    def destroy_group(self) -> None:
        """Leave the group."""
        self._comm.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        """Reduce the arrays of all ranks, in place."""
        op = _operator(allreduce_options)
        self._comm.all_reduce(_only(tensor), op, timeout=_timeout(allreduce_options))

    def barrier(self, barrier_options: Any = None) -> None:
        """Return when all ranks have called this."""
        self._comm.barrier(timeout=_timeout(barrier_options))

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        """Reduce the arrays of all ranks into that of the root; the others stay as they are."""
        root = getattr(reduce_options, "root_rank", 0)
        op = _operator(reduce_options)
        self._comm.reduce(_only(tensor), op, root, timeout=_timeout(reduce_options))

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        """Give all ranks the array of the root, in place."""
        root = getattr(broadcast_options, "root_rank", 0)
        self._comm.broadcast(_only(tensor), root, timeout=_timeout(broadcast_options))

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None
    ) -> None:
        """Copy the array of each rank into the array of its place in ``tensor_list[0]``."""
        outputs = [_plain(output) for output in _only(tensor_list)]
        gathered = self._comm.all_gather(_only(tensor), timeout=_timeout(allgather_options))
        for output, part in zip(outputs, gathered, strict=True):
            output[...] = part

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None
    ) -> None:
        """Reduce the lists ``tensor_list[0]`` of all ranks; each gets the array of its place.

        Raises
        ------
        ValueError
            The arrays differ in shape, or `tensor` has another one.
        """
        output = _only(tensor)
        blocks = [_plain(block) for block in _only(tensor_list)]
        if any(tuple(block.shape) != tuple(output.shape) for block in blocks):
            shapes = [tuple(block.shape) for block in blocks]
            raise ValueError(f"blocks of {shapes} for an output of {tuple(output.shape)}")
        self._comm.reduce_scatter(
            _stack(blocks),
            _operator(reducescatter_options),
            out=output,
            timeout=_timeout(reducescatter_options),
        )

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send an array to another rank."""
        self._comm.send(_only(tensor), send_options.dst_rank, timeout=_timeout(send_options))

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive an array from another rank, in place."""
        self._comm.recv(_only(tensor), recv_options.src_rank, timeout=_timeout(recv_options))


def _meet(world_size: int, rank: int, group_name: str) -> unisono.Communicator:
    key = f"unisono_collective_group_{group_name}".encode()
    if rank:
        return unisono.init(_published(key), rank=rank, world_size=world_size)
    host = get_node_ip_address()
    url = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        url += f":{free.getsockname()[1]}"
    internal_kv._internal_kv_put(key, url.encode(), overwrite=True)
    try:
        return unisono.init(url, rank=0, world_size=world_size)
    finally:
        # All have read it, or the group is not made; the next one of this name has its own.
        with contextlib.suppress(Exception):
            internal_kv._internal_kv_del(key)


def _published(key: bytes) -> str:
    limit = _offers.seconds("join_timeout") or math.inf
    deadline = time.monotonic() + limit
    while (found := internal_kv._internal_kv_get(key)) is None:
        if time.monotonic() > deadline:
            raise unisono.TimeoutError(
                f"rank 0 has not published its address under {key.decode()} within {limit:g} s"
            )
        time.sleep(_PAUSE)
    return bytes(found).decode()


def _only(values: list[Any]) -> Any:
    if len(values) != 1:
        raise unisono.UnsupportedError(
            f"{len(values)} arrays in one call: unisono has one array for each rank"
        )
    return values[0] if isinstance(values[0], list) else _plain(values[0])


def _plain(array: Any) -> Any:
    # A tensor that requires a gradient cannot be lent or written to.
    return array.detach() if hasattr(array, "detach") else array


def _stack(blocks: list[Any]) -> Any:
    first = blocks[0]
    if hasattr(first, "detach"):
        import torch

        return torch.stack(blocks)
    if hasattr(first, "__cuda_array_interface__"):
        import cupy

        return cupy.stack(blocks)
    import numpy as np

    return np.stack(blocks)


def _operator(options: Any) -> str:
    chosen = getattr(options, "reduceOp", None)
    name = "SUM" if chosen is None else chosen.name
    if name not in _OPERATORS:
        raise unisono.UnsupportedError(f"unisono has no operator {name} for Ray")
    return _OPERATORS[name]


def _timeout(options: Any) -> timedelta | None:
    limit = getattr(options, "timeout_ms", None)
    # Ray says "unset" by a negative time.
    return limit if limit is not None and limit.total_seconds() > 0 else None
