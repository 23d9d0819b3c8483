"""The threads that unisono has in this process, which it names after itself."""

from __future__ import annotations

import atexit
import time
from pathlib import Path


def names() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            # It has just ended.
            continue
        if name.startswith("unisono"):
            found.append(name)
    return sorted(found)


def left_after(seconds: float) -> list[str]:
    """Those that are still there when all are gone, or after this long."""
    until = time.monotonic() + seconds
    while (left := names()) and time.monotonic() < until:
        time.sleep(0.001)
    return left


def look_at_exit() -> None:
    """Print what is left when the handlers that are registered from now on have run."""
    # The system lists a thread for some microseconds after its end.
    atexit.register(lambda: [print("left:", name, flush=True) for name in left_after(0.05)])
