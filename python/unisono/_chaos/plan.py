"""A round of chaos as data: the ranks, their hosts, and the faults, all from one seed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

#: The kinds of faults, each with what it does.
KINDS = {
    "kill": "SIGKILL of a rank",
    "stop": "SIGSTOP of a rank, and SIGCONT some time later",
    "delay": "a rank sleeps before an operation",
    "close": "some TCP connections of a rank are closed",
    "reset": "some TCP connections of a rank are reset",
    "drop": "some TCP connections of a rank lose all that comes from then on",
    "cut": "a rank's host has no network for some time",
    "isolate": "a rank's host has no network for so long that it is given up",
}
#: Those that need connections over TCP, hosts, and a network in which we may break things.
OVER_TCP = ("close", "reset", "drop")
BETWEEN_HOSTS = ("cut", "isolate")
ON_NETWORKS = ("reset", "cut", "isolate")
#: Those that no round has beside an isolation: it is a majority that goes on, which is told by
#: the ranks that live, the end of a cut would be the end of the isolation, and a rank that is
#: stopped for longer than hosts may be silent then does not open its connections again in time.
NOT_BESIDE_ISOLATION = ("kill", "cut", "stop")
#: How long a silent host is waited for where one is isolated, in seconds.
SILENCE = 2.0
#: Those that last, in seconds at least and at most.
LASTING = {
    "stop": (0.1, 3.0),
    "delay": (0.01, 0.5),
    "cut": (0.2, 3.0),
    "isolate": (7 * SILENCE, 9 * SILENCE),
}
DOORS = ("numpy", "torch", "c")
TRANSPORTS = ("auto", "shm", "tcp")
_WRITTEN = re.compile(r"(\w+)@(\d+):(\d+)(?:/([\d.]+))?")


@dataclass(frozen=True, order=True)
class Fault:
    """A fault that comes as soon as a rank has begun that operation, or a moment later.

    Operations count from 1; a fault of operation 0 comes while the rank joins.
    """

    operation: int
    rank: int
    kind: str
    #: How long it lasts.
    seconds: float = 0.0
    #: Seconds from the beginning of the operation.
    late: float = 0.0

    def __str__(self) -> str:
        lasting = f"/{self.seconds:g}" if self.seconds else ""
        return f"{self.kind}@{self.rank}:{self.operation}{lasting}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``KIND@RANK:OPERATION`` or ``KIND@RANK:OPERATION/SECONDS``, as it is printed.

        Raises
        ------
        ValueError
            It is something else.
        """
        found = _WRITTEN.fullmatch(text)
        if not found or found[1] not in KINDS or (found[4] and found[1] not in LASTING):
            lasting = ", ".join(LASTING)
            raise ValueError(
                f"{text!r} is no fault: write KIND@RANK:OPERATION, with /SECONDS for {lasting}; "
                f"kinds are {', '.join(KINDS)}"
            )
        usual = sum(LASTING.get(found[1], (0.0, 0.0))) / 2
        seconds = float(found[4]) if found[4] else usual
        return cls(int(found[3]), int(found[2]), found[1], seconds)


@dataclass(frozen=True)
class Wishes:
    """The rounds that are wanted: each round chooses among these."""

    ranks: Sequence[int] = (2, 3, 4, 5, 6, 7, 8)
    hosts: Sequence[int] = (1,)
    transports: Sequence[str] = TRANSPORTS
    doors: Sequence[str] = ("numpy",)
    kinds: Sequence[str] = tuple(KINDS)
    operations: int = 100
    #: Given faults, instead of those that a round would choose.
    faults: Sequence[Fault] = ()
    #: Whether the jobs have networks of their own.
    has_networks: bool = False


