"""The work of a rank in a round of chaos, with results that are known beforehand.

The operations follow from the seed of the round and their numbers, so all ranks call the same. A
rank that is told of a failure goes on with the ranks that are left, or with all of them once the
processes have come that take the places of those that are gone. All then begin with the same
operation: the last that one of them has begun.
"""

from __future__ import annotations

import faulthandler
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import unisono
from unisono._chaos.c_library import CallError, Communicator
from unisono._chaos.hosts import enter
from unisono._chaos.plan import SILENCE, Round

#: Elements of a message: in a slot, in a ring, lent, in pieces.
COUNTS = (1, 17, 1000, 20_000, 300_000)
#: Seconds until an operation, a meeting, or an agreement of those that are left has failed.
TIMEOUT = 60.0
MEETING = 30.0
#: Descriptors that a process keeps for further groups, and seconds until it has closed the rest.
KEPT = 8
CLOSING = 5.0
_GONE = re.compile(r"rank (\d+)(?: \([^)]*\))? is gone")
_LEFT_BEHIND = re.compile("are not the majority|on without this rank")


class WrongError(Exception):
    """A result that is not what it must be."""


class LeftBehindError(Exception):
    """The others go on without this rank, or may."""


class Door(Protocol):
    """A group, through one of the ways to it."""

    #: The ranks that it has, by their numbers at the start.
    numbers: list[int]
    #: The exceptions that a failure of the group is.
    failures: tuple[type[Exception], ...]

    def reduce(self, array: np.ndarray, largest: bool = False) -> Any: ...
    def broadcast(self, array: np.ndarray, root: int) -> None: ...
    def gather(self, array: np.ndarray) -> Any: ...
    def exchange(self, array: np.ndarray) -> Any: ...
    def pass_on(self, array: np.ndarray, to: int, source: int) -> Any: ...
    def at_once(self, arrays: Sequence[np.ndarray]) -> None: ...
    def culprit(self, error: Exception) -> int | None: ...
    def recover(self, error: Exception) -> None: ...
    def close(self) -> None: ...


@dataclass
class Post:
    """The place of a rank, and what it shares with the process that started it."""

    round: Round
    number: int
    url: str
    #: The network of its host, as a file; None for the network of this process.
    network: str | None
    #: For each rank the operation that it has begun, and milliseconds that it is to sleep.
    begun: Any
    sleeps: Any
    #: Whether the round is over.
    over: Any
    #: Where it says what has happened.
    tell: Any

    def say(self, kind: str, **details: Any) -> None:
        """Send an event."""
        self.tell.send({"event": kind, "at": time.monotonic(), **details})


def run(post: Post) -> None:
    """Be the rank, from the first meeting to the end of the round."""
    os.setsid()
    faulthandler.register(signal.SIGUSR1)
    if post.network:
        enter(post.network)
    before = _descriptors()
    door = _open(post)
    post.say("joined", numbers=door.numbers)
    steps = None
    try:
        steps = _work(post, door)
    except WrongError as error:
        post.say("wrong", text=str(error))
        return
    except LeftBehindError as error:
        post.say("left behind", text=str(error))
    door.close()
    # Connections end in good order, which takes a moment.
    until = time.monotonic() + CLOSING
    while _descriptors() > before + KEPT and time.monotonic() < until:
        time.sleep(0.01)
    left = max(0, _descriptors() - before - KEPT)
    if steps is not None:
        post.say("done", steps=steps, numbers=door.numbers, left=left)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _open(post: Post) -> Door:
    os.environ["UNISONO_TRANSPORT"] = post.round.transport
    os.environ.setdefault("UNISONO_TIMEOUT", f"{TIMEOUT:g}")
    os.environ.setdefault("UNISONO_JOIN_TIMEOUT", f"{MEETING:g}")
    if post.round.isolated():
        os.environ.setdefault("UNISONO_PEER_TIMEOUT", f"{SILENCE:g}")
    if not post.network:
        os.environ["UNISONO_HOST"] = f"host {post.round.hosts[post.number]}"
    doors: dict[str, Callable[[Post], Door]] = {"numpy": NumPy, "torch": Torch, "c": C}
    make = doors[post.round.door]
    while True:
        try:
            return make(post)
        except (unisono.Error, CallError, RuntimeError) as error:  # noqa: PERF203 -- it waits for others
            # A process that comes may meet ranks that have other things to do.
            if not post.round.replaces:
                raise
            post.say("not met", text=str(error))


def _work(post: Post, door: Door) -> int:
    step, together = 1, False
    while True:
        try:
            if not together:
                step = int(door.reduce(np.array([step]), largest=True)[0])
                together = True
                post.say("together", numbers=door.numbers, step=step)
            post.begun[post.number] = step
            if post.sleeps[post.number]:
                pause, post.sleeps[post.number] = post.sleeps[post.number], 0
                time.sleep(pause / 1000)
            _operate(door, post, step)
            if door.reduce(np.array([post.over.value]), largest=True)[0]:
                return step
            step += 1
        except door.failures as error:  # noqa: PERF203 -- a failure is rare
            if not getattr(error, "fatal", True):
                raise
            post.say("failed", text=str(error), culprit=door.culprit(error), step=step)
            together = False
            door.recover(error)


