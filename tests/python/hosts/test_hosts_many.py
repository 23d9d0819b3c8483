"""Ranks on up to eight hosts, with one rank or several on each, and one on each of 200."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from namespaces import Hosts, hosts, ip, numbered, place_of, why_not
from ranks import RankResult, run_ranks

TROUBLE = why_not()
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")

SHORT, LONG = 1003, 1_000_003


def put_router_in_the_middle(net: Hosts) -> None:
    """Join hosts that have no network yet by a router, as pods are: each has a link to it alone.

    On a switch every host would have an entry for every other one in the kernel's table of
    neighbours, which all namespaces share and which has room for 1,024.
    """
    gateway = "169.254.1.1"
    ip("netns", "exec", net.switch, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    for host, name in enumerate(net.names):
        port = f"port{host}"
        link = ["link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name]
        ip("-n", net.switch, *link)
        ip("-n", net.switch, "addr", "add", f"{gateway}/32", "dev", port)
        ip("-n", net.switch, "link", "set", port, "up")
        ip("-n", net.switch, "route", "add", f"{net.address(host)}/32", "dev", port)
        ip("-n", name, "addr", "add", f"{net.address(host)}/32", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "route", "add", gateway, "dev", "eth0", "scope", "link")
        ip("-n", name, "route", "add", "default", "via", gateway)


def run(
    net: Hosts, host_of: Sequence[int], what: str, *args: Any, seconds: int = 30
) -> list[RankResult]:
    """Run each rank on its host; it may wait that long for others."""

    def variables(rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": net.address(host_of[0]),
            "MASTER_PORT": "29535",
            **place_of(rank, host_of),
            "UNISONO_TIMEOUT": str(seconds),
            "UNISONO_JOIN_TIMEOUT": str(seconds),
        }

    return run_ranks(
        len(host_of),
        f"hosts_ranks:{what}",
        *args,
        timeout=2 * seconds,
        env=variables,
        host=lambda rank: net.names[host_of[rank]],
    )


@pytest.mark.parametrize(
    "ranks,numbering",
    [
        ([1] * 4, "blocks"),
        ([3, 2, 1], "blocks"),
        ([3, 2, 1], "round-robin"),
        ([1] * 8, "blocks"),
    ],
    ids=["4 hosts", "3+2+1", "3+2+1 in turn", "8 hosts"],
)
def test_everything_is_right(ranks, numbering):
    host_of = numbered(ranks, numbering)
    with hosts(len(ranks)) as net:
        results = run(net, host_of, "everything")
    for result in results:
        here = host_of[result.rank]
        others = {Hosts.address(host) for host in range(len(ranks)) if host != here}
        between = {(Hosts.address(here), other) for other in others}
        # Every other host is reached over TCP, and no rank of the same one.
        assert result.value.connections == between, result
        assert (result.value.segments > 0) == (ranks[here] > 1), result


@pytest.mark.parametrize(
    "ranks,numbering",
    [([2, 2], "round-robin"), ([1] * 4, "blocks")],
    ids=["2+2 in turn", "4 hosts"],
)
def test_a_sum_has_the_same_bits_on_all_ranks(ranks, numbering):
    with hosts(len(ranks)) as net:
        results = run(net, numbered(ranks, numbering), "sums_of_fractions", [SHORT, LONG])
    found = [result.value for result in results]
    assert set(found[0]) == {SHORT, LONG}
    assert all(bits == found[0] for bits in found), found


def test_two_hundred_hosts_form_a_group():
    with hosts(200, networks=0) as net:
        put_router_in_the_middle(net)
        results = run(net, range(200), "sums_of_fractions", [SHORT], seconds=120)
    assert len({result.value[SHORT] for result in results}) == 1
