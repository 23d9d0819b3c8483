"""Ranks on up to eight hosts, made of network namespaces, with one rank or several on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from namespaces import Hosts, hosts, numbered, place_of, why_not
from ranks import RankResult, run_ranks

TROUBLE = why_not()
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")

SHORT, LONG = 1003, 1_000_003


def run(net: Hosts, host_of: Sequence[int], what: str, *args: Any) -> list[RankResult]:
    """Run each rank on its host."""

    def variables(rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": net.address(host_of[0]),
            "MASTER_PORT": "29535",
            **place_of(rank, host_of),
            "UNISONO_TIMEOUT": "30",
            "UNISONO_JOIN_TIMEOUT": "20",
        }

    return run_ranks(
        len(host_of),
        f"hosts_ranks:{what}",
        *args,
        timeout=60,
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
