"""Arrays that this process offers to others, which read and write them while it computes.

The doors of frameworks that move arrays between processes (``unisono.ray``,
``unisono.vllm_weights``, ``unisono.torchstore``) stand on this: an :class:`Offer` names memory of
this process and travels by whatever the framework has. A process that has it transfers the bytes,
one-sided, over the transports of every group: within a host in one copy, between hosts over TCP.

A process has one port that others connect to, and one more for each process that it reads from or
writes to; both are made when first needed. Arrays are of NumPy or of torch, contiguous and on the
CPU, and this module imports neither.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import unisono
from unisono import _native

if TYPE_CHECKING:
    from unisono._core import _Port, _Region, _Transfer

__all__ = [
    "Offer",
    "Offered",
    "Transfers",
    "empty",
    "offer_all",
    "read",
    "readable",
    "seconds",
    "write",
]

# How long a process that has made an offer may take to answer, in seconds.
_ANSWER = 30.0
# The same where a connection with it has ended: it has probably gone.
_ANSWER_AGAIN = 5.0
# How often a wait looks whether it is to stop.
_LOOK = 0.1

# The address of an array and its length in bytes.
_Span = tuple[int, int]


class Offer(NamedTuple):
    """Memory of a process. It grants access, to be given to those alone that may have it.

    Attributes
    ----------
    url
        By which the process is reached.
    region
        The memory; no bytes where there are none.
    """

    url: bytes
    region: bytes


class Offered:
    """Arrays that this process offers until they are withdrawn; their memory is kept so long.

    Attributes
    ----------
    offers
        One for each array, in their order.
    """

    def __init__(self, own: _OwnPort) -> None:
        self.offers: list[Offer] = []
        self._own = own
        self._spans: list[_Span] = []

    def add(self, array: Any) -> None:
        """Offer one more array."""
        span, region = _span(array), b""
        if span[1]:
            registered = self._own.regions.take(array, span)
            self._spans.append(span)
            region = self._own.port.remote(registered).to_bytes()
        self.offers.append(Offer(self._own.url, region))

    def withdraw(self) -> None:
        """End the offers: transfers that begin later fail. May be called again."""
        while self._spans:
            self._own.regions.give_back(self._spans.pop())


class Transfers:
    """Reads or writes under way.

    Memory of this process that they use is kept until they have ended, and registered until they
    were waited for or this object goes.
    """

    def __init__(self) -> None:
        self._transfers: list[_Transfer] = []
        self._registered: list[tuple[_Regions, _Span]] = []

    def __del__(self) -> None:
        # It may be collected amid a call of these regions, which hold a lock then.
        for regions, span in self._registered:
            regions.unwanted.append(span)

    def start(self, is_read: bool, peer: _Peer, array: Any, region: bytes) -> None:
        """Start one more, between an array and a region of a peer."""
        remote = _native.load()._RemoteRegion.from_bytes(region)
        span = _, length = _span(array)
        if remote.length != length:
            raise ValueError(f"an array of {length} bytes for an offer of {remote.length}")
        port, regions = peer.connected()
        local = regions.take(array, span)
        self._registered.append((regions, span))
        start = port.read if is_read else port.write
        self._transfers.append(start(local, 0, length, remote))

    def done(self) -> bool:
        """Return whether all have ended, well or not."""
        return all(transfer.done() for transfer in self._transfers)

    def wait(
        self, timeout: float | None = None, is_stopped: Callable[[], bool] | None = None
    ) -> None:
        """Wait until all have ended.

        Parameters
        ----------
        timeout
            In seconds; None for that of operations, ``UNISONO_TIMEOUT``. Transfers that have not
            ended by then go on, and keep their memory.
        is_stopped
            Looked at meanwhile: whether to wait no longer.

        Raises
        ------
        TimeoutError
            They take longer.
        AbortedError
            The wait was stopped.
        Error
            What a transfer failed with.
        """
        if timeout is None:
            timeout = seconds("timeout")
        deadline = None if timeout is None else time.monotonic() + timeout
        for transfer in self._transfers:
            self._wait_for(transfer, timeout, deadline, is_stopped)
        while self._registered:
            regions, span = self._registered.pop()
            regions.give_back(span)

    def _wait_for(
        self,
        transfer: _Transfer,
        timeout: float | None,
        deadline: float | None,
        is_stopped: Callable[[], bool] | None,
    ) -> None:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            look = left if is_stopped is None else min(_LOOK, _LOOK if left is None else left)
            if transfer.wait(look):
                return
            if is_stopped is not None and is_stopped():
                raise unisono.AbortedError("the wait for a transfer was stopped")
            if left is not None and left <= 0:
                raise unisono.TimeoutError(f"a transfer has not ended after {timeout:g} s")


class _Regions:
    """The memory that a port has registered, counted: the same may be wanted more than once."""

    def __init__(self, port: _Port) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._counted: dict[_Span, tuple[_Region, int]] = {}
        # To be given back by the next call.
        self.unwanted: deque[_Span] = deque()

    def take(self, array: Any, span: _Span) -> _Region:
        while self.unwanted:
            self.give_back(self.unwanted.popleft())
        with self._lock:
            region, count = self._counted.get(span, (None, 0))
            if region is None:
                region = self._port.register(*span, _owner(array))
            self._counted[span] = region, count + 1
            return region

    def give_back(self, span: _Span) -> None:
        """Undo a `take`. Transfers under way keep the memory until they have ended."""
        with self._lock:
            region, count = self._counted.pop(span)
            if count > 1:
                self._counted[span] = region, count - 1
                return
            # A transfer uses it, or this process is a fork of the port's.
            with contextlib.suppress(unisono.Error):
                self._port.unregister(region, 0.0)


class _OwnPort:
    """The port by which others read and write memory of this process."""

    def __init__(self) -> None:
        self.port: _Port = _native.load()._Port()
        self.url = self.port.bind()
        self.regions = _Regions(self.port)


class _Peer:
    """A process whose memory this one reads and writes."""

    def __init__(self, url: bytes) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._port: _Port | None = None
        self._regions: _Regions | None = None

    def is_gone(self) -> bool:
        return not self._lock.locked() and not (self._port and self._port.is_connected())

    def connected(self) -> tuple[_Port, _Regions]:
        with self._lock:
            if self._port is None or self._regions is None or not self._port.is_connected():
                port: _Port = _native.load()._Port()
                port.connect(self._url, _ANSWER if self._port is None else _ANSWER_AGAIN)
                self._port, self._regions = port, _Regions(port)
            return self._port, self._regions


class _Process:
    """The ports of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: _OwnPort | None = None
        self._peers: dict[bytes, _Peer] = {}

    def own(self) -> _OwnPort:
        with self._lock:
            if self._own is None:
                self._own = _OwnPort()
            return self._own

    def peer(self, url: bytes) -> _Peer:
        with self._lock:
            if url not in self._peers:
                # Those that have gone do not come back: another process has another address.
                for gone in [known for known, peer in self._peers.items() if peer.is_gone()]:
                    del self._peers[gone]
                self._peers[url] = _Peer(url)
            return self._peers[url]


