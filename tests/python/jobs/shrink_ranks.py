"""The rank functions of `test_shrink.py`."""

from __future__ import annotations

import _thread
import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import unisono

COUNTS = [1, 500, 70_000]


@dataclass
class Story:
    """The groups that a rank was in, by their first numbers, and how it went on from each."""

    groups: list[list[int]]
    #: The steps that all had ended when a group failed.
    ended: list[int] = field(default_factory=list)
    #: Seconds from each failure to the first result of the next group.
    seconds: list[float] = field(default_factory=list)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def contribution(number: int, step: int) -> np.ndarray:
    count = COUNTS[step % len(COUNTS)]
    return np.full(count, (number + 1) * (step + 1), np.float64)


def train(
    comm: unisono.Communicator,
    story: Story,
    steps: int,
    death: int | None = None,
    victims: Sequence[int] = (),
) -> unisono.Communicator:
    """Sum in each group for `steps`, at least until the `victims` are gone.

    Each step is one collective, so the number of those that all have ended says where to go on. In
    the step `death` this rank dies.
    """
    numbers, step, failed = story.groups[-1], 0, 0.0
    first = 0
    while step < first + steps or set(victims) & set(numbers):
        if step == death:
            die()
        try:
            total = comm.all_reduce(contribution(numbers[comm.rank], step))
        except unisono.Error:
            failed = failed or time.monotonic()
            before = comm.ended
            shrunk = comm.shrink()
            comm.close()
            comm = shrunk
            assert comm.former_ranks is not None
            assert comm.former_ended is not None
            assert comm.former_ended in (before, before - 1)
            numbers = [numbers[rank] for rank in comm.former_ranks]
            first += comm.former_ended
            story.groups.append(numbers)
            story.ended.append(first)
            step = first
            continue
        if failed:
            story.seconds.append(time.monotonic() - failed)
            failed = 0.0
        expected = sum(number + 1 for number in numbers) * (step + 1)
        np.testing.assert_array_equal(total, np.full(total.shape, expected))
        step += 1
    return comm


def go_on(deaths: dict[int, int], steps: int = 20) -> Story:
    """Ranks die in these steps; the others go on and get the sums of those that live."""
    comm = unisono.init()
    story = Story([list(range(comm.size))])
    train(comm, story, steps, death=deaths.get(comm.rank)).close()
    return story


def die_at_any_time(seed: int, victims: Sequence[int]) -> Story:
    """As `go_on`, where victims die at times of their own, also while the ranks agree."""
    comm = unisono.init()
    chance = random.Random(f"{seed} {comm.rank}")
    if comm.rank in victims:
        threading.Timer(chance.expovariate(1 / 0.02), die).start()
    story = Story([list(range(comm.size))])
    train(comm, story, 20, victims=victims).close()
    return story


def one_does_not_come(late: int, how: str) -> tuple[Any, list[int] | None]:
    """A rank that lives does not call shrink at first; a second call goes on from there."""
    comm = unisono.init()
    gone = comm.size - 1
    if comm.rank == gone:
        die()
    with pytest.raises(unisono.Error):
        comm.barrier()
    found = None
    if comm.rank == late:
        time.sleep(3)
        if how == "is excluded":
            return found, None
    else:
        with pytest.raises(unisono.TimeoutError) as caught:
            comm.shrink(timeout=1)
        found = (caught.value.peer, str(caught.value))
        # Until the others have given up as well.
        time.sleep(1)
    shrunk = comm.shrink(exclude=[late] if how == "is excluded" else None)
    assert shrunk.all_reduce(np.ones(1))[0] == shrunk.size
    return found, shrunk.former_ranks


def come_too_late(late: int, heard: Path) -> tuple[str, float] | None:
    """The others go on without a rank that lives, and close the group, before it calls shrink."""
    comm = unisono.init()
    if comm.rank == comm.size - 1:
        die()
    with pytest.raises(unisono.Error):
        comm.barrier()
    if comm.rank != late:
        shrunk = comm.shrink(exclude=[late])
        comm.close()
        until = time.monotonic() + 40
        while not heard.exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert shrunk.all_reduce(np.ones(1))[0] == shrunk.size
        return None
    time.sleep(2)
    began = time.monotonic()
    with pytest.raises(unisono.AbortedError) as caught:
        comm.shrink(timeout=60)
    seconds = time.monotonic() - began
    heard.touch()
    return str(caught.value), seconds


