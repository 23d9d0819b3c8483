"""Links with a rate, a delay and losses between hosts, which are cut and healed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from carrier import TUN, Link
from namespaces import Hosts, hosts, why_not
from ranks import run_ranks

TROUBLE = why_not() or (None if Path(TUN).exists() else f"there is no {TUN}")
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")

ROOT = Path(__file__).resolve().parents[3]


def run(net: Hosts, what: str, *args: object, per_host: int = 1, **more: str) -> list:
    def variables(rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": net.address(0),
            "MASTER_PORT": "29521",
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "UNISONO_TIMEOUT": "60",
            "UNISONO_JOIN_TIMEOUT": "40",
            **more,
        }

    def host(rank: int) -> str:
        return net.names[rank // per_host]

    world = per_host * len(net.names)
    found = run_ranks(
        world, f"hosts_ranks:{what}", *args, timeout=120, env=variables, host=host, check=True
    )
    return [result.value for result in found]


def test_a_round_trip_takes_at_least_twice_the_delay():
    with hosts(2, link=Link(delay=0.05)) as net:
        assert min(run(net, "quickest_round_trip", 5)) >= 0.1


@pytest.mark.parametrize("per_host", [1, 2])
def test_values_are_right_where_packets_are_slow_and_get_lost(per_host):
    with hosts(2, link=Link(rate=2e8, delay=0.005, loss=0.005)) as net:
        run(net, "everything", per_host=per_host)


@pytest.mark.parametrize("link", [None, Link(rate=1e9)], ids=["switch", "carrier"])
def test_a_short_outage_only_delays_the_job(link):
    with hosts(2, link=link) as net:
        over = threading.Event()

        def trouble() -> None:
            for act in (net.cut, net.heal):
                if over.wait(3):
                    return
                act(0)

        thread = threading.Thread(target=trouble)
        thread.start()
        try:
            longest = run(net, "reduce_for_a_while", 10)
        finally:
            over.set()
            thread.join()
    # The link was noticed to be down, or this has shown nothing.
    assert max(longest) > 2


def test_a_user_can_run_the_bed():
    program = "import os, socket; print(os.environ['RANK'], os.environ['LOCAL_RANK'])"
    bed = [sys.executable, "-m", "tests.hosts", "--hosts", "2,1", "--rate", "100"]
    done = subprocess.run(
        [*bed, "--delay", "1", "--", sys.executable, "-c", program],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[host 0, rank 0] 0 0", "[host 0, rank 1] 1 1", "[host 1, rank 2] 2 0"]


def test_the_bed_ends_all_when_one_fails():
    program = (
        "import os, sys, time; sys.exit(3) if os.environ['NODE_RANK'] == '1' else time.sleep(90)"
    )
    bed = [sys.executable, "-m", "tests.hosts", "--hosts", "1,1", "--nodes", "--"]
    done = subprocess.run(
        [*bed, sys.executable, "-c", program],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "failed: host 1" in done.stdout
