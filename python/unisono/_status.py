"""``unisono status``: the ranks on this host, their operations, and the ranks that these wait for.

Every process with a group answers on an abstract Unix socket (``rust/core``,
``transport/endpoint/status.rs``), whatever its program does meanwhile. So a job that hangs can be
asked. A process that is stopped cannot answer, and that is told instead.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "@unisono-status-"
# Seconds for a process to begin its answer, and to go on.
PATIENCE = 1.0
# Ranks that are told of as late: by how many seconds, and how many of them.
WORTH_TELLING = 1.0
MOST_LATE = 3
STATES = {"T": "stopped (SIGCONT lets it go on)", "t": "stopped by a debugger", "Z": "dead"}
LABEL = re.compile(r"host (?P<host>.*), pid (?P<pid>\d+)")


@dataclass
class Process:
    """A process with groups: its answer, or the reason why there is none."""

    pid: int
    # In its own PID namespace.
    own_pid: int
    command: str
    state: str
    answer: dict[str, Any] | None = None
    trouble: str = ""

    def line(self) -> str:
        """Return the process in words."""
        return f"pid {self.pid}, {self.state}: {self.command or 'a command that is not shown'}"


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


def processes() -> list[Process]:
    """Ask every process of this host that has groups."""
    table = Path("/proc/net/unix").read_text().splitlines()[1:]
    paths = {line.split()[-1] for line in table}
    names = sorted(path for path in paths if path.startswith(PREFIX))
    with ThreadPoolExecutor(max_workers=64) as threads:
        found = [process for process in threads.map(_ask, names) if process]
    return sorted(found, key=lambda process: process.pid)


def _ask(name: str) -> Process | None:
    """The answer of one process; None where it has ended meanwhile."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.settimeout(PATIENCE)
        try:
            asked.connect("\0" + name[1:])
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                return None
            pid = _pid(name)
            trouble = f"it cannot be asked: {error}"
            return Process(pid, pid, _command(pid), _state(pid), trouble=trouble)
        credentials = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, user, _ = struct.unpack("3i", credentials)
        process = Process(pid or _pid(name), _pid(name), _command(pid), _state(pid))
        if user != os.geteuid():
            process.trouble = f"it belongs to {_user(user)}, and answers that user alone"
            return process
        text = b""
        try:
            while part := asked.recv(1 << 16):
                text += part
            process.answer = json.loads(text)
        except TimeoutError:
            process.trouble = f"no answer within {PATIENCE:.0f} s"
        except (OSError, ValueError) as error:
            process.trouble = f"no answer that can be read: {error}"
        return process


