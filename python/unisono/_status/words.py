"""The answers of processes, put together by groups, and in words.

The ranks that others wait for come first in a group; before all groups, those that wait for each
other.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono._status.ask import Process

# Ranks that are told of as late: by how many seconds, and how many of them.
WORTH_TELLING = 1.0
MOST_LATE = 3
# Groups wait for each other if each wait is as long: answers are not all of the same moment.
LONG_WAIT = 0.5
LABEL = re.compile(r"host (?P<host>.*), pid (?P<pid>\d+)")


@dataclass
class Group:
    """A group, as those of its ranks see it that have answered."""

    name: str
    members: list[dict[str, Any]]
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)

    def number(self, rank: int) -> str:
        """Return the rank, with its number in the whole job where that is another one."""
        known = self.members[rank]["global"]
        return f"rank {rank}" if known == rank else f"rank {rank} (global rank {known})"

    @property
    def short(self) -> str:
        """The beginning of its name, which tells it from others."""
        return self.name[:8]

    @property
    def title(self) -> str:
        """Its name, its size and how much of it has answered."""
        there = sum(process.is_elsewhere for process in self.processes.values())
        here = f"{len(self.ranks) - there} of them here"
        also = f", {there} on other hosts" if there else ""
        return f"group {self.short} of {len(self.members)} ranks, {here}{also}"

    @property
    def is_idle(self) -> bool:
        """Whether none of the ranks that have answered is in an operation or has failed."""
        return not any(state["operations"] or state["failure"] for state in self.ranks.values())

    def awaited(self) -> dict[int, list[int]]:
        """Return the ranks that others wait for outside of the same operation, with those others.

        These are also the ranks that have not begun a collective yet: others may wait for one after
        the other.
        """
        first = self.first_operations()
        waits: dict[int, list[int]] = {}
        for rank, operation in first.items():
            for peer in operation["waits_for"]:
                is_in_it = peer in first and first[peer]["name"] == operation["name"]
                if not is_in_it or "number" not in operation:
                    waits.setdefault(peer, []).append(rank)
            number = operation.get("number", 0)
            for peer, state in self.ranks.items():
                if state["collectives"] < number and rank not in waits.get(peer, ()):
                    waits.setdefault(peer, []).append(rank)
        return dict(sorted(waits.items(), key=lambda item: (-len(item[1]), item[0])))

    def first_operations(self) -> dict[int, dict[str, Any]]:
        """Return the operation of each rank that has begun first."""
        states = self.ranks.items()
        return {rank: state["operations"][0] for rank, state in states if state["operations"]}

    def process_of(self, rank: int, found: Iterable[Process]) -> Process | None:
        """Return the process of a rank, which may not have answered or not have the group."""
        if rank in self.processes:
            return self.processes[rank]
        label = LABEL.fullmatch(self.members[rank]["process"])
        for process in found if label else ():
            if label and int(label["pid"]) == process.own_pid and label["host"] in process.names:
                return process
        return None

    def is_where_asked(self, rank: int, found: Iterable[Process]) -> bool:
        """Return whether the rank is on a host whose processes are known."""
        label = LABEL.fullmatch(self.members[rank]["process"])
        return label is not None and any(label["host"] in process.names for process in found)


def groups(found: Iterable[Process]) -> list[Group]:
    """Put the answers of the ranks of each group together, the largest group first."""
    known: dict[str, Group] = {}
    for process in found:
        for rank in process.answer["groups"] if process.answer else ():
            group = known.setdefault(rank["id"], Group(rank["id"], rank["ranks"]))
            group.ranks[rank["rank"]] = rank
            group.processes[rank["rank"]] = process
    return sorted(known.values(), key=lambda group: (-len(group.members), group.name))


def blamed(group: Group, found: Iterable[Process]) -> dict[int, str]:
    """Return the ranks that others wait for outside of the same operation, each with the words.

    If none waits, this is the rank that the errors of a failed group name. ``found`` are all
    processes, also those that have not answered.
    """
    first = group.first_operations()
    words = {}
    for peer, waiting in group.awaited().items():
        longest = max(waiting, key=lambda rank: first[rank]["seconds"])
        operation = first[longest]
        count = f"{len(waiting)} ranks wait" if len(waiting) > 1 else f"rank {longest} waits"
        words[peer] = (
            f"{group.number(peer)} {_doing(group, peer, found)}; {count} for it in "
            f"{operation['name']}, for {operation['seconds']:.1f} s"
        )
    return words or _named_by_failures(group)


def _named_by_failures(group: Group) -> dict[int, str]:
    """The rank that most of those that have failed name in their errors, with one of these."""
    failed = {rank: state for rank, state in group.ranks.items() if state["failure"]}
    naming: dict[int, list[int]] = {}
    for rank, state in failed.items():
        peer = state["failure_rank"]
        if peer is not None and peer != rank:
            naming.setdefault(peer, []).append(rank)
    if not naming:
        return {}
    peer = max(naming, key=lambda rank: (len(naming[rank]), -rank))
    count = f"{len(naming[peer])} of {len(failed)} ranks that have failed"
    label = group.members[peer]["process"]
    failure = failed[naming[peer][0]]["failure"]
    return {peer: f"{group.number(peer)} ({label}) is named by {count}: {failure}"}


def _doing(group: Group, rank: int, found: Iterable[Process]) -> str:
    state = group.ranks.get(rank)
    label = group.members[rank]["process"]
    if state is None:
        process = group.process_of(rank, found)
        if process and process.answer:
            return f"({label}) has not made this group yet, or has closed it"
        if process:
            return f"({label}) is {process.state}: {process.trouble}"
        if not group.is_where_asked(rank, found):
            return f"({label}) is on another host, which was not asked or has not answered"
        return f"({label}) is no process here that can be asked"
    if state["failure"]:
        return f"({label}) has failed: {state['failure']}"
    if state["operations"]:
        return f"({label}) is in {state['operations'][0]['name']}"
    process = group.processes[rank]
    elsewhere = _elsewhere(group, process)
    call = f"; {process.call}" if process.call and not elsewhere else ""
    last = state["last"] or "it has had none"
    return f"({label}) is in no operation of this group (its last: {last}){elsewhere}{call}"


def _elsewhere(group: Group, process: Process) -> str:
    """The operation of another group that a process is in."""
    for other in process.answer["groups"] if process.answer else ():
        if other["id"] != group.name and other["operations"]:
            return f", but in {other['operations'][0]['name']} of group {other['id'][:8]}"
    return ""


def circle(all_groups: Iterable[Group]) -> str | None:
    """Return the ranks of several groups that wait for each other, in words, if there are any."""
    # For whom each process waits, and in which group: by its label, which is its own in a job.
    waits: dict[str, list[tuple[str, Group, int, int]]] = {}
    for group in all_groups:
        first = group.first_operations()
        for peer, waiting in group.awaited().items():
            for rank in waiting:
                if first[rank]["seconds"] < LONG_WAIT:
                    continue
                edge = (group.members[peer]["process"], group, rank, peer)
                waits.setdefault(group.members[rank]["process"], []).append(edge)
    for start in waits:
        path = _way_back(waits, start, start, set())
        named = dict.fromkeys(group.short for _, group, _, _ in path)
        if len(named) < 2:
            continue
        links = []
        for _, group, rank, peer in path:
            operation = group.first_operations()[rank]
            links.append(
                f"{group.number(rank)} of {group.short} ({group.members[rank]['process']}) waits "
                f"for {group.number(peer)} in {operation['name']}, for {operation['seconds']:.1f} s"
            )
        return (
            f"groups {' and '.join(named)} wait for each other: {'; '.join(links)}; all ranks "
            "must call the operations of their groups in one order"
        )
    return None


def _way_back(
    waits: dict[str, list[tuple[str, Group, int, int]]], at: str, start: str, seen: set[str]
) -> list[tuple[str, Group, int, int]]:
    """The waits that lead from a process to another; none where there is no such way."""
    seen.add(at)
    for edge in waits.get(at, ()):
        if edge[0] == start:
            return [edge]
        if edge[0] not in seen and (rest := _way_back(waits, edge[0], start, seen)):
            return [edge, *rest]
    return []


def late(group: Group) -> dict[int, str]:
    """Return the ranks that others have waited for much longer than they have waited, in words."""
    waits: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for rank in group.ranks:
        for told in waited(group, rank)["by_rank"]:
            waits.setdefault(told["rank"], []).append((rank, told))
    found = []
    for peer, entries in waits.items():
        by, most = max(entries, key=lambda entry: entry[1]["seconds"])
        # It may have waited itself, for a rank that was late.
        is_here = "waited" in group.ranks.get(peer, {})
        own = waited(group, peer)["seconds"]
        if most["seconds"] - own < WORTH_TELLING:
            continue
        was_late, itself = "was late", f"it has waited {own:.1f} s"
        if not is_here:
            was_late, itself = "may have been late", "how long it has waited itself is not known"
        line = (
            f"{group.number(peer)} {was_late}: {group.number(by)} has waited "
            f"{most['seconds']:.1f} s for it, longest in {most['last']:,} of "
            f"{called(group.ranks[by]):,} operations, {1000 * most['median_seconds']:.1f} ms in "
            f"the median; {itself}"
        )
        found.append((not is_here, own - most["seconds"], peer, line))
    return {peer: line for *_, peer, line in sorted(found)[:MOST_LATE]}


def waited(group: Group, rank: int) -> dict[str, Any]:
    """Return the waits of a rank; none of one that does not tell."""
    # A process of an older version does not tell.
    told = group.ranks.get(rank, {}).get("waited")
    return told or {"seconds": 0.0, "operations": 0, "by_rank": [], "by_operation": {}}


def called(state: dict[str, Any]) -> int:
    """Return how many operations a rank has called in a group."""
    return int(state["collectives"] + state["messages"])


def doing(state: dict[str, Any]) -> str:
    """Return the operations that a rank is in, in words."""
    if state["failure"]:
        return f"has failed: {state['failure']}"
    if not state["operations"]:
        return f"no operation; the last: {state['last'] or 'none so far'}"
    shown = []
    for operation in state["operations"][:3]:
        peers = operation["waits_for"]
        whom = f", waits for {numbers(peers)}" if peers else ""
        shown.append(f"{operation['name']} for {operation['seconds']:.1f} s{whom}")
    more = len(state["operations"]) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def numbers(ranks: list[int]) -> str:
    """Return the ranks in words, the first of them where there are many."""
    named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def silent(
    found: Iterable[Process], all_groups: Iterable[Group], *, strangers: bool = True
) -> Iterator[str]:
    """Return the processes that have not answered, with the ranks that they are, in words.

    Without `strangers` those are left out that are no ranks of these groups, as far as is known.
    """
    found = list(found)
    for process in found:
        if process.answer is not None:
            continue
        known = [
            f"{group.number(rank)} of group {group.short}"
            for group in all_groups
            for rank in range(len(group.members))
            if rank not in group.ranks and group.process_of(rank, found) is process
        ]
        who = f", {known[0]}" if known else ""
        if not known and not strangers:
            continue
        yield f"{process.line()} ({process.trouble}){who}"


def text(found: list[Process], *, stacks: bool = False) -> str:
    """Return all of it in words, with the ranks that others wait for first in each group."""
    known = groups(found)
    lines = list(silent(found, known))
    if several := circle(known):
        lines.append(several)
    idle = []
    for group in known:
        if group.is_idle:
            idle.append(f"{group.title}: no operation is under way here")
            idle += [f"  {line}" for line in late(group).values()]
            continue
        lines.append(group.title)
        for rank, line in blamed(group, found).items():
            lines.append(f"  {line}")
            if stacks and rank in group.processes and not group.processes[rank].is_elsewhere:
                lines += [f"      {line}" for line in _stack(group.processes[rank].pid)]
        lines += [f"  {line}" for line in late(group).values()]
        for rank, state in sorted(group.ranks.items()):
            process = group.processes[rank]
            host = f"host {process.host}, " if process.is_elsewhere else ""
            lines.append(f"  {group.number(rank)}, {host}pid {process.pid}: {doing(state)}")
    return "\n".join([*lines, *idle])


def _stack(pid: int) -> list[str]:
    """The Python stacks of a process, which is not asked for them, by py-spy."""
    spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    try:
        done = subprocess.run(
            [spy, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except FileNotFoundError:
        return ["its Python stack: py-spy is not installed (pip install py-spy)"]
    except subprocess.TimeoutExpired:
        return ["its Python stack: py-spy has not ended within 10 s"]
    return (done.stdout or done.stderr).strip().splitlines()
