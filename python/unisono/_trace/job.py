"""The operations of a job: read from the files of its processes, on one clock, and joined.

The times in a file are those of the monotonic clock, which all processes of a running kernel
share. Between hosts, the ranks have compared the clocks over the links of their group when it
formed; where no group spans two hosts the clock of the day stands in, and the job says so.

Joined are collectives, by the group and their number in it, and messages: the n-th message that a
rank sends to another with a tag meets the n-th receive, in the order of the calls, that has got one
from there with that tag.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from unisono._trace import proto

SUFFIX = ".pftrace"
MESSAGES = ("send", "recv")
_TO_ROOT = ("reduce", "gather")
_FROM_ROOT = ("broadcast", "scatter")


@dataclass(slots=True, eq=False)
class Operation:
    """An operation of a rank; times in nanoseconds."""

    name: str
    member: Member
    begin: int
    end: int
    notes: dict[str, Any]
    # For how long others had not come; and the one that came last, if it was not this rank.
    wait: int = 0
    last: Operation | None = None
    # The send of a receive, and the other way round.
    partner: Operation | None = None

    @property
    def number(self) -> int:
        """The number of the operation in its group."""
        return int(self.notes["sequence"])

    @property
    def bytes(self) -> int:
        """The bytes of its longer buffer."""
        return int(self.notes["bytes"])

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.name in MESSAGES

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return "failure" in self.notes

    def wait_for(self, last: Operation) -> None:
        """Note the part without which this one cannot end, and that came last."""
        if last.begin > self.begin:
            self.wait = min(last.begin, self.end) - self.begin
            self.last = last


@dataclass(eq=False)
class Member:
    """A rank of a group."""

    group: str
    # How often the process was in a group of that name before: a number apart.
    time: int
    rank: int
    numbers: list[int]
    process: Process
    lost: int = 0
    # Nanoseconds by which the clock of rank 0 stands before this one's, and the error of that.
    clock: tuple[int, int] | None = None
    operations: list[Operation] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, int]:
        """The group, the same for all its ranks."""
        return self.group, self.time

    @property
    def title(self) -> str:
        """The name of the track."""
        return f"rank {self.rank} of {len(self.numbers)}, group {self.group[:8]}"


@dataclass(eq=False)
class Process:
    """A process, by its file. Its rank is the one in the whole job."""

    path: Path
    host: str = ""
    boot: str = ""
    pid: int = 0
    rank: int = 0
    # The clock of the day less the monotonic clock.
    realtime: int = 0
    members: list[Member] = field(default_factory=list)

    def operations(self) -> Iterator[Operation]:
        """All operations of the process."""
        return itertools.chain.from_iterable(member.operations for member in self.members)


@dataclass
class Clock:
    """The clock of a host: the nanoseconds that lead to the first one's, and how that is known."""

    host: str
    offset: int
    # Give or take that much; None where the clock of the day stands in.
    error: int | None


class NoTraceError(Exception):
    """A folder has no trace of ranks; the message says so."""


@dataclass
class Job:
    """All processes, on the clock of the first one's host."""

    processes: list[Process]
    # By the id of the boot.
    clocks: dict[str, Clock]

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Read the files of a folder.

        Raises
        ------
        NoTraceError
            if it has none.
        """
        paths = sorted(folder.glob("rank-*" + SUFFIX))
        processes = [process for path in paths if (process := _process(path)) is not None]
        if not processes:
            raise NoTraceError(
                f"{folder} has no trace: run the program with UNISONO_TRACE={folder} on every rank"
            )
        processes.sort(key=lambda process: (process.rank, process.pid))
        job = cls(processes, _clocks(processes))
        job._align()
        job._join()
        return job

    @property
    def first(self) -> Process:
        """The process whose clock is the job's."""
        return self.processes[0]

    def operations(self) -> Iterator[Operation]:
        """All operations of all ranks."""
        return itertools.chain.from_iterable(process.operations() for process in self.processes)

    @cached_property
    def collectives(self) -> dict[tuple[str, int, int], list[Operation]]:
        """The parts of each collective, by its group and its number there."""
        found: dict[tuple[str, int, int], list[Operation]] = defaultdict(list)
        for operation in self.operations():
            if not operation.is_message:
                group, time = operation.member.place
                found[group, time, operation.number].append(operation)
        return found

    @cached_property
    def messages(self) -> list[tuple[Operation, Operation]]:
        """The sends and receives that have met."""
        sends: dict[tuple[Any, ...], list[Operation]] = defaultdict(list)
        receives: dict[tuple[Any, ...], list[Operation]] = defaultdict(list)
        for operation in self.operations():
            if operation.is_message and not operation.has_failed:
                member, notes = operation.member, operation.notes
                ends = (member.rank, notes.get("peer", -1))
                is_send = operation.name == "send"
                ends = ends if is_send else ends[::-1]
                stream = (*member.place, *ends, notes.get("tag", 0))
                (sends if is_send else receives)[stream].append(operation)
        lossy = {member.place for member in self._members() if member.lost}
        met: list[tuple[Operation, Operation]] = []
        for stream, sent in sends.items():
            if stream[:2] in lossy:
                continue
            pairs = zip(
                sorted(sent, key=lambda one: one.number),
                sorted(receives.get(stream, ()), key=lambda one: one.number),
                strict=False,
            )
            # A difference in length would show that they have not met after all.
            met += itertools.takewhile(lambda pair: pair[0].bytes == pair[1].bytes, pairs)
        return met

    @cached_property
    def backwards(self) -> int:
        """The number of messages that arrive before they were sent: clocks are that far apart."""
        return sum(received.end < sent.begin for sent, received in self.messages)

    @property
    def lost(self) -> int:
        """Events that could not be written as fast as they came."""
        return sum(member.lost for member in self._members())

    def _members(self) -> Iterator[Member]:
        return itertools.chain.from_iterable(process.members for process in self.processes)

    def _align(self) -> None:
        for process in self.processes:
            offset = self.clocks[process.boot].offset
            for operation in process.operations():
                operation.begin += offset
                operation.end += offset

    def _join(self) -> None:
        for parts in self.collectives.values():
            for part in parts:
                needed = [other for other in parts if _needs(part, other)]
                if needed:
                    part.wait_for(max(needed, key=lambda other: other.begin))
        for sent, received in self.messages:
            sent.partner, received.partner = received, sent
            received.wait_for(sent)


