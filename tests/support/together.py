"""Threads that call at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable

# Of a wait for another thread; nothing waits so long unless something is wrong.
LIMIT = 20


def together(*functions: Callable[[], None]) -> None:
    """Run the functions at the same time, each in a thread of its own."""
    failed: list[BaseException] = []
    all_there = threading.Barrier(len(functions))

    def safe(function: Callable[[], None]) -> None:
        try:
            all_there.wait(LIMIT)
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=safe, args=(each,), daemon=True) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads), f"a thread hangs; failed: {failed}"
    if failed:
        raise failed[0]
