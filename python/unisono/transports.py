"""unisono as a one-sided transport of torch 2.15 and newer.

>>> from torch.distributed._transport import new_transport
>>> transport = new_transport("unisono")

A transport reads and writes tensors that another process has registered, while that process
computes: weights that go from a trainer to those that generate, caches that move between hosts.
torch's interface for it is still private (``torch.distributed._transport``), so it may change with
torch; what its methods promise is said there.

Within a host large tensors go in one copy: from memory that both processes map where what is read
lies in unisono's heap (``torch.from_numpy(unisono.empty(...))``), by the kernel elsewhere. Between
hosts they go over TCP. Tensors on CUDA devices are copied to the memory of the host and from it by
each side. The settings are those of every group (``UNISONO_INTERFACE``,
``UNISONO_ENCRYPT``), and both processes have the same.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import math
import operator
import threading
import time
import weakref
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed import Work
from torch.distributed._transport import Transport, wait_all

from unisono import _native
from unisono.errors import Error, TimeoutError  # noqa: A004

if TYPE_CHECKING:
    from torch.distributed._transport import Memory, MemoryView, MutableMemoryView, RemoteBuffer

    from unisono._core import _Port, _Region, _RemoteRegion, _Transfer

__all__ = [
    "UnisonoMemory",
    "UnisonoMemoryView",
    "UnisonoMutableMemoryView",
    "UnisonoRemoteBuffer",
    "UnisonoTransport",
]

_open: weakref.WeakSet[UnisonoTransport] = weakref.WeakSet()


class UnisonoRemoteBuffer:
    """Registered memory of a peer: what :meth:`UnisonoMemory.to_remote_buffer` returns there.

    It grants access to that memory, to be given to the peer alone that may have it.
    """

    def __init__(self, region: _RemoteRegion) -> None:
        self._region = region

    def size(self) -> int:
        """Return how many bytes it has."""
        return self._region.length

    def part(self, offset: int, length: int) -> UnisonoRemoteBuffer:
        """Return ``length`` bytes of it, from ``offset`` on: what the interface of torch lacks.

        Raises
        ------
        InvalidArgumentError
            They do not lie in it.
        """
        return UnisonoRemoteBuffer(self._region.part(_index(offset), _index(length)))

    def serialize(self) -> bytes:
        """Return the 64 bytes to be given to the peer."""
        return self._region.to_bytes()

    @classmethod
    def deserialize(cls, data: bytes) -> UnisonoRemoteBuffer:
        """Return what :meth:`serialize` has written.

        Raises
        ------
        InvalidArgumentError
            It has not: the bytes are something else, or of another version.
        """
        if type(data) is not bytes:
            raise TypeError(f"a serialized remote buffer is bytes, not {type(data).__name__}")
        return cls(_core()._RemoteRegion.from_bytes(data))

    def __eq__(self, other: object) -> bool:
        """Whether both are the same bytes of the same memory."""
        if not isinstance(other, UnisonoRemoteBuffer):
            return NotImplemented
        return self._region == other._region

    def __hash__(self) -> int:
        """Return the same for what is equal."""
        return hash(self.serialize())


class UnisonoMemoryView:
    """Some bytes of registered memory, to be read from."""

    def __init__(self, memory: UnisonoMemory, offset: int, length: int) -> None:
        self._memory = memory
        self._offset = offset
        self._length = length

    def size(self) -> int:
        """Return how many bytes it has."""
        return self._length


class UnisonoMutableMemoryView(UnisonoMemoryView):
    """Some bytes of registered memory, to be read from and written to."""

    writable: Literal[True] = True


class UnisonoMemory:
    """A tensor that is registered with a transport."""

    def __init__(self, transport: UnisonoTransport, region: _Region, tensor: torch.Tensor) -> None:
        self._transport = transport
        self._region = region
        self._tensor = weakref.ref(tensor)
        self._address = tensor.data_ptr()

    def to_view(self, offset: int | None = None, length: int | None = None) -> UnisonoMemoryView:
        """Return ``length`` bytes from ``offset`` on; without them, all or the rest."""
        return UnisonoMemoryView(self, *self._range(offset, length))

    def to_mutable_view(
        self, offset: int | None = None, length: int | None = None
    ) -> UnisonoMutableMemoryView:
        """Return the same, which :meth:`UnisonoTransport.read` may write to."""
        return UnisonoMutableMemoryView(self, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> UnisonoRemoteBuffer:
        """Return what a peer needs to read and write this memory. It never waits."""
        _check_timeout(timeout)
        return UnisonoRemoteBuffer(self._transport._port.remote(self._region))

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        if not self._region.is_registered():
            raise RuntimeError("the memory has been unregistered")
        whole = len(self._region)
        offset = 0 if offset is None else _index(offset)
        length = max(whole - offset, 0) if length is None else _index(length)
        if offset + length > whole:
            raise ValueError(
                f"{length} bytes at offset {offset} do not lie in the {whole} that are registered"
            )
        return offset, length

    def _check(self) -> None:
        tensor = self._tensor()
        if tensor is None:
            # Its storage lives as long as the region.
            return
        if tensor.data_ptr() != self._address or tensor.nbytes != len(self._region):
            raise RuntimeError("the registered tensor was resized, or has another storage now")


class UnisonoTransport(Transport):  # type: ignore[misc]
    """One-sided reads and writes of tensors, between processes of one host and of several.

    Tensors on CUDA devices go through the memory of the host, by each side for itself. As in all of
    torch's transports an ordinary read or write knows of no stream: synchronize the one that fills
    a tensor before, and that which reads the peer's.

    Parameters
    ----------
    device
        The device of all tensors; None: each is of the CPU, or of a CUDA device.
    timeout
        How many seconds a wait may take where a call does not say. A transfer whose wait is over
        goes on.

    Raises
    ------
    ValueError
        Another device, or a timeout that is none.
    InvalidArgumentError
        A ``UNISONO_*`` variable is wrong.
    """

    def __init__(self, device: torch.device | str | None = None, *, timeout: float = 30.0) -> None:
        super().__init__(device)
        if self.device is not None:
            _check_type(self.device)
        _check_timeout(timeout)
        self._default_timeout: float = timeout
        self._port: _Port = _core()._Port()
        self._lock = threading.Lock()
        self._pending: deque[_TransferWork] = deque()
        # Closing refuses new transfers; closed has let go of everything.
        self._closing = False
        self._closed = False
        _open.add(self)

    @staticmethod
    def supported() -> bool:
        """Return whether the native module loads."""
        try:
            return hasattr(_core(), "_Port")
        except ImportError:
            return False

    def bind(self, *, timeout: float | None = None) -> bytes:
        """Let peers connect; return what they need for that, which holds a secret."""
        _check_timeout(timeout)
        self._check_open()
        return self._port.bind()

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        """Connect to the peer whose :meth:`bind` returned ``peer_url``; return zero.

        Raises
        ------
        TimeoutError
            The peer does not answer.
        InvalidArgumentError
            The bytes are nothing that ``bind`` returns.
        RuntimeError
            There is a peer already.
        """
        timeout = self._seconds(timeout)
        self._check_open()
        if self._port.is_connected():
            raise RuntimeError("the transport is connected already")
        self._port.connect(peer_url, timeout)
        return 0

    def connected(self) -> bool:
        """Return whether there is a peer, which lives as far as is known here."""
        return not self._closing and self._port.is_connected()

    def register_memory(
        self, tensor: torch.Tensor, *, timeout: float | None = None
    ) -> UnisonoMemory:
        """Register a contiguous tensor. The same memory again is the same registration.

        Its storage is kept until :meth:`unregister_memory` or :meth:`close`.
        """
        _check_timeout(timeout)
        self._check_open()
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a torch.Tensor is registered, not {type(tensor).__name__}")
        self._check_device(tensor.device)
        _check_type(tensor.device)
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError("only a contiguous tensor can be registered: see tensor.contiguous()")
        if tensor.numel() == 0:
            raise ValueError("an empty tensor cannot be registered")
        owner = tensor.untyped_storage()
        region = self._port.register(tensor.data_ptr(), tensor.nbytes, owner)
        if tensor.is_cuda and not region.is_on_device():
            # The host would read addresses that it does not know.
            self._port.unregister(region, 0.0)
            raise RuntimeError("the CUDA driver does not know this tensor: is its context lost?")
        return UnisonoMemory(self, region, tensor)

    def unregister_memory(self, memory: Memory, *, timeout: float | None = None) -> None:
        """Unregister memory: later transfers of it fail, on both sides.

        Raises
        ------
        RuntimeError
            Transfers of this transport still use it.
        TimeoutError
            A peer's transfer still does; none begins any more.
        """
        timeout = self._seconds(timeout)
        self._check_open()
        if not isinstance(memory, UnisonoMemory) or memory._transport is not self:
            raise TypeError("the memory was not registered by this transport")
        views = [work._view for work in self._unfinished()] + self._cuda_stream_views()
        if any(view._memory._region == memory._region for view in views):
            raise RuntimeError("the memory has pending transfers: wait before unregistering it")
        self._port.unregister(memory._region, timeout)

    def write(
        self,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | Work:
        """Write a view to the beginning of a peer's memory.

        Returns zero when the bytes are there, or with ``async_op`` a Work at once.
        """
        return self._transfer(False, local_buffer, remote_buffer, async_op, timeout)

    def read(
        self,
        local_buffer: MutableMemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | Work:
        """Read the beginning of a peer's memory into a view, as :meth:`write` writes."""
        return self._transfer(True, local_buffer, remote_buffer, async_op, timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for this transport's transfers, and let go of everything.

        Transfers of peers with this process fail from now on.

        Raises
        ------
        TimeoutError
            A transfer is still under way. No new ones are taken; close it again.
        Error
            What a transfer failed with that was under way. Everything has been let go of.
        """
        deadline = _Deadline(self._seconds(timeout))
        # Those in streams begin before: refused, torch would end the process.
        self._close_cuda_streams()
        self._closing = True
        failure: Error | None = None
        for work in self._unfinished():
            try:
                ended = work._transfer.wait(deadline.left())
            except Error as error:
                failure = failure or error
                continue
            if not ended:
                raise TimeoutError("a transfer is still under way: the transport is not closed yet")
        self._release(deadline.left())
        if failure is not None:
            raise failure

    async def close_async(self, *, timeout: float | None = None) -> None:
        """As :meth:`close`, without blocking the event loop."""
        deadline = _Deadline(self._seconds(timeout))
        # Those in streams begin before: refused, torch would end the process.
        self._close_cuda_streams()
        self._closing = True
        failure: BaseException | None = None
        pending = self._unfinished()
        try:
            await wait_all(pending, timeout=deadline.left())
        except (Error, RuntimeError) as error:
            if not all(work.is_completed() for work in pending):
                raise
            failure = error
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._release, deadline.left())
        if failure is not None:
            raise failure

    def _check_transfer(
        self, local_buffer: MemoryView, remote_buffer: RemoteBuffer, *, mutable: bool
    ) -> None:
        kind = UnisonoMutableMemoryView if mutable else UnisonoMemoryView
        if not isinstance(local_buffer, kind) or local_buffer._memory._transport is not self:
            method = "to_mutable_view" if mutable else "to_view"
            raise TypeError(
                f"the local buffer is no view of memory of this transport: see `{method}`"
            )
        if not isinstance(remote_buffer, UnisonoRemoteBuffer):
            raise TypeError("the remote buffer is not one of unisono's transport")
        local_buffer._memory._check()

    def _transfer(
        self,
        is_read: bool,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        async_op: bool,
        timeout: float | None,
    ) -> int | Work:
        timeout = self._seconds(timeout)
        self._check_open()
        self._check_transfer(local_buffer, remote_buffer, mutable=is_read)
        assert isinstance(local_buffer, UnisonoMemoryView)
        assert isinstance(remote_buffer, UnisonoRemoteBuffer)
        memory, offset = local_buffer._memory, local_buffer._offset
        start = self._port.read if is_read else self._port.write
        transfer = start(memory._region, offset, local_buffer._length, remote_buffer._region)
        work = _TransferWork(self, transfer, local_buffer, timeout)
        with self._lock:
            while self._pending and self._pending[0]._transfer.done():
                self._pending.popleft()
            self._pending.append(work)
        if async_op:
            return work
        work.wait()
        return 0

    def _unfinished(self) -> list[_TransferWork]:
        with self._lock:
            return [work for work in self._pending if not work._transfer.done()]

    def _release(self, timeout: float) -> None:
        try:
            self._port.close(timeout)
            self._closed = True
        finally:
            # All transfers have ended now, or are about to.
            with self._lock:
                self._pending.clear()

    def _check_open(self) -> None:
        if self._closing:
            raise RuntimeError("the transport is closed")

    def _seconds(self, timeout: float | None) -> float:
        _check_timeout(timeout)
        return self._default_timeout if timeout is None else timeout


class _TransferWork(Work):  # type: ignore[misc]
    """A transfer under way."""

    def __init__(
        self,
        transport: UnisonoTransport,
        transfer: _Transfer,
        view: UnisonoMemoryView,
        timeout: float,
    ) -> None:
        super().__init__()
        self._transport = transport
        self._transfer = transfer
        self._view = view
        self._timeout = timeout
        self._future: torch.futures.Future[Any] | None = None

    def is_completed(self) -> bool:
        return self._transfer.done()

    def is_success(self) -> bool:
        return self._transfer.done() and self._transfer.exception() is None

    def exception(self) -> BaseException | None:
        return self._transfer.exception()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        _check_timeout(seconds)
        seconds = seconds or self._timeout
        if not self._transfer.wait(seconds):
            raise TimeoutError(f"the transfer has not ended after {seconds:g} s, and goes on")
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        with self._transport._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                resolve = functools.partial(_resolve, self._future, self._transfer)
                self._transfer.when_done(resolve)
            return self._future

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return []

    def synchronize(self) -> None:
        self.wait()


def _resolve(future: torch.futures.Future[Any], transfer: _Transfer) -> None:
    if (error := transfer.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result([])


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def _check_type(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"unisono's transport moves memory of the CPU and of CUDA devices, not of {device}: "
            "copy it to the host first (tensor.cpu()), or use another transport"
        )


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not (math.isfinite(timeout) and timeout >= 0):
        raise ValueError(f"a timeout is a number of seconds from 0 on, not {timeout}")


def _index(value: Any) -> int:
    index = operator.index(value)
    if index < 0:
        raise ValueError(f"{index} is no offset and no length of memory")
    return index


def _core() -> Any:
    return _native.load()


@atexit.register
def _close_all() -> None:
    """End transfers before the interpreter goes: a thread that waits for one would outlive it."""
    for transport in list(_open):
        if not transport._closed:
            transport._close_cuda_streams()
            transport._closing = True
            with contextlib.suppress(Error):
                transport._release(0.0)
