"""The findings of a trace: stragglers, waiting, the slowest operations and links, in words.

A rank is late in an operation if it comes last and more than `LATE` after the median of the others,
without the time for which it waited itself in between: a rank that is held up holds up others, too.
The wait of a rank is the time from its call until the last of those has come without which its
operation cannot end, which is known from their clocks alone; the rest of an operation is its
transfer. Where the engine has noted that a rank waited for a peer that had come already, and longer
than the peer waited for others, that is a wait of the link to the peer, or of its core.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unisono._trace.job import Job, Operation

# Nanoseconds after which a rank is late: less is the noise of processes that share cores.
LATE = 50_000
# A rank that held the others for a smaller part of the time of the one that held them longest is
# no straggler.
WORTH_TELLING = 0.05
# Bytes from which a message tells the rate of its link.
LONG = 64 << 10
MOST = 8
_BINS = 100
_SECOND = 1e9

#: The columns of a table, and its rows.
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


@dataclass
class Rank:
    """A process in the report; times in seconds."""

    rank: int
    host: str
    pid: int
    span: float = 0.0
    inside: float = 0.0
    waiting: float = 0.0
    operations: int = 0
    # How often it was late, by how much each time, and for how long others waited then.
    late: list[float] = field(default_factory=list)
    held: float = 0.0
    # The operations in which it was late: how often, by name.
    late_in: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    # The share of waiting in each part of the trace.
    bins: list[float] = field(default_factory=list)


@dataclass
class Kind:
    """Operations of one name, length and algorithm; times in seconds."""

    name: str
    bytes: int
    algorithm: str
    times: list[float] = field(default_factory=list)
    transfers: list[float] = field(default_factory=list)


@dataclass
class Link:
    """The way from one rank to another; times in seconds."""

    source: int
    target: int
    transfers: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    # For how long the target waited for the source in collectives: once that had come, and for
    # longer than that waited itself.
    waited: float = 0.0


@dataclass
class Report:
    """All findings."""

    ranks: list[Rank]
    kinds: list[Kind]
    links: list[Link]
    slowest: list[dict[str, Any]]
    collectives: int
    messages: int
    seconds: float
    clocks: list[dict[str, Any]]
    backwards: int
    lost: int
    failures: list[str]

    @property
    def stragglers(self) -> list[Rank]:
        """The ranks that held the others for long, the longest first."""
        most = max((rank.held for rank in self.ranks), default=0)
        late = [rank for rank in self.ranks if rank.late and rank.held >= WORTH_TELLING * most]
        return sorted(late, key=lambda rank: -rank.held)

    @property
    def title(self) -> str:
        """The size of the job."""
        return (
            f"{len(self.ranks)} ranks, {self.collectives} collectives and {self.messages} messages "
            f"in {seconds(self.seconds)}"
        )

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def report(job: Job) -> Report:
    """Find out who was late, who waited, and for how long."""
    begin = min((one.begin for one in job.operations()), default=0)
    end = max((one.end for one in job.operations()), default=0)
    ranks = {id(one): Rank(one.rank, one.host, one.pid) for one in job.processes}
    waits_of = {}
    for process in job.processes:
        rank = ranks[id(process)]
        operations = list(process.operations())
        rank.operations = len(operations)
        rank.span = (end - begin) / _SECOND
        rank.inside = _covered((one.begin, one.end) for one in operations) / _SECOND
        waits = list(_union((one.begin, one.begin + one.wait) for one in operations))
        rank.waiting = sum(till - since for since, till in waits) / _SECOND
        rank.bins = _shares(waits, begin, end)
        waits_of[id(process)] = waits
    collectives = job.collectives.values()
    for parts in [*collectives, *([sent, got] for sent, got in job.messages)]:
        _blame(parts, ranks, waits_of)
    slowest = sorted(job.operations(), key=lambda one: one.begin - one.end)[:MOST]
    return Report(
        list(ranks.values()),
        _kinds(job),
        _links(job),
        [_slow(one, begin) for one in slowest],
        len(collectives),
        len(job.messages),
        (end - begin) / _SECOND,
        [asdict(clock) for clock in job.clocks.values()],
        job.backwards,
        job.lost,
        [_failure(one) for one in job.operations() if one.has_failed][:MOST],
    )


def _blame(
    parts: Sequence[Operation],
    ranks: dict[int, Rank],
    waits_of: dict[int, list[tuple[int, int]]],
) -> None:
    """Note the rank that others waited for, unless it was held up itself."""
    held = [part for part in parts if part.last is not None]
    if not held:
        return
    last = max((part.last for part in held if part.last), key=lambda one: one.begin)
    others = int(statistics.median(part.begin for part in parts if part is not last))
    process = id(last.member.process)
    lag = last.begin - others
    own = lag - _within(waits_of[process], others, last.begin)
    if own < LATE:
        return
    rank = ranks[process]
    rank.late.append(own / _SECOND)
    rank.held += sum(part.wait for part in held) / _SECOND * own / lag
    rank.late_in[last.name] += 1


def _within(spans: Sequence[tuple[int, int]], begin: int, end: int) -> int:
    """The length of the parts of the spans, which are in order, between two times."""
    first = max(bisect.bisect_left(spans, (begin, begin)) - 1, 0)
    found = 0
    for at in range(first, len(spans)):
        since, till = spans[at]
        if since >= end:
            break
        found += max(0, min(till, end) - max(since, begin))
    return found


def _kinds(job: Job) -> list[Kind]:
    """The operations by kind, those that took most time in all first."""
    found: dict[tuple[str, int, str], Kind] = {}
    for one in job.operations():
        key = one.name, one.bytes, one.notes.get("algorithm", "")
        kind = found.setdefault(key, Kind(*key))
        kind.times.append((one.end - one.begin) / _SECOND)
        kind.transfers.append((one.end - one.begin - one.wait) / _SECOND)
    return sorted(found.values(), key=lambda kind: -sum(kind.times))


def _links(job: Job) -> list[Link]:
    """The ways between ranks of the whole job, those with the slowest messages first."""
    found: dict[tuple[int, int], Link] = {}

    def link(source: int, target: int) -> Link:
        return found.setdefault((source, target), Link(source, target))

    for sent, received in job.messages:
        both = max(sent.begin, received.begin)
        took = max(received.end - both, 1) / _SECOND
        way = link(sent.member.process.rank, received.member.process.rank)
        way.transfers.append(took)
        if sent.bytes >= LONG:
            way.rates.append(sent.bytes / took)
    for parts in job.collectives.values():
        begins = {part.member.rank: part for part in parts}
        for part in parts:
            for peer, waited in part.notes.get("waited_ns", {}).items():
                other = begins.get(int(peer))
                if other is None:
                    continue
                missing = max(0, min(other.begin, part.end) - part.begin)
                # The other one may have been held up itself, as in a ring.
                held_up = sum(other.notes.get("waited_ns", {}).values())
                beyond = max(0, waited - missing - held_up) / _SECOND
                ends = other.member.process.rank, part.member.process.rank
                link(*ends).waited += beyond

    def slowness(way: Link) -> tuple[float, float]:
        return -statistics.median(way.transfers or [0.0]), -way.waited

    return sorted(found.values(), key=slowness)


def _slow(one: Operation, begin: int) -> dict[str, Any]:
    return {
        "rank": one.member.process.rank,
        "name": f"{one.name} #{one.number}",
        "bytes": one.bytes,
        "at": (one.begin - begin) / _SECOND,
        "seconds": (one.end - one.begin) / _SECOND,
        "waited": one.wait / _SECOND,
        "last": one.last.member.process.rank if one.last else None,
    }


def _failure(one: Operation) -> str:
    return f"rank {one.member.process.rank}: {one.name} #{one.number}: {one.notes['failure']}"


def _union(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans without what they have in common."""
    since, till = 0, 0
    for begin, end in sorted(spans):
        if begin > till:
            if till > since:
                yield since, till
            since, till = begin, end
        else:
            till = max(till, end)
    if till > since:
        yield since, till


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    return sum(till - since for since, till in _union(spans))