def leave_out(rank: int) -> list[int] | None:
    """Nothing has failed: the ranks but one go on by themselves, and all go on with the first."""
    comm = unisono.init()
    comm.barrier()
    shrunk = None
    if comm.rank != rank:
        shrunk = comm.shrink([rank])
        assert shrunk.all_reduce(np.ones(1))[0] == comm.size - 1
        assert shrunk.former_ended == 1
        with pytest.raises(unisono.InvalidArgumentError, match="has been shrunk"):
            comm.shrink([rank])
        with pytest.raises(unisono.InvalidArgumentError, match="exclude itself"):
            comm.shrink([comm.rank])
    with pytest.raises(unisono.InvalidArgumentError, match="out of range"):
        comm.shrink([comm.size])
    assert comm.all_reduce(np.ones(1))[0] == comm.size
    return shrunk and shrunk.former_ranks


def break_connections() -> None:
    """Shut down every TCP connection of this process, as a router does that forgets them."""
    for link in psutil.Process().net_connections("tcp4"):
        if link.status != psutil.CONN_ESTABLISHED:
            continue
        # One that was being made may have gone meanwhile.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fd)) as copy:
            copy.shutdown(socket.SHUT_RDWR)


def survive_breaks() -> int:
    """The connections of a rank break, again and again; no operation fails."""
    comm = unisono.init()
    for step in range(20):
        if comm.rank == 1 and step % 4 == 1:
            break_connections()
        total = comm.all_reduce(np.full(50_000, float(step)))
        np.testing.assert_array_equal(total, step * comm.size)
    ended = comm.ended
    comm.close()
    return ended


def fail_and_go_on(how: str) -> tuple[str, list[int] | None]:
    """The group fails although all its ranks live; all go on."""
    comm = unisono.init()
    other = np.ones(2 if how == "mismatch" and comm.rank == 1 else 1)
    with pytest.raises(unisono.Error) as caught:
        comm.barrier()
        if comm.rank == 1 and how == "abort":
            comm.abort()
        while True:
            comm.all_reduce(other)
    shrunk = comm.shrink()
    comm.close()
    assert shrunk.all_reduce(np.ones(1))[0] == shrunk.size
    return type(caught.value).__name__, shrunk.former_ranks


def interrupt() -> float:
    """Ctrl-C ends the wait for a rank that does not come."""
    comm = unisono.init()
    if comm.rank == 1:
        time.sleep(3)
        return 0.0
    threading.Timer(0.5, _thread.interrupt_main).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        comm.shrink()
    return time.monotonic() - began


def be_cut_off(begin: str, cut: str) -> tuple[str, Any]:
    """The network between the hosts goes; each half tries to go on by itself."""
    comm = unisono.init()
    comm.barrier()
    Path(f"{begin}-{comm.rank}").touch()  # no rank is in the barrier any more when all are there
    while not Path(cut).exists():
        time.sleep(0.01)
    with pytest.raises(unisono.PeerLostError):
        comm.all_reduce(np.ones(1))
    try:
        shrunk = comm.shrink()
    except unisono.Error as error:
        return type(error).__name__, str(error)
    assert shrunk.all_reduce(np.ones(1))[0] == shrunk.size
    return "goes on", shrunk.former_ranks


def keep_numbers(gone: list[int], died: int) -> list[int]:
    """Ranks are gone and the others keep their numbers, also when another one dies."""
    comm = unisono.init()
    world, me = comm.size, comm.rank
    if me in gone:
        die()
    with pytest.raises(unisono.Error):
        while True:
            comm.barrier()
    masked = comm.mask()
    comm.close()
    assert (masked.rank, masked.size) == (me, world)
    assert masked.former_ranks == list(range(world))
    living = [rank for rank in range(world) if rank not in gone]
    assert masked.living == living
    with pytest.raises(unisono.InvalidArgumentError, match="out of range"):
        masked.mask(exclude=[world])
    for count in (1, 700, 100_000):
        every_collective(masked, living, count)
    messages(masked, living, gone[0])
    if me == died:
        # The others wait for nothing but the next sum.
        time.sleep(0.5)
        die()
    with pytest.raises(unisono.PeerLostError, match=rf"rank {died} \(host") as caught:
        while True:
            masked.all_reduce(np.ones(1))
    assert caught.value.peer == died
    again = masked.mask(exclude=[gone[0]])
    living = [rank for rank in living if rank != died]
    assert (again.rank, again.size, again.living) == (me, world, living)
    every_collective(again, living, 5)
    half = again.split(0 if me == living[0] else 1)
    assert half is not None
    assert half.size == (1 if me == living[0] else len(living) - 1)
    return again.shrink().former_ranks or []


