"""``unisono doctor``: right hosts are told from wrong ones, and every pair of a job is measured."""

from __future__ import annotations

import errno
import json
import platform
import shutil
import sys
from pathlib import Path

import pytest
from doctor_ranks import AHEAD, CALLS
from launching import Done, run
from ranks import free_port

from unisono import _doctor
from unisono._doctor import host, interfaces, job, machine, memory, pairs
from unisono._doctor.finding import ADVICE, BROKEN, OK, Finding

COMMAND = [sys.executable, "-m", "unisono"]
PROGRAM = str(Path(__file__).with_name("doctor_ranks.py"))
LAUNCH = [*COMMAND, "launch", "--output", "plain"]

needs_calls = pytest.mark.skipif(
    platform.machine() not in CALLS, reason="the numbers of this processor's calls are not known"
)


def told(done: Done) -> dict:
    return json.loads("\n".join(done.out))


def found(topic: str, findings: list[dict]) -> dict:
    (one,) = (finding for finding in findings if finding["topic"] == topic)
    return one


def examined(*troubles: str, env: dict[str, str] | None = None) -> tuple[int, list[dict]]:
    done = run([sys.executable, PROGRAM, *troubles, "--", "--json"], env=env)
    answer = told(done)
    assert answer["runs"] == (done.code == 0), done
    return done.code, answer["findings"]


@pytest.mark.check
def test_this_host_is_well() -> None:
    done = run([*COMMAND, "doctor"])
    assert done.code == 0, done
    text = "\n".join(done.out)
    assert "ranks of this host share memory" in text
    assert done.out[-1].startswith("a job runs here; ")
    topics = {line.split()[1] for line in done.out if line.startswith(("  ok ", "  advice "))}
    assert topics >= {"cores", "files", "tcp", "interfaces", "address", "torch", "cuda", "secret"}


def test_few_files_are_told_with_the_command() -> None:
    code, findings = examined("files:300")
    assert code == 0
    files = found("files", findings)
    assert files["state"] == ADVICE
    begin = "a process may have 300 files open, too few from 13 ranks over TCP on: 4 for each other"
    assert files["line"].startswith(begin)
    assert "ulimit -n 4352" in files["mend"]


def test_no_job_runs_with_too_few_files() -> None:
    code, findings = examined("files:14")
    assert code == 1
    assert "two ranks on this host cannot meet: " in found("memory", findings)["line"]


@pytest.mark.parametrize(
    "variable, value, words",
    [
        ("UNISONO_TRANSPRT", "tcp", "there is no environment variable UNISONO_TRANSPRT; did you"),
        ("UNISONO_INTERFACE", "eth77", 'interface "eth77" is not one of this host'),
        ("UNISONO_SECRET_FILE", "/nowhere", "read secret file /nowhere: No such file"),
    ],
)
def test_settings_that_are_refused_are_told(variable: str, value: str, words: str) -> None:
    code, findings = examined(env={variable: value})
    settings = found("settings", findings)
    assert (code, settings["state"]) == (1, BROKEN)
    assert settings["line"].startswith(words)


@needs_calls
def test_memory_that_is_not_read_is_told_with_the_reason() -> None:
    code, findings = examined("refuse:process_vm_readv")
    shared = found("memory", findings)
    assert (code, shared["state"]) == (0, ADVICE)
    assert shared["line"].endswith(
        "process_vm_readv is refused: a seccomp filter stands in the way (Operation not permitted)"
    )
    assert "--cap-add SYS_PTRACE" in shared["mend"]


@needs_calls
def test_a_filter_that_ends_ranks_is_told() -> None:
    code, findings = examined("kill:process_vm_readv")
    shared = found("memory", findings)
    assert (code, shared["state"]) == (1, BROKEN)
    assert "a seccomp filter ends a rank" in shared["line"]
    # It is of use.
    env = {"UNISONO_LEND_BYTES": "none"}
    assert shared["mend"].startswith("export UNISONO_LEND_BYTES=none\n")
    code, findings = examined("kill:process_vm_readv", env=env)
    assert (code, found("memory", findings)["state"]) == (0, ADVICE)


@needs_calls
def test_ranks_that_cannot_share_memory_are_told_with_the_reason() -> None:
    code, findings = examined("refuse:memfd_create")
    shared = found("memory", findings)
    assert (code, shared["state"]) == (0, ADVICE)
    assert shared["line"].endswith("over TCP: memfd_create is refused (Operation not permitted)")


def test_a_user_that_its_namespace_does_not_know_is_told() -> None:
    enter = ["unshare", "--user"]
    if shutil.which(enter[0]) is None or run([*enter, "true"]).code != 0:
        pytest.skip("this system makes no user namespaces here")
    done = run([*enter, sys.executable, PROGRAM, "--", "--json"])
    shared = found("memory", told(done)["findings"])
    assert (done.code, shared["state"]) == (0, ADVICE)
    assert "over TCP: this user is one that its user namespace does not know" in shared["line"]


