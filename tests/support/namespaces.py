"""Several hosts on one: network namespaces joined by a virtual switch.

A network namespace has its own interfaces, routes, ports and abstract Unix sockets, which is what
ranks on different hosts do not share. The switch is a bridge in a namespace of its own, so nothing
is added to the host's own network.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

# What `ip netns exec` puts in place of /etc/hosts and the like: a folder per namespace.
OWN_FILES = Path("/etc/netns")
RUNNING = Path("/run/netns")
PREFIX = "unisono-"


class Hosts:
    """The namespaces of one test: host 0 is at ``10.91.0.1``, host 1 at ``10.91.0.2``, and so on.

    With a second network every host also has ``eth1`` and the address ``10.92.0.N`` on it.
    """

    def __init__(self, count: int, networks: int) -> None:
        stem = f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        self.switch = f"{stem}-switch"
        self.names = [f"{stem}-{index}" for index in range(count)]
        self.networks = networks

    @staticmethod
    def address(host: int, network: int = 0) -> str:
        return f"10.{91 + network}.0.{host + 1}"

    def enter(self, host: int) -> list[str]:
        """The command that becomes the one after it, inside of ``host``."""
        return ["ip", "netns", "exec", self.names[host]]

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
        for network in range(self.networks):
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

    def unplug(self, host: int, network: int = 0) -> None:
        ip("-n", self.names[host], "link", "del", f"eth{network}")

    def cut(self, network: int) -> None:
        """Let nothing through on that network, as if its switch had no power."""
        for host in range(len(self.names)):
            ip("-n", self.switch, "link", "set", f"port{network}-{host}", "nomaster")

    def remove(self) -> None:
        for name in [self.switch, *self.names]:
            remove(name)


@contextmanager
def hosts(count: int = 2, networks: int = 1) -> Iterator[Hosts]:
    """Make ``count`` hosts on ``networks`` networks, and remove them whatever happens."""
    remove_orphans()
    made = Hosts(count, networks)
    try:
        made.make()
        yield made
    finally:
        made.remove()


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


def remove_orphans() -> None:
    """Remove what a test run that was killed has left behind."""
    for entry in RUNNING.glob(f"{PREFIX}*") if RUNNING.is_dir() else ():
        owner = entry.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            remove(entry.name)
