"""``unisono metrics``: the state of the ranks on this host for Prometheus, as OpenMetrics text.

Each time it is asked, the processes are asked. The labels are those of NCCL's inspector where it
has them: ``node``, ``comm_name``, ``nranks``, ``n_nodes``, ``collective`` and ``slurm_job_id``.
Ranks are those of the group; ``unisono_rank_info`` has the rank in the whole job.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unisono._status import ask, words
from unisono._status.ask import Process
from unisono._status.words import Group

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

#: Each family: its type, its unit, and what it tells. A counter's samples end in ``_total``.
FAMILIES = {
    "unisono_ranks": (
        "gauge",
        "",
        "Ranks of a group: running, failed, silent (does not answer), dead (gone) or elsewhere",
    ),
    "unisono_rank": ("info", "", "A rank that answers"),
    "unisono_operations": (
        "counter",
        "",
        "Operations that a rank has called, by their name and the longest of their size class",
    ),
    "unisono_operation_bytes": (
        "counter",
        "bytes",
        "Bytes of these operations, of the longer buffer of each",
    ),
    "unisono_operation_moving_seconds": (
        "counter",
        "seconds",
        "Time of collectives in which they moved data and waited for no rank",
    ),
    "unisono_operations_under_way": ("gauge", "", "Operations of a rank that have not ended"),
    "unisono_operation_age_seconds": (
        "gauge",
        "seconds",
        "Time since the oldest operation under way began; 0 where none is",
    ),
    "unisono_awaited_by_ranks": (
        "gauge",
        "",
        "Ranks that wait for this one, which is not in their operation: above 0 for long is a hang",
    ),
    "unisono_failed": (
        "gauge",
        "",
        "1 if the group has failed on this rank, with the code of the error",
    ),
    "unisono_mended_connections": (
        "counter",
        "",
        "Connections between hosts that have broken and were made again",
    ),
    "unisono_wait_seconds": (
        "counter",
        "seconds",
        "Time for which operations of a rank have waited for others, by their name and size class",
    ),
    "unisono_wait_operations": ("counter", "", "Operations of a rank that have waited for others"),
    "unisono_wait_for_seconds": (
        "counter",
        "seconds",
        "Time for which operations of a rank have waited for another one",
    ),
    "unisono_wait_for_last": (
        "counter",
        "",
        "Operations in which a rank has waited longest for another one",
    ),
    "unisono_wait_for_median_seconds": (
        "gauge",
        "seconds",
        "Median of the waits of a rank for another one",
    ),
    "unisono_silent_processes": ("gauge", "", "Processes of jobs here that do not answer"),
}
_SUFFIXES = {"counter": "_total", "info": "_info", "gauge": ""}

Sample = tuple[str, Mapping[str, Any], float]


def text(found: Iterable[Process]) -> str:
    """Return the answers as OpenMetrics text."""
    found = list(found)
    samples: dict[str, list[str]] = {}
    for name, labels, value in _samples(found):
        named = ",".join(f'{label}="{_escaped(str(it))}"' for label, it in labels.items())
        suffix = _SUFFIXES[FAMILIES[name][0]]
        number = str(int(value)) if value == int(value) else repr(value)
        samples.setdefault(name, []).append(f"{name}{suffix}{{{named}}} {number}")
    lines = []
    for name, (kind, unit, told) in FAMILIES.items():
        if name not in samples:
            continue
        lines.append(f"# TYPE {name} {kind}")
        lines += [f"# UNIT {name} {unit}"] if unit else []
        lines += [f"# HELP {name} {told}", *samples[name]]
    return "\n".join([*lines, "# EOF", ""])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _samples(found: list[Process]) -> Iterable[Sample]:
    jobs = {process.pid: _slurm_job(process.pid) for process in found}
    for group in words.groups(found):
        yield from _of_group(group, found, jobs)
    states: dict[str, int] = {}
    for process in found:
        if process.answer is None:
            states[process.state] = states.get(process.state, 0) + 1
    for state, count in sorted(states.items()):
        yield "unisono_silent_processes", {"node": socket.gethostname(), "state": state}, count


def _of_group(group: Group, found: list[Process], jobs: Mapping[int, str]) -> Iterable[Sample]:
    places = {member["process"].rpartition(", pid ")[0] for member in group.members}
    first = group.processes[min(group.ranks)]
    common = {
        "node": socket.gethostname(),
        "comm_name": group.short,
        "nranks": len(group.members),
        "n_nodes": len(places),
        "slurm_job_id": jobs[first.pid],
    }
    states = [_state(group, rank, found) for rank in range(len(group.members))]
    for state in ("running", "failed", "silent", "dead", "elsewhere"):
        yield "unisono_ranks", {**common, "state": state}, states.count(state)
    awaited = group.awaited()
    for rank in sorted({*group.ranks, *awaited}):
        waiting = len(awaited.get(rank, ()))
        yield "unisono_awaited_by_ranks", {**common, "rank": rank}, waiting
    for rank in sorted(group.ranks):
        yield from _of_rank(group, rank, {**common, "rank": rank})


def _of_rank(group: Group, rank: int, labels: Mapping[str, Any]) -> Iterable[Sample]:
    state, process = group.ranks[rank], group.processes[rank]
    told = {
        "global_rank": group.members[rank]["global"],
        "pid": process.pid,
        "version": (process.answer or {}).get("version", ""),
    }
    yield "unisono_rank", {**labels, **told}, 1
    for collective, count in state["called"].items():
        for size in count["by_size"]:
            kind = {**labels, "collective": collective, "up_to": _up_to(size)}
            yield "unisono_operations", kind, size["operations"]
            yield "unisono_operation_bytes", kind, size["bytes"]
            yield "unisono_operation_moving_seconds", kind, size["moving_seconds"]
    operations = state["operations"]
    yield "unisono_operations_under_way", labels, len(operations)
    oldest = max((operation["seconds"] for operation in operations), default=0)
    yield "unisono_operation_age_seconds", labels, oldest
    code = {"code": state["failure_code"]} if state["failure"] else {}
    yield "unisono_failed", {**labels, **code}, state["failure"] is not None
    mended: dict[int, int] = {}
    for link in state["links"]:
        mended[link["rank"]] = mended.get(link["rank"], 0) + link["mended"]
    for peer, count in sorted(mended.items()):
        yield "unisono_mended_connections", {**labels, "for_rank": peer}, count
    waited = words.waited(group, rank)
    for collective, waits in waited["by_operation"].items():
        for size in waits["by_size"]:
            kind = {**labels, "collective": collective, "up_to": _up_to(size)}
            yield "unisono_wait_seconds", kind, size["seconds"]
            yield "unisono_wait_operations", kind, size["operations"]
    for waits in waited["by_rank"]:
        pair = {**labels, "for_rank": waits["rank"]}
        yield "unisono_wait_for_seconds", pair, waits["seconds"]
        yield "unisono_wait_for_last", pair, waits["last"]
        yield "unisono_wait_for_median_seconds", pair, waits["median_seconds"]


def _up_to(size: Mapping[str, Any]) -> str:
    """The longest of a size class, as buckets of histograms have it."""
    return "+Inf" if size["up_to"] is None else str(size["up_to"])


def _state(group: Group, rank: int, found: list[Process]) -> str:
    if rank in group.ranks:
        return "failed" if group.ranks[rank]["failure"] else "running"
    if group.process_of(rank, found):
        return "silent"
    return "dead" if group.is_where_asked(rank, found) else "elsewhere"


def _slurm_job(pid: int) -> str:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == b"SLURM_JOB_ID":
                return value.decode(errors="replace")
    # As NCCL's inspector has it.
    return "unknown"


def write(path: Path, content: str) -> None:
    """Write a file at once: a reader finds the old one or the new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        # The collector is another user.
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = 10.0

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        body = text(ask.processes()).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing of each request."""


def _serve(address: str, port: int) -> int:
    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        daemon_threads = True

    with Server((address, port), _Handler) as server:
        host = f"[{address}]" if ":" in address else address
        print(f"http://{host}:{server.server_port}/metrics", flush=True)
        server.serve_forever()
    return 0


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=f"{name} metrics",
        description="The ranks of this host for Prometheus: once to the standard output, into a "
        "file, or over HTTP.",
    )
    where = found.add_mutually_exclusive_group()
    where.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="write it there, for node_exporter: name it *.prom",
    )
    where.add_argument("--port", type=int, metavar="PORT", help="answer requests there (0: any)")
    found.add_argument(
        "--address", default="127.0.0.1", metavar="ADDRESS", help="with --port (127.0.0.1)"
    )
    found.add_argument(
        "--interval", type=float, metavar="SECONDS", help="with --file: again and again"
    )
    return found


def metrics(arguments: list[str], name: str) -> int:
    """Export what `arguments` ask for, and return the exit status."""
    parser = command_line(name)
    chosen = parser.parse_args(arguments)
    if chosen.interval is not None and (chosen.file is None or chosen.interval <= 0):
        parser.error("--interval is for --file, and above 0")
    try:
        if chosen.port is not None:
            return _serve(chosen.address, chosen.port)
        while True:
            content = text(ask.processes())
            if chosen.file is None:
                print(content, end="")
                return 0
            write(chosen.file, content)
            if chosen.interval is None:
                return 0
            time.sleep(chosen.interval)
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        print(f"unisono metrics: {error}", file=sys.stderr)
        return 1
