"""Connections that break between ranks that live: they are made again, and nothing is lost.

`ss -K` resets a connection as a middlebox would, at one end or both.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from namespaces import Hosts, hosts, ip, why_not
from ranks import RankResult, run_ranks

TROUBLE = why_not() or (None if shutil.which("ss") else "there is no ss (iproute2)")
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")
PORT = "29523"


def run(net: Hosts, world: int, what: str, *args: object, **more: str) -> list:
    """Run ranks in turn on the hosts, and return their values."""

    def env(rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": net.address(0),
            "MASTER_PORT": PORT,
            "LOCAL_RANK": str(rank // 2),
            "LOCAL_WORLD_SIZE": str(world // 2),
            "UNISONO_TIMEOUT": "30",
            "UNISONO_JOIN_TIMEOUT": "20",
            "UNISONO_LOG": "info",
            **more,
        }

    results = run_ranks(
        world,
        f"mending_ranks:{what}",
        *args,
        timeout=60,
        env=env,
        host=lambda rank: net.names[rank % 2],
        torch=what == "through_torch",
    )
    run.output = "\n".join(map(RankResult.report, results))
    return [result.value for result in results]


def connections(net: Hosts, host: int) -> list[tuple[str, str]]:
    """Return both ends of each connection between ranks, as `host` has it."""
    command = [*net.enter(host), "ss", "-Htn", "state", "established"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout
    pairs = [tuple(line.split()[2:4]) for line in lines.splitlines()]
    return [pair for pair in pairs if not any(end.endswith(f":{PORT}") for end in pair)]


def reset(net: Hosts, host: int, pair: tuple[str, str]) -> None:
    command = ["ss", "-K", "state", "established", "src", pair[0], "dst", pair[1]]
    subprocess.run([*net.enter(host), *command], capture_output=True, timeout=10, check=False)


def reset_all(net: Hosts, host: int) -> int:
    pairs = connections(net, host)
    for pair in pairs:
        reset(net, host, pair)
    return len(pairs)


def await_ranks(folder: Path, what: str, world: int) -> None:
    until = time.monotonic() + 50
    while len(list(folder.glob(f"{what}-*"))) < world:
        assert time.monotonic() < until, f"the ranks have not come to {what}"
        time.sleep(0.01)


@contextmanager
def beside(act: Callable[[], None]) -> Iterator[None]:
    """Do this beside what follows; its error is that of the test."""
    failed: list[BaseException] = []

    def contained() -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=contained)
    thread.start()
    yield
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("what", ["exchange", "through_torch"])
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_resets_lose_nothing(what, is_encrypted, tmp_path):
    more = {}
    if is_encrypted:
        secret = tmp_path / "secret"
        secret.touch(mode=0o600)
        secret.write_text("of this test, and of no other one\n")
        more = {"UNISONO_ENCRYPT": "1", "UNISONO_SECRET_FILE": str(secret)}
    chance, resets = random.Random(what), []
    with hosts() as net:

        def break_now_and_then() -> None:
            await_ranks(tmp_path, "joined", 4)
            (tmp_path / "joined").touch()
            until = time.monotonic() + 4
            while time.monotonic() < until:
                host = chance.randrange(2)
                pairs = connections(net, host)
                # On a busy machine the ranks may have ended by then.
                for pair in chance.sample(pairs, min(len(pairs), 1)):
                    reset(net, host, pair)
                    resets.append(pair)
                time.sleep(0.05)

        with beside(break_now_and_then):
            values = run(net, 4, what, str(tmp_path), 4.5, **more)
    assert len(resets) > 3
    assert all(rounds > 3 for rounds, _ in values), values
    assert "a connection broke and was made again" in run.output


def test_connections_that_were_forgotten_while_no_rank_used_them(tmp_path):
    with hosts() as net:

        def forget() -> None:
            await_ranks(tmp_path, "joined", 2)
            assert reset_all(net, 0) >= 4
            (tmp_path / "joined").touch()

        with beside(forget):
            values = run(net, 2, "after_rest", str(tmp_path))
    assert max(values) < 8, values


@pytest.mark.parametrize("then", ["sent_before_rest", "sent_before_the_end"])
def test_a_message_of_a_rank_that_does_nothing_more(then, tmp_path):
    """Its bytes are on their way when the connection breaks, and its caller has been told."""
    with hosts() as net:

        def lose() -> None:
            await_ranks(tmp_path, "joined", 2)
            net.cut(0)
            (tmp_path / "joined").touch()
            await_ranks(tmp_path, "sent", 2)
            reset_all(net, 0)
            (tmp_path / "reset").touch()
            net.heal(0)

        with beside(lose):
            run(net, 2, then, str(tmp_path))


@pytest.mark.parametrize("seconds", [1.5, 4.0])
def test_an_outage_delays_what_is_under_way(seconds, tmp_path):
    with hosts() as net:

        def cut() -> None:
            await_ranks(tmp_path, "joined", 4)
            (tmp_path / "joined").touch()
            time.sleep(0.5)
            net.cut(0)
            time.sleep(seconds)
            net.heal(0)

        with beside(cut):
            values = run(net, 4, "exchange", str(tmp_path), seconds + 1.5)
    longest = max(longest for _, longest in values)
    assert seconds < longest < seconds + 8, values  # on a busy machine


@pytest.mark.parametrize("how", ["switch", "interface"])
def test_another_interface_takes_over(how, tmp_path):
    with hosts(networks=2) as net:

        def cut() -> None:
            await_ranks(tmp_path, "joined", 2)
            (tmp_path / "joined").touch()
            time.sleep(0.5)
            if how == "switch":
                net.cut(0)
            else:
                ip("-n", net.names[1], "link", "set", "eth0", "down")

        with beside(cut):
            more = {"UNISONO_INTERFACE": "eth0,eth1"}
            values = run(net, 2, "exchange", str(tmp_path), 4.0, **more)
            ends = run.output
    assert all(rounds > 3 for rounds, _ in values), f"{values}\n{ends}"
    assert "a connection broke and was made again" in ends
