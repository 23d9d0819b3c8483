"""The host, as files of the system and the environment tell: nothing is started for it."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np

import unisono
from unisono._doctor.finding import ADVICE, OK, Finding

# Descriptors that a rank may come to need for each other one, and besides (rust/core,
# descriptors.rs).
PER_PEER, OTHERS = 4, 256
# A group of fewer ranks than this over TCP is worth advice.
MANY_RANKS = 128
# About the largest buffer that Linux gives a connection by default: less has been set on purpose.
LEAST_BUFFER = 4 << 20
# Looks at such a clock need no system call.
FAST_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase"}


def read(path: str) -> str:
    """Return the text of a file of the system, without white space around it; empty: none."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def examine() -> list[Finding]:
    """Return the findings about this host and process that cost nothing."""
    parts: list[Callable[[], list[Finding]]] = [
        _system,
        _cores,
        _clock,
        _files,
        _locked_memory,
        _tcp_buffers,
        _own_name,
        _gloo,
    ]
    return [finding for part in parts for finding in part()]


def _system() -> list[Finding]:
    line = (
        f"Linux {platform.release()} on {platform.machine()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}, unisono {unisono.__version__}"
    )
    return [Finding("system", OK, line)]


def cores() -> int:
    """Return the number of cores that this process may use, whole ones of a quota."""
    allowed = len(os.sched_getaffinity(0))
    share = quota()
    return allowed if share is None else max(1, min(allowed, int(share)))


def _cores() -> list[Finding]:
    allowed, there, share = os.sched_getaffinity(0), os.cpu_count() or 0, quota()
    line = f"{len(allowed)} of {there} cores may be used"
    nodes = {name: numbers for name, numbers in _nodes().items() if numbers}
    if len(nodes) > 1:
        used = sorted(name for name, numbers in nodes.items() if numbers & allowed)
        line += f", in {len(used)} of {len(nodes)} memory nodes ({', '.join(used)})"
    found = [Finding("cores", OK, line)]
    if share is not None and share < len(allowed):
        found = [
            Finding(
                "cores",
                ADVICE,
                f"{line}, but a quota of the cgroup stops them after the time of {share:g}",
                f"export OMP_NUM_THREADS={max(1, int(share))}, divided by the ranks of this host\n"
                f"or a larger quota: docker run --cpus {len(allowed)}, resources.limits.cpu",
            )
        ]
    return found


def quota() -> float | None:
    """Return the cores whose time the cgroup of this process may use; None: all of them."""
    shares = []
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = "/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/cpu"
        steps = [step for step in path.split("/") if step and step != ".."]
        for depth in range(len(steps) + 1):
            folder = "/".join([root, *steps[:depth]])
            if controllers:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                words = [read(f"{folder}/{name}") for name in names]
            else:
                words = read(f"{folder}/cpu.max").split()
            if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
                shares.append(int(words[0]) / int(words[1]))
    return min(shares, default=None)


def _nodes() -> dict[str, set[int]]:
    """The cores of each memory node."""
    found = {}
    for number in _list(read("/sys/devices/system/node/online")):
        found[f"node{number}"] = _list(read(f"/sys/devices/system/node/node{number}/cpulist"))
    return found


def unbound_nodes() -> int:
    """Return how many memory nodes this process may run in, where it may run in several; else 0."""
    allowed = os.sched_getaffinity(0)
    used = [numbers for numbers in _nodes().values() if numbers & allowed]
    return len(used) if len(used) > 1 else 0