def _pid(name: str) -> int:
    """The pid that the process has where it runs, which may be another PID namespace."""
    number = name.removeprefix(PREFIX).partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    line = " ".join(word.decode(errors="replace") for word in words if word)[:200]
    # Another user's words may not move the cursor of a terminal.
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "in another PID namespace"
    return STATES.get(letter, "running")


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


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

    These are also the ranks that have not begun a collective yet: others may wait for one after the
    other.

    ``found`` are all processes, also those that have not answered.
    """
    first = {rank: state["operations"][0] for rank, state in group.ranks.items() if _is_in(state)}
    waits: dict[int, list[int]] = {}
    for rank, operation in first.items():
        for peer in operation["waits_for"]:
            is_in_it = peer in first and first[peer]["name"] == operation["name"]
            if not is_in_it or "number" not in operation:
                waits.setdefault(peer, []).append(rank)
        number = operation.get("number", 0)
        for peer, state in group.ranks.items():
            if state["collectives"] < number and rank not in waits.get(peer, ()):
                waits.setdefault(peer, []).append(rank)
    words = {}
    for peer, waiting in sorted(waits.items(), key=lambda item: (-len(item[1]), item[0])):
        longest = max(waiting, key=lambda rank: first[rank]["seconds"])
        operation = first[longest]
        count = f"{len(waiting)} ranks wait" if len(waiting) > 1 else f"rank {longest} waits"
        words[peer] = (
            f"{group.number(peer)} {_doing(group, peer, found)}; {count} for it in "
            f"{operation['name']}, for {operation['seconds']:.1f} s"
        )
    return words


def _is_in(state: dict[str, Any]) -> bool:
    return bool(state["operations"])


def _doing(group: Group, rank: int, found: Iterable[Process]) -> str:
    state = group.ranks.get(rank)
    label = group.members[rank]["process"]
    if state is None:
        hosts = {process.answer["host"] for process in group.processes.values() if process.answer}
        place = LABEL.fullmatch(label)
        if place is None or place["host"] not in hosts:
            return f"({label}) is on another host, where `unisono status` tells more"
        for process in found:
            if int(place["pid"]) == process.own_pid:
                if process.answer:
                    return f"({label}) has not made this group yet, or has closed it"
                return f"({label}) is {process.state}: {process.trouble}"
        return f"({label}) is no process here that can be asked"
    if state["failure"]:
        return f"({label}) has failed: {state['failure']}"
    if not state["operations"]:
        last = state["last"] or "it has had none"
        return f"({label}) is in no operation of this group (its last: {last})"
    return f"({label}) is in {state['operations'][0]['name']}"


def late(group: Group) -> list[str]:
    """Return the ranks that others have waited for much longer than they have waited, in words."""
    waits: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for rank in group.ranks:
        for waited in _waited(group, rank)["by_rank"]:
            waits.setdefault(waited["rank"], []).append((rank, waited))
    found = []
    for peer, entries in waits.items():
        by, most = max(entries, key=lambda entry: entry[1]["seconds"])
        # It may have waited itself, for a rank that was late.
        is_here = "waited" in group.ranks.get(peer, {})
        own = _waited(group, peer)["seconds"]
        if most["seconds"] - own < WORTH_TELLING:
            continue
        was_late, itself = "was late", f"it has waited {own:.1f} s"
        if not is_here:
            was_late, itself = "may have been late", "ask where it runs how long it has waited"
        line = (
            f"{group.number(peer)} {was_late}: {group.number(by)} has waited "
            f"{most['seconds']:.1f} s for it, longest in {most['last']:,} of "
            f"{_called(group, by):,} operations, {1000 * most['median_seconds']:.1f} ms in the "
            f"median; {itself}"
        )
        found.append((not is_here, own - most["seconds"], line))
    return [line for *_, line in sorted(found)[:MOST_LATE]]


def _waited(group: Group, rank: int) -> dict[str, Any]:
    # A process of an older version does not tell, nor does one on another host.
    told = group.ranks.get(rank, {}).get("waited")
    return told or {"seconds": 0.0, "by_rank": []}


def _called(group: Group, rank: int) -> int:
    state = group.ranks[rank]
    return int(state["collectives"] + state["messages"])


def _row(group: Group, rank: int) -> str:
    state, process = group.ranks[rank], group.processes[rank]
    if state["failure"]:
        doing = f"has failed: {state['failure']}"
    elif not state["operations"]:
        doing = f"no operation; the last: {state['last'] or 'none so far'}"
    else:
        shown = []
        for operation in state["operations"][:3]:
            peers = operation["waits_for"]
            whom = f", waits for {_numbers(peers)}" if peers else ""
            shown.append(f"{operation['name']} for {operation['seconds']:.1f} s{whom}")
        more = len(state["operations"]) - len(shown)
        doing = "; ".join(shown) + (f"; and {more} more" if more else "")
    return f"  {group.number(rank)}, pid {process.pid}: {doing}"


def _numbers(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def text(found: list[Process], *, stacks: bool = False) -> str:
    """Return all of it in words, with the ranks that others wait for first in each group."""
    silent = [process for process in found if process.answer is None]
    lines = [f"{process.line()} ({process.trouble})" for process in silent]
    idle = []
    for group in groups(found):
        here, world = len(group.ranks), len(group.members)
        title = f"group {group.name[:8]} of {world} ranks, {here} of them here"
        if not any(_is_in(state) or state["failure"] for state in group.ranks.values()):
            idle.append(f"{title}: no operation is under way here")
            idle += [f"  {line}" for line in late(group)]
            continue
        lines.append(title)
        for rank, line in blamed(group, found).items():
            lines.append(f"  {line}")
            if stacks and rank in group.processes:
                lines += [f"      {line}" for line in _stack(group.processes[rank].pid)]
        lines += [f"  {line}" for line in late(group)]
        lines += [_row(group, rank) for rank in sorted(group.ranks)]
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


def status(arguments: list[str], name: str) -> int:
    """Print the state of the jobs on this host, and return the exit status: 1 if there is none."""
    parser = argparse.ArgumentParser(
        prog=f"{name} status",
        description="The ranks on this host, their operations, and the ranks that these wait for.",
    )
    parser.add_argument("--json", action="store_true", help="print the answers as they came")
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="show the Python stacks of those that others wait for, by py-spy",
    )
    chosen = parser.parse_args(arguments)
    found = processes()
    if chosen.json:
        print(json.dumps([vars(process) for process in found], indent=1))
    else:
        print(text(found, stacks=chosen.stacks) or "no process with a group of unisono runs here")
    return 0 if found else 1
