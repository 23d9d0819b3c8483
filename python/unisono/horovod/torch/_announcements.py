"""The store of the job, as the ranks with data and those without use it; see ``_join``.

A rank that waits for an operation longer than usual looks whether ranks have joined, and from then
on writes into the store what it calls: first what they have missed, then each call before it
starts.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from unisono.horovod.torch._call import HorovodInternalError

if TYPE_CHECKING:
    from unisono.horovod.torch._world import World


def key(here: World, name: str) -> str:
    return f"join/{here.epoch}/{name}"


def announce(here: World) -> None:
    """See whether ranks have joined, and write down for them what they may have missed."""
    with here.lock:
        joined = here.store.add(key(here, "count"), 0)
        if joined == here.joined:
            return
        here.joined = joined
        behind = min(positions(here))
        oldest = here.recent[0][0] if here.recent else here.sequence
        if behind < min(oldest, here.sequence):
            raise HorovodInternalError(
                f"a rank joined {here.sequence - behind} calls ago, more than are remembered"
            )
        # Every rank writes the same, so it does not matter which does.
        here.published = min(here.published, behind - 1) if here.published >= 0 else behind - 1
        publish(here)


def publish(here: World) -> None:
    """Write down what this rank calls, once ranks have joined."""
    if here.joined == 0:
        return
    for number, call in here.recent:
        if number > here.published:
            here.store.set(key(here, f"call/{number}"), pickle.dumps(call))
    here.published = here.sequence - 1


def positions(here: World) -> list[int]:
    """Return how many calls each rank that has joined had made."""
    keys = [key(here, f"rank/{rank}") for rank in range(here.size)]
    return [int(here.store.get(key)) for key in keys if here.store.check([key])]