def _operate(door: Door, post: Post, step: int) -> None:
    chance = random.Random(f"{post.round.seed} {step}")
    kind, count = chance.choice(_OPERATIONS), chance.choice(COUNTS)
    numbers, world = door.numbers, len(door.numbers)
    me, at = numbers.index(post.number), chance.randrange(world)

    def mine(number: int, count: int = count) -> np.ndarray:
        # Small whole numbers: every sum is exact.
        return (np.arange(count) * 3 + number * 5 + step).astype(np.float32) % 97

    def check(found: np.ndarray, wanted: np.ndarray) -> None:
        if not np.array_equal(found, wanted):
            wrong = np.flatnonzero(found != wanted)
            raise WrongError(
                f"operation {step}, {kind} of {count} elements among ranks {numbers}: "
                f"{wrong.size} of {wanted.size} are wrong, the first at {wrong[0]}: "
                f"{found[wrong[0]]} and not {wanted[wrong[0]]}"
            )

    if kind == "all_reduce":
        check(door.reduce(mine(post.number)), np.sum([*map(mine, numbers)], axis=0))
    elif kind == "largest":
        check(door.reduce(mine(post.number), largest=True), np.max([*map(mine, numbers)], axis=0))
    elif kind == "broadcast":
        array = mine(post.number)
        door.broadcast(array, at)
        check(array, mine(numbers[at]))
    elif kind == "all_gather":
        check(door.gather(mine(post.number)), np.concatenate([*map(mine, numbers)]))
    elif kind == "all_to_all":
        count = -(-count // world)
        blocks = np.concatenate([mine(post.number * 7 + other, count) for other in numbers])
        wanted = [mine(other * 7 + post.number, count) for other in numbers]
        check(door.exchange(blocks), np.concatenate(wanted))
    elif kind == "messages":
        to, source = (me + 1) % world, (me - 1) % world
        check(door.pass_on(mine(post.number), to, source), mine(numbers[source]))
    else:
        arrays = [mine(post.number + turn) for turn in range(4)]
        door.at_once(arrays)
        for turn, array in enumerate(arrays):
            check(array, np.sum([mine(number + turn) for number in numbers], axis=0))


_OPERATIONS = (
    "all_reduce",
    "largest",
    "broadcast",
    "all_gather",
    "all_to_all",
    "messages",
    "at once",
)


class Numbered:
    """A group whose ranks are told by their numbers at the start, whatever theirs are in it."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.numbers = list(range(post.round.world))
        #: The group's numbers are those at the start, and it has blocks for ranks that are gone.
        self.is_masked = False

    def not_recovered(self, error: Exception) -> None:
        """Tell of an attempt to go on that has failed; raises if the others go on alone."""
        if self.post.round.isolated() and _LEFT_BEHIND.search(str(error)):
            raise LeftBehindError(str(error)) from error
        self.post.say("not recovered", text=str(error))

    def rank(self, at: int) -> int:
        """Return the number in the group of the rank at this place among those that are left."""
        return self.numbers[at] if self.is_masked else at

    def number(self, rank: int) -> int | None:
        """Return the number at the start of this rank of the group."""
        if self.is_masked:
            return rank
        return self.numbers[rank] if rank < len(self.numbers) else None

    def with_gone(self, blocks: np.ndarray) -> np.ndarray:
        """Return blocks for all ranks of the group, of those for the ones that are left."""
        rows = blocks.reshape(len(self.numbers), -1)
        if not self.is_masked:
            return rows
        every = np.full((self.post.round.world, rows.shape[1]), -1, rows.dtype)
        every[self.numbers] = rows
        return every

    def without_gone(self, blocks: np.ndarray) -> np.ndarray:
        """Return the blocks of those that are left, of blocks of all ranks of the group."""
        return (blocks[self.numbers] if self.is_masked else blocks).reshape(-1)


class NumPy(Numbered):
    """A communicator of `unisono.init`."""

    def __init__(self, post: Post) -> None:
        super().__init__(post)
        self.failures: tuple[type[Exception], ...] = (unisono.Error,)
        self.comm: Any = self.join(post)

    def join(self, post: Post) -> Any:
        """Meet the others."""
        return unisono.init(post.url, rank=post.number, world_size=post.round.world)

    def reduce(self, array: np.ndarray, largest: bool = False) -> Any:
        return self.comm.all_reduce(array, op="max" if largest else "sum")

    def broadcast(self, array: np.ndarray, root: int) -> None:
        self.comm.broadcast(array, self.rank(root))

    def gather(self, array: np.ndarray) -> Any:
        return self.without_gone(self.comm.all_gather(array))

    def exchange(self, array: np.ndarray) -> Any:
        return self.without_gone(self.comm.all_to_all(self.with_gone(array)))

    def pass_on(self, array: np.ndarray, to: int, source: int) -> Any:
        received = np.empty_like(array)
        sent = self.comm.isend(array, self.rank(to))
        self.comm.recv(received, self.rank(source))
        sent.wait()
        return received

    def at_once(self, arrays: Sequence[np.ndarray]) -> None:
        for work in [self.comm.all_reduce(array, async_op=True) for array in arrays]:
            work.wait()

    def culprit(self, error: Exception) -> int | None:
        peer = getattr(error, "peer", None)
        return None if peer is None else self.number(peer)

    def recover(self, error: Exception) -> None:
        del error
        while True:
            try:
                self._go_on()
                return
            except self.failures as again:  # noqa: PERF203 -- each attempt waits for others
                self.not_recovered(again)

    def _go_on(self) -> None:
        if self.post.round.masks:
            left = self.comm.mask(timeout=MEETING)
            # Numbers at the start are those in a whole group.
            numbers, self.is_masked = left.living, True
        else:
            left = self.comm.shrink(timeout=MEETING)
            numbers = [self.numbers[rank] for rank in left.former_ranks or []]
        self.comm.close()
        self.comm, self.numbers = left, numbers
        world = self.post.round.world
        if self.post.round.replaces and len(numbers) < world:
            self.comm = left.grow(timeout=MEETING)
            left.close()
            self.numbers, self.is_masked = list(range(world)), False

    def close(self) -> None:
        self.comm.close()


class C(NumPy):
    """A communicator of libunisono, which knows nothing of Python."""

    def __init__(self, post: Post) -> None:
        super().__init__(post)
        self.failures = (CallError,)

    def join(self, post: Post) -> Any:
        """Meet the others."""
        return Communicator.from_url(post.url, post.number, post.round.world)


class Torch(Numbered):
    """The default group of torch.distributed."""

    def __init__(self, post: Post) -> None:
        super().__init__(post)
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.failures: tuple[type[Exception], ...] = (dist.DistError,)
        world = post.round.world
        # The file outlives any rank.
        store = dist.FileStore(post.url, world)
        dist.init_process_group("unisono", store=store, rank=post.number, world_size=world)

    def reduce(self, array: np.ndarray, largest: bool = False) -> Any:
        result = self.torch.from_numpy(array.copy())
        self.dist.all_reduce(result, self.dist.ReduceOp.MAX if largest else self.dist.ReduceOp.SUM)
        return result.numpy()

    def broadcast(self, array: np.ndarray, root: int) -> None:
        self.dist.broadcast(self.torch.from_numpy(array), group_src=self.rank(root))

    def gather(self, array: np.ndarray) -> Any:
        blocks = self.torch.empty((self.dist.get_world_size(), array.size))
        self.dist.all_gather_into_tensor(blocks, self.torch.from_numpy(array))
        return self.without_gone(blocks.numpy())

    def exchange(self, array: np.ndarray) -> Any:
        given = self.torch.from_numpy(self.with_gone(array))
        self.dist.all_to_all_single(result := self.torch.empty_like(given), given)
        return self.without_gone(result.numpy())

    def pass_on(self, array: np.ndarray, to: int, source: int) -> Any:
        given = self.torch.from_numpy(array)
        result = self.torch.empty_like(given)
        works = [
            self.dist.isend(given, group_dst=self.rank(to)),
            self.dist.irecv(result, group_src=self.rank(source)),
        ]
        for work in works:
            work.wait()
        return result.numpy()

    def at_once(self, arrays: Sequence[np.ndarray]) -> None:
        tensors = map(self.torch.from_numpy, arrays)
        for work in [self.dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def culprit(self, error: Exception) -> int | None:
        found = _GONE.search(str(error))
        return self.number(int(found[1])) if found else None

    def recover(self, error: Exception) -> None:
        gone: set[int] = set()
        if self.post.round.masks:
            self._mask()
            return
        while True:
            # torch wants to know who is gone, and each error names one more.
            named = _GONE.search(str(error))
            if named is None or int(named[1]) in gone:
                raise error
            gone.add(int(named[1]))
            try:
                self.dist.shrink_group(sorted(gone))
            except self.failures as again:
                error = again
                self.post.say("not recovered", text=str(again))
                continue
            self.numbers = [n for rank, n in enumerate(self.numbers) if rank not in gone]
            return

    def _mask(self) -> None:
        import unisono.torch

        while True:
            try:
                self.numbers, self.is_masked = unisono.torch.mask(), True
                return
            except self.failures as again:  # noqa: PERF203 -- each attempt waits for others
                self.not_recovered(again)

    def close(self) -> None:
        self.dist.destroy_process_group()
