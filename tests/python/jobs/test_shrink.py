"""Ranks that go on when others are gone: they agree on who they are, and form a group."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import pytest
from namespaces import Hosts, hosts, why_not
from ranks import RankResult, run_ranks

TROUBLE = why_not()
across_hosts = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")
# From a failure to the next result, also on a busy machine.
SOON = 5.0
PORT = "29519"
LIMITS = {"UNISONO_TIMEOUT": "30", "UNISONO_JOIN_TIMEOUT": "20"}


def run(world: int, what: str, *args: object, gone=(), **more) -> list:
    """Return the values of the ranks that are not `gone`, which SIGKILL has ended."""
    more.setdefault("env", LIMITS)
    results = run_ranks(world, f"shrink_ranks:{what}", *args, timeout=60, check=False, **more)
    left = [result for result in results if result.rank not in gone]
    report = "\n".join(map(RankResult.report, results))
    assert all(result.ok for result in left), report
    assert all(results[rank].exit_code == -signal.SIGKILL for rank in gone), report
    return [result.value for result in left]


def run_on(net: Hosts, what: str, *args: object, gone=(), **more: str) -> list:
    """As `run`, with ranks 0 and 1 on one host, and 2 and 3 on another."""

    def env(rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": net.address(0),
            "MASTER_PORT": PORT,
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
            **LIMITS,
            **more,
        }

    where = net.names
    return run(4, what, *args, gone=gone, env=env, host=lambda rank: where[rank // 2])


@pytest.mark.check
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("gone", [[0], [2], [0, 1, 4]])
def test_those_that_are_left_go_on(gone, transport):
    deaths = dict.fromkeys(gone, 7)
    stories = run(5, "go_on", deaths, gone=gone, env={**LIMITS, "UNISONO_TRANSPORT": transport})
    for story in stories:
        assert story.groups == stories[0].groups
        assert story.groups[-1] == [rank for rank in range(5) if rank not in gone]
        # A rank may die before others have read what it sent last.
        assert story.ended[0] in (6, 7)
        assert max(story.seconds) < SOON


def test_one_after_the_other_until_one_is_left():
    stories = run(4, "go_on", {0: 5, 3: 9, 1: 12}, gone=[0, 1, 3])
    assert stories[0].groups == [[0, 1, 2, 3], [1, 2, 3], [1, 2], [2]]
    deaths = zip(stories[0].ended, [5, 9, 12], strict=True)
    assert all(ended in (death - 1, death) for ended, death in deaths)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_die_at_any_time_are_left_out(seed):
    world = 6
    victims = random.Random(seed).sample(range(world), 3)
    stories = run(world, "die_at_any_time", seed, victims, gone=victims)
    for story in stories:
        assert story.groups == stories[0].groups
        assert story.groups[-1] == [rank for rank in range(world) if rank not in victims]


@pytest.mark.parametrize("how", ["comes later", "is excluded"])
def test_a_rank_that_lives_and_does_not_come_is_named(how):
    first, late, third = run(4, "one_does_not_come", 1, how, gone=[3])
    # The first leads, and the third waits for it.
    for (peer, message), named in ((first[0], 1), (third[0], 0)):
        assert peer == named
        assert f"this one waits for: rank {named} (host " in message
    left = [0, 1, 2] if how == "comes later" else [0, 2]
    assert first[1] == third[1] == left
    assert late[1] == (left if how == "comes later" else None)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_that_comes_when_the_others_have_gone_on_hears_of_it(late, transport, tmp_path):
    env = {**LIMITS, "UNISONO_TRANSPORT": transport}
    message, seconds = run(4, "come_too_late", late, tmp_path / "heard", gone=[3], env=env)[late]
    assert "it has closed the communicator, and may have gone on without this rank" in message
    assert seconds < 30


def test_ranks_are_left_out_of_a_group_that_lives():
    assert run(3, "leave_out", 1) == [[0, 2], None, [0, 2]]


@pytest.mark.check
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("gone, died", [([0], 3), ([1, 4], 0)])
def test_ranks_keep_their_numbers(gone, died, transport):
    env = {**LIMITS, "UNISONO_TRANSPORT": transport}
    left = [rank for rank in range(6) if rank not in (*gone, died)]
    stories = run(6, "keep_numbers", gone, died, gone=[*gone, died], env=env)
    assert stories == [left] * len(left)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_that_keeps_its_number_is_named_by_it(transport):
    env = {**LIMITS, "UNISONO_TRANSPORT": transport}
    for text in run(4, "name_before_links", 3, gone=[0, 3], env=env):
        assert "rank 3 (" in text
        assert "rank 2 (" not in text


@pytest.mark.parametrize(
    "how, error",
    [
        ("abort", "AbortedError"),
        ("mismatch", "MismatchError"),
    ],
)
def test_all_go_on_after_a_failure_of_no_rank(how, error):
    env = {**LIMITS, "UNISONO_TRANSPORT": "tcp"}
    assert run(3, "fail_and_go_on", how, env=env) == [(error, [0, 1, 2])] * 3


@pytest.mark.check
def test_a_connection_that_breaks_is_no_failure():
    assert run(3, "survive_breaks", env={**LIMITS, "UNISONO_TRANSPORT": "tcp"}) == [20] * 3


def test_an_interrupt_ends_the_wait():
    seconds, _ = run(2, "interrupt")
    assert 0.3 < seconds < SOON


@across_hosts
def test_of_two_halves_one_goes_on(tmp_path: Path):
    begin, cut = tmp_path / "begin", tmp_path / "cut"
    with hosts() as net:

        def cut_when_ready() -> None:
            until = time.monotonic() + 30
            while len(list(tmp_path.glob("begin-*"))) < 4 and time.monotonic() < until:
                time.sleep(0.01)
            net.swallow(0)
            cut.touch()

        thread = threading.Thread(target=cut_when_ready, daemon=True)
        thread.start()
        values = run_on(net, "be_cut_off", str(begin), str(cut), UNISONO_PEER_TIMEOUT="2")
        thread.join()
    assert values[:2] == [("goes on", [0, 1])] * 2, values
    for kind, message in values[2:]:
        assert kind == "PeerLostError", message
        assert "cannot be reached from here and may live" in message


@across_hosts
def test_a_rank_that_ends_on_another_host_is_left_out():
    with hosts() as net:
        for gone in (0, 3):
            stories = run_on(net, "go_on", {gone: 7}, gone=[gone])
            assert stories[0].groups[-1] == [rank for rank in range(4) if rank != gone]
