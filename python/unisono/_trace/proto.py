"""The part of Perfetto's trace format that ranks write, read and written.

A trace is a sequence of packets, each the field 1 of a message. `packets` reads the events and the
descriptions of tracks, as rust/core/src/trace/proto.rs writes them; a file that ends in the middle
of a packet, since its process was killed, is read up to there.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

BEGIN, END, INSTANT = 1, 2, 3
MONOTONIC, BOOTTIME, REALTIME = 3, 6, 1
# Of all events that are written: one writer.
_SEQUENCE = 1


@dataclass(slots=True)
class Event:
    """A packet with an event: the time, its kind, its track, and what it tells."""

    time: int
    kind: int
    track: int
    name: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def packets(data: bytes) -> Iterator[Event]:
    """Read the events of a trace, in their order."""
    for number, packet in _fields(memoryview(data), is_cut=True):
        if number != 1:
            continue
        time, body = 0, None
        for inner, value in _fields(packet):
            if inner == 8:
                time = value
            elif inner == 11:
                body = value
        if body is not None:
            yield _event(time, body)


def _event(time: int, body: memoryview) -> Event:
    event = Event(time, 0, 0)
    for number, value in _fields(body):
        if number == 9:
            event.kind = value
        elif number == 11:
            event.track = value
        elif number == 23:
            event.name = str(value, "utf-8")
        elif number == 4:
            name, note = _known(bytes(value))
            event.notes[name] = note
    return event


@functools.lru_cache(maxsize=1 << 14)
def _known(body: bytes) -> tuple[str, Any]:
    """An annotation: most are the same as in other events."""
    return _annotation(memoryview(body))


def _annotation(body: memoryview) -> tuple[str, Any]:
    name: str = ""
    found: Any = None
    for number, value in _fields(body):
        if number == 10:
            name = str(value, "utf-8")
        elif number == 3:
            found = value
        elif number == 4:
            found = value - (1 << 64) if value >> 63 else value
        elif number == 6:
            found = str(value, "utf-8")
        elif number == 11:
            found = {} if found is None else found
            key, entry = _annotation(value)
            found[key] = entry
        elif number == 12:
            found = [] if found is None else found
            found.append(_annotation(value)[1])
    return name, found


def _fields(data: memoryview, is_cut: bool = False) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers as such, all else as bytes."""
    at, end = 0, len(data)
    while at < end:
        try:
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == 0:
                value, at = _varint(data, at)
                yield tag >> 3, value
                continue
            if kind == 2:
                size, at = _varint(data, at)
            else:
                size = {1: 8, 5: 4}[kind]
        except (IndexError, KeyError):
            if is_cut:
                return
            raise ValueError("this is no trace") from None
        if at + size > end:
            if is_cut:
                return
            raise ValueError("this is no trace")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7


class Writer:
    """A trace that is being written, as a list of bytes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def clocks(self, time: int, readings: Mapping[int, int]) -> None:
        """Say where clocks stood at one time."""
        body = b"".join(
            _nested(1, _number(1, clock) + _number(2, at)) for clock, at in readings.items()
        )
        self._packet(time, _nested(6, body))

    def process(self, uuid: int, pid: int, name: str, order: int) -> None:
        """Name a process, under whose `uuid` its tracks lie."""
        process = _number(1, pid) + _number(3, order) + _text(6, name)
        self._packet(0, _nested(60, _number(1, uuid) + _nested(3, process)))

    def track(self, uuid: int, parent: int, name: str) -> None:
        """Name a track of a process."""
        self._packet(0, _nested(60, _number(1, uuid) + _text(2, name) + _number(5, parent)))

    def span(
        self,
        track: int,
        times: tuple[int, int],
        name: str,
        notes: Mapping[str, Any],
        arrows: tuple[Iterable[int], Iterable[int]] = ((), ()),
    ) -> None:
        """Write an operation; of the numbers of `arrows` some begin with it and some end in it."""
        begin, end = times
        leaving, arriving = arrows
        body = _number(9, BEGIN) + _number(11, track) + _text(23, name)
        body += b"".join(_nested(4, _text(10, key) + _value(note)) for key, note in notes.items())
        body += b"".join(_fixed(47, arrow) for arrow in leaving)
        self._packet(begin, _nested(11, body))
        # An arrow points to the end: a rank that waits has begun before the one that it waits for.
        body = _number(9, END) + _number(11, track)
        body += b"".join(_fixed(48, arrow) for arrow in arriving)
        self._packet(end, _nested(11, body))

    def _packet(self, time: int, body: bytes) -> None:
        head = _number(8, time) + _number(58, MONOTONIC) + _number(10, _SEQUENCE)
        self.parts.append(_nested(1, head + body))


def _digits(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _number(number: int, value: int) -> bytes:
    return _digits(number << 3) + _digits(value)


def _fixed(number: int, value: int) -> bytes:
    return _digits(number << 3 | 1) + struct.pack("<Q", value)


def _nested(number: int, body: bytes) -> bytes:
    return _digits(number << 3 | 2) + _digits(len(body)) + body


def _text(number: int, text: str) -> bytes:
    return _nested(number, text.encode())


def _value(note: Any) -> bytes:
    if isinstance(note, dict):
        entries = (_text(10, str(key)) + _value(entry) for key, entry in note.items())
        return b"".join(_nested(11, entry) for entry in entries)
    if isinstance(note, int):
        return _number(4, note & (1 << 64) - 1)
    return _text(6, str(note))
