"""Several hosts on one: network namespaces that are joined by a bridge.

They need a process with a network of its own, in which it may make devices: `alone` starts the
program again in one. Nothing is added to the network of this machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_NEW_NETWORK = 0x40000000
_MARK = "_UNISONO_CHAOS_ALONE"
_TOOLS = ("unshare", "setpriv", "ip", "ss", "nsenter")


def why_not() -> str | None:
    """Return the reason why this machine lets us make no hosts, if it does not."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (util-linux, iproute2)"
    done = subprocess.run(
        [*_unshare(), "ip", "link", "add", "type", "veth"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip() or "it may not make networks" if done.returncode else None


def alone(arguments: Sequence[str]) -> None:
    """Start this program again with a network of its own, unless it has one: then return."""
    if os.environ.pop(_MARK, None):
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "bridge", "type", "bridge")
        _ip("link", "set", "bridge", "up")
        return
    os.environ[_MARK] = "1"
    os.execvp("unshare", [*_unshare(), sys.executable, "-m", "unisono", "chaos", *arguments])


def _unshare() -> list[str]:
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


class Hosts:
    """Hosts 0, 1 and so on, with the addresses 10.91.0.1, 10.91.0.2 and so on."""

    def __init__(self, count: int) -> None:
        # A namespace lives as long as a process in it.
        self._keepers: list[subprocess.Popen[bytes]] = []
        for host in range(count):
            self._make(host)

    def _make(self, host: int) -> None:
        # Ctrl-C is for this process, which ends them; however it ends, they do.
        keep = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
        keeper = subprocess.Popen(keep, start_new_session=True)
        self._keepers.append(keeper)
        here = Path("/proc/self/ns/net").readlink()
        while Path(self.network(host)).readlink() == here or _is_starting(keeper.pid):
            time.sleep(0.001)
        pid, port = str(keeper.pid), f"port{host}"
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _ip("link", "set", port, "master", "bridge", "up")
        for words in (
            ["addr", "add", f"{self.address(host)}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            inside = ["nsenter", "--target", pid, "--net", "ip", *words]
            subprocess.run(inside, check=True, capture_output=True, timeout=10)

    @staticmethod
    def address(host: int) -> str:
        """Return the address of a host."""
        return f"10.91.0.{host + 1}"

    def network(self, host: int) -> str:
        """Return the file by which a process `enter`s a host."""
        return f"/proc/{self._keepers[host].pid}/ns/net"

    @staticmethod
    def cut(host: int) -> None:
        """Let nothing through to a host and from it; no end sees its interface go."""
        _ip("link", "set", f"port{host}", "nomaster")

    @staticmethod
    def heal(host: int) -> None:
        """Let everything through again."""
        _ip("link", "set", f"port{host}", "master", "bridge")

    def end(self) -> None:
        """Remove them."""
        for host, keeper in enumerate(self._keepers):
            keeper.kill()
            keeper.wait()
            # It goes with the namespace, but later.
            with suppress(subprocess.CalledProcessError):
                _ip("link", "del", f"port{host}")


def _is_starting(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() != "sleep"


def enter(network: str) -> None:
    """Bring this process, which has one thread, into the network of a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(network).open() as file:
        if libc.setns(file.fileno(), _NEW_NETWORK) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), network)