@dataclass(frozen=True)
class Round:
    """One job, and the faults that it meets."""

    seed: int
    door: str
    transport: str
    #: The host of each rank.
    hosts: list[int]
    operations: int
    #: Whether processes take the places of ranks that were killed.
    replaces: bool
    #: Whether the ranks that are left keep their numbers.
    masks: bool = False
    faults: list[Fault] = field(default_factory=list)
    #: Instead of these: for so long, in seconds, a fault of one of these kinds after each pause.
    seconds: float = 0.0
    every: float = 0.0
    kinds: list[str] = field(default_factory=list)

    @classmethod
    def choose(cls, seed: int, wishes: Wishes) -> Round:
        """Return the round of that seed: the same wishes give the same round."""
        chance = random.Random(f"unisono chaos {seed}")
        world, count = chance.choice(wishes.ranks), chance.choice(wishes.hosts)
        count = min(count, world)
        hosts = [rank * count // world for rank in range(world)]
        # Shared memory alone does not lead to another host.
        transports = [kind for kind in wishes.transports if kind != "shm" or count == 1] or ["auto"]
        transport, door = chance.choice(transports), chance.choice(wishes.doors)
        replaces = door != "torch" and chance.random() < 0.5
        # Of its own, so that seeds mean what they did.
        masks = random.Random(f"unisono chaos {seed}, numbers").random() < 0.5
        made = cls(seed, door, transport, hosts, wishes.operations, replaces, masks)
        given = [replace(fault, late=_late(chance, fault.operation)) for fault in wishes.faults]
        made.faults.extend(sorted(given) or made._draw(chance, wishes))
        if made.isolated():
            # Processes that live are not replaced, and shrink_group leaves out whom it is told to.
            return replace(made, replaces=False, masks=made.masks or door == "torch")
        return made

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def has_tcp(self) -> bool:
        """Whether some ranks speak over TCP."""
        return self.transport == "tcp" or len(set(self.hosts)) > 1

    def isolated(self) -> set[int]:
        """Return the ranks whose host is isolated in it."""
        faults = [fault for fault in self.faults if fault.rank < self.world]
        of = {self.hosts[fault.rank] for fault in faults if fault.kind == "isolate"}
        return {rank for rank, host in enumerate(self.hosts) if host in of}

    def left_behind(self) -> set[int]:
        """Return the ranks that cannot reach a majority then, or half of all with rank 0."""
        apart = self.isolated()
        majority = 2 * len(apart) > self.world or (2 * len(apart) == self.world and 0 in apart)
        return set(range(self.world)) - apart if majority else apart

    def lasts(self) -> float:
        """Return how long its faults hold up the ranks, in seconds."""
        return sum(fault.seconds for fault in self.faults)

    def further(self, chance: random.Random) -> Fault:
        """Return one more fault, of a round that goes on for some time."""
        kind, rank = chance.choice(self.kinds), chance.randrange(self.world)
        low, high = LASTING.get(kind, (0.0, 0.0))
        return Fault(0, rank, kind, round(chance.uniform(low, high), 2))

    def _draw(self, chance: random.Random, wishes: Wishes) -> list[Fault]:
        kinds = [kind for kind in wishes.kinds if self.may_have(kind, wishes)]
        faults: list[Fault] = []
        if not kinds:
            return faults
        alive = list(range(self.world))
        for _ in range(chance.randint(1, 4)):
            kind, rank = chance.choice(kinds), chance.choice(alive)
            before = {fault.kind for fault in faults}
            if (kind == "isolate" and before & {*NOT_BESIDE_ISOLATION, kind}) or (
                kind in NOT_BESIDE_ISOLATION and "isolate" in before
            ):
                continue
            if kind == "kill":
                if len(alive) == 1:
                    continue
                alive.remove(rank)
            low, high = LASTING.get(kind, (0.0, 0.0))
            seconds = round(chance.uniform(low, high), 2)
            # A job in which a rank is killed before it has joined does not begin.
            if kind not in ("kill", "delay", "isolate") and chance.random() < 0.15:
                operation = 0
            else:
                operation = chance.randrange(1, self.operations)
            faults.append(Fault(operation, rank, kind, seconds, _late(chance, operation)))
        return sorted(faults)

    def may_have(self, kind: str, wishes: Wishes) -> bool:
        """Return whether a fault of this kind makes sense in it."""
        if kind in ON_NETWORKS and not wishes.has_networks:
            return False
        if kind in BETWEEN_HOSTS:
            return len(set(self.hosts)) > 1
        return kind not in OVER_TCP or self.has_tcp

    def __str__(self) -> str:
        hosts = len(set(self.hosts))
        place = "one host" if hosts == 1 else f"{hosts} hosts"
        loses = self._kills() or self.isolated()
        after = ", the others keep their numbers" if self.masks and loses else ""
        if self.replaces and self._kills():
            after = ", killed ranks are replaced"
        faults = " ".join(map(str, self.faults)) or "no faults"
        if self.every:
            faults = f"{', '.join(self.kinds)} every {self.every:g} s for {self.seconds:g} s"
        return (
            f"seed {self.seed}: {self.world} ranks on {place}, {self.transport}, {self.door}"
            f"{after}: {faults}"
        )

    def _kills(self) -> bool:
        return "kill" in self.kinds or any(fault.kind == "kill" for fault in self.faults)


def _late(chance: random.Random, operation: int) -> float:
    # To join takes longer than an operation.
    return chance.uniform(0, 0.02 if operation else 0.5)