def offer_all(arrays: Sequence[Any]) -> Offered:
    """Let those that are given the offers read and write these arrays, or none of them.

    Raises
    ------
    ValueError
        An array is not contiguous or not on the CPU, or a tensor that torch conjugates or
        negates only when it is read.
    """
    offered = Offered(_process.own())
    try:
        for array in arrays:
            offered.add(array)
    except BaseException:
        offered.withdraw()
        raise
    return offered


def read(offers: Sequence[Offer], arrays: Sequence[Any]) -> Transfers:
    """Start to read what is offered into arrays of the same sizes, each as a whole.

    Raises
    ------
    TimeoutError
        The process that made an offer does not answer.
    ValueError
        An array is not contiguous, not on the CPU, or of another size.
    """
    return _start(True, offers, arrays)


def write(arrays: Sequence[Any], offers: Sequence[Offer]) -> Transfers:
    """Start to write arrays to what is offered, as :func:`read` reads."""
    return _start(False, offers, arrays)


def empty(shape: Sequence[int], dtype: Any) -> Any:
    """Return a new array in the heap, a tensor where `dtype` is torch's."""
    if type(dtype).__module__ != "torch":
        return unisono.empty(shape, dtype)
    import torch

    if not (count := math.prod(shape)):
        return torch.empty(tuple(shape), dtype=dtype)
    block = torch.from_numpy(unisono.empty(count * dtype.itemsize, "uint8"))
    return block.view(dtype).view(tuple(shape))


def readable(tensor: Any) -> Any:
    """Return a tensor that can be offered: this one, or a copy in the heap."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not _is_lazy(tensor):
        return tensor
    return empty(tensor.shape, tensor.dtype).copy_(tensor)


def seconds(name: str) -> float | None:
    """Return a setting that is a time, from the environment or by default; None for no limit."""
    (setting,) = (each for each in unisono.settings() if each.name == name)
    value = os.environ.get(setting.variable) or setting.default
    return None if value == "none" else float(value)


def _start(is_read: bool, offers: Sequence[Offer], arrays: Sequence[Any]) -> Transfers:
    transfers = Transfers()
    for each, array in zip(offers, arrays, strict=True):
        length = _span(array)[1]
        if not each.region:
            if length:
                raise ValueError(f"an array of {length} bytes for an offer of none")
            continue
        transfers.start(is_read, _process.peer(each.url), array, each.region)
    return transfers


def _span(array: Any) -> _Span:
    """Return the address of an array and its length in bytes."""
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise ValueError(
                f"unisono moves memory of the CPU, and the tensor is on {array.device}: "
                "copy it to the host first (tensor.cpu())"
            )
        if not array.is_contiguous():
            raise ValueError("only contiguous tensors can be moved: see tensor.contiguous()")
        if _is_lazy(array):
            raise ValueError(
                "a conjugate or negative that torch has not computed yet cannot be moved: "
                "see tensor.resolve_conj().resolve_neg()"
            )
        return array.data_ptr(), array.nbytes
    if not array.flags.c_contiguous:
        raise ValueError("only contiguous arrays can be moved: see numpy.ascontiguousarray")
    if array.dtype.hasobject:
        raise ValueError("an array of objects of Python cannot be moved")
    return array.ctypes.data, array.nbytes


def _is_lazy(tensor: Any) -> bool:
    """Return whether the memory of a tensor holds other values than the tensor has."""
    return bool(tensor.is_conj() or tensor.is_neg())


def _owner(array: Any) -> Any:
    return array.untyped_storage() if hasattr(array, "untyped_storage") else array


_process = _Process()


def _forget() -> None:
    """Begin anew in a forked child: ports belong to the process that made them."""
    global _process  # noqa: PLW0603
    _process = _Process()


os.register_at_fork(after_in_child=_forget)
