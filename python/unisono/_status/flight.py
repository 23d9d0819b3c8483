"""Flight records: the last operations of each rank, in the form of torch's flight recorder.

The form is that of torch 2.15, version 2.10, which ``torchfrtrace`` reads. Calls that are carried
out at once take no times, so they have none.

torch's analyzer takes a message for a collective of all ranks of its group, and blames the ranks
that have no part in it. So ``entries`` has the messages under way alone, each in a group of its two
ranks; ``messages``, which the analyzer does not read, has all with peers and tags.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from unisono._status import words
from unisono._status.ask import Process

_VERSION = "2.10"
# How many blocks of `count` elements the input and the output have; 0: one for each rank.
_BLOCKS = {
    "all_gather": (1, 0),
    "gather": (1, 0),
    "reduce_scatter": (0, 1),
    "scatter": (0, 1),
    "all_to_all": (0, 0),
}


def write(found: Iterable[Process], prefix: str) -> list[Path]:
    """Write a file for each rank in the whole job, and return their paths.

    Parameters
    ----------
    found
        The answers of the processes.
    prefix
        The path before the number of the rank.
    """
    paths = []
    for rank, record in sorted(records(found).items()):
        path = Path(f"{prefix}{rank}")
        path.write_bytes(pickle.dumps(record))
        paths.append(path)
    return paths


def records(found: Iterable[Process]) -> dict[int, dict[str, Any]]:
    """Return the record of each rank, by its number in the whole job."""
    known: dict[int, dict[str, Any]] = {}
    for group in words.groups(list(found)):
        # They become names of files.
        ranks = [int(member["global"]) for member in group.members]
        config = {"name": group.name, "desc": "", "ranks": str(ranks)}
        for rank, state in group.ranks.items():
            record = known.setdefault(ranks[rank], _empty())
            record["pg_config"][group.name] = config
            heard = float((group.processes[rank].answer or {})["seconds"])
            for one in state["recent"]:
                if one["name"] not in ("send", "recv"):
                    record["entries"].append(_entry(group, one, heard))
                else:
                    record["messages"].append(_message(group, one, heard))
            for entry, pair in _under_way(group, ranks, rank, state["recent"], heard):
                record["entries"].append(entry)
                name = entry["process_group"][0]
                two = {"name": name, "desc": "", "ranks": str(pair)}
                for member in pair:
                    known.setdefault(member, _empty())["pg_config"][name] = two
    return known


def _empty() -> dict[str, Any]:
    return {
        "version": _VERSION,
        "entries": [],
        "messages": [],
        "pg_config": {},
        "pg_status": {},
        "comm_lib_version": "unisono",
    }


def _entry(group: words.Group, recent: dict[str, Any], heard: float) -> dict[str, Any]:
    name, count = recent["name"], recent["count"]
    inputs, outputs = (blocks or len(group.members) for blocks in _BLOCKS.get(name, (1, 1)))
    if name in ("all_gather", "reduce_scatter") and recent["uneven"]:
        name, count = f"{name}_v", 0
    has_elements = name != "barrier"
    return {
        "process_group": (group.name, ""),
        "collective_seq_id": recent["number"],
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": f"unisono:{name}",
        "input_sizes": [[count * inputs] if has_elements else []],
        "output_sizes": [[count * outputs] if has_elements else []],
        **_common(recent, heard),
    }


def _common(recent: dict[str, Any], heard: float) -> dict[str, Any]:
    """The fields of all operations."""
    has_ended = recent["state"] == "completed"
    begun = ended = None
    if recent["seconds"] is not None:
        begun = int((heard - recent["seconds"]) * 1e9)
        ended = begun + int(recent["took"] * 1e9) if has_ended else None
    return {
        "record_id": recent["number"],
        "pg_id": 0,
        "op_id": recent["number"],
        "state": "completed" if has_ended else "started",
        "time_created_ns": begun or 0,
        "time_discovered_started_ns": begun,
        "time_discovered_completed_ns": ended,
        "duration_ms": recent["took"] * 1e3 if ended is not None else None,
        "timeout_ms": 0,
        "retired": has_ended,
        "input_dtypes": [recent["dtype"] or ""],
        "output_dtypes": [recent["dtype"] or ""],
        "frames": [],
        "thread_id": "",
        "thread_name": "",
    }


def _message(group: words.Group, recent: dict[str, Any], heard: float) -> dict[str, Any]:
    return {
        "process_group": (group.name, ""),
        "p2p_seq_id": recent["number"],
        "is_p2p": True,
        "profiling_name": f"unisono:{recent['name']}",
        # Of the group; None where a receive from any rank has met no message.
        "peer": recent["peer"],
        "tag": recent["tag"],
        "input_sizes": [[recent["count"]]],
        "output_sizes": [[recent["count"]]],
        **_common(recent, heard),
    }


def _under_way(
    group: words.Group, ranks: list[int], rank: int, recent: list[dict[str, Any]], heard: float
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """The messages that have not ended, each with the numbers in the job of its two ranks.

    Both sides number those from one rank to the other with one tag, so the analyzer finds the send
    of a receive.
    """
    numbers: dict[str, int] = {}
    for one in recent:
        peer = one.get("peer")
        if one["state"] != "started" or peer is None or peer == rank:
            continue
        sends = one["name"] == "send"
        source, target = (rank, peer) if sends else (peer, rank)
        name = f"{group.name} {source}->{target} tag {one['tag']}"
        number = numbers[name] = numbers.get(name, 0) + 1
        globally = [ranks[member] for member in (source, target)]
        pair = sorted(globally)
        # The analyzer counts the ranks of the pair.
        begin, end = (pair.index(member) for member in globally)
        way = f"send {begin}->{end}" if sends else f"recv {end}<-{begin}"
        entry = {
            **_message(group, one, heard),
            "process_group": (name, ""),
            "collective_seq_id": number,
            "p2p_seq_id": number,
            "profiling_name": f"unisono:{way}",
        }
        yield entry, pair
