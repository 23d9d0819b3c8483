"""Connections of another process, broken from outside: what a middlebox or a firewall would do.

It takes no rights but those of the process's user over a descendant.
`reset` needs a network of our own.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
_ESTABLISHED = 1
_ATTACH_FILTER = 26
_libc = ctypes.CDLL(None, use_errno=True)


def close(pid: int, chance: random.Random) -> None:
    """Close some TCP connections of a process, at least one."""
    for one in _some(pid, chance):
        _shut(one)


def reset(pid: int, chance: random.Random, network: str | None) -> None:
    """Reset some TCP connections of a process, in a network that is ours."""
    inside = ["nsenter", f"--net={network}"] if network else []
    for one in _some(pid, chance):
        try:
            near, far = one.getsockname(), one.getpeername()
        except OSError:
            # It has ended meanwhile.
            continue
        ends = ["src", f"{near[0]}:{near[1]}", "dst", f"{far[0]}:{far[1]}"]
        command = [*inside, "ss", "-K", "state", "established", *ends]
        subprocess.run(command, capture_output=True, timeout=10, check=False)


def drop(pid: int, chance: random.Random) -> None:
    """Let some TCP connections of a process hear nothing any more."""
    for one in _some(pid, chance):
        _deafen(one)


def _some(pid: int, chance: random.Random) -> Iterator[socket.socket]:
    sockets = list(_connections(pid))
    for one in [one for one in sockets if chance.random() < 0.5] or sockets[:1]:
        yield one
    for one in sockets:
        one.close()


def _connections(pid: int) -> Iterator[socket.socket]:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for file in list(Path(f"/proc/{pid}/fd").iterdir()):
            copy = _libc.syscall(_PIDFD_GETFD, process, int(file.name), 0)
            if copy < 0:
                continue
            try:
                one = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            if _is_connection(one):
                yield one
            else:
                one.close()
    except FileNotFoundError:
        return
    finally:
        os.close(process)


def _is_connection(one: socket.socket) -> bool:
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return False
    return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0] == _ESTABLISHED


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _deafen(one: socket.socket) -> None:
    # A filter of one instruction, which takes nothing of any packet.
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0), 8)
    program = struct.pack("HP", 1, ctypes.addressof(nothing))
    with suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
