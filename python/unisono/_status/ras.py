"""The answers in the form of ``ncclras -f json``, for programs that read that.

Fields of NCCL's that have no meaning here, such as those of devices, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import unisono
from unisono._status import words
from unisono._status.ask import Process

# ncclSuccess and ncclRemoteError.
_SUCCESS, _FAILED = 0, 6


def report(found: Iterable[Process]) -> dict[str, Any]:
    """Return one object for all groups."""
    found = list(found)
    known = words.groups(found)
    return {
        "unisono_version": unisono.__version__,
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
        "communicators_count": len(known),
        "communicators": [_communicator(group, found) for group in known],
    }


def _communicator(group: words.Group, found: list[Process]) -> dict[str, Any]:
    missing = [rank for rank in range(len(group.members)) if rank not in group.ranks]
    return {
        "hash": f"0x{group.name}",
        "size": len(group.members),
        "ranks_count": len(group.ranks),
        "missing_ranks_count": len(missing),
        "ranks": [_rank(group, rank) for rank in sorted(group.ranks)],
        "missing_ranks": [_missing(group, rank, found) for rank in missing],
    }


def _place(group: words.Group, rank: int) -> dict[str, Any]:
    label = words.LABEL.fullmatch(group.members[rank]["process"])
    return {
        "rank": rank,
        "host": label["host"] if label else "",
        "pid": int(label["pid"]) if label else 0,
    }


def _rank(group: words.Group, rank: int) -> dict[str, Any]:
    state = group.ranks[rank]
    has_failed = state["failure"] is not None
    return {
        **_place(group, rank),
        "status": {
            "init_state": _SUCCESS,
            "async_error": _FAILED if has_failed else _SUCCESS,
            "finalize_called": False,
            "destroy_flag": False,
            "abort_flag": has_failed,
        },
        "collective_counts": {
            name: count["operations"]
            for name, count in state["called"].items()
            if name not in ("send", "recv")
        },
    }


def _missing(group: words.Group, rank: int, found: list[Process]) -> dict[str, Any]:
    process = group.process_of(rank, found)
    return {
        **_place(group, rank),
        "status": {
            # It may have closed the group, or not made it yet.
            "unresponsive": process is None or process.answer is None,
            "considered_dead": process is None and group.is_where_asked(rank, found),
        },
    }
