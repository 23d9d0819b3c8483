"""``unisono simulate``: a job that is not run, its calls in time, and the end of it if a rank dies.

All ranks are in this process, over links and on a clock that are simulated; the choice of
algorithms, the plans, the messages and the errors are the real ones (``rust/core``,
``engine/world``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from unisono import _explain
from unisono._explain import in_bytes, in_seconds
from unisono.errors import Error

_EXAMPLES = """\
examples:
  unisono simulate all_reduce:16M barrier --ranks 8 --hosts 2
  unisono simulate all_reduce:1M --ranks 8 --hosts 8 --dies 3@400us
  unisono simulate all_gather:4M --hosts 4 --stops 1@1ms+5s --story
  unisono simulate --world 7
"""
_EVENTS = {
    "dies": ("RANK@TIME", "the process of a rank ends"),
    "dark": ("RANK@TIME", "its host is cut off without a sign"),
    "breaks": ("RANK@TIME+TIME", "its connections break for a while"),
    "stops": ("RANK@TIME+TIME", "it does not run for a while"),
    "skips": ("RANK@CALL", "it leaves out a call (from 0 on)"),
}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def simulate(arguments: Sequence[str], name: str) -> int:
    """Print what happens, and return the exit status: 1 where a call fails."""
    parser = command_line(name)
    chosen = parser.parse_intermixed_args(arguments)
    from unisono import _native

    if chosen.world is not None:
        print(_native.load()._world(chosen.world), end="")
        return 0
    if not 1 <= chosen.hosts <= chosen.ranks:
        parser.error(f"{chosen.ranks} ranks on {chosen.hosts} hosts: each host has one at least")
    if not chosen.calls:
        parser.error("no call: name one, such as all_reduce:16M")
    events = [(kind, *getattr(chosen, kind)) for kind in _EVENTS if getattr(chosen, kind)]
    if len(events) > 1:
        parser.error("one event at a time: " + ", ".join(f"--{event[0]}" for event in events))
    hosts = _explain.hosts_of(chosen.ranks, chosen.hosts)
    try:
        answer = _native.load()._simulate(
            hosts,
            chosen.calls,
            latency=chosen.latency * 1e-6,
            rate=chosen.rate * 1e9,
            event=events[0] if events else None,
            settings=chosen.set,
            seed=chosen.seed,
            story=chosen.story or chosen.json,
        )
    except ValueError as error:
        parser.error(str(error))
    except Error as error:
        print(f"{name} simulate: {error}", file=sys.stderr)
        return 1
    failed = any(call["error"] for rank in answer["ranks"] for call in rank)
    if chosen.json:
        print(json.dumps({"hosts": hosts, **answer}))
    elif chosen.story:
        print(answer["story"], end="")
    else:
        print("\n".join(text(chosen, answer)))
    return int(failed)


def text(chosen: argparse.Namespace, answer: dict[str, Any]) -> list[str]:
    """Return the lines of an answer: a table of the calls, then the errors."""
    links = f"{in_seconds(chosen.latency * 1e-6)} apart with {chosen.rate:g} GB/s out of each"
    where = "one host" if chosen.hosts == 1 else f"{chosen.hosts} hosts {links}"
    lines = [f"{chosen.ranks} ranks on {where}; bytes inside a host take no time", ""]
    lines.append(f"{'call':<22}{'algorithm':<20}{'begins':>10}{'ends':>10}{'takes':>10}  ranks")
    for number, (operation, size, _) in enumerate(chosen.calls):
        of_ranks = [(rank, call) for rank, calls in enumerate(answer["ranks"]) for call in calls]
        calls = [(rank, call) for rank, call in of_ranks if call["call"] == number]
        if not calls:
            continue
        begun = [call["begun"] for _, call in calls]
        ended = [call["ended"] for _, call in calls if call["ended"] is not None]
        good = [rank for rank, call in calls if call["ended"] is not None and not call["error"]]
        algorithm = next((call["algorithm"] for _, call in calls if call["algorithm"]), None) or ""
        called = operation if operation == "barrier" else f"{operation} of {in_bytes(size)}"
        first, last = min(begun), max(ended, default=None)
        times = f"{in_seconds(first):>10}"
        if last is not None:
            times += f"{in_seconds(last):>10}{in_seconds(last - first):>10}"
        of = "all" if len(good) == chosen.ranks else f"{len(good)} of {chosen.ranks}"
        lines.append(f"{called:<22}{algorithm:<20}{times:<30}  {of}")
    return lines + _errors(answer)


def _errors(answer: dict[str, Any]) -> list[str]:
    """Return the errors: for each the time at which ranks get it first, and the ranks."""
    found: dict[str, list[tuple[float, int]]] = {}
    for rank, calls in enumerate(answer["ranks"]):
        for call in calls:
            if call["error"]:
                found.setdefault(call["error"], []).append((call["ended"], rank))
    lines = [""] if found else []
    for error, ends in sorted(found.items(), key=lambda item: min(item[1])):
        ranks = ", ".join(str(rank) for _, rank in sorted(ends, key=lambda end: end[1]))
        one = "rank" if len(ends) == 1 else "ranks"
        lines.append(f"{in_seconds(min(ends)[0]):>10}  {one} {ranks}: {error}")
    return lines


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=f"{name} simulate",
        description="A job that is not run: its calls in time, and what a fault would do.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("calls", nargs="*", type=_call, metavar="CALL", help="NAME[:BYTES[:ROOT]], in order")
    add("--ranks", "-n", type=int, default=4, help="how many ranks (4)")
    add("--hosts", type=int, default=2, help="hosts that they are spread over (2)")
    add("--latency", type=float, default=20, metavar="US", help="from host to host (20)")
    add("--rate", type=float, default=1.2, metavar="GB/S", help="out of each host (1.2)")
    for event, (form, meaning) in _EVENTS.items():
        add(f"--{event}", type=_EventOf(event, form), metavar=form, help=meaning)
    add("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="a setting")
    add("--seed", type=_number, default=0, help="another order of the ranks' turns (0)")
    add("--story", action="store_true", help="print all events in time")
    add("--json", action="store_true", help="print everything as JSON")
    add("--world", type=_number, metavar="SEED", help="a world of unisono's own tests instead")
    return parser


def _call(written: str) -> tuple[str, int, int]:
    name, _, rest = written.partition(":")
    size, _, root = rest.partition(":")
    if name == "barrier":
        return name, 0, 0
    return name, _explain.size(size) if size else 1 << 20, _number(root or "0")


def _number(written: str) -> int:
    if not written.isdigit() or int(written) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{written!r} is no number from 0 on")
    return int(written)


class _EventOf:
    """Reads an event of one kind: the rank, the time or the call, and how long it lasts."""

    def __init__(self, kind: str, form: str) -> None:
        self.kind, self.form = kind, form

    def __call__(self, written: str) -> tuple[int, float, float]:
        rank, _, times = written.partition("@")
        at, plus, lasts = times.partition("+")
        wanted = "+" in self.form
        if not rank.isdigit() or not at or bool(lasts) != wanted or bool(plus) != wanted:
            raise argparse.ArgumentTypeError(f"{written!r} has not the form {self.form}")
        if self.kind == "skips":
            return _number(rank), float(_number(at)), 0.0
        return _number(rank), _seconds(at), _seconds(lasts) if wanted else 0.0


def _seconds(written: str) -> float:
    number = written.rstrip("mus")
    try:
        seconds = float(number) * _UNITS[written[len(number) :] or "s"]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{written!r} is no time like 400us, 3ms or 5s")
    return seconds


def _setting(written: str) -> tuple[str, str]:
    name, separator, value = written.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{written!r} has no form like eager_bytes=64K")
    return name, value
