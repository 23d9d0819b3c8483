"""Networks on which other libraries are known to pick an address that does not work.

Each is made of network namespaces, with no setting that names an interface: the ranks find a way by
themselves.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable

import pytest
from hosts_ranks import Links
from namespaces import Hosts, hosts, ip, why_not
from ranks import RankResult, run_ranks

TROUBLE = why_not()
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")


def run(
    net: Hosts,
    master: str,
    *,
    per_host: int = 1,
    what: str = "everything",
    prefix: Callable[[int], list[str]] | None = None,
    **more: str,
) -> list[RankResult]:
    """Run ranks on all hosts, in blocks, and check every result against NumPy."""

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

    def host(rank: int) -> str:
        return net.names[rank // per_host]

    world = per_host * len(net.names)
    target = f"hosts_ranks:{what}"
    return run_ranks(world, target, timeout=60, env=variables, host=host, prefix=prefix)


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
    """Several interfaces, one of them to the other host."""
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


def named_pod(rank: int) -> list[str]:
    """The command that gives a rank, alone on its host, a host name of its own."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"pod-{rank}"]


@pytest.mark.parametrize("own", [{}, {"pod-0": "192.0.2.7", "pod-1": "192.0.2.7"}])
def test_the_name_of_a_pod_is_that_of_nothing_here(own):
    """As with hostNetwork: the pod's name is unknown, or leads somewhere else."""
    with hosts() as net:
        for host in range(2):
            net.name_hosts(host, {"node0": net.address(0), **own})
        found = between(run(net, "node0", prefix=named_pod))
    assert found == [
        {(Hosts.address(0), Hosts.address(1))},
        {(Hosts.address(1), Hosts.address(0))},
    ]


def test_a_master_of_an_unknown_name_is_told():
    """As where rank 0's own name is taken for MASTER_ADDR. A name server is asked for 10 s."""
    with hosts() as net:
        for host in range(2):
            net.name_hosts(host, {})
        short = {"UNISONO_JOIN_TIMEOUT": "3"}
        serves, comes = run(net, "pod-0", what="join_only", prefix=named_pod, **short)
    assert serves.value.kind == "SystemCallError", serves.value
    assert serves.value.seconds < 12, serves.value
    assert comes.value.kind == "TimeoutError", comes.value
    for result in (serves, comes):
        assert "pod-0 port" in result.value.message, result.value
        assert "failed to lookup address" in result.value.message, result.value


def join_in_a_ring(net: Hosts) -> None:
    """Give each host a link to the next one, with a network of its own: none is on all three."""
    for host, name in enumerate(net.names):
        other = net.names[(host + 1) % len(net.names)]
        ip(
            "-n",
            name,
            "link",
            "add",
            "right",
            "type",
            "veth",
            "peer",
            "name",
            "left",
            "netns",
            other,
        )
        for end, device in enumerate([(name, "right"), (other, "left")], 1):
            at, interface = device
            ip("-n", at, "addr", "add", f"10.93.{host}.{end}/24", "dev", interface)
            ip("-n", at, "link", "set", interface, "up")
    # To the master's address the last host goes by its own link to that host.
    ip("-n", net.names[-1], "route", "add", "10.93.0.1/32", "via", f"10.93.{len(net.names) - 1}.2")


def test_hosts_in_a_ring_reach_each_other_by_all_interfaces():
    with hosts(3, networks=0) as net:
        join_in_a_ring(net)
        found = between(run(net, "10.93.0.1", UNISONO_INTERFACE="left,right"))
    # Both neighbours of each host, in whichever direction they have connected.
    assert [{theirs[:7] for _ours, theirs in links} for links in found] == [
        {"10.93.0", "10.93.2"},
        {"10.93.0", "10.93.1"},
        {"10.93.1", "10.93.2"},
    ]


