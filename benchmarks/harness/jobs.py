"""A job: the ranks of one peer, alive for as long as their world is measured, each under commands.

Every rank has a FIFO for commands and one for replies (benchmarks/ranks/channel.h has the words).
A rank without a command sleeps in `read`, so the jobs of all peers live side by side and only the
one that measures uses the cores.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

START_SECONDS = 180.0
REPLY_SECONDS = 300.0


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class RefusedError(Exception):
    """The peer has no such collective, or no such buffers."""


class FailedError(Exception):
    """A rank died, was too late, or computed something wrong."""


class Job:
    """`world` ranks of one peer. `commands` start them: one process for all, or one for each."""

    def __init__(
        self,
        name: str,
        world: int,
        commands: Sequence[Sequence[str]],
        folder: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name, self.world, self.folder = name, world, folder
        self._commands, self._replies = [], []
        for rank in range(world):
            for kind in ("commands", "replies"):
                os.mkfifo(folder / f"{kind}-{rank}")
            # The driver holds the only other end for writing: if it dies, the ranks read an end
            # of file. It reads and writes here, or to open would mean to wait for the rank.
            path = folder / f"commands-{rank}"
            self._commands.append(os.open(path, os.O_RDWR))
            path = folder / f"replies-{rank}"
            self._replies.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        self._pending = [b""] * world
        with (folder / "errors").open("w") as errors:
            self._processes = [
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    env=os.environ | (environment or {}),
                    # A group of its own, so that all of it can be ended, and only it; no session of
                    # its own: Linux shares the cores between sessions (autogroups) first, and a
                    # process that yields lets only those of its own session run.
                    preexec_fn=os.setpgrp,  # noqa: PLW1509  the driver has one thread
                )
                for command in commands
            ]

    def wait_until_ready(self) -> Job:
        self._read_replies(START_SECONDS)
        return self

    def command(self, line: str) -> list[float]:
        """Tell every rank, and return every rank's number (zero where the answer has none)."""
        for descriptor in self._commands:
            os.write(descriptor, f"{line}\n".encode())
        return self._read_replies(REPLY_SECONDS, line)

    def _read_replies(self, limit: float, line: str = "the start") -> list[float]:
        until, waiting = time.monotonic() + limit, set(range(self.world))
        with selectors.DefaultSelector() as selector:
            for rank, descriptor in enumerate(self._replies):
                selector.register(descriptor, selectors.EVENT_READ, rank)
            while waiting:
                for key, _ in selector.select(timeout=0.2):
                    rank = key.data
                    part = os.read(key.fd, 4096)
                    if not part:
                        raise self._failure(f"rank {rank} ended", line)
                    self._pending[rank] += part
                    if b"\n" in self._pending[rank]:
                        selector.unregister(key.fd)
                        waiting.discard(rank)
                if waiting and any(process.poll() is not None for process in self._processes):
                    raise self._failure("a process ended", line)
                if time.monotonic() > until:
                    raise self._failure(f"no reply within {limit:.0f} s from {waiting}", line)
        replies = [pending.decode().strip() for pending in self._pending]
        self._pending = [b""] * self.world
        return [self._number(reply, line) for reply in replies]

    def _number(self, reply: str, line: str) -> float:
        word, _, rest = reply.partition(" ")
        if word == "no":
            raise RefusedError(rest)
        if word != "ok":
            raise self._failure(reply, line)
        return float(rest) if rest else 0.0

    def _failure(self, what: str, line: str) -> FailedError:
        errors = (self.folder / "errors").read_text(errors="replace").strip()
        text = f"{self.name}, {self.world} ranks, at {line!r}: {what}"
        return FailedError(f"{text}\n{errors}" if errors else text)

    def close(self) -> None:
        """Let the ranks read the end of their commands; end what is still there a little later."""
        for descriptor in self._commands:
            os.close(descriptor)
        self._commands = []
        until = time.monotonic() + 10
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for descriptor in self._replies:
            os.close(descriptor)
        self._replies = []


class Jobs:
    """The jobs of one world, started at the same time, in a folder that goes with them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-bench-")
        self._jobs: dict[str, Job] = {}

    def folder(self, name: str) -> Path:
        path = Path(self._folder.name) / name.replace("/", "-")
        path.mkdir()
        return path

    def add(self, job: Job) -> Job:
        self._jobs[job.name] = job
        return job

    def __iter__(self):
        return iter(self._jobs.values())

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self:
            job.close()
        self._folder.cleanup()
