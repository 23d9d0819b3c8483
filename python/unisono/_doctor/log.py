"""The log of this process, kept and read.

The core tells its choices in its log alone: the addresses it listens at, the way of each link, and
the reason why a faster way was of no use. So the doctor lets it write at debug, and keeps that.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

_LINK = re.compile(r": link open rank=\d+ peer=(\d+) lane=PointToPoint via=(.+)$", re.MULTILINE)
_COLLECTIVE = re.compile(r": link open rank=\d+ peer=\d+ lane=Collective via=(.+)$", re.MULTILINE)
_LISTENING = re.compile(r": listening address=(\S+) reason=(.+)$", re.MULTILINE)
_SET_BACK = re.compile(r": no .+ inside this host: using \S+ peer=.+? reason=(.+)$", re.MULTILINE)
_NO_SOCKET = re.compile(r": no Unix socket, so no shared memory: .* cause=(.+)$", re.MULTILINE)
_GRAVE = re.compile(r"^\S+ +(?:WARN|ERROR) .*\n", re.MULTILINE)


class Log:
    """The lines that the core has written so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def text(self) -> str:
        """Return all of them."""
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0).decode(errors="replace")

    def links(self) -> dict[int, str]:
        """Return the way of each link for messages, by the peer's rank."""
        return {int(peer): way for peer, way in _LINK.findall(self.text())}


@contextlib.contextmanager
def kept() -> Iterator[Log]:
    """Keep the bytes of standard error meanwhile; those that a user would see come at the end."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        log = Log(file)
        try:
            yield log
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            os.write(2, asked_for(log.text(), os.environ.get("UNISONO_LOG", "warn")).encode())


def asked_for(text: str, level: str) -> str:
    """Return the lines of a log that the level of UNISONO_LOG lets through, nearly."""
    if level in ("info", "debug"):
        return text
    return "".join(_GRAVE.findall(text)) if level == "warn" else ""


def listening(text: str) -> list[tuple[str, str]]:
    """Return the addresses, without ports, each with the reason why it was chosen."""
    return [(address.rpartition(":")[0], why) for address, why in _LISTENING.findall(text)]


def collective_way(text: str) -> str:
    """Return the way of the first link for collectives; empty where there is none."""
    found = _COLLECTIVE.search(text)
    return found[1] if found else ""


def set_back(text: str) -> str:
    """Return why shared memory was tried in vain; empty where it was not."""
    found = _SET_BACK.search(text) or _NO_SOCKET.search(text)
    return found[1] if found else ""
