"""libunisono's functions, as a rank of chaos calls them: a program in C would do the same."""

from __future__ import annotations

import ctypes
import functools
import json
from ctypes import byref, c_char_p, c_double, c_int32, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from unisono import _c

_DTYPES = {np.dtype(np.float32): 3, np.dtype(np.int64): 10}
_OPERATORS = {"sum": 1, "max": 5}
_FOREVER = c_double(-1.0)
_TAG = c_uint64(0)


class _ErrorStruct(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("status", c_int32),
        ("fatal", c_int32),
        ("peer", c_int32),
        ("reserved", c_int32),
        ("message", c_char_p),
        ("operation", c_char_p),
    )


class CallError(Exception):
    """A call of libunisono that has failed."""

    def __init__(self, error: _ErrorStruct) -> None:
        super().__init__((error.message or b"").decode())
        self.fatal = bool(error.fatal)
        self.peer = error.peer if error.peer >= 0 else None


@functools.cache
def _library() -> ctypes.CDLL:
    # The file without a version is for linkers.
    [file] = Path(_c.answer(["--libdir"])).glob("libunisono.so.*")
    return ctypes.CDLL(str(file))


def _call(name: str, *arguments: Any) -> None:
    if getattr(_library(), f"unisono_{name}")(*arguments):
        error = _ErrorStruct(size=ctypes.sizeof(_ErrorStruct))
        _library().unisono_last_error(byref(error))
        raise CallError(error)


def _start(of: np.ndarray) -> c_void_p:
    return c_void_p(of.ctypes.data)


class Work:
    """An operation that has been started, with the memory that it uses."""

    def __init__(self, *memory: np.ndarray) -> None:
        self.handle = c_void_p()
        self._memory = memory

    def wait(self) -> None:
        """Wait for its end."""
        try:
            _call("work_wait", self.handle, _FOREVER)
        finally:
            _call("work_destroy", self.handle)


class Communicator:
    """The calls of a communicator of Python that chaos makes, on one of libunisono."""

    def __init__(self, handle: c_void_p) -> None:
        self._handle = handle
        size = c_int32()
        _call("communicator_world_size", handle, byref(size))
        self._world = size.value

    @classmethod
    def from_url(cls, url: str, rank: int, world_size: int) -> Communicator:
        """Join a group, with the settings of the environment."""
        handle = c_void_p()
        place = (url.encode(), c_int32(rank), c_int32(world_size))
        _call("communicator_from_url", *place, None, byref(handle))
        return cls(handle)

    def all_reduce(self, array: np.ndarray, op: str = "sum", async_op: bool = False) -> Any:
        work = Work(array)
        _call(
            "all_reduce",
            *(self._handle, _start(array), _start(array), c_size_t(array.size)),
            *(_DTYPES[array.dtype], _OPERATORS[op], None),
            byref(work.handle) if async_op else None,
        )
        return work if async_op else array

    def broadcast(self, array: np.ndarray, root: int) -> None:
        elements = (_start(array), c_size_t(array.size), _DTYPES[array.dtype])
        _call("broadcast", self._handle, *elements, c_int32(root), None, None)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        result = np.empty((self._world, array.size), array.dtype)
        elements = (c_size_t(array.size), _DTYPES[array.dtype])
        _call("all_gather", self._handle, _start(array), _start(result), *elements, None, None)
        return result

    def all_to_all(self, blocks: np.ndarray) -> np.ndarray:
        given = np.ascontiguousarray(blocks)
        result = np.empty_like(given)
        elements = (c_size_t(given.size // self._world), _DTYPES[given.dtype])
        _call("all_to_all", self._handle, _start(given), _start(result), *elements, None, None)
        return result

    def isend(self, array: np.ndarray, to: int) -> Work:
        work = Work(array)
        elements = (_start(array), c_size_t(array.size), _DTYPES[array.dtype])
        _call("isend", self._handle, *elements, c_int32(to), _TAG, None, byref(work.handle))
        return work

    def recv(self, array: np.ndarray, source: int) -> None:
        elements = (_start(array), c_size_t(array.size), _DTYPES[array.dtype])
        _call("recv", self._handle, *elements, c_int32(source), _TAG, None, None)

    def stats(self) -> dict[str, Any]:
        """Return for whom the operations of this rank have waited."""
        text, length = ctypes.create_string_buffer(1 << 20), c_size_t()
        capacity = c_size_t(len(text))
        _call("communicator_stats", self._handle, text, capacity, byref(length))
        found: dict[str, Any] = json.loads(text.value)
        return found

    @property
    def living(self) -> list[int]:
        ranks, count = (c_int32 * self._world)(), c_size_t()
        _call("communicator_living", self._handle, ranks, byref(count))
        return list(ranks)[: count.value]

    @property
    def former_ranks(self) -> list[int]:
        ranks, ended = (c_int32 * self._world)(), c_uint64()
        _call("communicator_former", self._handle, ranks, byref(ended))
        return list(ranks)

    def shrink(self, timeout: float) -> Communicator:
        return self._left("shrink", timeout)

    def mask(self, timeout: float) -> Communicator:
        return self._left("mask", timeout)

    def _left(self, name: str, timeout: float) -> Communicator:
        left = c_void_p()
        wish = (None, c_size_t(0), c_double(timeout))
        _call(f"communicator_{name}", self._handle, *wish, byref(left))
        return Communicator(left)

    def grow(self, timeout: float) -> Communicator:
        grown = c_void_p()
        wish = (None, c_int32(0), c_double(timeout))
        _call("communicator_grow", self._handle, *wish, byref(grown))
        return Communicator(grown)

    def close(self) -> None:
        _call("communicator_destroy", self._handle)
