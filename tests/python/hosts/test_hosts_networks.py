"""Networks on which other libraries are known to pick an address that does not work.

Each is made of network namespaces, with no setting that names an interface: the ranks find a way by
themselves.
"""

from __future__ import annotations

import pytest
from hosts_ranks import Links
from namespaces import Hosts, hosts, ip, why_not
from ranks import RankResult, run_ranks

TROUBLE = why_not()
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")


def run(net: Hosts, master: str, *, per_host: int = 1, **more: str) -> list[RankResult]:
    """Run ranks on both hosts, in blocks, and check every result against NumPy."""

    def variables(rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": master,
            "MASTER_PORT": "29521",
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "UNISONO_TIMEOUT": "30",
            "UNISONO_JOIN_TIMEOUT": "20",
            **more,
        }

    def enter(rank: int) -> list[str]:
        return net.enter(rank // per_host)

    world = per_host * len(net.names)
    return run_ranks(
        world, "hosts_ranks:everything", timeout=60, env=variables, prefix=enter, check=True
    )


def between(results: list[RankResult]) -> list[set[tuple[str, str]]]:
    values: list[Links] = [result.value for result in results]
    return [links.connections for links in values]


def test_the_masters_name_is_127_0_1_1_on_its_own_host():
    """As Debian's installer writes /etc/hosts."""
    with hosts() as net:
        net.name_host(0, "node0", "127.0.1.1")
        net.name_host(1, "node0", net.address(0))
        found = between(run(net, "node0"))
    assert found == [
        {(Hosts.address(0), Hosts.address(1))},
        {(Hosts.address(1), Hosts.address(0))},
    ]


@pytest.mark.parametrize("name", ["docker0", "cni0"])
def test_a_bridge_of_containers_comes_first(name):
    """Every host has the same address on it, which leads nowhere, and it is the first interface."""
    with hosts() as net:
        put_bridge_first(net, name)
        run(net, net.address(0))


def put_bridge_first(net: Hosts, name: str) -> None:
    for host, namespace in enumerate(net.names):
        net.unplug(host)
        ip("-n", namespace, "link", "add", name, "type", "bridge")
        ip("-n", namespace, "addr", "add", "172.17.0.1/16", "dev", name)
        ip("-n", namespace, "link", "set", name, "up")
        net.plug(host)


def test_hosts_have_an_interface_to_a_network_of_their_own():
    """Several interfaces, of which one leads to the other host."""
    with hosts(networks=2) as net:
        net.cut(0)
        found = between(run(net, net.address(0, 1)))
    assert found[0] == {(Hosts.address(0, 1), Hosts.address(1, 1))}


def test_the_address_of_a_pod_is_a_network_of_one():
    """As clusters give each pod: an address with 32 bits, and a gateway that is on the link."""
    with hosts() as net:
        for host, name in enumerate(net.names):
            own, other = net.address(host), net.address(1 - host)
            ip("-n", name, "addr", "del", f"{own}/24", "dev", "eth0")
            ip("-n", name, "addr", "add", f"{own}/32", "dev", "eth0")
            ip("-n", name, "route", "add", f"{other}/32", "dev", "eth0")
        run(net, net.address(0))


def test_hosts_are_on_two_networks_with_a_router_between():
    with hosts(networks=2) as net:
        switch = net.switch
        for network in range(2):
            gateway = f"10.{91 + network}.0.254"
            ip("-n", switch, "addr", "add", f"{gateway}/24", "dev", f"bridge{network}")
            name = net.names[network]
            ip("-n", name, "link", "set", f"eth{1 - network}", "down")
            ip("-n", name, "route", "add", "default", "via", gateway)
        ip("netns", "exec", switch, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        found = between(run(net, net.address(0)))
    assert found[0] == {(Hosts.address(0), Hosts.address(1, 1))}


def test_hosts_have_addresses_of_version_6_alone():
    with hosts() as net:
        for host, name in enumerate(net.names):
            ip("-n", name, "addr", "flush", "dev", "eth0", "scope", "global")
            ip("-n", name, "addr", "add", f"fd91::{host + 1}/64", "dev", "eth0", "nodad")
        run(net, "fd91::1", per_host=2)


def test_one_interface_of_a_host_is_dead():
    with hosts(networks=2) as net:
        for name in net.names:
            ip("-n", name, "link", "set", "eth0", "down")
        found = between(run(net, net.address(0, 1)))
    assert found[0] == {(Hosts.address(0, 1), Hosts.address(1, 1))}


@pytest.mark.parametrize("trouble", ["a bridge first", "one network cut"])
def test_ranks_that_meet_in_a_file_find_the_network_that_works(trouble, tmp_path):
    """Nothing tells them which network the other host is on: they try what there is."""
    bridge = trouble == "a bridge first"
    with hosts(networks=1 if bridge else 2) as net:
        if bridge:
            put_bridge_first(net, "docker0")
        else:
            net.cut(0)
        results = run_ranks(
            2,
            "hosts_ranks:meet_in_a_file",
            str(tmp_path / "store"),
            timeout=60,
            env={
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "UNISONO_TIMEOUT": "30",
                "UNISONO_JOIN_TIMEOUT": "20",
            },
            prefix=net.enter,
        )
    network = 0 if bridge else 1
    ours, theirs = Hosts.address(0, network), Hosts.address(1, network)
    assert [result.value for result in results] == [{(ours, theirs)}, {(theirs, ours)}]
