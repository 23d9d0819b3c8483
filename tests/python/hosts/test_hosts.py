"""Ranks on two hosts, made of network namespaces: shared memory inside, TCP between."""

from __future__ import annotations

import json
import re
import signal
import sys

import pytest
from launching import on_every_host
from namespaces import Hosts, hosts, ip, why_not
from ranks import RankResult, run_ranks

TROUBLE = why_not()
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")

WORLD = 4
PORT = "29517"


def run(
    net: Hosts, what: str, *args: object, check: bool = True, env=lambda _rank: {}, **more: str
) -> list:
    """Run ranks 0 and 1 on the first host, 2 and 3 on the second."""

    def variables(rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": net.address(0),
            "MASTER_PORT": PORT,
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
            "UNISONO_TIMEOUT": "30",
            "UNISONO_JOIN_TIMEOUT": "20",
            **more,
            **env(rank),
        }

    return run_ranks(
        WORLD,
        f"hosts_ranks:{what}",
        *args,
        timeout=60,
        env=variables,
        check=check,
        host=lambda rank: net.names[rank // 2],
    )


def check_links(results: list[RankResult], network: int = 0) -> None:
    """Each rank shares memory inside its host, and TCP leads to the other host alone."""
    for result in results:
        here = result.rank // 2
        assert result.value.segments > 0, result
        between = (Hosts.address(here, network), Hosts.address(1 - here, network))
        assert result.value.connections == {between}, result


def test_labels_tell_which_ranks_share_a_host():
    with hosts() as net:
        check_links(run(net, "everything", env=lambda rank: {"UNISONO_HOST": f"node{rank // 2}"}))


def test_sums_in_8_bits_are_near_and_the_same_everywhere():
    with hosts() as net:
        results = run(net, "sums_in_8_bits")
    assert len({str(result.value) for result in results}) == 1, results


def test_arrays_are_read_and_written_on_the_other_host():
    with hosts() as net:
        run(net, "read_and_write")


def test_without_labels_the_network_namespace_tells():
    with hosts() as net:
        results = run(net, "everything")
    check_links(results)
    # Nothing was tried in vain.
    assert not any("no shared memory" in result.output for result in results)


def test_ranks_of_one_label_find_out_by_trying():
    with hosts() as net:
        results = run(net, "everything", UNISONO_HOST="one", UNISONO_LOG="info")
    check_links(results)
    # A rank that finds out says so, with the reason, and does not repeat it.
    fallback = "no shared memory inside this host: using TCP"
    told = [result.output.count(fallback) for result in results]
    assert max(told) == 1, "\n".join(result.report() for result in results)
    assert any("another container?" in result.output for result in results)


@pytest.mark.parametrize("network", [0, 1])
def test_the_interface_is_the_one_that_leads_to_the_master(network):
    with hosts(networks=2) as net:
        check_links(run(net, "everything", MASTER_ADDR=net.address(0, network)), network)


@pytest.mark.parametrize(
    "interface", ["eth1", "address", "^eth0", "ib0,eth1,eth0", "=eth1", "GLOO", "NCCL"]
)
def test_another_interface_can_be_asked_for(interface):
    def asked(rank: int) -> dict[str, str]:
        if interface in ("GLOO", "NCCL"):
            return {f"{interface}_SOCKET_IFNAME": "eth1"}
        wanted = Hosts.address(rank // 2, 1) if interface == "address" else interface
        return {"UNISONO_INTERFACE": wanted}

    with hosts(networks=2) as net:
        check_links(run(net, "everything", env=asked), 1)


def test_the_next_address_is_tried_where_one_is_not_answered():
    with hosts(networks=2) as net:
        net.cut(0)
        results = run(net, "everything", MASTER_ADDR=net.address(0, 1), UNISONO_INTERFACE="eth")
    check_links(results, 1)


@pytest.mark.parametrize("hidden", [0, 1])
def test_a_host_that_can_only_connect_to_the_others_does(hidden):
    """As behind a router that lets connections out and none in: what it publishes leads nowhere."""
    inner = "192.168.77.1"

    def behind(rank: int) -> dict[str, str]:
        return {"UNISONO_INTERFACE": inner} if rank // 2 == hidden else {}

    with hosts() as net:
        ip("-n", net.names[hidden], "addr", "add", f"{inner}/32", "dev", "lo")
        for result in run(net, "everything", env=behind):
            assert result.value.connections, result


# All addresses together have 7 s to answer, then the peer has 2 s to come from its side: the error
# comes after 10 s at the latest, and without that after 30 s. A busy machine needs some time.
@pytest.mark.parametrize(
    "trouble,networks", [("cut", 1), ("cut", 2), ("swallow", 1), ("swallow", 3)]
)
def test_ranks_that_cannot_reach_each_other_say_what_they_tried(trouble, networks):
    """Each rank is reached by the networks that do not work, though another would."""
    dead = range(networks)
    with hosts(networks=networks + 1) as net:
        for network in dead:
            getattr(net, trouble)(network)
        interfaces = ",".join(f"eth{network}" for network in dead)
        master = net.address(0, networks)
        results = run(net, "join_and_reduce", MASTER_ADDR=master, UNISONO_INTERFACE=interfaces)
    for result in results:
        assert result.value.kind == "PeerLostError", result.value
        assert result.value.seconds < 25, result.value
    named = [result.value.message for result in results if "reached from" in result.value.message]
    assert named, results
    addresses = [Hosts.address(host, network) for host in range(2) for network in dead]
    for part in ["cannot be reached from rank", *addresses, "UNISONO_INTERFACE"]:
        assert all(part in message for message in named), (part, named)


def test_an_interface_that_does_not_exist_is_refused_with_those_there_are():
    def wrong(rank: int) -> dict[str, str]:
        return {"UNISONO_INTERFACE": "eth7"} if rank == 3 else {}

    with hosts() as net:
        *others, refused = run(net, "join_only", env=wrong, UNISONO_JOIN_TIMEOUT="4")
    assert refused.value.kind == "InvalidArgumentError", refused.value
    for part in ["eth7", "lo (127.0.0.1)", f"eth0 ({Hosts.address(1)})"]:
        assert part in refused.value.message, refused.value
    for result in others:
        assert (result.value.kind, result.value.peer) == ("TimeoutError", 3), result.value


def test_the_master_may_be_given_by_name():
    with hosts() as net:
        for host in range(2):
            net.name_host(host, "node-zero", net.address(0))
        check_links(run(net, "everything", MASTER_ADDR="node-zero"))


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_killed_on_one_host_is_named_on_both(victim):
    with hosts() as net:
        results = run(net, "die", victim, int(signal.SIGKILL), check=False)
    assert results[victim].exit_code == -signal.SIGKILL
    for result in results:
        if result.rank == victim:
            continue
        assert result.ok, result.report()
        assert (result.value.kind, result.value.peer) == ("PeerLostError", victim), result.value
        assert f"rank {victim} (host " in result.value.message, result.value
        assert result.value.seconds < 10, result.value


def test_a_link_that_goes_down_ends_in_a_timeout_that_names_the_peer():
    with hosts() as net:
        results = run(net, "cut_off", 2, UNISONO_TIMEOUT="3")
    for result in results:
        assert result.value.kind == "TimeoutError", result.value
        assert "all_reduce #" in result.value.message, result.value
        assert f"rank {result.value.peer} (host " in result.value.message, result.value
        assert result.value.seconds < 15, result.value


REDUCE = """
import os

import torch
import torch.distributed as dist

dist.init_process_group("unisono")
total = torch.full((4,), float(dist.get_rank()))
dist.all_reduce(total)
# In one write, so that those of two ranks do not mix.
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}: {total[0]:.0f}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_starts_a_job_on_two_hosts(rendezvous, tmp_path):
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)

    def command(host: int) -> list[str]:
        # A host's own name is that of nothing there, as with pods in their host's network.
        start = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"pod-{host}"]
        start += [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        if rendezvous == "static":
            start += [f"--node-rank={host}", "--master-addr=node0", f"--master-port={PORT}"]
        else:
            start += ["--rdzv-backend=c10d", f"--rdzv-endpoint=node0:{PORT}", "--rdzv-id=job"]
            # Else ranks would get the name of the first host as MASTER_ADDR.
            start += [f"--local-addr={net.address(host)}"]
            start += [f"--rdzv-conf=is_host={int(host == 0)}"]
        return [*start, str(script)]

    with hosts() as net:
        for host in range(2):
            net.name_host(host, "node0", net.address(0))
        printed = on_every_host(net, command, timeout=90)
    for host, text in enumerate(printed):
        for rank in (2 * host, 2 * host + 1):
            assert f"rank {rank} of 4: 6" in text, text


def test_status_asks_other_hosts_through_the_group(tmp_path):
    with hosts() as net:
        told = run(net, "asks_through_the_group", str(tmp_path / "lock"))[0].value
    before, shown, text, ras = told
    # A rank whose program holds the GIL answers.
    assert "of 4 ranks, 2 of them here, 2 on other hosts" in before, before
    assert re.search(r"(?m)^  rank 2 \(.*is in no operation .*; 2 ranks wait for it", before), (
        before
    )
    assert re.search(r"(?m)^  rank 3, host .*, pid \d+: all_reduce #3 for ", before), before
    # `top` shows the ranks of both hosts.
    rows = re.findall(r"(?m)^ +(\d) +\d+ +(-|all_reduce #3) ", shown)
    assert sorted(rows) == [
        (str(rank), "-" if rank in (0, 2) else "all_reduce #3") for rank in range(4)
    ]
    # One that is stopped does not answer, and the others still do.
    assert "of 4 ranks, 2 of them here, 1 on other hosts" in text, text
    silent = r"(?m)^pid \d+ on .*, silent \(no answer .*\), rank 3 of group"
    assert re.search(silent, text), text
    assert re.search(r"(?m)^  rank 2, host .*, pid \d+: no operation", text), text
    (communicator,) = ras["communicators"]
    (missing,) = communicator["missing_ranks"]
    assert (missing["rank"], missing["status"]["unresponsive"]) == (3, True), ras


def test_status_asks_all_hosts(tmp_path):
    ssh = tmp_path / "reach"
    # As a host does at a login.
    ssh.write_text('#!/bin/sh\necho "Welcome to $1"\nexec ip netns exec "$1" sh -c "$2"\n')
    ssh.chmod(0o755)
    with hosts() as net:
        names = ",".join(net.names)
        (text, error), ras, code = run(net, "asks_on_all_hosts", names, str(ssh))[0].value
    (title,) = (line for line in text.splitlines() if line.startswith("group"))
    assert title.endswith("of 4 ranks, 4 of them here"), text
    assert re.search(r"(?m)^  rank 0 \(.*; 3 ranks wait for it in all_reduce #1, for ", text), text
    assert len(re.findall(r"(?m)^  rank \d, pid ", text)) == 4
    assert code == 1
    assert error.startswith("unisono status: unknown does not answer"), error
    (communicator,) = json.loads(ras)["communicators"]
    assert (communicator["size"], communicator["missing_ranks_count"]) == (4, 0)
    counts = [rank["collective_counts"] for rank in communicator["ranks"]]
    assert counts == [{}, *[{"all_reduce": 1}] * 3]
