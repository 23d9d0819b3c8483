"""The failures of unisono, as exceptions.

Every error of unisono is an :class:`Error`. Its class says what kind of failure it is; most are
also the exception that Python has for that kind, so ``except TimeoutError`` works.

An :class:`InvalidArgumentError` and an :class:`UnsupportedError` cost the call alone: nothing was
sent, and the communicator still works. Every other error that ends an operation ends the
communicator as well, on all ranks.
"""

from __future__ import annotations

import builtins
from typing import ClassVar

__all__ = [
    "AbortedError",
    "Error",
    "InternalError",
    "InvalidArgumentError",
    "MismatchError",
    "PeerLostError",
    "SystemCallError",
    "TimeoutError",
    "UnsupportedError",
    "UntrustedError",
]


class Error(Exception):
    """A failure; see the subclasses for its kinds.

    Attributes
    ----------
    code : str
        The kind of failure, the same in all languages: ``"PeerLost"``.
    fatal : bool
        Whether a communicator is dead after such a failure of one of its operations.
    peer : int or None
        The rank that caused the failure, where it is another one, by its number in the group.
    operation : str or None
        The operation that failed: ``"all_reduce #17"``.
    """

    code: ClassVar[str] = "Internal"
    fatal: ClassVar[bool] = True
    peer: int | None = None
    operation: str | None = None


class InvalidArgumentError(Error, ValueError):
    """An argument is wrong. Nothing was sent, and the communicator still works."""

    code = "InvalidArgument"
    fatal = False


class UnsupportedError(Error, NotImplementedError):
    """The request has no meaning or no implementation. Nothing was sent."""

    code = "Unsupported"
    fatal = False


class TimeoutError(Error, builtins.TimeoutError):  # noqa: A001
    """Something did not happen within its time."""

    code = "Timeout"


class PeerLostError(Error, ConnectionError):
    """The process of another rank ended, left the group or cannot be reached."""

    code = "PeerLost"


class MismatchError(Error, RuntimeError):
    """Two ranks called different operations, or the same one with different parameters."""

    code = "Mismatch"


class AbortedError(Error, RuntimeError):
    """The communicator was aborted, here or by another rank."""

    code = "Aborted"


class SystemCallError(Error, OSError):
    """The operating system or the network refused something."""

    code = "System"


class UntrustedError(Error, ConnectionError):
    """A connection or a store entry was not what a member of the job would send."""

    code = "Untrusted"


class InternalError(Error, RuntimeError):
    """A defect in unisono."""

    code = "Internal"
