"""unisono as the transport of torchstore's tensors.

    import unisono.torchstore

    unisono.torchstore.install()        # in each process that puts or gets

Where torchstore's own transport carries a tensor in the call to a storage volume, the process that
calls offers the tensor's memory, and the volume reads it there for a put, and writes to it for a
get, one-sided.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torchstore.transport import pipe
from torchstore.transport.buffers import TransportBuffer

from unisono import _offers

__all__ = ["UnisonoTransportBuffer", "install"]


def install() -> None:
    """Have this process's puts and gets go over unisono. May be called again.

    The volumes need not call it: what they are sent names the transport.

    Raises
    ------
    UnsupportedError
        This version of torchstore chooses its transport otherwise.
    """
    if not hasattr(pipe.Pipe, "create_transport_buffer"):
        import unisono

        raise unisono.UnsupportedError(
            "this version of torchstore is not served: tried with torchstore 0.1.2"
        )
    pipe.Pipe.create_transport_buffer = lambda _: UnisonoTransportBuffer()


class UnisonoTransportBuffer(TransportBuffer):  # type: ignore[misc]
    """The tensor of one put or get, in the process that calls or, pickled, in the volume.

    torchstore makes it and calls its methods; objects that are no tensors pass by it.
    """

    # A get asks for the shape before, so that there is memory for the volume to write to.
    requires_meta = True

    def __init__(self) -> None:
        self._offer: _offers.Offer | None = None
        self._meta: tuple[torch.Size, torch.dtype] | None = None
        # The memory that is offered, in the process that calls alone.
        self._tensor: torch.Tensor | None = None
        self._offered: _offers.Offered | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tensor": None, "_offered": None}

    def allocate(self, tensor_like: torch.Tensor | tuple[Any, ...] | str | None) -> None:
        """Offer a tensor where it lies, or memory for one of this shape and type."""
        if tensor_like is None or isinstance(tensor_like, str):
            return
        if isinstance(tensor_like, torch.Tensor):
            self._tensor = _offers.readable(tensor_like.detach())
        else:
            self._tensor = _offers.empty(*tensor_like)
        self._meta = self._tensor.shape, self._tensor.dtype
        self._offered = _offers.offer_all([self._tensor])
        (self._offer,) = self._offered.offers

    async def read_into(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """Return the tensor: in the volume by reading it, in the process that calls at once."""
        if self._tensor is None:
            return await asyncio.to_thread(self._read, tensor)
        if tensor is None:
            return self._tensor
        if tensor.data_ptr() != self._tensor.data_ptr():
            tensor.copy_(self._tensor)
        return tensor

    async def write_from(self, tensor: torch.Tensor | None) -> None:
        """Take a tensor: in the volume by writing it to the process that calls.

        There it is offered already.
        """
        if tensor is not None and self._tensor is None:
            await asyncio.to_thread(self._write, tensor)

    async def drop(self) -> None:
        """End the offer."""
        if self._offered is not None:
            self._offered.withdraw()

    def _read(self, tensor: torch.Tensor | None) -> torch.Tensor:
        offer, meta = self._remote()
        if tensor is None:
            tensor = _offers.empty(*meta)
        _offers.read([offer], [tensor]).wait()
        return tensor

    def _write(self, tensor: torch.Tensor) -> None:
        offer, (shape, dtype) = self._remote()
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ValueError(
                f"a tensor of {tuple(tensor.shape)}, {tensor.dtype}, where {tuple(shape)}, "
                f"{dtype}, is awaited"
            )
        _offers.write([_offers.readable(tensor)], [offer]).wait()

    def _remote(self) -> tuple[_offers.Offer, tuple[torch.Size, torch.dtype]]:
        if self._offer is None or self._meta is None:
            raise ValueError("no tensor was allocated for this call of torchstore")
        return self._offer, self._meta