@pytest.mark.check
def test_every_pair_of_four_ranks_is_in_the_table() -> None:
    done = run([*LAUNCH, "-n", "4", PROGRAM])
    assert done.code == 0, done
    begin = next(at for at, line in enumerate(done.out) if line.startswith("ranks "))
    title, *rows, last = done.out[begin:]
    assert title.split() == ["ranks", "way", "one", "way", "rate", "and", "back"]
    expected = ["0 - 1", "0 - 2", "0 - 3", "1 - 2", "1 - 3", "2 - 3"]
    assert [row[:5] for row in rows] == expected
    for row in rows:
        assert row[5:].split()[:2] == ["shared", "memory"], row
        latency, _, there, _, back, _ = row.split()[5:]
        assert float(latency.replace(",", "")) > 0, row
        assert min(float(there), float(back)) >= 0, row
    assert last.startswith("a job runs here; ")
    assert sum("ranks of this host share memory" in line for line in done.out) == 1


def test_hosts_are_told_apart_with_their_clocks() -> None:
    done = run([*LAUNCH, "-n", "3", PROGRAM, "two_hosts", "--", "--json"])
    assert done.code == 0, done
    answer = told(done)
    assert answer["ranks"] == ["a", "a", "b"]
    ways = {(pair["first"], pair["second"]): pair["ways"] for pair in answer["pairs"]}
    assert ways[0, 1] == ["shared memory", "shared memory"]
    for pair in ((0, 2), (1, 2)):
        assert all(way.startswith("tcp 127.0.0.1:") for way in ways[pair]), ways
    (clock,) = answer["clocks"]
    assert clock["rank"] == 2
    assert clock["ahead"] == pytest.approx(AHEAD, abs=clock["within"] + 0.1)
    time = found("time", answer["findings"])
    assert (time["state"], time["ranks"]) == (ADVICE, [2])
    assert "chronyc makestep" in time["mend"]
    way = found("ways", answer["findings"])
    assert way["line"].endswith("UNISONO_HOST=a and b")
    settings = [one for one in answer["findings"] if one["topic"] == "settings"]
    assert {(one["line"], tuple(one["ranks"])) for one in settings} == {("UNISONO_HOST=a", (0, 1))}


def test_a_rank_that_does_not_come_is_named() -> None:
    env = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "UNISONO_JOIN_TIMEOUT": "1",
    }
    done = run([sys.executable, PROGRAM], env=env)
    assert (done.code, done.out) == (1, [])
    assert "no job runs: rank 1 of 2 did not join within 1 s" in "\n".join(done.err)
    # The host alone is well.
    assert run([sys.executable, PROGRAM, "--", "--here"], env=env).code == 0


def test_a_torch_that_is_not_served_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    build = "python -m unisono build-torch"
    broken = "2.9.1, not served: /a/door.so does not load (why)"
    for said, line in (
        (f"2.9.1, not served: `{build}` makes a build for it", "2.9.1, not served"),
        (f"{broken}; try `{build}`", broken),
    ):
        monkeypatch.setattr(machine.installed, "_torch_here", lambda said=said: said)
        assert machine._torch() == Finding("torch", ADVICE, line, build)


