"""The page "unisono" of torch's debug server: the ranks of the job, and those that others wait for.

It is made in the process of the server, beside rank 0. For each host one rank is asked, which tells
of all processes there (``_torch_debug``), also of those that are stopped or hold the GIL. Ranks
that are unknown after that are asked themselves.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from http.client import HTTPException
from typing import TYPE_CHECKING

from torch.distributed.debug._frontend import DebugHandler, NavLink, Route
from torch.distributed.debug._store import get_world_size, tcpstore_client

from unisono._status import ask, words
from unisono._torch_debug import NAME, of_job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.debug._frontend import HTTPRequestHandler

    from unisono._status.ask import Process
    from unisono._status.words import Group

# Seconds for a look at all ranks, and how many of a host are asked for all of it, one after the
# other. Each of these has half of the time that is left.
PATIENCE = 8.0
TRIED = 3
# The most ranks and links of a group that are shown, those first that matter most.
MOST_RANKS = 64
MOST_LINKS = 256
_COLUMNS = (
    *("rank", "host", "pid", "operation", "since", "waits for"),
    *("operations", "waited", "longest for", "mended"),
)
_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}unisono{% endblock %}</h1>{% endblock %}
{% block content %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
nav { flex-wrap: wrap }
section.content { overflow-wrap: anywhere }
.wide { overflow-x: auto; overflow-wrap: normal }
.wide table { border-collapse: collapse; font-size: .9rem }
.wide th, .wide td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top;
                     border-bottom: 1px solid #d5d9de }
.wide th { white-space: nowrap }
.wide td { max-width: 28em }
.wide td.number { white-space: nowrap }
.culprit, .culprits { color: #a31515 }
.culprits li { margin-bottom: .4em }
.aside { color: #5a6270 }
h2 { font-size: 1.3rem; margin-top: 1.6rem }
</style>
{{ body | safe }}
{% endblock %}
"""


@dataclass
class Job:
    """The processes of a job; and the ranks that are unknown, each with the reason."""

    processes: list[Process]
    unknown: dict[int, str]


