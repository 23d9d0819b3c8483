"""Rows of results, and the file of a run: what ``--json`` writes and ``--against`` reads."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unisono._bench.operations import IN_PLACE, OUT_OF_PLACE

Key = tuple[str, int, str, str]


@dataclass(frozen=True)
class Figures:
    """Times and bandwidths of one form of an operation."""

    time_us: float
    #: GB/s, of 10^9 bytes; 0 where no bytes are moved.
    algbw: float
    busbw: float
    #: Wrong elements on all ranks; None: not checked.
    wrong: int | None

    @classmethod
    def of(cls, seconds: float, size: int, factor: float, wrong: int | None) -> Figures:
        """Return the figures of a call that takes so long."""
        bandwidth = size / seconds / 1e9
        return cls(seconds * 1e6, bandwidth, bandwidth * factor, wrong)


@dataclass(frozen=True)
class Peer:
    """Another runtime's time of one call, and that time / unisono's."""

    time_us: float
    ratio: float


@dataclass(frozen=True)
class Row:
    """An operation of one size."""

    operation: str
    size: int
    count: int
    type: str
    #: "none" and -1 where there is no such thing; "all" for a root that moves on with each call.
    redop: str
    root: int | str
    ranks: int
    out_of_place: Figures | None
    in_place: Figures | None
    peers: dict[str, Peer] = field(default_factory=dict)
    #: Bus bandwidth by that of an earlier run.
    against: float | None = None

    @property
    def key(self) -> Key:
        """The name under which a row of another run is compared with this one."""
        return self.operation, self.size, self.type, self.redop

    @property
    def main(self) -> Figures:
        """The figures that are compared and drawn: those out of place, if there are any."""
        figures = self.out_of_place or self.in_place
        assert figures is not None
        return figures

    @property
    def figures(self) -> list[Figures]:
        """The figures of all forms."""
        return [one for one in (self.out_of_place, self.in_place) if one is not None]

    def faster_than(self, other: Row) -> float | None:
        """Return the bus bandwidth by another's; where no bytes are moved, the other's time."""
        if self.main.busbw and other.main.busbw:
            return self.main.busbw / other.main.busbw
        return other.main.time_us / self.main.time_us if self.ranks == other.ranks else None


def wrong_in(rows: Iterable[Row]) -> int:
    """Return the wrong elements of all rows."""
    return sum(figures.wrong or 0 for row in rows for figures in row.figures)


def average(rows: Iterable[Row]) -> float:
    """Return the mean bus bandwidth of all rows and forms that move bytes."""
    found = [figures.busbw for row in rows for figures in row.figures if row.size]
    return sum(found) / len(found) if found else 0.0


def machine(version: str, hosts: int) -> dict[str, Any]:
    """Return the host of this rank, in words and numbers."""
    return {
        "host": platform.node(),
        "hosts": hosts,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "unisono": version,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


@dataclass(frozen=True)
class Run:
    """All rows of a run, and where and how they were measured."""

    machine: dict[str, Any]
    command: Sequence[str]
    rows: Sequence[Row]
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(
            timespec="seconds"
        )
    )

    def text(self) -> str:
        """Return it as JSON."""
        record = {"date": self.date, "command": self.command, "machine": self.machine}
        return json.dumps({**record, "rows": [asdict(row) for row in self.rows]}, indent=1)

    @classmethod
    def read(cls, path: Path) -> Run:
        """Return the run of a file.

        Raises
        ------
        OSError
            It cannot be read.
        ValueError
            It is no run.
        """
        try:
            record = json.loads(path.read_text("utf-8"))
            rows = [_row(row) for row in record["rows"]]
            return cls(record["machine"], record["command"], rows, record["date"])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no file that `unisono bench --json` wrote") from error


def _row(record: dict[str, Any]) -> Row:
    forms = {
        form: Figures(**record[form]) if record[form] else None for form in (OUT_OF_PLACE, IN_PLACE)
    }
    peers = {name: Peer(**peer) for name, peer in record["peers"].items()}
    return Row(**{**record, **forms, "peers": peers})