def _needs(part: Operation, other: Operation) -> bool:
    """Whether this part of a collective cannot end before the other one has begun."""
    root = part.notes.get("root")
    if part.name in _FROM_ROOT:
        return other.member.rank == root
    return part.name not in _TO_ROOT or part.member.rank == root or other is part


def _process(path: Path) -> Process | None:
    """Read a file; `None` where it ends before it has named its process."""
    process, named = Process(path), False
    tracks: dict[int, Member] = {}
    times: dict[tuple[str, int], int] = defaultdict(int)
    under_way: dict[int, proto.Event] = {}
    for event in proto.packets(path.read_bytes()):
        member, notes = tracks.get(event.track), event.notes
        if event.kind == proto.BEGIN:
            under_way[event.track] = event
        elif event.kind == proto.END:
            begun = under_way.pop(event.track, None)
            if member is not None and begun is not None:
                member.operations.append(
                    Operation(begun.name, member, begun.time, event.time, begun.notes)
                )
        elif event.name == "process":
            process.host, process.boot = notes["host"], notes["boot"] or notes["host"]
            process.pid, process.rank = notes["pid"], notes["rank"]
            process.realtime, named = notes["realtime_ns"], True
        elif event.name == "group":
            group, rank = notes["group"], notes["rank"]
            member = Member(group, times[group, rank], rank, notes["numbers"], process)
            times[group, rank] += 1
            tracks[event.track] = member
            process.members.append(member)
        elif event.name == "beside" and notes["track"] in tracks:
            tracks[event.track] = tracks[notes["track"]]
        elif event.name == "clock" and member is not None:
            member.clock = notes["offset_ns"], notes["error_ns"]
        elif event.name == "lost" and member is not None:
            member.lost += notes["events"]
    return process if named else None


def _clocks(processes: list[Process]) -> dict[str, Clock]:
    """The clock of each host against that of the first process."""
    # By two boots: the nanoseconds that lead from the first one's clock to the second one's.
    known: dict[tuple[str, str], tuple[int, int]] = {}
    zeros = {
        (member.place, member.numbers[member.rank]): process.boot
        for process in processes
        for member in process.members
        if member.rank == 0
    }
    for process in processes:
        for member in process.members:
            there = zeros.get((member.place, member.numbers[0]))
            if member.clock is None or there is None or there == process.boot:
                continue
            offset, error = member.clock
            for ends, sign in (((process.boot, there), 1), ((there, process.boot), -1)):
                if ends not in known or error < known[ends][1]:
                    known[ends] = sign * offset, error
    first = processes[0]
    clocks = {first.boot: Clock(first.host, 0, 0)}
    hosts = {process.boot: process for process in processes}
    waiting = [first.boot]
    while waiting:
        near = waiting.pop(0)
        for (boot, there), (offset, error) in known.items():
            if there == near and boot not in clocks:
                known_by = clocks[near]
                clocks[boot] = Clock(
                    hosts[boot].host, known_by.offset + offset, (known_by.error or 0) + error
                )
                waiting.append(boot)
    for boot, process in hosts.items():
        if boot not in clocks:
            clocks[boot] = Clock(process.host, process.realtime - first.realtime, None)
    return clocks
