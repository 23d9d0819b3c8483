"""The ranks of other hosts, asked through their groups.

A process of this host asks others in its turn, over a connection that its group proves
(``rust/core``, ``transport/endpoint/inquiry.rs``). A process is asked once, whatever groups it is
in; the processes of a group that are here share the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from unisono._status import ask, flight, ras, words
from unisono._status.ask import Process

# Seconds for a process of another host to answer; the processes that one asks at a time (`MOST` of
# turns.rs, beside inquiry.rs); and the longest words of a process that has not answered.
PATIENCE = 0.6
AT_A_TIME = 32
_LONGEST = 300


@dataclass(frozen=True)
class _Question:
    """Ranks of a group, and the one of this host that asks them (``ask.question``)."""

    group: words.Group
    asker: int
    ranks: list[int]


def processes(found: Iterable[Process], *, records: bool = False) -> list[Process]:
    """Ask the ranks that no process here has answered for.

    Parameters
    ----------
    found
        The processes of this host.
    records
        Whether they send the records of their operations too.

    Returns
    -------
    list
        Their processes; of those that do not answer, the reason.
    """
    questions = list(_questions(list(found)))
    if not questions:
        return []
    with ThreadPoolExecutor(max_workers=64) as threads:
        answers = threads.map(lambda question: _answers(question, records=records), questions)
        return [process for answer in answers for process in answer]


def _questions(found: list[Process]) -> Iterator[_Question]:
    planned: set[str] = set()
    for group in words.groups(found):
        missing = []
        for rank, member in enumerate(group.members):
            label = member["process"]
            if label in planned or group.process_of(rank, found):
                continue
            planned.add(label)
            missing.append(rank)
        for number, asker in enumerate(group.ranks):
            if ranks := missing[number :: len(group.ranks)]:
                yield _Question(group, asker, ranks)


def _answers(question: _Question, *, records: bool) -> list[Process]:
    group = question.group
    asked = {
        "group": group.name,
        "rank": question.asker,
        "ranks": question.ranks,
        "seconds": PATIENCE,
        "records": records,
    }
    asker = group.processes[question.asker]
    rounds = math.ceil(len(question.ranks) / AT_A_TIME)
    told, trouble = ask.question(asker, asked, PATIENCE * rounds + ask.PATIENCE)
    late = {"trouble": trouble or f"no answer within {PATIENCE:.1f} s"}
    return [_process(group, rank, told.get(rank, late), records=records) for rank in question.ranks]


def _process(group: words.Group, rank: int, told: dict[str, Any], *, records: bool) -> Process:
    label = words.LABEL.fullmatch(group.members[rank]["process"])
    host, pid = (label["host"], int(label["pid"])) if label else ("", 0)
    process = Process(pid, pid, "", "silent", host=host, is_elsewhere=True)
    answer = _plain(told.get("answer"))
    if answer is None:
        process.trouble = ask.plain(str(told.get("trouble")))[:_LONGEST]
        return process
    process.answer, process.state = answer, "running"
    if not _can_be_told(process, records=records):
        process.answer, process.state = None, "silent"
        process.trouble = "its answer has another form: does it run another version of unisono?"
    return process


def _can_be_told(process: Process, *, records: bool) -> bool:
    """Whether the answer of another host, which may have any form, is one for all that reads it."""
    # It imports this module.
    from unisono._status import top

    try:
        answer: dict[str, Any] = process.answer or {}
        if answer["form"] != ask.FORM:
            return False
        process.command = answer["program"]["command"]
        process.call = ask.call_in_words(answer["program"])
        words.text([process])
        ras.report([process])
        look = top.Look(0.0, [process])
        top.frame(look, look)
        if records:
            flight.records([process])
        return all(
            0 <= rank < len(group.members)
            for group in words.groups([process])
            for rank in group.ranks
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False


def _plain(value: Any) -> Any:
    """The same without letters that move the cursor of a terminal."""
    if isinstance(value, str):
        return ask.plain(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {ask.plain(name): _plain(one) for name, one in value.items()}
    return value
