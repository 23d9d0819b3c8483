"""One file of all operations, with arrows, and an archive with the traces of torch beside it.

Perfetto joins arrows within one file alone, so the operations of all ranks go into one, on one
clock. The traces of torch's profiler (``export_chrome_trace``) that lie in the same folder are put
beside it in the archive; its manifest says by how much each is to be moved.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import tarfile
import time
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono._trace import proto
from unisono._trace.job import Job, Member, Operation, Process

OPERATIONS = "unisono.pftrace"
MANIFEST = "perfetto_manifest.json"
#: What a file can be, by its suffix.
SUFFIXES = (".pftrace", ".zip", ".tar")
# A rank that came this much later than another one gets an arrow to it, in nanoseconds.
WORTH_AN_ARROW = 100_000


@dataclass
class Merged:
    """The numbers of what was written."""

    operations: int
    messages: int
    waits: int
    # The traces of torch, and those that were left out with the reason.
    beside: list[str]
    left_out: list[str]


def write(job: Job, folder: Path, target: Path) -> Merged:
    """Write all that `folder` has into one file, whose suffix says which kind."""
    operations, merged = _operations(job)
    if target.suffix == ".pftrace":
        target.write_bytes(operations)
        return merged
    members = {OPERATIONS: operations}
    files: list[dict[str, Any]] = [{"path": OPERATIONS}]
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")]):
        try:
            name, text, entry = _torch(job, path)
        except (OSError, EOFError, ValueError) as error:
            merged.left_out.append(f"{path.name}: {error}")
            continue
        members[name] = text
        files.append(entry)
        merged.beside.append(path.name)
    manifest = {"perfetto_manifest": {"version": 1, "files": files}}
    # It is known by its beginning, which may have no space.
    members = {MANIFEST: json.dumps(manifest, separators=(",", ":")).encode(), **members}
    if target.suffix == ".tar":
        _tar(target, members)
    else:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
    return merged


def _tar(target: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(target, "w") as archive:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size, about.mtime = len(data), int(time.time())
            archive.addfile(about, io.BytesIO(data))


def _operations(job: Job) -> tuple[bytes, Merged]:
    """The operations of all ranks as a trace, on the clock of the first one's host."""
    writer, uuids = proto.Writer(), itertools.count(1)
    first = min((operation.begin for operation in job.operations()), default=0)
    writer.clocks(
        first,
        {
            proto.MONOTONIC: first,
            proto.BOOTTIME: first,
            proto.REALTIME: first + job.first.realtime,
        },
    )
    leaving, arriving, messages, waits = _arrows(job)
    count, pids = 0, set()
    for process in job.processes:
        parent = next(uuids)
        # Two hosts may have processes of one number, which Perfetto would take for one.
        pid = process.pid
        while pid in pids:
            pid += 1 << 22
        pids.add(pid)
        name = f"rank {process.rank} ({process.host}, pid {process.pid})"
        writer.process(parent, pid, name, process.rank)
        for member in process.members:
            count += len(member.operations)
            for row, operations in enumerate(_rows(member), 1):
                track = next(uuids)
                title = member.title if row == 1 else f"{member.title}, beside {row}"
                writer.track(track, parent, title)
                for operation in operations:
                    ends = leaving.get(operation, ()), arriving.get(operation, ())
                    times = operation.begin, operation.end
                    writer.span(track, times, operation.name, _notes(operation), ends)
    return b"".join(writer.parts), Merged(count, messages, waits, [], [])


def _rows(member: Member) -> list[list[Operation]]:
    """The operations in rows in which none overlaps another, the earliest first."""
    rows: list[list[Operation]] = []
    for operation in sorted(member.operations, key=lambda one: (one.begin, one.end)):
        row = next((row for row in rows if row[-1].end <= operation.begin), None)
        if row is None:
            rows.append([operation])
        else:
            row.append(operation)
    return rows or [[]]


def _notes(operation: Operation) -> dict[str, Any]:
    notes = dict(operation.notes)
    if waited := notes.pop("waited_ns", None):
        notes["waited_us"] = {f"rank {rank}": time // 1000 for rank, time in waited.items()}
    if operation.last is not None:
        notes["came_last"] = f"rank {operation.last.member.rank}"
        notes["until_then_us"] = operation.wait // 1000
    return notes


def _arrows(
    job: Job,
) -> tuple[dict[Operation, list[int]], dict[Operation, list[int]], int, int]:
    """The arrows that leave and that reach each operation, and how many there are of each kind.

    From each send to its receive, and from the rank that came last to a collective to each that had
    to wait for it.
    """
    leaving: dict[Operation, list[int]] = defaultdict(list)
    arriving: dict[Operation, list[int]] = defaultdict(list)
    numbers = itertools.count(1)

    def draw(begin: Operation, end: Operation) -> None:
        number = next(numbers)
        leaving[begin].append(number)
        arriving[end].append(number)

    for sent, received in job.messages:
        draw(sent, received)
    waits = 0
    for parts in job.collectives.values():
        for part in parts:
            if part.last is not None and part.wait >= WORTH_AN_ARROW:
                draw(part.last, part)
                waits += 1
    return leaving, arriving, len(job.messages), waits


def _torch(job: Job, path: Path) -> tuple[str, bytes, dict[str, Any]]:
    """A trace of torch's profiler: its name in the archive, its text, its entry in the manifest.

    Its times are those of the clock of the day, less a base that it names.
    """
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    trace = json.loads(text)
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        raise ValueError("no trace of torch's profiler")
    process = _process_of(job, trace)
    offset = int(trace.get("baseTimeNanoseconds", 0)) - process.realtime
    offset += job.clocks[process.boot].offset
    name = f"torch/{path.name.removesuffix('.gz')}"
    entry: dict[str, Any] = {
        "path": name,
        "clocks": {"sync_to": {"file": OPERATIONS, "clock": "MONOTONIC"}, "offset_ns": offset},
    }
    if len(job.clocks) > 1:
        entry["machine"] = {"name": process.host}
    return name, text, entry


def _process_of(job: Job, trace: dict[str, Any]) -> Process:
    """The process of a trace: the one with its rank, or with the number that its events have."""
    rank = trace.get("distributedInfo", {}).get("rank")
    pids = {event.get("pid") for event in trace["traceEvents"]}
    same_host = [one for one in job.processes if one.host == trace.get("host_name", one.host)]
    found = [process for process in same_host if process.pid in pids]
    found += [process for process in job.processes if process.rank == rank]
    if not found:
        raise ValueError("it is of none of these ranks")
    return found[0]