def test_hosts_in_a_ring_name_the_pair_and_the_setting():
    """By default a rank is reached by the link that leads to the master, and by no other."""
    with hosts(3, networks=0) as net:
        join_in_a_ring(net)
        results = run(net, "10.93.0.1", what="meet_in_vain")
    for result in results[1:]:
        other = 3 - result.rank
        pair = rf"rank {other} \(.*\) cannot be reached from rank {result.rank} \("
        assert result.value.kind == "PeerLostError", result.value
        assert re.search(pair, result.value.message), result.value
        assert "Network is unreachable" in result.value.message, result.value
        assert "UNISONO_INTERFACE decides" in result.value.message, result.value
        assert result.value.seconds < 10, result.value


def gateway(network: int) -> str:
    return f"10.{91 + network}.0.254"


def put_router_between(net: Hosts) -> None:
    """Leave host 0 on the first network alone and host 1 on the second; the switch routes."""
    switch = net.switch
    for network in range(2):
        ip("-n", switch, "addr", "add", f"{gateway(network)}/24", "dev", f"bridge{network}")
        name = net.names[network]
        ip("-n", name, "link", "set", f"eth{1 - network}", "down")
        ip("-n", name, "route", "add", "default", "via", gateway(network))
    ip("netns", "exec", switch, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")


def test_hosts_are_on_two_networks_with_a_router_between():
    with hosts(networks=2) as net:
        put_router_between(net)
        found = between(run(net, net.address(0)))
    assert found[0] == {(Hosts.address(0), Hosts.address(1, 1))}


# Packets from the second network have the router's address, and only answers go there.
TRANSLATION = """
table ip router {
    chain leaving { type nat hook postrouting priority srcnat; oifname "bridge0" masquerade; }
    chain passing {
        type filter hook forward priority filter;
        iifname "bridge0" ct state new drop
    }
}
"""


def translate_addresses(net: Hosts) -> None:
    """Let connections through the router of `put_router_between` from the second network alone."""
    if shutil.which("nft") is None:
        pytest.skip("`nft` is not installed (on Debian: apt-get install nftables)")
    command = ["ip", "netns", "exec", net.switch, "nft", "-f", "-"]
    done = subprocess.run(
        command, input=TRANSLATION, check=False, capture_output=True, text=True, timeout=10
    )
    if done.returncode:
        pytest.skip(f"the kernel translates no addresses: {done.stderr.strip()}")


@pytest.mark.parametrize("inwards,per_host", [("no route", 2), ("dropped", 2)])
def test_a_router_translates_the_addresses_of_one_host(inwards, per_host):
    """As at a site with private addresses: connections go out from it, and none come in."""
    with hosts(networks=2) as net:
        put_router_between(net)
        translate_addresses(net)
        if inwards == "no route":
            ip("-n", net.names[0], "route", "del", "default")
        found = between(run(net, net.address(0), per_host=per_host))
    outside, inside = found[:per_host], found[per_host:]
    assert outside == [{(Hosts.address(0), gateway(0))}] * per_host
    assert inside == [{(Hosts.address(1, 1), Hosts.address(0))}] * per_host


@pytest.mark.parametrize("place", ["eth0", "lo", "eth1"])
def test_the_master_is_another_address_of_its_host(place):
    """The other host gets there by the first address; on its own host every route says lo."""
    master = "10.91.0.77" if place == "eth0" else "10.99.0.1"
    with hosts() as net:
        zero, one = net.names
        if place == "eth1":
            ip("-n", zero, "link", "add", "eth1", "type", "bridge")
            ip("-n", zero, "link", "set", "eth1", "up")
        ip("-n", zero, "addr", "add", f"{master}/24", "dev", place)
        if place != "eth0":
            ip("-n", one, "route", "add", f"{master}/32", "via", net.address(0))
        found = between(run(net, master, per_host=2))
    # A connection may go either way: from the first address, or to the master's.
    for connections in found[2:]:
        assert {ours for ours, _theirs in connections} == {Hosts.address(1)}
        assert {theirs for _ours, theirs in connections} <= {Hosts.address(0), master}


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
            host=net.names.__getitem__,
        )
    network = 0 if bridge else 1
    ours, theirs = Hosts.address(0, network), Hosts.address(1, network)
    assert [result.value for result in results] == [{(ours, theirs)}, {(theirs, ours)}]
