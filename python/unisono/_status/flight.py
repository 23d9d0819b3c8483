"""Flight records: the last collectives of each rank, in the form of torch's flight recorder.

The form is that of torch 2.15, version 2.10, which ``torchfrtrace`` reads. Messages are not in it,
nor are times, which short calls do not take.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
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
    records: dict[int, dict[str, Any]] = {}
    for group in words.groups(list(found)):
        ranks = [member["global"] for member in group.members]
        config = {"name": group.name, "desc": "", "ranks": str(ranks)}
        for rank, state in group.ranks.items():
            record = records.setdefault(ranks[rank], _empty())
            record["pg_config"][group.name] = config
            record["entries"] += [_entry(group, one) for one in state["recent"]]
    paths = []
    for rank, record in sorted(records.items()):
        path = Path(f"{prefix}{rank}")
        path.write_bytes(pickle.dumps(record))
        paths.append(path)
    return paths


def _empty() -> dict[str, Any]:
    return {
        "version": _VERSION,
        "entries": [],
        "pg_config": {},
        "pg_status": {},
        "comm_lib_version": "unisono",
    }


def _entry(group: words.Group, recent: dict[str, Any]) -> dict[str, Any]:
    name, count = recent["name"], recent["count"]
    inputs, outputs = (blocks or len(group.members) for blocks in _BLOCKS.get(name, (1, 1)))
    if name in ("all_gather", "reduce_scatter") and recent["uneven"]:
        name, count = f"{name}_v", 0
    has_elements = name != "barrier"
    return {
        "record_id": recent["number"],
        "pg_id": 0,
        "process_group": (group.name, ""),
        "collective_seq_id": recent["number"],
        "p2p_seq_id": 0,
        "op_id": recent["number"],
        "is_p2p": False,
        "profiling_name": f"unisono:{name}",
        "state": "completed" if recent["state"] == "completed" else "started",
        "time_created_ns": 0,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "duration_ms": None,
        "timeout_ms": 0,
        "retired": recent["state"] == "completed",
        "input_sizes": [[count * inputs] if has_elements else []],
        "input_dtypes": [recent["dtype"] or ""],
        "output_sizes": [[count * outputs] if has_elements else []],
        "output_dtypes": [recent["dtype"] or ""],
        "frames": [],
        "thread_id": "",
        "thread_name": "",
    }
