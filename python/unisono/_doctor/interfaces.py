"""The interfaces of this host, and the addresses of them that other ranks are given."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from unisono._doctor import host
from unisono._doctor.finding import ADVICE, OK, Finding

_SYSTEM = "/sys/class/net"
_SIOCGIFADDR = 0x8915
# An interface that is faster by this is worth advice.
_FASTER = 4


@dataclass
class Interface:
    """An interface with its addresses; those of one link alone are left out."""

    name: str
    addresses: list[str]
    is_up: bool
    # In Mbit/s; 0 where the system does not tell.
    speed: int

    def text(self) -> str:
        """Return it in words."""
        speed = f" at {self.speed:,} Mbit/s" if self.speed else ""
        return f"{self.name} {', '.join(self.addresses)}{speed}"

    def leads_out(self) -> bool:
        """Whether other hosts may be behind it: it is no loopback, and no bridge of containers."""
        is_bridge = os.path.isdir(f"{_SYSTEM}/{self.name}/bridge")  # noqa: PTH112
        return self.is_up and self.name != "lo" and bool(self.addresses) and not is_bridge


def interfaces() -> list[Interface]:
    """Return the interfaces of this network namespace."""
    version_6 = _version_6()
    found = []
    for _, name in socket.if_nameindex():
        addresses = [*_version_4(name), *version_6.get(name, ())]
        speed = host.read(f"{_SYSTEM}/{name}/speed")
        is_up = host.read(f"{_SYSTEM}/{name}/operstate") != "down"
        number = int(speed) if speed.isdecimal() else 0
        found.append(Interface(name, addresses, is_up, number))
    return found


def _version_4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _version_6() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in host.read("/proc/net/if_inet6").splitlines():
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if not address.is_link_local:
            found.setdefault(name, []).append(str(address))
    return found


def examine(listening: Sequence[dict[str, str]]) -> list[Finding]:
    """Return the findings about the interfaces, and the addresses that were chosen among theirs.

    Each address comes with its port and the reason of the choice, as ``stats`` has them.
    """
    there = interfaces()
    shown = [one.text() for one in there if one.addresses]
    idle = [one.name for one in there if not one.addresses]
    line = "; ".join(shown) + (f"; without an address: {', '.join(idle)}" if idle else "")
    found = [Finding("interfaces", OK, line or "there is none")]
    if not listening:
        return found
    chosen = [(one["address"].rpartition(":")[0].strip("[]"), one["reason"]) for one in listening]
    outside = [one for one in chosen if not ipaddress.ip_address(one[0]).is_loopback]
    words = "; ".join(f"{address} ({why})" for address, why in outside or chosen)
    if not outside:
        if any(one.leads_out() for one in there):
            return [*found, Finding("address", OK, f"ranks reach this host at {words}")]
        line = "other hosts cannot reach this one: no interface beside loopback has an address"
        mend = "ip link set INTERFACE up; ip address add ADDRESS dev INTERFACE"
        return [*found, Finding("address", ADVICE, line, mend)]
    line = f"other hosts reach this one at {words}"
    if faster := _faster(there, [address for address, _ in outside]):
        line += f", though {faster.name} is faster"
        mend = f"export UNISONO_INTERFACE={faster.name}"
        return [*found, Finding("address", ADVICE, line, mend)]
    return [*found, Finding("address", OK, line)]


def _faster(there: Sequence[Interface], addresses: Sequence[str]) -> Interface | None:
    """The fastest of those that leave the host, if the first one that was chosen is much slower."""
    chosen = next((one for one in there if addresses[0] in one.addresses), None)
    best = max((one for one in there if one.leads_out()), key=lambda one: one.speed, default=None)
    if chosen is None or best is None or not chosen.speed:
        return None
    return best if best.speed >= _FASTER * chosen.speed else None