class Page(DebugHandler):  # type: ignore[misc]
    """The page; made in the process of rank 0, and pickled where the server is not forked."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def routes(self) -> list[Route]:
        return [Route("/unisono", self._handle)]

    def nav_links(self) -> list[NavLink]:
        return [NavLink("/unisono", "unisono")]

    def templates(self) -> dict[str, str]:
        return {"unisono.html": _TEMPLATE}

    def dump(self) -> str:
        job = look(self.pid)
        unknown = [f"rank {rank}: {why}" for rank, why in job.unknown.items()]
        return "\n".join([*unknown, words.text(job.processes)])

    def dump_filename(self) -> str:
        return NAME

    def _handle(self, request: HTTPRequestHandler) -> bytes:
        body = page(look(self.pid), datetime.now(timezone.utc))
        return bytes(request.frontend.render_template("unisono.html", body=body))


def look(pid: int) -> Job:
    """Ask the ranks of the job whose rank 0 is this process here."""
    end = time.monotonic() + PATIENCE
    addresses, unknown = _addresses()
    by_host: dict[str, list[str]] = {}
    for address in addresses.values():
        by_host.setdefault(address.rpartition(":")[0], []).append(address)
    here = of_job(ask.processes(), pid)
    with ThreadPoolExecutor(max_workers=64) as threads:
        hosts = threads.map(lambda some: _of_host(some, end), by_host.values())
        found = _merged([here, *hosts])
        job = of_job(found, pid)
        missing = [rank for rank in addresses if rank not in _ranks(job)]
        told = threads.map(lambda rank: _of_rank(addresses[rank], end), missing)
        answers = dict(zip(missing, told, strict=True))
    found = _merged([found, *(answer for answer in answers.values() if isinstance(answer, list))])
    job = of_job(found, pid)
    for rank, answer in answers.items():
        if rank not in _ranks(job):
            why = answer if isinstance(answer, str) else "it has no group of this job"
            unknown[rank] = f"{addresses[rank]}: {why}"
    return Job(job, dict(sorted(unknown.items())))


def _addresses() -> tuple[dict[int, str], dict[int, str]]:
    """The workers of the ranks, and the ranks without one."""
    store = tcpstore_client()
    addresses, unknown = {}, {}
    for rank in range(get_world_size()):
        key = f"rank{rank}"
        if store.check([key]):
            addresses[rank] = store.get(key).decode()
        else:
            unknown[rank] = "it has not called start_debug_server"
    return addresses, unknown


def _of_host(addresses: list[str], end: float) -> list[Process]:
    for address in addresses[:TRIED]:
        now = time.monotonic()
        answer = _of_rank(address, now + (end - now) / 2)
        if not isinstance(answer, str):
            return answer
    return []


def _of_rank(address: str, end: float) -> list[Process] | str:
    """The processes of the host of a rank, by that rank; the reason where there are none."""
    request = urllib.request.Request(f"{address}/handler/{NAME}", data=b"", method="POST")
    left = end - time.monotonic()
    if left <= 0:
        return "no time was left to ask it"
    try:
        with urllib.request.urlopen(request, timeout=left) as response:
            found = [ask.from_record(record) for record in json.load(response)]
        # An answer that cannot be shown is none.
        page(Job(found, {}), datetime.now(timezone.utc))
        return found
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return "it has no group of unisono"
        return f"it cannot tell: {error}"
    except (OSError, HTTPException, json.JSONDecodeError) as error:
        return f"no answer: {getattr(error, 'reason', error)}"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return "its answer has another form: does it run another version of unisono?"


def _merged(answers: Iterable[list[Process]]) -> list[Process]:
    known: dict[tuple[str, int], Process] = {}
    for process in (process for answer in answers for process in answer):
        known.setdefault((process.host, process.pid), process)
    return list(known.values())


def _ranks(job: list[Process]) -> set[int]:
    """The ranks in the whole job that have answered, or whose silence is explained."""
    known = set()
    for group in words.groups(job):
        for rank, member in enumerate(group.members):
            if group.process_of(rank, job):
                known.add(member["global"])
    return known


def page(job: Job, now: datetime) -> str:
    """Return the page in HTML, without what surrounds it on all pages of the server."""
    groups = words.groups(job.processes)
    seen = (
        f'<p class="aside">Seen at {now:%H:%M:%S} UTC. Load the page again for another look; '
        "<code>unisono status</code> on a host tells the same of its ranks.</p>"
    )
    parts = (part for group in groups for part in _group(group, job.processes))
    return "\n".join([seen, *_culprits(job, groups), *parts])


def _culprits(job: Job, groups: list[Group]) -> Iterator[str]:
    yield "<h2>Waited for</h2>"
    told = list(words.silent(job.processes, groups, strangers=False))
    told += filter(None, [words.circle(groups)])
    for group in groups:
        where = f"group {group.short}: " if len(groups) > 1 else ""
        told += [f"{where}{line}" for line in words.blamed(group, job.processes).values()]
    told += [f"rank {rank}: {why}" for rank, why in job.unknown.items()]
    if told:
        yield f'<ul class="culprits">{"".join(f"<li>{escape(line)}</li>" for line in told)}</ul>'
    elif groups:
        yield "<p>No rank keeps others waiting.</p>"
    else:
        yield "<p>No rank of this job has a group of unisono.</p>"


def _group(group: Group, found: list[Process]) -> Iterator[str]:
    culprits = words.blamed(group, found)
    yield f"<h2>Group {escape(group.short)} of {len(group.members)} ranks</h2>"
    for line in words.late(group).values():
        yield f"<p>{escape(line)}</p>"
    first = group.first_operations()

    def order(rank: int) -> tuple[bool, bool, float, int]:
        failed = bool(group.ranks.get(rank, {}).get("failure"))
        age = first[rank]["seconds"] if rank in first else 0.0
        return rank not in culprits, not failed, -age, rank

    ranks = sorted(range(len(group.members)), key=order)
    if len(ranks) <= MOST_RANKS:
        ranks.sort(key=lambda rank: (rank not in culprits, rank))
    rows = [(rank in culprits, _row(group, rank, found)) for rank in ranks[:MOST_RANKS]]
    yield _table(_COLUMNS, rows)
    if len(ranks) > MOST_RANKS:
        yield f"<p>And {len(ranks) - MOST_RANKS} more ranks.</p>"
    yield from _links(group)


def _row(group: Group, rank: int, found: list[Process]) -> tuple[str, ...]:
    label = words.LABEL.fullmatch(group.members[rank]["process"])
    number = group.number(rank).removeprefix("rank ")
    place = (number, label["host"] if label else "", label["pid"] if label else "")
    state = group.ranks.get(rank)
    if state is None:
        process = group.process_of(rank, found)
        silent = "it does not answer"
        if process:
            silent = process.trouble or "it has not made this group yet, or has closed it"
        return (*place, silent, *[""] * 6)
    operation, since, whom = "", "", ""
    if state["operations"]:
        oldest = state["operations"][0]
        more = len(state["operations"]) - 1
        operation = oldest["name"] + (f", and {more} more" if more else "")
        since = f"{oldest['seconds']:.1f} s"
        whom = words.numbers(oldest["waits_for"]) if oldest["waits_for"] else ""
    if state["failure"]:
        operation = f"has failed: {state['failure']}"
    waited = words.waited(group, rank)
    most = max(waited["by_rank"], key=lambda one: one["seconds"], default=None)
    longest = f"{group.number(most['rank'])}, {most['seconds']:.1f} s" if most else ""
    mended = sum(link["mended"] for link in state["links"])
    return (
        *(*place, operation or f"none; the last: {state['last'] or 'none so far'}", since, whom),
        *(f"{words.called(state):,}", f"{waited['seconds']:.1f} s", longest, f"{mended}"),
    )


def _links(group: Group) -> Iterator[str]:
    """The ways of its links, and each link for those who unfold them: mended ones come first."""
    links = [(rank, link) for rank, state in group.ranks.items() for link in state["links"]]
    if not links:
        return
    ways = Counter(link["by"] for _, link in links)
    told = ", ".join(f"{count} by {way}" for way, count in ways.most_common())
    mended = sum(link["mended"] for _, link in links)
    also = f"; connections mended: {mended}" if mended else ""
    links.sort(key=lambda one: (-one[1]["mended"], one[0], one[1]["rank"]))
    rows: list[tuple[bool, tuple[str, ...]]] = [
        (False, (f"{rank}", f"{link['rank']}", link["by"], link["for"], f"{link['mended']}"))
        for rank, link in links[:MOST_LINKS]
    ]
    table = _table(("rank", "to", "by", "for", "mended"), rows)
    left = f"<p>And {len(links) - MOST_LINKS} more.</p>" if len(links) > MOST_LINKS else ""
    yield f"<details><summary>Links: {escape(told + also)}</summary>{table}{left}</details>"


def _table(columns: tuple[str, ...], rows: list[tuple[bool, tuple[str, ...]]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in columns)
    body = "".join(
        f"<tr{' class=culprit' if marked else ''}>"
        + "".join(f"<td{_kind(cell)}>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for marked, row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _kind(cell: str) -> str:
    return " class=number" if len(cell) < 24 else ""
