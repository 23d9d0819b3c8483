"""Long messages between hosts whose network caps the rate of each connection."""

from __future__ import annotations

import pytest
from namespaces import Hosts, hosts, limit, limit_flows, why_not
from ranks import RankResult, run_ranks

TROUBLE = why_not()
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")

# A link for messages and one for collectives have two connections each.
LINKS = 4


def run(net: Hosts, what: str, rounds: int, check: bool = True, **more: str) -> list[RankResult]:
    def variables(_rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": net.address(0),
            "MASTER_PORT": "29531",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "UNISONO_TIMEOUT": "60",
            "UNISONO_LOG": "debug",
            **more,
        }

    target = f"hosts_ranks:{what}"
    return run_ranks(
        2, target, rounds, timeout=120, env=variables, host=net.names.__getitem__, check=check
    )


@pytest.mark.parametrize("threads", ["auto", "3"])
@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_capped_connections_are_joined_by_others(encrypt, threads):
    with hosts() as net:
        limit_flows(net, 400)
        variables = {"UNISONO_ENCRYPT": encrypt, "UNISONO_THREADS": threads}
        results = run(net, "long_messages", 12, **variables)
    for result in results:
        assert len(result.value) > LINKS, result.report()
        assert "tried more connections" in result.output, result.report()


def test_several_interfaces_share_long_messages():
    with hosts(networks=2) as net:
        limit(net, 400)
        results = run(net, "long_messages", 8, UNISONO_INTERFACE="eth0,eth1")
    for rank, result in enumerate(results):
        used = {Hosts.address(rank, network) for network in (0, 1)}
        assert set(result.value) == used, result.report()


def test_the_end_of_a_rank_is_noticed_on_all_connections():
    with hosts() as net:
        limit_flows(net, 400)
        zero, _one = run(net, "long_messages_until_one_dies", 10, check=False)
    assert zero.value.kind == "PeerLostError", zero.report()
    assert zero.value.peer == 1, zero.report()
    assert zero.value.seconds < 15, zero.report()
