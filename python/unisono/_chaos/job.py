"""A round of chaos: its ranks are started, meet their faults, and are judged by what they tell."""

from __future__ import annotations

import functools
import heapq
import itertools
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono._chaos import rank, sockets
from unisono._chaos.hosts import Hosts
from unisono._chaos.plan import Fault, Round

#: Seconds without an operation after which a round hangs.
HANGS = 90.0
#: Operations that all ranks must end after the last fault, so that none is left unnoticed.
SETTLED = 15
_SHARED = Path("/dev/shm")
_context = multiprocessing.get_context("forkserver")


def prepare(doors: set[str]) -> None:
    """Let ranks be forks of a process that has imported what they need."""
    modules = ["unisono._chaos.rank", *(["torch"] if "torch" in doors else [])]
    _context.set_forkserver_preload(modules)


@dataclass
class Outcome:
    """A round that is over."""

    round: Round
    #: What was not as it must be; a round without such is right.
    troubles: list[str] = field(default_factory=list)
    #: The faults that happened, by kind. Others found their rank gone.
    met: Counter[str] = field(default_factory=Counter)
    #: Seconds from the first failure that a rank was told to its next operation with the others.
    recoveries: list[float] = field(default_factory=list)
    operations: int = 0
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """Return it for a line of JSON."""
        return {
            "seed": self.round.seed,
            "round": str(self.round),
            "troubles": self.troubles,
            "faults": dict(self.met),
            "recoveries": self.recoveries,
            "operations": self.operations,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class _Rank:
    process: Any
    events: multiprocessing.connection.Connection
    is_over: bool = False


class Job:
    """The ranks of a round, and what is done to them."""

    def __init__(self, chosen: Round, hosts: Hosts | None) -> None:
        self.round, self.hosts = chosen, hosts
        self.outcome = Outcome(chosen)
        self.chance = random.Random(f"unisono chaos {chosen.seed}, its faults")
        #: The operation that each rank has begun, 0 while it joins.
        self.begun = _context.RawArray("q", chosen.world)
        self.sleeps = _context.RawArray("q", chosen.world)
        self.over = _context.RawValue("q", 0)
        self.folder = tempfile.mkdtemp(prefix="unisono-chaos-")
        self.url = self._place()
        self.ranks: dict[int, _Rank] = {}
        #: When each rank was killed, for the first time.
        self.killed: dict[int, float] = {}
        #: When a host was isolated.
        self.isolated: float | None = None
        self.pending = list(chosen.faults)
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.turns = itertools.count()
        self.told: dict[int, list[dict[str, Any]]] = {n: [] for n in range(chosen.world)}
        #: When all ranks had joined, of a round whose faults go on.
        self.since: float | None = None
        #: The operation that all have to reach until the round is over.
        self.goal: int | None = None

    def _place(self) -> str:
        if self.round.door == "torch":
            return str(Path(self.folder) / "store")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return f"tcp://{self.hosts.address(0) if self.hosts else '127.0.0.1'}:{port}"

    def run(self) -> Outcome:
        """Play the round."""
        shared = set(_SHARED.iterdir())
        began = time.monotonic()
        try:
            for number in range(self.round.world):
                self._start(number)
            self._go_on()
        finally:
            self._end()
        self.outcome.seconds = time.monotonic() - began
        self._judge()
        for file in set(_SHARED.iterdir()) - shared:
            self._trouble(f"left behind: {file}")
        return self.outcome

    def _trouble(self, text: str) -> None:
        self.outcome.troubles.append(text)

    # Ranks

    def _start(self, number: int) -> None:
        ours, theirs = _context.Pipe(duplex=False)
        network = self._network(number)
        post = rank.Post(
            self.round, number, self.url, network, self.begun, self.sleeps, self.over, theirs
        )
        process = _context.Process(target=rank.run, args=(post,), daemon=True)
        process.start()
        theirs.close()
        self.ranks[number] = _Rank(process, ours)

    def _network(self, number: int) -> str | None:
        return self.hosts.network(self.round.hosts[number]) if self.hosts else None

    def _go_on(self) -> None:
        last, moved = [0], time.monotonic()
        while any(not one.is_over for one in self.ranks.values()):
            self._listen()
            now = time.monotonic()
            if list(self.begun) != last:
                last, moved = list(self.begun), now
            if now - moved > HANGS + self.round.lasts():
                self._hang()
                return
            self._break(now)
            self._look_for_the_end()

    def _listen(self) -> None:
        running = {n: one for n, one in self.ranks.items() if not one.is_over}
        waits = [one.events for one in running.values()]
        ready = multiprocessing.connection.wait(waits, timeout=0.002)
        for number, one in running.items():
            if one.events in ready and not self._hear(number, one):
                one.is_over = True
                one.process.join()
                self._ended(number, one.process.exitcode)

    def _hear(self, number: int, one: _Rank) -> bool:
        """Take what a rank has to tell; returns whether it may tell more."""
        try:
            while one.events.poll():
                self.told[number].append(one.events.recv())
        except (EOFError, OSError):
            return False
        return True

    def _ended(self, number: int, status: int) -> None:
        said = [event["event"] for event in self.told[number]]
        if status == -signal.SIGKILL and number in self.killed:
            self.told[number].append({"event": "killed", "at": time.monotonic()})
            self.begun[number] = 0
            if self.round.replaces:
                self._start(number)
        elif status != 0 or not {"done", "wrong", "left behind"} & set(said):
            self._trouble(f"rank {number} ended with status {status}; its output says why")

    def _alive(self) -> list[int]:
        return [number for number, one in self.ranks.items() if not one.is_over]

    # Faults

    def _break(self, now: float) -> None:
        if self.round.every and self.since is None and all(self.begun):
            self.since = now
        goes_on = self.since is not None and now - self.since < self.round.seconds
        if goes_on and not self.timers:
            fault = self.round.further(self.chance)
            self._later(self.round.every, functools.partial(self._inflict, fault))
        for fault in [f for f in self.pending if self.begun[f.rank] >= f.operation]:
            self.pending.remove(fault)
            self._later(fault.late, functools.partial(self._inflict, fault))
        # A rank that is gone begins nothing more.
        if not self.round.replaces:
            self.pending = [f for f in self.pending if not self.ranks[f.rank].is_over]
        while self.timers and self.timers[0][0] <= now:
            heapq.heappop(self.timers)[2]()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (time.monotonic() + seconds, next(self.turns), act))

    def _inflict(self, fault: Fault) -> None:
        number, one = fault.rank, self.ranks[fault.rank]
        if one.is_over:
            return
        pid = one.process.pid
        self.outcome.met[fault.kind] += 1
        if fault.kind == "kill":
            self.killed.setdefault(number, time.monotonic())
            os.kill(pid, signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(pid, signal.SIGSTOP)
            self._later(fault.seconds, functools.partial(self._go_on_with, one))
        elif fault.kind == "delay":
            self.sleeps[number] = int(fault.seconds * 1000)
        elif fault.kind == "close":
            sockets.close(pid, self.chance)
        elif fault.kind == "reset":
            sockets.reset(pid, self.chance, self._network(number))
        elif fault.kind == "drop":
            sockets.drop(pid, self.chance)
        elif self.hosts:
            hosts, host = self.hosts, self.round.hosts[number]
            if fault.kind == "isolate":
                self.isolated = time.monotonic()
            hosts.cut(host)
            self._later(fault.seconds, lambda: hosts.heal(host))

    @staticmethod
    def _go_on_with(one: _Rank) -> None:
        # It may have been killed meanwhile, and its number be another process's.
        if not one.is_over:
            os.kill(one.process.pid, signal.SIGCONT)

    def _look_for_the_end(self) -> None:
        """The round is over once all ranks have done some operations after the last fault."""
        if self.pending or self.timers or (self.goal is None and self._is_before_the_end()):
            self.goal = None
            return
        if self.goal is None:
            self.goal = max(self.begun) + SETTLED
        if all(self.begun[number] >= self.goal for number in self._alive()):
            self.over.value = 1

    def _is_before_the_end(self) -> bool:
        return bool(max(self.begun) < self.round.operations)

    def _hang(self) -> None:
        for number in self._alive():
            pid = self.ranks[number].process.pid
            self._trouble(f"rank {number} hangs (pid {pid}), in operation {self.begun[number]}")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _end(self) -> None:
        for one in self.ranks.values():
            if one.process.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(one.process.pid, signal.SIGKILL)
            one.process.join()
            one.process.close()
            one.events.close()
        if self.hosts:
            for host in set(self.round.hosts):
                self.hosts.heal(host)
        shutil.rmtree(self.folder, ignore_errors=True)

    # Judgement

    def _judge(self) -> None:
        groups = set()
        for number, events in self.told.items():
            failed = 0.0
            for event in events:
                kind = event["event"]
                if kind == "wrong":
                    self._trouble(f"rank {number}: {event['text']}")
                elif kind == "failed":
                    failed = failed or event["at"]
                    self._judge_failure(number, event)
                elif kind == "together" and failed:
                    self.outcome.recoveries.append(event["at"] - failed)
                    failed = 0.0
                elif kind == "killed":
                    failed = 0.0
                elif kind == "left behind" and number not in self.round.left_behind():
                    self._trouble(f"rank {number} is left behind: {event['text']}")
                elif kind == "done":
                    self._judge_end(number, event)
                    groups.add(tuple(event["numbers"]))
        if len(groups) > 1:
            self._trouble(f"the ranks ended in different groups: {sorted(groups)}")

    def _judge_failure(self, number: int, event: dict[str, Any]) -> None:
        culprit = event["culprit"]
        when = self.killed.get(culprit)
        apart = self.round.isolated()
        if culprit is not None and (culprit in apart) != (number in apart):
            when = self.isolated
        if when is None or when > event["at"]:
            named = "no rank" if culprit is None else f"rank {culprit}, which lived"
            self._trouble(
                f"rank {number} failed in operation {event['step']} and named {named}: "
                f"{event['text']}"
            )

    def _judge_end(self, number: int, event: dict[str, Any]) -> None:
        self.outcome.operations = max(self.outcome.operations, event["steps"])
        gone = set() if self.round.replaces else set(self.killed)
        if self.isolated and len(event["numbers"]) < self.round.world:
            gone |= self.round.left_behind()
        wanted = [one for one in range(self.round.world) if one not in gone]
        if event["numbers"] != wanted:
            self._trouble(f"rank {number} ended with ranks {event['numbers']}, not {wanted}")
        if event["left"] > 0:
            self._trouble(f"rank {number} has {event['left']} descriptors left")
