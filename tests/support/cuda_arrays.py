"""Arrays on CUDA devices as other libraries have them, made of nothing but the driver's calls.

``InterfaceArray`` has ``__cuda_array_interface__`` alone, as Numba's arrays; ``DLPackArray`` has
DLPack alone, as JAX's; ``BothArray`` has both, as CuPy's. Each belongs to a stream, in whose order
its memory is written and read. Whatever ``libcuda.so.1`` the loader finds will do, a real one and
the emulated one of the tests.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
from typing import Any

import numpy as np

LEGACY = 1


class Cuda:
    """The driver, with the primary context of a device current on this thread."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.device = 0
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: CUDA error {code}"

    def made(self, name: str, *arguments: Any) -> int:
        """The value that a call stores in its first argument: an address or a handle."""
        place = ctypes.c_size_t()
        self.call(name, ctypes.byref(place), *arguments)
        return place.value

    def enter(self, device: int | None = None) -> None:
        """Make a device current; without a number, that of this rank: ranks take them in turn."""
        self.device = int(os.environ["LOCAL_RANK"]) % self.devices if device is None else device
        context = self.made("cuDevicePrimaryCtxRetain", ctypes.c_int(self.device))
        self.call("cuCtxSetCurrent", ctypes.c_void_p(context))

    @property
    def free_memory(self) -> int:
        """Bytes of the current device that are free, over all processes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @property
    def devices(self) -> int:
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value


@functools.cache
def cuda() -> Cuda:
    atexit.register(_release)
    return Cuda()


def device_count() -> int:
    """How many devices there are; without a driver, none. This process takes none of them."""
    try:
        return cuda().devices
    except (OSError, AssertionError):
        return 0


# Objects to give back, by address or handle, and the function that does it.
_MADE: dict[int, str] = {}
_GATES: list[Gate] = []


def _release() -> None:
    """Give back all that was made here: what is left in the driver then is unisono's."""
    if not _MADE:
        return
    for gate in _GATES:
        gate.open()
    cuda().call("cuCtxSynchronize")
    for made, release in _MADE.items():
        cuda().call(release, ctypes.c_size_t(made))


class Pinned:
    """Memory of the host that streams copy from and to without the host's waiting."""

    def __init__(self, count: int, dtype: np.dtype) -> None:
        size = max(1, count * dtype.itemsize)
        self.address = cuda().made("cuMemAllocHost_v2", ctypes.c_size_t(size))
        _MADE[self.address] = "cuMemFreeHost"
        raw = (ctypes.c_uint8 * size).from_address(self.address)
        self.array = np.frombuffer(raw, np.uint8)[: count * dtype.itemsize].view(dtype)


class Stream:
    """A stream of the current device; without a new handle, the legacy default stream."""

    def __init__(self, handle: int | None = None) -> None:
        nonblocking = ctypes.c_uint(1)
        self.handle = cuda().made("cuStreamCreate", nonblocking) if handle is None else handle
        if handle is None:
            _MADE[self.handle] = "cuStreamDestroy_v2"
        self.raw = ctypes.c_void_p(self.handle)

    def synchronize(self) -> None:
        cuda().call("cuStreamSynchronize", self.raw)

    def wait_for(self, other: Stream) -> None:
        event = ctypes.c_void_p(cuda().made("cuEventCreate", ctypes.c_uint(2)))
        cuda().call("cuEventRecord", event, other.raw)
        cuda().call("cuStreamWaitEvent", self.raw, event, ctypes.c_uint(0))
        cuda().call("cuEventDestroy_v2", event)

    def gate(self) -> Gate:
        """From here on nothing happens in the stream until the gate is opened."""
        return Gate(self)


class Gate:
    """A place in a stream that it does not get past before ``open``."""

    def __init__(self, stream: Stream) -> None:
        self.word = Pinned(1, np.dtype(np.uint32))
        self.word.array[0] = 0
        address, value = ctypes.c_uint64(self.word.address), ctypes.c_uint32(1)
        # Until the word is the value or more.
        cuda().call("cuStreamWaitValue32_v2", stream.raw, address, value, ctypes.c_uint(0))
        _GATES.append(self)

    def open(self) -> None:
        self.word.array[0] = 1


