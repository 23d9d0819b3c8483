"""Asks every process with a group, on this host and over ssh on others.

A process answers on an abstract Unix socket (``rust/core``, ``transport/endpoint/status.rs``),
whatever its program does meanwhile. One that is stopped cannot answer, and that is told instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import pwd
import shlex
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

PREFIX = "@unisono-status-"
# The form of the answers (rust/core, endpoint/status.rs).
FORM = 3
# Seconds for a process to begin its answer, and to go on; and for a host.
PATIENCE = 1.0
PATIENCE_WITH_A_HOST = 30.0
STOPPED = "stopped (SIGCONT lets it go on)"
STATES = {
    "T": STOPPED,
    "t": "stopped by a debugger",
    "Z": "dead",
    "D": "waiting for a disk or a network file system",
}
# As those of `unisono launch` (rust/launch, reach.rs): no questions, and an end to all waiting.
_SSH_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_PASSED_ON = ("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
# System calls that say where a program is, by their numbers on each processor: the words, and
# whether the first argument is a file that belongs to them.
_READS, _WRITES = ("it reads", True), ("it writes", True)
_FLUSHES, _SLEEPS = ("it flushes", True), ("it sleeps", False)
_WAITS = ("it waits for a child process", False)
_CALLS = {
    "x86_64": {
        **dict.fromkeys((0, 17, 19, 295), _READS),
        **dict.fromkeys((1, 18, 20, 296), _WRITES),
        **dict.fromkeys((74, 75, 277, 306), _FLUSHES),
        **dict.fromkeys((35, 230), _SLEEPS),
        **dict.fromkeys((61, 247), _WAITS),
    },
    "aarch64": {
        **dict.fromkeys((63, 65, 67, 69), _READS),
        **dict.fromkeys((64, 66, 68, 70), _WRITES),
        **dict.fromkeys((82, 83, 84, 267), _FLUSHES),
        **dict.fromkeys((101, 115), _SLEEPS),
        **dict.fromkeys((95, 260), _WAITS),
    },
}


@dataclass(eq=False)
class Process:
    """A process with groups: its answer, or the reason why there is none."""

    pid: int
    # In its own PID namespace.
    own_pid: int
    command: str
    state: str
    answer: dict[str, Any] | None = None
    trouble: str = ""
    # The system call that its main thread is in, in words, where that is one that says something.
    call: str = ""
    # The machine that it was asked on.
    host: str = ""
    # Where it answers.
    socket: str = ""
    # Whether a process of this host has asked it, through their group.
    is_elsewhere: bool = False

    @property
    def names(self) -> set[str]:
        """The names of its host, from outside and from inside."""
        return {self.host, self.answer["host"] if self.answer else self.host}

    def line(self) -> str:
        """Return the process in words."""
        if self.is_elsewhere:
            return f"pid {self.pid} on {self.host}, {self.state}"
        return f"pid {self.pid}, {self.state}: {self.command or 'a command that is not shown'}"


def processes() -> list[Process]:
    """Ask every process of this host that has groups."""
    table = Path("/proc/net/unix").read_text().splitlines()[1:]
    paths = {line.split()[-1] for line in table}
    names = sorted(path for path in paths if path.startswith(PREFIX))
    with ThreadPoolExecutor(max_workers=64) as threads:
        found = [process for process in threads.map(_ask, names) if process]
    return sorted(found, key=lambda process: process.pid)


def processes_of(hosts: Sequence[str], ssh: str) -> tuple[list[Process], list[str]]:
    """Ask those of other hosts, by ``unisono status --here --json`` there.

    Returns
    -------
    tuple
        The processes, and a sentence for each host that did not answer.
    """

    def ask(host: str) -> list[Process] | str:
        words = [*shlex.split(ssh), host, _there()]
        if Path(words[0]).name == "ssh":
            words[-2:-2] = _SSH_OPTIONS
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=PATIENCE_WITH_A_HOST,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{host} does not answer: {error}"
        # A host may greet before.
        greeting, begin, records = done.stdout.rpartition("\n[")
        try:
            return [from_record(record) for record in json.loads(f"[{records}" if begin else "")]
        except (AttributeError, TypeError, ValueError):
            said = (done.stderr.strip() or greeting.strip() or "nothing").splitlines()[-1]
            return f"{host} does not answer (exit status {done.returncode}): {said}"

    with ThreadPoolExecutor(max_workers=64) as threads:
        answers = list(threads.map(ask, hosts))
    found = [process for answer in answers if not isinstance(answer, str) for process in answer]
    return found, [answer for answer in answers if isinstance(answer, str)]


def _there() -> str:
    """The command for a shell of another host, where unisono is in the same place."""
    passed = [f"{name}={os.environ[name]}" for name in _PASSED_ON if name in os.environ]
    return "echo; exec " + shlex.join(
        ["env", *passed, sys.executable, "-m", "unisono", "status", "--here", "--json"]
    )


def from_record(record: dict[str, Any]) -> Process:
    """Return a process of ``unisono status --json``, perhaps of another version."""
    known = {field.name for field in fields(Process)}
    return Process(**{name: value for name, value in record.items() if name in known})


def question(
    process: Process, asked: dict[str, Any], patience: float
) -> tuple[dict[int, dict[str, Any]], str]:
    """Have a process of this host ask ranks elsewhere.

    Parameters
    ----------
    process
        The one that asks.
    asked
        All fields of the question, which the process parses (``Question`` of ``inquiry.rs``):
        ``group``, its name of 32 hexadecimal digits; ``rank``, that of the process in the group;
        ``ranks``, those to ask; ``seconds`` for them to answer, a float; and ``records``, whether
        they send the records of their operations.
    patience
        Seconds for the process itself.

    Returns
    -------
    tuple
        By rank, for those that have been heard of, ``answer`` or ``trouble``; and the reason in
        words where there is nothing.
    """
    asker = f"pid {process.pid} here, which was to ask it,"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(patience)
        try:
            stream.connect("\0" + process.socket[1:])
            stream.sendall(json.dumps(asked).encode())
            stream.shutdown(socket.SHUT_WR)
            answer = json.loads(_read(stream))
            if trouble := answer.get("trouble"):
                return {}, f"{asker} answers: {trouble}"
            return {one["rank"]: dict(one) for one in answer["elsewhere"]}, ""
        except (OSError, ValueError) as error:
            return {}, f"{asker} does not answer: {error}"
        except (AttributeError, KeyError, TypeError):
            return {}, f"{asker} answers in another form: does it run another version of unisono?"


def _read(stream: socket.socket) -> bytes:
    parts = []
    while part := stream.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def _ask(name: str) -> Process | None:
    """The answer of one process; None where it has ended meanwhile."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.settimeout(PATIENCE)
        try:
            asked.connect("\0" + name[1:])
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                return None
            process = _described(_pid(name), name)
            process.trouble = f"it cannot be asked: {error}"
            return process
        credentials = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, user, _ = struct.unpack("3i", credentials)
        process = _described(pid or _pid(name), name)
        if user != os.geteuid():
            process.trouble = f"it belongs to {_user(user)}, and answers that user alone"
            return process
        if process.state == STOPPED:
            process.trouble = "no answer before it goes on"
            return process
        try:
            # No question follows.
            asked.shutdown(socket.SHUT_WR)
            answer = json.loads(_read(asked))
            if answer["form"] == FORM:
                process.answer = answer
            else:
                process.trouble = (
                    f"it runs unisono {answer['version']}, whose answers have another form: ask by "
                    "the command of that version"
                )
        except TimeoutError:
            process.trouble = f"no answer within {PATIENCE:.0f} s"
        except (OSError, ValueError) as error:
            if _state(process.pid) == STATES["Z"] or not Path(f"/proc/{process.pid}").exists():
                return None
            process.trouble = f"no answer that can be read: {error}"
        return process