def every_collective(comm: unisono.Communicator, living: list[int], count: int) -> None:
    """Each collective of those that are left; blocks of the others stay as they are."""
    world, me, dead = comm.size, comm.rank, -7.0
    is_there = np.isin(np.arange(world), living)
    own = np.arange(count) + 1000.0 * me
    gathered = np.stack([np.arange(count) + 1000.0 * rank for rank in range(world)])
    total = gathered[is_there].sum(axis=0)

    def expect(values: np.ndarray, fill: float) -> np.ndarray:
        return np.where(is_there[:, None], values, fill)

    np.testing.assert_array_equal(comm.all_reduce(own.copy()), total)
    np.testing.assert_allclose(comm.all_reduce(own.copy(), "avg"), total / len(living))
    np.testing.assert_array_equal(comm.all_gather(own), expect(gathered, 0))
    out = np.full((world, count), dead)
    comm.all_gather(own, out=out, async_op=True).wait()
    np.testing.assert_array_equal(out, expect(gathered, dead))
    in_place = np.full((world, count), dead)
    in_place[me] = own
    comm.all_gather(in_place[me], out=in_place)
    np.testing.assert_array_equal(in_place, expect(gathered, dead))
    np.testing.assert_array_equal(comm.reduce_scatter(gathered), gathered[me] * len(living))
    for root in living[:2]:
        there = comm.broadcast(own.copy(), root)
        np.testing.assert_array_equal(there, gathered[root])
        reduced = comm.reduce(own.copy(), root=root)
        blocks = comm.gather(own, root)
        if me == root:
            np.testing.assert_array_equal(reduced, total)
            np.testing.assert_array_equal(blocks, expect(gathered, 0))
        out = np.empty(count)
        comm.scatter(gathered if me == root else None, root, out=out)
        np.testing.assert_array_equal(out, gathered[me])
    mine = gathered + 1e6 * me
    theirs = np.stack([own + 1e6 * rank for rank in range(world)])
    np.testing.assert_array_equal(comm.all_to_all(mine), expect(theirs, 0))
    counts = [1 + rank for rank in range(world)]
    rows = comm.all_gather_v(np.full((counts[me], 2), float(me)), counts)
    wanted = np.repeat(np.where(is_there, np.arange(world), 0.0), counts)
    np.testing.assert_array_equal(rows, np.stack([wanted, wanted], axis=1))
    comm.barrier()
    for gone in set(range(world)) - set(living):
        with pytest.raises(unisono.InvalidArgumentError, match=f"rank {gone} is gone"):
            comm.broadcast(own, gone)


def messages(comm: unisono.Communicator, living: list[int], gone: int) -> None:
    at = living.index(comm.rank)
    left, right = living[at - 1], living[(at + 1) % len(living)]
    got = np.empty(3)
    receiving = comm.irecv(got, left)
    comm.isend(np.full(3, float(comm.rank)), right).wait()
    receiving.wait()
    assert got.tolist() == [left] * 3
    sending = comm.isend(np.full(3, float(comm.rank)), right)
    assert comm.recv(got).source == left
    assert got.tolist() == [left] * 3
    sending.wait()
    for message in (comm.send, comm.recv):
        with pytest.raises(unisono.InvalidArgumentError, match=f"rank {gone} is gone"):
            message(got, gone)
    own = np.full(3, 10.0 + comm.rank)
    for dest, source in ((gone, left), (right, gone)):
        with pytest.raises(unisono.InvalidArgumentError, match=f"rank {gone} is gone"):
            comm.sendrecv(own, dest, got, source)
    # Nothing has begun there.
    assert comm.sendrecv(own, right, got, left).source == left
    assert got.tolist() == [10.0 + left] * 3


def name_before_links(died: int) -> str:
    """In a masked group a rank is named by its number, also if no link to it was open."""
    comm = unisono.init()
    if comm.rank == 0:
        die()
    with pytest.raises(unisono.Error):
        while True:
            comm.barrier()
    masked = comm.mask()
    comm.close()
    if masked.rank == died:
        die()
    with pytest.raises(unisono.PeerLostError) as caught:
        masked.recv(np.empty(1), died)
    assert caught.value.peer == died
    return str(caught.value)
