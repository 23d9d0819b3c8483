"""Shared by the ranks in Python: they answer commands, and time calls hot or cold.

The words are channel.h's, and one more, `cold BYTES`: from then on a rank goes over BYTES of other
memory before each call that is timed, so that the caches of its core hold nothing of the buffers;
0 ends that. Neither this nor the meeting of all ranks after it is part of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def serve(folder: str, rank: str, join: Callable[[], Callable[[str], str]]) -> None:
    """Join, say that this rank is ready, and answer each command with what `join` has returned."""
    with (
        Path(folder, f"replies-{rank}").open("w", buffering=1) as replies,
        Path(folder, f"commands-{rank}").open() as commands,
    ):
        answer = join()
        replies.write("ok\n")
        replies.writelines(f"{answer(line)}\n" for line in commands)


class Clock:
    """Times calls, hot or cold."""

    def __init__(self) -> None:
        self.other_memory: tuple[bytearray, bytearray] | None = None

    def cold(self, size: int) -> str:
        """Answer the command `cold`."""
        half = size // 2
        self.other_memory = (bytearray(half), bytearray(b"1") * half) if half else None
        return "ok"

    def seconds(self, call: Callable[[], object], meet: Callable[[], object], calls: int) -> float:
        """Return the time that `calls` calls take after a meeting of all ranks."""
        if self.other_memory is None:
            meet()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - start
        seconds = 0.0
        for _ in range(calls):
            written, read = self.other_memory
            written[:] = read
            meet()
            start = time.perf_counter()
            call()
            seconds += time.perf_counter() - start
        return seconds
