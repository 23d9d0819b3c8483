"""The processes of one job among those that answer: they share groups, directly or by others."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from unisono._status import words

if TYPE_CHECKING:
    from unisono._status.ask import Process


def with_pid(found: list[Process], pid: int) -> list[Process]:
    """Return the job of the process of this host that has this pid, here or in its container."""
    host = platform.node()
    own = [one for one in found if one.host == host and pid in (one.pid, one.own_pid)]
    return containing(own, found)


def apart(found: list[Process]) -> list[list[Process]]:
    """Return the jobs of those that have answered."""
    jobs: list[list[Process]] = []
    seen: set[Process] = set()
    for process in found:
        if process.answer and process.answer["groups"] and process not in seen:
            jobs.append(containing([process], found))
            seen.update(jobs[-1])
    return jobs


def containing(processes: list[Process], among: list[Process]) -> list[Process]:
    """Return the processes `among` these that are of the job of `processes`."""
    mine = {
        group.name
        for group in words.groups(among)
        if any(group.process_of(rank, processes) in processes for rank in range(len(group.members)))
    }
    # In their order, as a set has none.
    chosen: dict[Process, None] = {}
    while True:
        more = [process for process in among if process not in chosen and mine & _groups(process)]
        if not more:
            break
        chosen.update(dict.fromkeys(more))
        mine |= {name for process in more for name in _groups(process)}
    # Those that do not answer belong to it by what the others know of them.
    known = words.groups(chosen)
    silent = [process for process in among if process.answer is None]
    for group in known:
        for rank in range(len(group.members)):
            process = group.process_of(rank, silent) if rank not in group.ranks else None
            if process:
                chosen[process] = None
    return list(chosen)


def _groups(process: Process) -> set[str]:
    return {group["id"] for group in process.answer["groups"]} if process.answer else set()
