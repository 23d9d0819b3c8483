"""Ranks that fork, that execute other programs, and whose user the system does not tell."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from ranks import run_ranks

OURS = "processes_ranks"


def works(command: list[str]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run([*command, "true"], check=False).returncode == 0


def test_children_of_ranks_make_groups_while_their_parents_use_theirs(tmp_path):
    run_ranks(2, f"{OURS}:children_make_groups", str(tmp_path), timeout=90)


def test_what_a_child_leaves_open_is_closed_when_it_ends(tmp_path):
    run_ranks(2, f"{OURS}:a_child_ends_with_an_open_group", str(tmp_path))


def test_nothing_that_a_child_writes_reaches_its_parent_or_the_peers():
    run_ranks(2, f"{OURS}:a_child_writes_what_it_has_of_its_parent")


def without_randomised_addresses(rank: int) -> list[str]:
    return ["setarch", "-R"]


def test_nothing_of_a_program_that_is_executed_is_received(tmp_path):
    if not works(without_randomised_addresses(0)):
        pytest.skip("setarch cannot keep addresses from being randomised here")
    results = run_ranks(
        2,
        f"{OURS}:executes",
        str(tmp_path),
        prefix=without_randomised_addresses,
        check=False,
    )
    assert results[0].value in ("an error", "42.0"), results[0].report()


def as_nobody(rank: int) -> list[str]:
    """In a user namespace that knows no user: every process is shown as the overflow user's."""
    return ["unshare", "--user"]


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_nobody_shares_memory_with_nobody(transport):
    if not works(as_nobody(0)):
        pytest.skip("this process may not make user namespaces")
    env = {"UNISONO_TRANSPORT": transport, "UNISONO_LOG": "debug", "UNISONO_JOIN_TIMEOUT": "10"}
    results = run_ranks(2, f"{OURS}:meet", env=env, prefix=as_nobody, check=False)
    if transport == "auto":
        assert [result.value for result in results] == [2.0, 2.0], results[0].report()
    else:
        for result in results:
            assert "not the same host and user" in result.output, result.report()
