"""Signals while torch waits: handlers run, and what they raise comes out of the wait, in time."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from test_torch_collectives import dist

OURS = "torch_signals_ranks"


def test_handlers_run_while_a_wait_goes_on() -> None:
    # Each wait ends because a handler calls the other rank to it.
    run_ranks(2, f"{OURS}:waits_for_what_a_handler_does", torch=True, timeout=120)


def test_what_a_handler_raises_ends_the_wait_and_the_group() -> None:
    run_ranks(2, f"{OURS}:is_interrupted", torch=True, timeout=180)


@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupt_ends_joining_and_the_others_hear_of_it(who: int) -> None:
    run_ranks(2, f"{OURS}:is_interrupted_while_joining", who, torch=True, timeout=60)


def test_an_interrupt_ends_the_wait_for_the_store() -> None:
    run_ranks(1, f"{OURS}:is_interrupted_at_the_store", torch=True, timeout=60)


def test_another_thread_waits_on() -> None:
    assert dist.is_available()
    run_ranks(2, f"{OURS}:another_thread_waits_on", torch=True, timeout=60)
