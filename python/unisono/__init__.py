"""Collective communication between processes.

>>> comm = unisono.init()
>>> comm.all_reduce(array)

:func:`init` joins the group of all ranks, a :class:`Communicator`, whose methods are the
operations. They work on NumPy arrays and on everything with DLPack. torch is not needed and not
imported; to use unisono inside torch, pass ``"unisono"`` to
``torch.distributed.init_process_group``.

The native module is loaded when a name is first used: torch imports this package to learn of its
backend, and must not pay for more than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono import _queues
from unisono.errors import (
    AbortedError,
    Error,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    SystemCallError,
    TimeoutError,  # noqa: A004
    UnsupportedError,
    UntrustedError,
)

if TYPE_CHECKING:
    from unisono._core import (
        ANY_SOURCE,
        Candidate,
        Communicator,
        Heap,
        Message,
        Options,
        ReduceOp,
        Setting,
        Window,
        Work,
        __version__,
        empty,
        heap,
        init,
        settings,
    )

__all__ = [
    "ANY_SOURCE",
    "AbortedError",
    "Candidate",
    "Communicator",
    "Error",
    "Heap",
    "InternalError",
    "InvalidArgumentError",
    "Message",
    "MismatchError",
    "Options",
    "PeerLostError",
    "ReduceOp",
    "Setting",
    "SystemCallError",
    "TimeoutError",
    "UnsupportedError",
    "UntrustedError",
    "Window",
    "Work",
    "__version__",
    "empty",
    "heap",
    "init",
    "settings",
]

_queues.widen()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unisono import _native

    value = getattr(_native.load(), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
