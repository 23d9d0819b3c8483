"""Several hosts on one: network namespaces joined by a virtual switch.

A network namespace has its own interfaces, routes, ports and abstract Unix sockets, which is what
ranks on different hosts do not share. The switch is a bridge in a namespace of its own, so nothing
is added to the host's own network, but for a moment the devices of `carrier`.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from carrier import MTU, Carrier, Link

# The files that `ip netns exec` puts in place of /etc/hosts and the like: a folder per namespace.
OWN_FILES = Path("/etc/netns")
RUNNING = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MNT_DETACH = 2
_MS_BIND = 4096
_MS_REC = 16384
_MS_SLAVE = 1 << 19
PREFIX = "unisono-"


class Hosts:
    """The namespaces of one test: host 0 is at ``10.91.0.1``, host 1 at ``10.91.0.2``, and so on.

    With a second network every host also has ``eth1`` and the address ``10.92.0.N`` on it. With a
    link the first network is no switch, and has that rate, delay and loss.
    """

    def __init__(self, count: int, networks: int, link: Link | None = None) -> None:
        stem = f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        self.switch = f"{stem}-switch"
        self.names = [f"{stem}-{index}" for index in range(count)]
        self.networks = networks
        self.link = link
        self.carrier: Carrier | None = None

    @staticmethod
    def address(host: int, network: int = 0) -> str:
        return f"10.{91 + network}.0.{host + 1}"

    def enter(self, host: int) -> list[str]:
        """The command that becomes the one after it, inside of ``host``."""
        return enter(self.names[host])

    def name_host(self, host: int, name: str, address: str) -> None:
        """Let ``name`` stand for ``address`` inside of ``host``."""
        self.name_hosts(host, {name: address})

    def name_hosts(self, host: int, addresses: Mapping[str, str]) -> None:
        """Let each name stand for its address inside of ``host``, and no other name."""
        folder = OWN_FILES / self.names[host]
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))

    def make(self) -> None:
        for name in [self.switch, *self.names]:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        if self.link:
            self.carrier = Carrier(self.link, len(self.names), self.adopt)
        for network in range(1 if self.link else 0, self.networks):
            bridge = f"bridge{network}"
            ip("-n", self.switch, "link", "add", bridge, "type", "bridge")
            ip("-n", self.switch, "link", "set", bridge, "up")
            for host in range(len(self.names)):
                self.plug(host, network)

    def plug(self, host: int, network: int = 0) -> None:
        """Give ``host`` its interface on that network."""
        name, inner, outer = self.names[host], f"eth{network}", f"port{network}-{host}"
        peer = ["peer", "name", outer, "netns", self.switch]
        ip("-n", name, "link", "add", inner, "type", "veth", *peer)
        ip("-n", self.switch, "link", "set", outer, "master", f"bridge{network}")
        ip("-n", self.switch, "link", "set", outer, "up")
        ip("-n", name, "addr", "add", f"{self.address(host, network)}/24", "dev", inner)
        ip("-n", name, "link", "set", inner, "up")

    def adopt(self, host: int, device: str) -> None:
        """Make a device of this namespace the interface of ``host`` on the first network."""
        name = self.names[host]
        ip("link", "set", device, "netns", name)
        ip("-n", name, "link", "set", device, "name", "eth0", "mtu", str(MTU))
        ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")

    def unplug(self, host: int, network: int = 0) -> None:
        ip("-n", self.names[host], "link", "del", f"eth{network}")

    def cut(self, network: int) -> None:
        """Let nothing through on that network, as if its switch had no power."""
        if self.carrier and network == 0:
            self.carrier.cut()
            return
        for host in range(len(self.names)):
            ip("-n", self.switch, "link", "set", f"port{network}-{host}", "nomaster")

    def heal(self, network: int) -> None:
        """Let everything through again after `cut`."""
        if self.carrier and network == 0:
            self.carrier.heal()
            return
        for host in range(len(self.names)):
            port = f"port{network}-{host}"
            ip("-n", self.switch, "link", "set", port, "master", f"bridge{network}")

    def swallow(self, network: int) -> None:
        """Let nothing through on that network, and no host learn of it: a firewall that drops."""
        nobody = "02:00:00:00:00:01"
        for host, name in enumerate(self.names):
            for other in set(range(len(self.names))) - {host}:
                there = [self.address(other, network), "dev", f"eth{network}"]
                ip("-n", name, "neigh", "replace", *there, "lladdr", nobody, "nud", "permanent")

    def remove(self) -> None:
        if self.carrier:
            with suppress(OSError):
                self.carrier.end()
        for name in [self.switch, *self.names]:
            remove(name)


@contextmanager
def hosts(count: int = 2, networks: int = 1, link: Link | None = None) -> Iterator[Hosts]:
    """Make ``count`` hosts on ``networks`` networks, and remove them whatever happens."""
    remove_orphans()
    made = Hosts(count, networks, link)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def limit(net: Hosts, megabits: float) -> None:
    """Give every host's interface on the first network that rate, out and in."""
    rate = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms"]
    for host, name in enumerate(net.names):
        for namespace, device in ((name, "eth0"), (net.switch, f"port0-{host}")):
            command = ["tc", "-n", namespace, "qdisc", "add", "dev", device, *rate]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)


