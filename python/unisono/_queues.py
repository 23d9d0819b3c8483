"""Hardware queues for streams that wait.

CUDA spreads the streams of a process over 8 hardware queues unless ``CUDA_DEVICE_MAX_CONNECTIONS``
says otherwise when it is initialised, and a stream that waits for a peer holds up the others in its
queue. With the most that there can be, 32, they seldom meet.

Under NVIDIA's Multi-Process Service the processes that use a device take their queues from one pool
of about 100, which 32 for each would soon empty: the next process cannot open the device then.
"""

from __future__ import annotations

import os
import sys

_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST = 32
# The most queues that a process asks for where processes share a pool. Without the variable it gets
# 2, and streams soon share one of them. (An H200 gave 3 processes 32 each, 7 of them 16, 15 of them
# 8, and 48 of them 2.)
_MOST_OF_A_POOL = 8
_POOL = 96


def widen() -> None:
    """Ask for as many queues as there can be, if the variable is not set and CUDA is not in use.

    At ``import torch``, which imports this package also in programs that do not use it, this is
    left to the first group.
    """
    if _VARIABLE not in os.environ and not _is_torch_importing() and not _is_cuda_in_use():
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        os.environ.update(wanted(int(ranks) if ranks.isdecimal() else 0))


def wanted(ranks: int) -> dict[str, str]:
    """Return the variable to set in each rank of a host with `ranks` ranks (0: not known).

    It is empty where the driver's own choice is to stay.
    """
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    # Unlike `Path.exists`, for which another user's folder is an error on older versions of Python.
    if not os.path.exists(f"{pipes}/nvidia-cuda-mps-control.pid"):  # noqa: PTH110
        return {_VARIABLE: str(_MOST)}
    share = min(_MOST_OF_A_POOL, _POOL // ranks) if ranks else 0
    return {_VARIABLE: str(share)} if share > 1 else {}


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
