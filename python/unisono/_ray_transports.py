"""unisono as tensor transports of Ray (Ray Direct Transport), made known by ``unisono.ray``.

The actor that made an array keeps it, and the one that needs it reads it there, one-sided, into
memory of the heap. Ray orders the transfers, by its interface ``TensorTransportManager``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

import unisono
from unisono import _offers

__all__ = ["NumpyTransport", "TensorTransport"]


@dataclass
class _Metadata(TensorTransportMetadata):  # type: ignore[misc]
    """Shapes and types, as Ray wants them, and where the arrays are."""

    offers: list[_offers.Offer] = field(default_factory=list)


@dataclass
class _Fetch(FetchRequest):  # type: ignore[misc]
    """Arrays that are being read."""

    transfers: _offers.Transfers


class TensorTransport(TensorTransportManager):  # type: ignore[misc]
    """Tensors of the CPU between actors, and between an actor and the driver."""

    name = "UNISONO"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The offers of this process, by the numbers of objects.
        self._offered: dict[str, tuple[_Metadata, _offers.Offered]] = {}
        # Objects whose transfers to this process Ray has given up, until the transfers end.
        self._aborted: set[str] = set()

    def tensor_transport_backend(self) -> str:
        """Return the name by which Ray knows the transport."""
        return self.name

    @staticmethod
    def is_one_sided() -> bool:
        """Return True: only the receiver acts."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True: after a failure the actors live on."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return True: the driver has registered it there."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> _Metadata:
        """Offer the arrays of an object."""
        with self._lock:
            # A task that runs again has the arrays of the first time.
            if obj_id not in self._offered:
                offered = _offers.offer_all(rdt_object)
                meta = _Metadata(
                    tensor_meta=[(array.shape, array.dtype) for array in rdt_object],
                    tensor_device="cpu" if rdt_object else None,
                    offers=offered.offers,
                )
                self._offered[obj_id] = meta, offered
            return self._offered[obj_id][0]

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Return nothing in particular: an offer says where the arrays are."""
        return CommunicatorMetadata()

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: _Metadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> _Fetch:
        """Start to read the arrays of an object, into buffers where there are some.

        Raises
        ------
        AbortedError
            Ray has given the transfer up already.
        """
        # Ray calls `abort_transport` in another thread, which may come first.
        if obj_id in self._aborted:
            self._aborted.discard(obj_id)
            raise unisono.AbortedError(f"Ray has given up the transfer of object {obj_id}")
        meta = tensor_transport_metadata
        try:
            arrays = target_buffers or [_offers.empty(*each) for each in meta.tensor_meta]
            transfers = _offers.read(meta.offers, arrays)
        except BaseException:
            self._aborted.discard(obj_id)
            raise
        return _Fetch(obj_id=obj_id, tensors=arrays, transfers=transfers)

    def wait_fetch_complete(self, fetch_request: _Fetch, timeout: float = -1) -> list[Any]:
        """Return the arrays when they are there; a timeout below zero is none."""
        obj_id = fetch_request.obj_id
        try:
            fetch_request.transfers.wait(
                None if timeout < 0 else timeout, lambda: obj_id in self._aborted
            )
        finally:
            self._aborted.discard(obj_id)
        arrays: list[Any] = fetch_request.tensors
        return arrays

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: _Metadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Read the arrays of an object; Ray ends the wait by aborting it."""
        return self.wait_fetch_complete(
            self.fetch_multiple_tensors(
                obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
            )
        )

    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Ray calls this for transports whose sender acts, which this one's does not."""
        raise NotImplementedError("a one-sided transport sends nothing")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Any]
    ) -> None:
        """End the offers of an object that is no longer needed."""
        with self._lock:
            known = self._offered.pop(obj_id, None)
        if known is not None:
            # The arrays themselves may have other memory by now.
            known[1].withdraw()

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Wait no longer for an object, in the actor that receives it."""
        self._aborted.add(obj_id)


class NumpyTransport(TensorTransport):
    """The same for arrays of NumPy: in Ray a transport has one type of arrays."""

    name = "UNISONO_NUMPY"
