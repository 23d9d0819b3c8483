"""Hardware queues for streams that wait.

CUDA spreads the streams of a process over 8 hardware queues unless ``CUDA_DEVICE_MAX_CONNECTIONS``
says otherwise when it is initialised, and a stream that waits for a peer holds up the others in its
queue. With the most that there can be, 32, they seldom meet.
"""

from __future__ import annotations

import os
import sys

_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST = "32"


def widen() -> None:
    """Ask for as many queues as there can be, if the variable is not set and CUDA is not in use.

    At ``import torch``, which imports this package also in programs that do not use it, this is
    left to the first group.
    """
    if _VARIABLE not in os.environ and not _is_torch_importing() and not _is_cuda_in_use():
        os.environ[_VARIABLE] = _MOST


def _is_torch_importing() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _is_cuda_in_use(files: str = "/proc/self/fd") -> bool:
    """Whether this process has a GPU open."""
    try:
        names = os.listdir(files)  # noqa: PTH208 -- the cheapest way, at import
    except OSError:
        return False
    for name in names:
        try:
            target = os.readlink(f"{files}/{name}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith("/dev/nvidia") or target == "/dev/dxg":
            return True
    return False
