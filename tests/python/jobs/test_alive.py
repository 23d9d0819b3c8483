"""Which peers are lost: those whose process or host is gone, and not those that are only silent."""

from __future__ import annotations

import contextlib
import signal

import pytest
from namespaces import hosts, why_not
from ranks import RankResult, run_ranks

TRANSPORTS = ["shm", "tcp"]
TROUBLE = why_not()
across_hosts = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")

# Within this time every rank knows of the end of a process, also on a busy machine.
SOON = 5.0
# The least that a host may be silent for, and a time that is clearly longer.
LIMIT = 2
LONGER = 5.0
PORT = "29518"


def run(world: int, what: str, *args: object, transport: str = "auto", **more) -> list:
    variables = {"UNISONO_TRANSPORT": transport, "UNISONO_TIMEOUT": "none", **more.pop("env", {})}
    return run_ranks(
        world, f"alive_ranks:{what}", *args, timeout=40, env=variables, check=False, **more
    )


def values(results: list[RankResult], victim: int | None = None) -> list:
    others = [result for result in results if result.rank != victim]
    assert all(result.ok for result in others), "\n".join(map(RankResult.report, results))
    return [result.value for result in others]


# A DataLoader's workers are forked. A child made by the bare system call keeps all sockets: then
# the pidfd tells, which there is inside a host.
@pytest.mark.parametrize(
    "transport, how", [("shm", "fork"), ("tcp", "fork"), ("shm", "bare system call")]
)
@pytest.mark.parametrize("what", ["all_reduce", "barrier", "recv"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_killed_rank_is_missed_although_its_child_lives(what, transport, how):
    results = run(3, "die_beside_a_child", what, 0, how, transport=transport)
    assert results[0].exit_code == -signal.SIGKILL
    for bereaved in values(results, 0):
        assert bereaved.child_lived
        found = bereaved.ending
        assert (found.kind, found.peer) == ("PeerLostError", 0), found
        assert "rank 0 (host " in found.message, found
        assert found.seconds < SOON, found
        if how == "fork":
            assert bereaved.ports_taken == []


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", ["all_reduce", "recv"])
def test_a_rank_that_is_stopped_for_longer_than_the_limit_is_not_lost(what, transport):
    env = {"UNISONO_PEER_TIMEOUT": str(LIMIT)}
    results = run(2, "stop_for_a_while", what, LONGER, transport=transport, env=env)
    assert min(values(results)) >= LONGER


@pytest.mark.parametrize(
    "transport, limit, said",
    [
        ("shm", "10", "its process is stopped"),
        ("tcp", "10", "its process has not answered for"),
        ("tcp", "2", "its host answers, but its process has not for"),
    ],
)
def test_a_wait_that_times_out_says_whether_the_peer_runs(transport, limit, said):
    env = {
        "UNISONO_TRANSPORT": transport,
        "UNISONO_TIMEOUT": "5",
        "UNISONO_PEER_TIMEOUT": limit,
    }
    results = run_ranks(2, "failure_ranks:stop_one", 1, timeout=40, env=env, check=False)
    (found,) = values(results, 1)
    assert (found.kind, found.peer) == ("TimeoutError", 1), found
    assert f"rank 1: {said}" in found.message, found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_in_no_operation_is_not_said_to_be_stopped(transport):
    env = {"UNISONO_TIMEOUT": "4"}
    results = run(2, "wait_for_one_that_sleeps", 6.0, transport=transport, env=env)
    found = values(results)[0]
    assert (found.kind, found.peer) == ("TimeoutError", 1), found
    assert "its process" not in found.message, found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", ["messages", "an empty exchange"])
def test_an_idle_process_sleeps(transport, what):
    with contextlib.ExitStack() as stack:
        more = {}
        if TROUBLE is None:
            # Both on a host of their own, where no `unisono status` of another test finds them.
            net = stack.enter_context(hosts(1))
            more["host"] = lambda _rank: net.names[0]
        found = values(run(2, "idle", 4.0, what, transport=transport, **more))
    for before, after in found:
        assert after - before <= 2


@across_hosts
@pytest.mark.parametrize("cut", ["cable", "interface"])
@pytest.mark.parametrize("what", ["all_reduce", "recv", "nothing", "a first recv"])
def test_a_host_that_goes_dark_is_lost(what, cut):
    lost_within(what, cut, {"UNISONO_PEER_TIMEOUT": str(LIMIT), "UNISONO_TIMEOUT": "none"}, LIMIT)


@across_hosts
def test_a_host_that_is_dark_before_the_first_link_is_lost():
    env = {"UNISONO_PEER_TIMEOUT": str(LIMIT), "UNISONO_TIMEOUT": "60"}
    lost_within("a first link", "cable", env, LIMIT)


@across_hosts
def test_a_host_that_goes_dark_is_lost_by_default_after_ten_seconds():
    lost_within("recv", "cable", {"UNISONO_TIMEOUT": "60"}, 10)


def lost_within(what: str, cut: str, env: dict[str, str], limit: int) -> None:
    with hosts() as net:
        # From the other end of host 1's cable, or on host 1 itself.
        where = ["-n", net.switch] if cut == "cable" else []
        down = ["ip", *where, "link", "set", "port0-1" if where else "eth0", "down"]
        address = {"MASTER_ADDR": net.address(0), "MASTER_PORT": PORT}
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        results = run(
            2,
            "lose_the_network",
            what,
            down,
            2.0 * limit + 3,
            env={**env, **address, **alone},
            host=net.names.__getitem__,
        )
    for result, found in zip(results, values(results), strict=True):
        other = 1 - result.rank
        assert (found.kind, found.peer) == ("PeerLostError", other), found
        assert f"rank {other} (host " in found.message, found
        if what in ("nothing", "a first recv"):
            assert found.seconds < SOON, found
        else:
            assert limit * 0.5 < found.seconds < limit + 2 * SOON, found