def _shares(spans: Sequence[tuple[int, int]], begin: int, end: int) -> list[float]:
    """The share of each part of the trace that the spans cover."""
    width = max((end - begin) / _BINS, 1)
    found = [0.0] * _BINS
    for since, till in spans:
        first = min(int((since - begin) / width), _BINS - 1)
        last = min(int((till - begin) / width), _BINS - 1)
        for at in range(first, last + 1):
            left, right = begin + at * width, begin + (at + 1) * width
            found[at] += max(0.0, min(till, right) - max(since, left)) / width
    return [min(share, 1.0) for share in found]


def seconds(time: float) -> str:
    """Return a time in words."""
    for unit, name in ((1, "s"), (1e-3, "ms")):
        if time >= unit:
            return f"{time / unit:.3g} {name}" if time < 100 * unit else f"{time / unit:.0f} {name}"
    return f"{time * 1e6:.3g} us" if time else "0"


def size(count: float) -> str:
    """Return bytes in words."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def straggler(rank: Rank, told: Report) -> str:
    """Return the sentence about a rank that was late."""
    all_of = told.collectives + told.messages
    often = max(rank.late_in, key=lambda name: rank.late_in[name])
    return (
        f"rank {rank.rank} (host {rank.host}, pid {rank.pid}) was last in {len(rank.late)} of "
        f"{all_of} operations, by {seconds(statistics.median(rank.late))} in the median, mostly in "
        f"{often}; others waited {seconds(rank.held)} for it in all"
    )


def tables(told: Report) -> dict[str, Table]:
    """Return the tables of a report: by title, the columns and the rows."""
    ranks: list[tuple[str, ...]] = [
        (
            str(one.rank),
            one.host,
            str(one.operations),
            f"{_share(one.inside, one.span):.1%}",
            f"{_share(one.waiting, one.span):.1%}",
            str(len(one.late)),
            seconds(one.held),
        )
        for one in told.ranks
    ]
    kinds: list[tuple[str, ...]] = [
        (
            one.name,
            size(one.bytes),
            one.algorithm,
            str(len(one.times)),
            seconds(statistics.median(one.times)),
            seconds(statistics.median(one.transfers)),
            seconds(max(one.times)),
            seconds(sum(one.times)),
        )
        for one in told.kinds[:MOST]
    ]
    links: list[tuple[str, ...]] = [
        (
            f"{one.source} to {one.target}",
            str(len(one.transfers)),
            seconds(statistics.median(one.transfers)) if one.transfers else "",
            f"{size(statistics.median(one.rates))}/s" if one.rates else "",
            seconds(one.waited),
        )
        for one in told.links[:MOST]
    ]
    slowest: list[tuple[str, ...]] = [
        (
            one["name"],
            size(one["bytes"]),
            str(one["rank"]),
            seconds(one["at"]),
            seconds(one["seconds"]),
            seconds(one["waited"]),
            "" if one["last"] is None else str(one["last"]),
        )
        for one in told.slowest
    ]
    return {
        "Ranks, with their shares of the time": (
            ("rank", "host", "operations", "inside", "waiting", "late", "held others"),
            ranks,
        ),
        "Operations, those that took most time first": (
            ("operation", "size", "algorithm", "count", "median", "transfer", "longest", "in all"),
            kinds,
        ),
        "The longest operations": (
            ("operation", "size", "rank", "at", "took", "waited", "for rank"),
            slowest,
        ),
        "Links, the slowest first": (
            ("ranks", "messages", "median", "rate", "waits in collectives"),
            links,
        ),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def remarks(told: Report) -> list[str]:
    """Return the limits of a report: clocks, lost events, failures."""
    lines = []
    for clock in told.clocks[1:]:
        if clock["error"] is None:
            known = "by the clock of the day: no group has compared it over a link"
        else:
            known = f"give or take {seconds(clock['error'] / _SECOND)}, measured over a link"
        ahead = clock["offset"] / _SECOND
        lines.append(
            f"the clock of host {clock['host']} is moved by {ahead:+.6f} s to that of host "
            f"{told.clocks[0]['host']} ({known})"
        )
    if told.backwards:
        lines.append(
            f"{told.backwards} of {told.messages} messages arrive before they were sent: clocks "
            "have drifted apart since the job began"
        )
    if told.lost:
        lines.append(f"{told.lost} events are lost: the disk was slower than the ranks")
    lines += [f"failed: {failure}" for failure in told.failures]
    return lines


def text(told: Report) -> str:
    """Return the report in words."""
    lines = [told.title, *remarks(told), "", "Stragglers"]
    late = told.stragglers[:MOST]
    lines += [f"  {straggler(rank, told)}" for rank in late]
    if not late:
        lines.append(f"  none: no rank came more than {seconds(LATE / _SECOND)} after the others")
    for title, (columns, rows) in tables(told).items():
        if rows:
            lines += ["", title, *_table(columns, rows)]
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]