def _list(text: str) -> set[int]:
    """The numbers of a list such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _clock() -> list[Finding]:
    folder = "/sys/devices/system/clocksource/clocksource0"
    name = read(f"{folder}/current_clocksource")
    if not name or name in FAST_CLOCKS:
        return [Finding("clock", OK, f"the clock is {name or 'one the system does not name'}")]
    line = f"the clock is {name}, and each look at it costs a system call"
    there = FAST_CLOCKS.intersection(read(f"{folder}/available_clocksource").split())
    if not there:
        return [Finding("clock", OK, f"{line}; the system offers no faster one")]
    mend = f"echo {min(there)} > {folder}/current_clocksource"
    return [Finding("clock", ADVICE, line, mend)]


def _files() -> list[Finding]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return [Finding("files", OK, "a process may have any number of files open")]
    # A rank raises the lower limit by itself, up to this one.
    ranks = max(0, most - OTHERS) // PER_PEER + 1
    line = f"a process may have {most:,} files open"
    if ranks >= MANY_RANKS:
        return [Finding("files", OK, f"{line}, enough for {ranks:,} ranks over TCP")]
    enough = PER_PEER * 1024 + OTHERS
    return [
        Finding(
            "files",
            ADVICE,
            f"{line}, too few from {ranks + 1} ranks over TCP on: {PER_PEER} for each other rank, "
            "besides those of the program",
            f"ulimit -n {enough} (as root: `* hard nofile {enough}` in /etc/security/limits.conf)\n"
            f"or LimitNOFILE={enough} of a service, docker run --ulimit nofile={enough}",
        )
    ]


def _locked_memory() -> list[Finding]:
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = "any amount of" if most == resource.RLIM_INFINITY else f"{most >> 10:,} KiB of"
    line = f"a process may lock {size} memory; unisono locks none (RDMA libraries do)"
    return [Finding("locked", OK, line)]


def _tcp_buffers() -> list[Finding]:
    small = []
    sizes = []
    for name in ("tcp_rmem", "tcp_wmem"):
        words = read(f"/proc/sys/net/ipv4/{name}").split()
        if len(words) != 3:
            continue
        most = int(words[2])
        sizes.append(f"{name} {_bytes(most)}")
        if most < LEAST_BUFFER:
            small.append(f'sysctl -w net.ipv4.{name}="{words[0]} {words[1]} {4 * LEAST_BUFFER}"')
    bounds = {name: read(f"/proc/sys/net/core/{name}") for name in ("rmem_max", "wmem_max")}
    sizes += [f"{name} {_bytes(int(text))}" for name, text in bounds.items() if text.isdecimal()]
    if not sizes:
        line = "the system does not tell how large buffers of connections grow"
        return [Finding("tcp", OK, line)]
    line = f"buffers of connections grow to: {', '.join(sizes)}"
    if not small:
        return [Finding("tcp", OK, line)]
    line += "; to hosts that are milliseconds away such buffers bound the rate"
    return [Finding("tcp", ADVICE, line, "\n".join(small))]


def _bytes(count: int) -> str:
    return f"{count / (1 << 20):.3g} MiB"


def _own_name() -> list[Finding]:
    name = socket.gethostname()
    try:
        found = sorted({str(one[4][0]) for one in socket.getaddrinfo(name, None)})
    except OSError:
        line = f"this host's own name, {name}, leads nowhere; unisono does not need it, gloo does"
        return [Finding("name", ADVICE, line, f"echo ADDRESS {name} >> /etc/hosts")]
    shown = ", ".join(found)
    if all(address.startswith("127.") or address == "::1" for address in found):
        line = f"this host's own name, {name}, means {shown} here; unisono does not go by it"
        return [Finding("name", OK, line)]
    if any(map(_is_local, found)):
        return [Finding("name", OK, f"this host's own name, {name}, means {shown}")]
    line = f"this host's own name, {name}, means {shown}, which is no address of this host"
    mend = f"the address of this host for {name} in /etc/hosts or the name server"
    return [Finding("name", ADVICE, line, mend)]


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True


def _gloo() -> list[Finding]:
    asked = os.environ.get("UNISONO_AS_GLOO", "").strip().lower()
    if asked in ("", "0"):
        line = "gloo keeps its place (`unisono run PROGRAM` puts unisono there)"
        return [Finding("gloo", OK, line)]
    if asked != "1":
        line = f"UNISONO_AS_GLOO={asked} is neither 1 nor 0, so gloo stays"
        return [Finding("gloo", ADVICE, line, "export UNISONO_AS_GLOO=1")]
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        line = "UNISONO_AS_GLOO=1 does nothing with TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return [Finding("gloo", ADVICE, line, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")]
    return [Finding("gloo", OK, "torch programs that ask for gloo get unisono (UNISONO_AS_GLOO=1)")]


def protection(hosts: int) -> list[Finding]:
    """Return the findings about the secret and the encryption of a job on that many hosts."""
    encrypts = os.environ.get("UNISONO_ENCRYPT", "").lower() == "on"
    if "UNISONO_LAUNCH_SECRET" in os.environ:
        secret = "the secret of unisono launch keeps other processes out"
    elif os.environ.get("UNISONO_SECRET_FILE", "auto") != "auto":
        secret = f"the secret in {os.environ['UNISONO_SECRET_FILE']} keeps other processes out"
    else:
        line = "no secret: a process that can write to the store while ranks meet can join"
        if hosts == 1 and not encrypts:
            # Nothing of it listens on the network.
            return [Finding("secret", OK, f"{line} (`unisono launch` makes one)")]
        mend = (
            "(umask 077; openssl rand -hex 32 > ~/job.secret), the same file on every host\n"
            "export UNISONO_SECRET_FILE=~/job.secret"
        )
        return [Finding("secret", ADVICE, line, mend)]
    found = [Finding("secret", OK, secret)]
    if encrypts:
        line = "bytes that go over TCP between ranks are encrypted"
        found.append(Finding("encryption", OK, line))
    elif hosts > 1:
        line = "bytes between hosts are not encrypted (UNISONO_ENCRYPT=on does that)"
        found.append(Finding("encryption", OK, line))
    return found
