"""Threads that share a group: what one of them has begun takes no call of another."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ranks import run_ranks
from test_torch_collectives import check, dist, start, torch
from together import LIMIT, together

CPU = torch.device("cpu")


def test_threads_make_the_first_groups() -> None:
    run_ranks(1, f"{__name__}:rank_prepares_in_threads", torch=True)


def rank_prepares_in_threads() -> None:
    import unisono.torch

    # As torchft does, which makes a group in each thread.
    together(*[unisono.torch._prepare] * 4)


def test_threads_share_a_group() -> None:
    run_ranks(2, f"{__name__}:rank_shares_a_group", torch=True)


def rank_shares_a_group() -> None:
    rank, _ = start(timeout=LIMIT)
    batches_beside_collectives(rank)
    managers_in_two_threads(rank)
    windows_in_two_threads(rank)
    # torch 2.11 has none from Python.
    if hasattr(dist.group.WORLD._get_backend(CPU), "_start_time_estimate"):
        an_estimate_beside_calls(rank)


def batches_beside_collectives(rank: int) -> None:
    def batches(tag: int) -> None:
        for i in range(30):
            sent = torch.full((3000,), 10.0 * i + tag)
            received = torch.zeros(3000)
            calls = [
                dist.P2POp(dist.isend, sent, 1 - rank, tag=tag),
                dist.P2POp(dist.irecv, received, 1 - rank, tag=tag),
            ]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
            check(received, sent, tag, i)

    def collectives() -> None:
        for i in range(30):
            gathered = torch.zeros(2)
            dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank + i)))
            check(gathered, torch.tensor([float(i), i + 1.0]))
            reduced = torch.ones(1000)
            dist.all_reduce(reduced)
            check(reduced, torch.full((1000,), 2.0))
            work = dist.all_reduce(reduced, async_op=True)
            work.wait()
            check(reduced, torch.full((1000,), 4.0))

    together(collectives, *(lambda tag=tag: batches(tag) for tag in (1, 2, 3)))


def in_turn(*steps: Callable[[], None]) -> None:
    """Have one thread take the first step and the last, and another the one in between."""
    first, inside, last = steps
    begun, done = threading.Event(), threading.Event()

    def outer() -> None:
        try:
            first()
        finally:
            begun.set()
        assert done.wait(LIMIT)
        last()

    def inner() -> None:
        assert begun.wait(LIMIT)
        try:
            inside()
        finally:
            done.set()

    together(outer, inner)


def managers_in_two_threads(rank: int) -> None:
    """A manager, of torch's kind that has a list of calls, is open while another thread calls."""
    ones, others = [torch.ones(5) for _ in range(3)], [torch.full((5,), 2.0) for _ in range(3)]
    opened = []

    def open_and_call() -> None:
        opened.append(dist._coalescing_manager())
        opened[0].__enter__()
        for tensor in ones[:2]:
            dist.all_reduce(tensor)

    def call_and_open() -> None:
        dist.all_reduce(others[0])
        check(others[0], torch.full((5,), 4.0))
        gathered = torch.zeros(2)
        dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank)))
        check(gathered, torch.tensor([0.0, 1.0]))
        with dist._coalescing_manager():
            for tensor in others[1:]:
                dist.all_reduce(tensor)
        for tensor in others[1:]:
            check(tensor, torch.full((5,), 4.0))

    def call_and_close() -> None:
        check(ones[0], torch.ones(5))
        dist.all_reduce(ones[2])
        opened[0].__exit__(None, None, None)
        for tensor in ones:
            check(tensor, torch.full((5,), 2.0))

    in_turn(open_and_call, call_and_open, call_and_close)


def windows_in_two_threads(rank: int) -> None:
    """The same of windows of the backend: each thread has one."""
    group = dist.group.WORLD
    mine, theirs = torch.ones(3), torch.ones(3)
    left, right = torch.zeros(3), torch.zeros(3)
    works = []

    def exchange(into: torch.Tensor, value: float, tag: int) -> None:
        group._start_coalescing(CPU)
        dist.isend(torch.full((3,), value), 1 - rank, tag=tag)
        dist.irecv(into, 1 - rank, tag=tag)

    def first() -> None:
        exchange(left, rank + 10.0, 1)
        works.append(dist.all_reduce(mine, async_op=True))

    def inside() -> None:
        exchange(right, rank + 20.0, 2)
        # The other thread's window is as it was, and the end of this one waits for this one alone.
        dist.all_reduce(theirs)
        group._end_coalescing(CPU).wait()
        check(right, torch.full((3,), 21.0 - rank))
        check(theirs, torch.full((3,), 2.0))

    def last() -> None:
        group._end_coalescing(CPU).wait()
        check(left, torch.full((3,), 11.0 - rank))
        assert works[0].is_completed()
        check(mine, torch.full((3,), 2.0))

    in_turn(first, inside, last)


def an_estimate_beside_calls(rank: int) -> None:
    group = dist.group.WORLD
    tensor, other = torch.full((4,), float(rank)), torch.ones(4)
    estimates = []

    def first() -> None:
        group._get_backend(CPU)._start_time_estimate()
        dist.all_reduce(tensor)

    def inside() -> None:
        group._start_coalescing(CPU)
        work = dist.all_reduce(other, async_op=True)
        group._end_coalescing(CPU).wait()
        assert work.is_completed()
        check(other, torch.full((4,), 2.0))

    def last() -> None:
        estimates.append(group._get_backend(CPU)._end_time_estimate())

    in_turn(first, inside, last)
    check(tensor, torch.full((4,), float(rank)))
    assert estimates[0] > 0
