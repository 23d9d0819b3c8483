"""The ranks of test_numpy_threads.py."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
from together import LIMIT, together

import unisono

THREADS = 4
ROUNDS = 40
# Of a short message, of one that is announced, and of one that goes in pieces.
LENGTHS = (1, 5_000, 100_000)


def init() -> unisono.Communicator:
    return unisono.init(timeout=LIMIT)


def each(function: Callable[[int], None]) -> None:
    """Call the function with the number of each thread, in all of them at once."""
    together(*(lambda number=number: function(number) for number in range(THREADS)))


def one_each() -> None:
    world = init()
    comms = [world.split(0) for _ in range(THREADS)]

    def calls(number: int) -> None:
        comm = comms[number]
        ranks = np.arange(comm.size)
        for turn in range(ROUNDS):
            length = LENGTHS[turn % len(LENGTHS)]
            own = np.full(length, number + turn + comm.rank, np.int64)
            expected = (number + turn + ranks).sum()
            assert (comm.all_reduce(own) == expected).all()
            gathered = comm.all_gather(np.array([number, turn, comm.rank]))
            assert (gathered == [[number, turn, rank] for rank in ranks]).all()
            root = turn % comm.size
            given = np.full(length, number * turn + root if comm.rank == root else -1, np.int64)
            work = comm.broadcast(given, root, async_op=True)
            assert (work.result() == number * turn + root).all()
            assert comm.all_gather_object((number, comm.rank)) == [(number, r) for r in ranks]

    each(calls)
    for comm in (*comms, world):
        comm.close()


def shared() -> None:
    comm = init()
    peer = 1 - comm.rank
    ended = threading.Event()

    def messages(tag: int) -> None:
        for turn in range(ROUNDS):
            length = LENGTHS[turn % len(LENGTHS)]
            sent = np.full(length, 1000 * tag + turn, np.int64)
            got = np.zeros(length, np.int64)
            if turn % 3 == 0:
                work = comm.isend(sent, peer, tag)
                message = comm.recv(got, peer, tag)
                work.wait()
            elif turn % 3 == 1:
                work = comm.irecv(got, peer, tag)
                comm.send(sent, peer, tag)
                message = work.result()
            else:
                message = comm.sendrecv(sent, peer, got, peer, tag)
            assert (message.source, message.count) == (peer, length)
            assert (got == sent).all(), (tag, turn)

    def collectives() -> None:
        try:
            for turn in range(ROUNDS):
                value = np.full(LENGTHS[turn % len(LENGTHS)], float(turn))
                assert (comm.all_reduce(value, "max", async_op=True).result() == turn).all()
                comm.barrier()
        finally:
            ended.set()

    def looks() -> None:
        while not ended.is_set():
            assert comm.stats()["rank"] == comm.rank
            assert comm.error is None
            assert comm.recent_operations() is not None
            assert unisono.empty(1000).nbytes == 8000

    together(collectives, looks, *(lambda tag=tag: messages(tag) for tag in range(THREADS)))
    comm.close()


def come_and_go(folder: str) -> None:
    # Whatever Python does at the first use of the package, it does in threads here.
    ranks = threading.Barrier(THREADS)

    def joins(number: int) -> None:
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        for turn in range(3):
            ranks.wait(LIMIT)
            url = f"file://{folder}/{number}-{turn}"
            with unisono.init(url, rank=rank, world_size=size, timeout=LIMIT) as comm:
                assert (comm.all_reduce(np.ones(100)) == size).all()
                half = comm.split(comm.rank)
                assert half.size == 1
                assert (half.all_reduce(np.ones(100)) == 1).all()

    each(joins)


def wait_for_one() -> None:
    comm = init()
    for turn in range(ROUNDS):
        array = np.full(LENGTHS[turn % len(LENGTHS)], 1.0)
        work = comm.all_reduce(array, async_op=True)

        def waits(number: int, work: unisono.Work = work, array: np.ndarray = array) -> None:
            if number % 2:
                work.wait()
            assert work.result() is array
            assert work.done()
            assert work.exception() is None
            assert (array == comm.size).all()

        each(waits)
    comm.close()


def aborted() -> None:
    comm = init()
    begun = threading.Barrier(THREADS)
    seen = []
    # The ranks are connected, and the news of the abort comes that way.
    comm.sendrecv(np.ones(1), 1 - comm.rank, np.ones(1), 1 - comm.rank)

    def calls(number: int) -> None:
        begun.wait(LIMIT)
        if (comm.rank, number) == (0, 0):
            comm.abort("enough")
            return
        try:
            # Nothing sends it.
            comm.recv(np.zeros(10), 1 - comm.rank, number)
        except unisono.AbortedError as error:
            seen.append(str(error))

    each(calls)
    assert len(seen) == THREADS - (comm.rank == 0)
    assert all("enough" in text for text in seen)


def given_up() -> None:
    comm = init()
    blocks = unisono.heap().blocks
    alive = []
    lock = threading.Lock()

    def calls(tag: int) -> None:
        for _ in range(ROUNDS):
            for array in (np.ones(2000), unisono.empty(2000)):
                array[:] = 1
                received = np.zeros(2000)
                work = comm.irecv(received, 1 - comm.rank, tag)
                comm.isend(array, 1 - comm.rank, tag).wait()
                work.wait()
                assert (received == 1).all()
                with lock:
                    alive.extend([weakref.ref(array), weakref.ref(received)])

    each(calls)
    comm.barrier()
    comm.close()
    # The engine gives references up a moment after the end of an operation, and the next call of a
    # thread drops the objects.
    until = time.monotonic() + LIMIT
    while (unisono.heap().blocks > blocks or left(alive)) and time.monotonic() < until:
        gc.collect()
    assert not left(alive)
    assert unisono.heap().blocks == blocks


def left(alive: list[weakref.ref]) -> int:
    return sum(one() is not None for one in alive)
