"""Messages shorter than their receives, probes, and objects."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from test_numpy_collectives import TRANSPORTS, environment

import unisono


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receive_with_room_takes_a_shorter_message(transport):
    run_ranks(3, "numpy_messages_ranks:shorter", env=environment(transport))


@pytest.mark.check
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_probe_finds_a_message_and_leaves_it(transport):
    run_ranks(3, "numpy_messages_ranks:probes", env=environment(transport))


def test_a_probe_ends_with_its_peer():
    results = run_ranks(2, "numpy_messages_ranks:probe_of_the_dead", check=False)
    assert "rank 1" in results[0].value


@pytest.mark.check
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_objects(transport):
    run_ranks(3, "numpy_messages_ranks:objects", env=environment(transport))


def test_operators_by_names_in_any_case():
    with unisono.init(rank=0, world_size=1) as comm:
        for name in ("sum", "Sum", "SUM"):
            comm.all_reduce(bytearray(4), name)
        with pytest.raises(unisono.InvalidArgumentError, match='no operator "total"'):
            comm.all_reduce(bytearray(4), "total")