def limit_flows(net: Hosts, megabits: float) -> None:
    """Give every connection from a host on the first network that rate, by its port there."""
    ports = 16
    for name in net.names:
        commands = ["qdisc add dev eth0 root handle 1: htb default 99 r2q 1000"]
        for port in range(ports):
            one = f"1:{port + 1:x}"
            rate = f"rate {megabits}mbit burst 64kb cburst 64kb"
            match = f"u32 match ip sport {port} {ports - 1:#06x} flowid {one}"
            commands += [
                f"class add dev eth0 parent 1: classid {one} htb {rate}",
                f"filter add dev eth0 parent 1: protocol ip prio 1 {match}",
            ]
        for words in commands:
            command = ["tc", "-n", name, *words.split()]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)


def numbered(counts: Sequence[int], numbering: str) -> list[int]:
    """Return each rank's host, for hosts of ``counts`` ranks numbered in ``blocks`` or in turn."""
    if numbering == "blocks":
        return [host for host, count in enumerate(counts) for _ in range(count)]
    left, host_of = list(counts), []
    while any(left):
        for host in range(len(left)):
            if left[host]:
                left[host] -= 1
                host_of.append(host)
    return host_of


def place_of(rank: int, host_of: Sequence[int]) -> dict[str, str]:
    """Return what launchers tell a rank of its place on its host."""
    here = host_of[rank]
    return {
        "LOCAL_RANK": str(host_of[:rank].count(here)),
        "LOCAL_WORLD_SIZE": str(host_of.count(here)),
    }


def why_not() -> str | None:
    """Why no hosts can be made here, if they cannot."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "`ip` is not installed (on Debian: apt-get install iproute2)"
    try:
        with hosts(2):
            pass
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", None) or error
        return f"network namespaces cannot be made here: {said}".strip()
    return None


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


def remove(name: str) -> None:
    """Remove a namespace, and end what still runs in it: it was started there by a test."""
    with suppress(subprocess.SubprocessError, OSError):
        inside = ["ip", "netns", "pids", name]
        found = subprocess.run(inside, capture_output=True, text=True, timeout=10, check=True)
        for pid in map(int, found.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.SubprocessError, OSError):
        ip("netns", "del", name)
    shutil.rmtree(OWN_FILES / name, ignore_errors=True)
    with suppress(OSError):
        OWN_FILES.rmdir()


def enter(name: str) -> list[str]:
    """The command that becomes the one after it, inside of the namespace."""
    return ["ip", "netns", "exec", name]


def join(name: str) -> None:
    """Bring this process, which has one thread, into the namespace, as ``enter`` does.

    It then has mounts of its own: /sys shows the interfaces of the namespace, and the files of its
    folder in /etc/netns are in /etc.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: int | bytes | None) -> None:
        if getattr(libc, function)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{function}: {os.strerror(number)}", name)

    with (RUNNING / name).open() as namespace:
        call("setns", namespace.fileno(), _CLONE_NEWNET)
    call("unshare", _CLONE_NEWNS)
    call("mount", b"", b"/", b"none", _MS_SLAVE | _MS_REC, None)
    call("umount2", b"/sys", _MNT_DETACH)
    call("mount", name.encode(), b"/sys", b"sysfs", 0, None)
    for own in (OWN_FILES / name).glob("*"):
        there = Path("/etc") / own.name
        call("mount", bytes(own), bytes(there), b"none", _MS_BIND, None)


def remove_orphans() -> None:
    """Remove what a test run that was killed has left behind."""
    for entry in RUNNING.glob(f"{PREFIX}*") if RUNNING.is_dir() else ():
        owner = entry.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            remove(entry.name)
