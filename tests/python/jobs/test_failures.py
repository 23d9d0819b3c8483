"""No wait outlives its peer: when one rank fails, the others end with an error that names it."""

from __future__ import annotations

import signal

import pytest
from failure_ranks import Ending
from ranks import RankResult, run_ranks

TRANSPORTS = ["shm", "tcp"]
# Within this time every rank knows of an end that cannot be missed, also on a busy machine.
SOON = 5.0


def run(world: int, what: str, *args: object, transport: str = "auto", **env: str) -> list:
    variables = {"UNISONO_TRANSPORT": transport, "UNISONO_TIMEOUT": "20", **env}
    return run_ranks(world, f"failure_ranks:{what}", *args, timeout=40, env=variables, check=False)


def endings(results: list[RankResult], victim: int | None = None) -> list[Ending]:
    """How the ranks other than the victim ended; each of them by itself."""
    others = [result for result in results if result.rank != victim]
    assert all(result.ok for result in others), "\n".join(map(RankResult.report, results))
    return [result.value for result in others]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", ["all_reduce", "barrier", "recv"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_every_wait(what, victim, transport):
    results = run(3, "die_in", what, victim, transport=transport)
    assert results[victim].exit_code == -signal.SIGKILL
    for ending in endings(results, victim):
        assert ending.kind == "PeerLostError", ending
        assert ending.peer == victim, ending
        assert f"rank {victim} (host " in ending.message, ending
        assert what in ending.message, ending
        assert ending.seconds < SOON, ending


@pytest.mark.parametrize(
    "transport,settings",
    [("shm", {}), ("shm", {"LEND_BYTES": "none"}), ("tcp", {}), ("tcp", {"ENCRYPT": "on"})],
)
def test_a_rank_killed_at_any_moment_of_a_message_ends_the_wait(transport, settings, tmp_path):
    variables = {f"UNISONO_{name}": value for name, value in settings.items()}
    results = run(3, "die_at_every_moment", str(tmp_path), transport=transport, **variables)
    for of_rank, result in enumerate(endings(results)):
        for moment, ending in result.items():
            if of_rank == 1:
                assert ending is None, moment
                continue
            assert (ending.kind, ending.peer) == ("PeerLostError", 1), (moment, ending)
            assert "rank 1 (host " in ending.message, (moment, ending)
            assert ending.seconds < SOON, (moment, ending)


def test_errors_in_a_part_of_a_group_name_ranks_by_both_of_their_numbers():
    _, *results = endings(run(3, "talk_in_a_part"))
    for (ending,) in results:
        assert ending.kind == "MismatchError", ending
        for part in ["rank 0 (global rank 1, host ", "rank 1 (global rank 2, host "]:
            assert part in ending.message, ending


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_has_left_before_it_was_reached_is_said_to_have_left(transport):
    ending, _ = endings(run(2, "leave_before_a_link_is_there", transport=transport))
    assert (ending.kind, ending.peer) == ("PeerLostError", 1), ending
    assert "has closed its group" in ending.message, ending
    assert "INTERFACE" not in ending.message, ending
    assert ending.seconds < SOON, ending


def test_a_message_to_oneself_may_come_before_its_receive():
    results = run(2, "talk_to_oneself", [1, 1000, 3_000_000])
    endings(results)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_the_group_forms_is_named(victim):
    results = run(3, "die_while_joining", victim, 2, UNISONO_JOIN_TIMEOUT="4")
    assert results[victim].exit_code == -signal.SIGKILL
    for ending in endings(results, victim):
        assert f"rank {victim}" in ending.message, ending
        assert ending.seconds < 10, ending


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_is_named_when_the_time_is_up(transport):
    results = run(2, "stop_one", 1, transport=transport, UNISONO_TIMEOUT="2")
    (ending,) = endings(results, 1)
    assert (ending.kind, ending.peer) == ("TimeoutError", 1), ending
    assert "all_reduce #" in ending.message, ending
    assert "rank 1 (host " in ending.message, ending
    assert "bytes" in ending.message, ending


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_exit_without_closing_spares_the_last_collective_of_others(transport, tmp_path):
    variables = {"UNISONO_TRANSPORT": transport, "UNISONO_TIMEOUT": "20"}
    target = "failure_ranks:exit_after_the_last_collective"
    run_ranks(3, target, str(tmp_path), 50, timeout=60, env=variables)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_exits_while_others_wait_is_said_to_have_left(transport):
    results = run(3, "exit_early", 1, transport=transport)
    assert results[1].exit_code == 0
    for ending in endings(results, 1):
        assert (ending.kind, ending.peer) == ("PeerLostError", 1), ending
        assert "left the group in good order" in ending.message, ending
        assert ending.seconds < SOON, ending


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receive_from_any_source_goes_on_when_a_rank_leaves(transport):
    results = run(3, "receive_after_one_has_left", transport=transport)
    assert endings(results) == [1, 1, 2]


def test_a_rank_with_another_secret_is_kept_out(tmp_path):
    for rank, secret in enumerate(["the job's secret", "the job's secret", "a stranger's guess"]):
        file = tmp_path / f"secret-{rank}"
        file.write_text(secret)
        file.chmod(0o600)
    results = run_ranks(
        3,
        "failure_ranks:join_only",
        timeout=40,
        env=lambda rank: {
            "UNISONO_SECRET_FILE": str(tmp_path / f"secret-{rank}"),
            "UNISONO_JOIN_TIMEOUT": "3",
        },
    )
    # The store does not speak with it, so that the others cannot tell it from one that never came.
    assert "another secret" in results[2].value.message, results
    assert all("rank 2 of 3 did not join" in r.value.message for r in results[:2]), results


def test_a_setting_that_differs_is_named_with_both_values():
    results = run_ranks(
        2,
        "failure_ranks:join_only",
        timeout=40,
        env=lambda rank: {"UNISONO_RING_BYTES": ["64K", "128K"][rank]},
    )
    for result in results:
        assert result.value.kind == "MismatchError", result.value
        for part in ["ring_bytes", "65536", "131072", "rank 0", "rank 1"]:
            assert part in result.value.message, result.value
        assert result.value.seconds < SOON, result.value


def test_strangers_do_not_disturb():
    results = run(2, "work_among_strangers", 2.0, 21, transport="tcp")
    assert endings(results)[0] > 20