class Memory:
    """An array in the memory of the current device. ``stream`` orders what is done with it."""

    def __init__(self, values: np.ndarray, stream: Stream | None = None) -> None:
        self.stream = stream or Stream(LEGACY)
        self.device = cuda().device
        self.shape, self.dtype = values.shape, values.dtype
        self.strides: tuple[int, ...] | None = None
        self.read_only = False
        # Both made here, for to make them may wait for what streams have under way.
        self.staged = Pinned(values.size, values.dtype)
        self.fetched = Pinned(values.size, values.dtype)
        size = ctypes.c_size_t(max(1, values.nbytes))
        self.address = cuda().made("cuMemAlloc_v2", size)
        _MADE[self.address] = "cuMemFree_v2"
        self.fill(values)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def fill(self, values: np.ndarray) -> None:
        """Put a copy of ``values`` here, in the order of the stream."""
        self.staged.array[:] = values.reshape(-1)
        self._copy("cuMemcpyHtoDAsync_v2", self.address, self.staged.address)

    def later(self) -> Pinned:
        """The array's content when the stream comes here; to be read after synchronising it."""
        self._copy("cuMemcpyDtoHAsync_v2", self.fetched.address, self.address)
        return self.fetched

    def numpy(self) -> np.ndarray:
        result = self.later()
        self.stream.synchronize()
        return result.array.reshape(self.shape).copy()

    def free(self) -> None:
        self.stream.synchronize()
        cuda().call(_MADE.pop(self.address), ctypes.c_uint64(self.address))

    def _copy(self, name: str, to: int, source: int) -> None:
        count = ctypes.c_size_t(self.size * self.dtype.itemsize)
        if count.value > 0:
            to, source = ctypes.c_uint64(to), ctypes.c_uint64(source)
            cuda().call(name, to, source, count, self.stream.raw)


class InterfaceArray(Memory):
    """With ``__cuda_array_interface__`` alone."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.size else 0, self.read_only),
            "strides": self.strides,
            "stream": self.stream.handle,
            "version": 3,
        }


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_NAMED_CODES = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}
# Objects that capsules need, by the address of their struct, until their destructor is called.
_EXPORTED: dict[int, tuple[Any, ...]] = {}
_NAME = b"dltensor"


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _forget(capsule: int) -> None:
    _EXPORTED.pop(_pointer_of(capsule, _NAME), None)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.c_void_p, ctypes.c_char_p)


class DLPackArray(Memory):
    """With DLPack alone, in the form before 1.0. ``asked`` are the streams it was asked for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.asked.append(stream)
        assert stream is not None
        assert stream > 0, "0 is ambiguous"
        if stream != self.stream.handle:
            Stream(stream).wait_for(self.stream)
        code = _NAMED_CODES.get(self.dtype.name, _CODES.get(self.dtype.kind))
        managed = _Managed()
        extents = (ctypes.c_int64 * len(self.shape))(*self.shape)
        steps = None
        if self.strides is not None:
            counts = [step // self.dtype.itemsize for step in self.strides]
            steps = (ctypes.c_int64 * len(counts))(*counts)
        managed.tensor = _Tensor(
            self.address,
            *self.__dlpack_device__(),
            len(self.shape),
            code,
            self.dtype.itemsize * 8,
            1,
            ctypes.addressof(extents),
            0 if steps is None else ctypes.addressof(steps),
            0,
        )
        address = ctypes.addressof(managed)
        _EXPORTED[address] = (self, managed, extents, steps)
        return _new_capsule(address, _NAME, ctypes.cast(_forget, ctypes.c_void_p))


class BothArray(DLPackArray, InterfaceArray):
    """With both, as CuPy's."""


KINDS = {"interface": InterfaceArray, "dlpack": DLPackArray, "both": BothArray}


def stream_keyword(array: Memory) -> dict[str, int]:
    """The stream as an argument, for an array that does not say it: DLPack has no place for it."""
    return {} if hasattr(array, "__cuda_array_interface__") else {"stream": array.stream.handle}
