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
    return of([one for one in found if one.host == host and pid in (one.pid, one.own_pid)], found)


def apart(found: list[Process]) -> list[list[Process]]:
    """Return the jobs of those that have answered."""
    jobs: list[list[Process]] = []
    for process in found:
        if process.answer and process.answer["groups"] and not any(process in job for job in jobs):
            jobs.append(of([process], found))
    return jobs


def of(some: list[Process], found: list[Process]) -> list[Process]:
    """Return the processes of the job to which `some` of those found belong."""
    mine = {
        group.name
        for group in words.groups(found)
        if any(group.process_of(rank, some) in some for rank in range(len(group.members)))
    }
    chosen: list[Process] = []
    while True:
        more = [process for process in found if process not in chosen and mine & _groups(process)]
        if not more:
            break
        chosen += more
        mine |= {name for process in more for name in _groups(process)}
    # Those that do not answer belong to it by what the others know of them.
    known = words.groups(chosen)
    silent = [process for process in found if process.answer is None]
    for group in known:
        for rank in range(len(group.members)):
            process = group.process_of(rank, silent) if rank not in group.ranks else None
            if process and process not in chosen:
                chosen.append(process)
    return chosen


def _groups(process: Process) -> set[str]:
    return {group["id"] for group in process.answer["groups"]} if process.answer else set()