class System:
    """Files of a system that is not this one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
        monkeypatch.setattr(host, "read", lambda path: files.get(path, ""))


def of(topic: str, findings: list[Finding]) -> Finding:
    (one,) = (finding for finding in findings if finding.topic == topic)
    return one


def test_small_buffers_and_slow_clocks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "/sys/devices/system/clocksource/clocksource0"
    files = {
        "/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456",
        "/proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t262144",
        f"{folder}/current_clocksource": "hpet",
        f"{folder}/available_clocksource": "tsc hpet acpi_pm",
    }
    System(monkeypatch, files)
    findings = host.examine()
    buffers, clock = of("tcp", findings), of("clock", findings)
    assert (buffers.state, clock.state) == (ADVICE, ADVICE)
    assert buffers.mend == 'sysctl -w net.ipv4.tcp_wmem="4096 16384 16777216"'
    assert clock.mend == f"echo tsc > {folder}/current_clocksource"
    files["/proc/sys/net/ipv4/tcp_wmem"] = "4096 16384 4194304"
    files[f"{folder}/available_clocksource"] = "hpet acpi_pm"
    findings = host.examine()
    assert (of("tcp", findings).state, of("clock", findings).state) == (OK, OK)


@pytest.mark.parametrize(
    "files",
    [
        {
            "/proc/self/cgroup": "0::/pod/rank",
            "/sys/fs/cgroup/pod/cpu.max": "50000 100000",
            "/sys/fs/cgroup/pod/rank/cpu.max": "max 100000",
        },
        {
            "/proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/pod",
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "/sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "50000",
            "/sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_a_quota_of_a_cgroup_is_told(files: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    System(monkeypatch, files)
    assert host.quota() == 0.5
    cores = of("cores", host.examine())
    assert cores.state == ADVICE
    assert "the time of 0.5" in cores.line
    assert cores.mend.startswith("export OMP_NUM_THREADS=1,")


def test_memory_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "/sys/devices/system/node"
    files = {
        f"{folder}/online": "0-1",
        f"{folder}/node0/cpulist": "0-3",
        f"{folder}/node1/cpulist": "4-7",
    }
    System(monkeypatch, files)
    for allowed, nodes, words in (({1, 5}, 2, "2 of 2"), ({4}, 0, "1 of 2")):
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda _, allowed=allowed: allowed)
        assert host.unbound_nodes() == nodes
        assert f"in {words} memory nodes" in of("cores", host.examine()).line


@pytest.mark.parametrize(
    "scope, capabilities, reason, mend",
    [
        ("1", "0", "kernel.yama.ptrace_scope is 1", "sysctl -w kernel.yama.ptrace_scope=0"),
        ("3", "0", "kernel.yama.ptrace_scope is 3", "kernel.yama.ptrace_scope=0 in /etc/sysctl.d"),
        ("1", f"{1 << 19:x}", "Operation not permitted", "docker run"),
        ("", "0", "Operation not permitted", "docker run"),
    ],
)
def test_the_reason_why_memory_is_not_read(
    scope: str, capabilities: str, reason: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "/proc/sys/kernel/yama/ptrace_scope": scope,
        "/proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities}\nSeccomp:\t0\n",
    }
    System(monkeypatch, files)
    why, how = memory.why_unread(errno.EPERM, {"status": 0})
    assert why == reason
    assert how.startswith(mend)


def test_names_and_gloo_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(address: str) -> None:
        answer = [(2, 1, 6, "", (address, 0))]
        monkeypatch.setattr(host.socket, "getaddrinfo", lambda *_: answer)

    for address, state in (("127.0.1.1", OK), ("192.0.2.77", ADVICE)):
        resolve(address)
        name = of("name", host.examine())
        assert (name.state, address in name.line) == (state, True)
    for value, state in (("", OK), ("1", OK), ("yes", ADVICE)):
        monkeypatch.setenv("UNISONO_AS_GLOO", value)
        assert of("gloo", host.examine()).state == state
    monkeypatch.setenv("UNISONO_AS_GLOO", "1")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert of("gloo", host.examine()).mend == "unset TORCH_DEVICE_BACKEND_AUTOLOAD"


def test_a_job_of_several_hosts_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNISONO_LAUNCH_SECRET", "UNISONO_SECRET_FILE", "UNISONO_ENCRYPT"):
        monkeypatch.delenv(name, raising=False)
    assert [one.state for one in host.protection(1)] == [OK]
    (secret,) = host.protection(2)
    assert secret.state == ADVICE
    assert "UNISONO_SECRET_FILE=" in secret.mend
    monkeypatch.setenv("UNISONO_ENCRYPT", "on")
    # Encryption alone does not keep others out.
    assert [one.state for one in host.protection(1)] == [ADVICE]
    monkeypatch.setenv("UNISONO_SECRET_FILE", "/a/file")
    lines = [one.line for one in host.protection(2)]
    assert lines[1] == "bytes that go over TCP between ranks are encrypted"


def chosen(address: str, reason: str) -> list[Finding]:
    return interfaces.examine([{"address": f"{address}:1", "reason": reason}])


def test_a_faster_interface_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = interfaces.Interface("eth0", ["10.0.0.1"], True, 1_000)
    fast = interfaces.Interface("eth1", ["10.1.0.1"], True, 100_000)
    monkeypatch.setattr(interfaces, "interfaces", lambda: [slow, fast])
    told = of("address", chosen("10.0.0.1", "for a reason"))
    assert (told.state, told.mend) == (ADVICE, "export UNISONO_INTERFACE=eth1")
    assert "10.0.0.1 (for a reason)" in told.line
    assert of("address", chosen("10.1.0.1", "")).state == OK
    fast.is_up = False
    assert of("address", chosen("10.0.0.1", "")).state == OK
    inside = "127.0.0.1", "all ranks are on this host"
    assert of("address", chosen(*inside)).state == OK
    slow.addresses = []
    assert of("address", chosen(*inside)).state == ADVICE


def test_the_pairs_of_many_ranks() -> None:
    assert len(pairs.chosen([0] * 8)) == 28
    # Ranks 0, 3, 6 are on the first host, and so on.
    assert pairs.chosen([0, 1, 2] * 3) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 4), (2, 5)]
    many = pairs.chosen(list(range(40)))
    assert len(many) == 39 + 38
    assert {(0, 39), (38, 39)} <= set(many)


def place(**differs: object) -> dict:
    usual = {"label": "", "name": "n", "boot": "b", "network": "net:[1]", "pids": "pid:[1]"}
    usual |= {"user": 1, "transport": "auto", "cores": [0, 1, 2, 3], "quota": None, "nodes": 0}
    return {**usual, "threads": "", **differs}


@pytest.mark.parametrize(
    "differs, words, mend",
    [
        ({"transport": "tcp"}, "UNISONO_TRANSPORT=tcp", "unset UNISONO_TRANSPORT"),
        ({"label": "a"}, "UNISONO_HOST=auto and a", "unset UNISONO_HOST"),
        ({"user": 2}, "they belong to users 1 and 2", "one user"),
        ({"network": "net:[2]"}, "several network namespaces", "docker run --network host"),
        ({}, "as the log says", "unisono doctor"),
    ],
)
def test_the_reason_why_ranks_use_tcp(differs: dict, words: str, mend: str) -> None:
    finding = job.why_slow("tcp 10.0.0.1:5", place(), place(**differs), "as the log says")
    assert words in finding.line
    assert finding.mend.startswith(mend)
    assert job.why_slow("shared memory", place(), place(), "") is None
    apart = job.why_slow("shared memory", place(), place(pids="pid:[2]"), "")
    assert "PID namespaces" in apart.line


def test_crowds_are_told() -> None:
    def crowd(count: int, **differs: object) -> list[str]:
        reports = [{"place": place(**differs)} for _ in range(count)]
        found = job._crowds(job.Job([0] * count, ["n"]), reports)
        return [finding.line for finding, ranks in found if ranks == list(range(count))]

    assert crowd(4) == []
    assert crowd(5) == ["5 ranks share 4 cores, and wait for each other's time slices"]
    assert crowd(3, quota=2.5) == ["3 ranks share 2 cores, and wait for each other's time slices"]
    assert crowd(2, threads="4") == ["8 threads of the ranks share 4 cores (OMP_NUM_THREADS)"]
    assert crowd(2, nodes=2) == ["ranks run in 2 memory nodes, and are bound to none"]


def test_a_slow_pair_of_hosts_is_told() -> None:
    found = job.Job([0, 0, 1, 2], ["a", "b", "c"])
    rates = {(0, 1): 1e7, (0, 2): 1e9, (0, 3): 1.1e9, (2, 3): 2.6e8}
    found.pairs = [pairs.Measured(*both, 1e-5, rate, 1e9) for both, rate in rates.items()]
    assert job._slow(found) == []
    found.pairs[-1].there = 2.4e8
    ((slow, ranks),) = job._slow(found)
    assert ranks == [2, 3]
    assert slow.line.startswith("2 (b) - 3 (c) has 240 MB/s, where the median")


def test_findings_go_with_the_ranks_that_have_them() -> None:
    places = [place(name="vm"), place(name="vm", network="net:[2]"), place(name="other")]
    hosts, names = job.placed([{"place": here} for here in [*places, places[0]]])
    assert (hosts, names) == ([0, 1, 2, 0], ["vm#0", "vm#1", "other"])
    found = job.Job(hosts, names)
    every, some = Finding("a", OK, "of all"), Finding("b", ADVICE, "of some", "do\nor do")
    found.findings = [(some, [0, 3]), (every, [0, 1, 2, 3])]
    assert _doctor.sections(found) == [
        "every host: vm#0, vm#1, other (ranks 0 to 3)",
        "  ok      a           of all",
        "vm#0 (ranks 0, 3)",
        "  advice  b           of some\n" + " " * 22 + "-> do\n" + " " * 22 + "-> or do",
    ]
    assert _doctor.verdict([every, some]) == "a job runs here; one piece of advice above"


def test_devices_without_access_to_each_other_are_told() -> None:
    answer = {"error": "", "names": ["H200", "H200"], "refused": []}
    assert [one.state for one in machine.judge("driver", answer)] == [OK, OK]
    for refused in ([[0, 1], [1, 0]], [[1, 0]]):
        _, peers = machine.judge("driver", {**answer, "refused": refused})
        assert (peers.state, peers.line.endswith(": 0-1")) == (ADVICE, True)
    (lone,) = machine.judge("driver", {"error": "cuInit returns 100", "names": [], "refused": []})
    assert (lone.state, lone.line) == (
        ADVICE,
        "driver; it serves no device: cuInit returns 100",
    )
