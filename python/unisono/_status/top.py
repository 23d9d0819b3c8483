"""``unisono top``: the state of the jobs with ranks on this host, again and again, with rates.

A frame compares two looks: from them come the operations of a rank in a second, and the part of the
time for which it has waited. On a terminal ``rich`` draws it where it is installed; elsewhere a
frame is plain lines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono._status import ask, elsewhere, words
from unisono._status.ask import Process
from unisono._status.words import Group

if TYPE_CHECKING:
    from rich.console import Group as Renderables

COLUMNS = ("rank", "pid", "operation", "seconds", "waits for", "ops/s", "waited", "last")
#: Columns of numbers.
_RIGHT = frozenset(("pid", "seconds", "ops/s", "waited"))
#: The lines of a frame where no terminal says how many it has.
_LINES = 1000


@dataclass(frozen=True)
class Row:
    """A rank in a frame: the cells of its columns."""

    cells: tuple[str, ...]
    # Whether others wait for it for long, it comes late, or it has failed.
    is_blamed: bool


@dataclass(frozen=True)
class Section:
    """A group in a frame: the culprits in words, then its ranks, the culprits first."""

    title: str
    culprits: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class Look:
    """All answers at one time."""

    time: float
    found: list[Process]

    @classmethod
    def now(cls, *, here: bool) -> Look:
        """Ask all processes of this host, and unless only `here` the others of their groups."""
        found = ask.processes()
        if not here:
            found += elsewhere.processes(found)
        return cls(time.monotonic(), found)


@dataclass(frozen=True)
class Frame:
    """The difference between two looks, in words."""

    # Of no group: processes that do not answer, and groups that wait for each other.
    troubles: list[str]
    sections: list[Section]


def frame(before: Look, now: Look, chosen: str = "") -> Frame:
    """Compare two looks, at all groups or those whose names begin with `chosen`."""
    old = {group.name: group for group in words.groups(before.found)}
    known = [group for group in words.groups(now.found) if group.name.startswith(chosen)]
    # The ones that wait first, then the largest.
    known.sort(key=lambda group: group.is_idle)
    troubles = list(words.silent(now.found, known, strangers=not chosen))
    if several := words.circle(known):
        troubles.append(several)
    seconds = max(now.time - before.time, 1e-6)
    sections = [_section(group, old.get(group.name), seconds, now.found) for group in known]
    return Frame(troubles, sections)


def _section(group: Group, before: Group | None, seconds: float, found: list[Process]) -> Section:
    blamed, late = words.blamed(group, found), words.late(group)
    first, awaited = group.first_operations(), group.awaited()
    for rank in list(blamed):
        # In a job that goes well, ranks wait for a moment all the time.
        waiting = [first[peer]["seconds"] for peer in awaited.get(rank, ())]
        if waiting and max(waiting) < words.WORTH_TELLING:
            del blamed[rank]
    failed = {rank for rank, state in group.ranks.items() if state["failure"]}
    culprits = dict.fromkeys([*blamed, *late])
    order = [rank for rank in culprits if rank in group.ranks]
    order += [rank for rank in sorted(group.ranks) if rank not in culprits]
    rows = []
    for rank in order:
        state = before.ranks.get(rank) if before else None
        cells = _cells(group, rank, state, seconds)
        rows.append(Row(cells, rank in culprits or rank in failed))
    return Section(group.title, [*blamed.values(), *late.values()], rows)


def _cells(
    group: Group, rank: int, before: dict[str, Any] | None, seconds: float
) -> tuple[str, ...]:
    state = group.ranks[rank]
    operation, since, peers = "-", "", ""
    if state["failure"]:
        operation = "has failed"
    elif state["operations"]:
        first = state["operations"][0]
        operation, since = first["name"], f"{first['seconds']:.1f}"
        peers = words.numbers(first["waits_for"]).partition(" ")[2]
    rate, part = "", ""
    told = words.waited(group, rank)
    if before is not None:
        rate = f"{(words.called(state) - words.called(before)) / seconds:,.0f}"
        waited = told["seconds"] - (before.get("waited") or told)["seconds"]
        part = f"{min(waited / seconds, 1):.0%}"
    return (
        group.number(rank).removeprefix("rank "),
        str(group.processes[rank].pid),
        operation,
        since,
        peers,
        rate,
        f"{told['seconds']:,.1f} s {part:>4}",
        _last(told["by_rank"]),
    )


def _last(waited: list[dict[str, Any]]) -> str:
    """The rank that was waited for longest most often, and how often."""
    most = max(waited, key=lambda told: told["last"], default=None)
    return f"rank {most['rank']} ({most['last']:,})" if most and most["last"] else ""


def plain(shown: Frame, lines: int = _LINES) -> str:
    """Return a frame as lines, at most that many."""
    found = list(shown.troubles)
    for section in shown.sections:
        found.append(section.title)
        found += [f"  {line}" for line in section.culprits]
        table = [COLUMNS, *(row.cells for row in section.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = [
                f"{cell:>{width}}" if name in _RIGHT else f"{cell:<{width}}"
                for name, cell, width in zip(COLUMNS, row, widths, strict=True)
            ]
            found.append(f"  {'  '.join(cells)}".rstrip())
    if len(found) > lines:
        found[lines - 1 :] = [f"... and {len(found) - lines + 1} more lines"]
    return "\n".join(found) or "no process with a group of unisono runs here"


def drawn(shown: Frame, lines: int = _LINES) -> Renderables:
    """Return a frame as rich draws it, with as many ranks as fit into these lines."""
    from rich.console import Group as Renderables
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(line, style="bold red") for line in shown.troubles]
    # For more ranks than one of each group. A sentence takes two lines; a group a title, a head,
    # a rank and a line at the end.
    sentences = len(parts) + sum(len(section.culprits) for section in shown.sections)
    left = lines - 2 * sentences - 4 * len(shown.sections)
    for section in shown.sections:
        parts.append(Text(section.title, style="bold"))
        parts += [Text(f"  {line}", style="yellow") for line in section.culprits]
        table = Table(box=None, pad_edge=True, header_style="dim")
        for name in COLUMNS:
            table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
        rows = section.rows[: 1 + max(left, 0)]
        left -= len(rows) - 1
        for row in rows:
            table.add_row(*map(Text, row.cells), style="red" if row.is_blamed else "")
        parts.append(table)
        if more := len(section.rows) - len(rows):
            parts.append(Text(f"  ... and {more} more ranks", style="dim"))
    if not parts:
        parts.append(Text("no process with a group of unisono runs here"))
    return Renderables(*parts)


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=f"{name} top",
        description="The groups with ranks on this host again and again, the ranks that others wait"
        " for first. q ends it.",
    )
    found.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two frames (1)"
    )
    found.add_argument("--once", action="store_true", help="print one frame, after an interval")
    found.add_argument("--group", default="", metavar="NAME", help="that group alone, by its name")
    found.add_argument("--here", action="store_true", help="ask the ranks of this host alone")
    return found


def top(arguments: list[str], name: str) -> int:
    """Show frames until q is pressed, and return the exit status: 1 if nothing ran at the end."""
    parser = command_line(name)
    chosen = parser.parse_args(arguments)
    if chosen.interval <= 0:
        parser.error("--interval is above 0")
    with contextlib.suppress(KeyboardInterrupt):
        looks = _looks(chosen.interval, here=chosen.here)
        if sys.stdout.isatty() and not chosen.once and (live := _live()):
            return _show(live, looks, chosen.group)
        for before, now in looks:
            lines = _height() if sys.stdout.isatty() else _LINES
            print(_once(frame(before, now, chosen.group), lines), flush=True)
            if chosen.once:
                return 0 if now.found else 1
    return 0


def _once(shown: Frame, lines: int) -> str:
    """A frame as it is printed: with colours where a terminal shows them."""
    console = _console()
    if console is None or not sys.stdout.isatty():
        return plain(shown, lines)
    with console.capture() as captured:
        console.print(drawn(shown, lines))
    return str(captured.get()).rstrip("\n")


def _console() -> Any:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def _live() -> Any:
    console = _console()
    if console is None:
        return None
    from rich.live import Live

    return Live(console=console, screen=True, auto_refresh=False)


def _show(live: Any, looks: Iterable[tuple[Look, Look]], group: str) -> int:
    now = None
    with live:
        for before, now in looks:
            live.update(drawn(frame(before, now, group), _height()), refresh=True)
    return 0 if now and now.found else 1


def _height() -> int:
    return os.get_terminal_size(sys.stdout.fileno()).lines - 1


def _looks(interval: float, *, here: bool) -> Iterator[tuple[Look, Look]]:
    """Each two looks that follow one another, until q is pressed."""
    with _keys() as pressed:
        before = Look.now(here=here)
        while not pressed(interval):
            now = Look.now(here=here)
            yield before, now
            before = now


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Give a function that waits, and tells whether q was pressed or there is no more input."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield time.sleep
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left)[0]:
                key = os.read(keyboard, 1)
                if key in (b"q", b"Q", b""):
                    return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
