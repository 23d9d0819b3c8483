"""Groups that take in processes: further ones, and those in the place of ranks that are gone."""

from __future__ import annotations

import pytest
from ranks import free_port, run_ranks

LIMITS = {"UNISONO_TIMEOUT": "30", "UNISONO_JOIN_TIMEOUT": "20"}


def run(world: int, what: str, *args: object, **more: str) -> list:
    results = run_ranks(world, f"grow_ranks:{what}", *args, timeout=60, env={**LIMITS, **more})
    return [result.value for result in results]


@pytest.mark.check
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_further_ranks(tmp_path, transport):
    places = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    run(5, "further_ranks", str(tmp_path), *places, UNISONO_TRANSPORT=transport)


def test_ranks_that_do_not_come_are_named(tmp_path):
    run(2, "none_comes", str(tmp_path), f"tcp://127.0.0.1:{free_port()}")


def test_a_rank_that_cannot_meet_them_holds_all_back(tmp_path):
    run(3, "one_cannot", f"tcp://127.0.0.1:{free_port()}")


def test_a_rank_that_is_lost_meanwhile(tmp_path):
    results = run_ranks(3, "grow_ranks:one_is_lost", timeout=60, env=LIMITS, check=False)
    assert [result.exit_code for result in results] == [0, 0, -9], results
    assert all(result.value < 5 for result in results[:2]), results


def test_a_signal_ends_it(tmp_path):
    run(2, "interrupted")


@pytest.mark.parametrize("secret", [None, "0f" * 32])
def test_groups_form_of_handles(secret, tmp_path):
    more = {} if secret is None else {"UNISONO_LAUNCH_SECRET": secret}
    run(4, "of_handles", str(tmp_path), **more)