def _described(pid: int, name: str) -> Process:
    return Process(
        pid,
        _pid(name),
        _command(pid),
        _state(pid),
        call=_call(pid),
        host=platform.node(),
        socket=name,
    )


def _pid(name: str) -> int:
    """The pid that the process has where it runs, which may be another PID namespace."""
    number = name.removeprefix(PREFIX).partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return plain(" ".join(word.decode(errors="replace") for word in words if word)[:200])


def plain(line: str) -> str:
    """Return a line of another user or host, which may not move the cursor of a terminal."""
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "in another PID namespace"
    return STATES.get(letter, "running")


def _call(pid: int) -> str:
    """The call that the main thread is in; nothing where the kernel does not tell."""
    try:
        call = Path(f"/proc/{pid}/syscall").read_text()
        said = {"machine": platform.machine(), "call": call, "file": ""}
        with contextlib.suppress(OSError, ValueError, IndexError):
            said["file"] = str(Path(f"/proc/{pid}/fd/{int(call.split()[1], 16)}").readlink())
        return plain(call_in_words(said))
    except OSError:
        return ""


def call_in_words(said: dict[str, str]) -> str:
    """Return a system call in words, of ``machine`` and with the ``file`` of its first argument."""
    try:
        words, has_file = _CALLS[said["machine"]][int(said["call"].split()[0])]
    except (ValueError, KeyError, IndexError):
        return ""
    if not has_file:
        return words
    return f"{words} {said['file']}" if said["file"] else ""


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
