"""``unisono status``: a job that waits is asked for whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

from unisono import _status


def run(world: int, what: str, *, torch: bool = False) -> list:
    results = run_ranks(world, f"status_ranks:{what}", timeout=60, torch=torch)
    return [result.value for result in results]


@pytest.mark.parametrize("world", [2, 4])
def test_the_rank_that_others_wait_for_is_named_first(world: int) -> None:
    told = run(world, "is_in_its_data_loader")[-1]
    title, culprit, *ranks = told.lines
    assert title.endswith(f"of {world} ranks, {world} of them here")
    last = world - 1
    who = f"rank {last} (host "
    assert culprit.strip().startswith(who), told
    assert f"pid {told.pids[-1]}) is in no operation of this group (its last: all_gather #1" in (
        culprit
    )
    count = "rank 0 waits" if world == 2 else f"{last} ranks wait"
    assert f"; {count} for it in all_reduce #2, for " in culprit, told
    assert len(ranks) == world
    for rank, line in enumerate(ranks[:-1]):
        begin = f"  rank {rank}, pid {told.pids[rank]}: all_reduce #2 for "
        assert line.startswith(begin), line
        assert line.endswith(f"waits for rank {last}"), line
    assert "no operation; the last: all_gather #1" in ranks[-1]


def test_a_rank_that_is_stopped_is_told_by_the_others() -> None:
    told = run(3, "is_stopped")[0]
    assert told.lines[0].startswith(f"pid {told.pids[1]}, stopped"), told
    (found,) = (line for line in told.lines if line.startswith("  rank 1 ("))
    assert "is stopped (SIGCONT lets it go on): no answer" in found, told


def test_messages_and_groups_are_told_apart() -> None:
    told = run(3, "waits_for_a_message")[0]
    whole = told.lines.index(next(line for line in told.lines if "of 3 ranks" in line))
    part = told.lines.index(next(line for line in told.lines if "of 2 ranks" in line))
    assert "rank 2 (host" in told.lines[whole + 1], told
    assert "rank 1 waits for it in recv #1" in told.lines[whole + 1], told
    assert "rank 0 (host" in told.lines[part + 1], told
    # Its number in the group, and the one in the whole job.
    assert any("rank 1 (global rank 2), pid" in line for line in told.lines[part:]), told


def test_a_group_that_has_failed_says_why() -> None:
    told = run(2, "has_failed")[0]
    assert any("has failed:" in line and "for a test" in line for line in told.lines), told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_hears_nothing() -> None:
    for heard, said in run(2, "is_asked_by_another_user"):
        assert heard == b""
        assert said == "it belongs to user root, and answers nobody else"


def test_a_job_of_torch_is_asked() -> None:
    told = run(2, "asks_through_torch", torch=True)[1]
    assert any("rank 0 waits for it in all_reduce #2" in line for line in told.lines), told


def test_stacks_are_py_spys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "py-spy is not installed" in _status._stack(7)[0]
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "$@"; echo "    load (data.py:3)"\n')
    spy.chmod(0o755)
    assert _status._stack(7) == ["dump --pid 7", "    load (data.py:3)"]


def test_the_command() -> None:
    command = [sys.executable, "-m", "unisono", "status", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert isinstance(json.loads(done.stdout), list)


def test_without_jobs_there_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_status, "processes", list)
    assert _status.status([], "unisono") == 1
    assert capsys.readouterr().out == "no process with a group of unisono runs here\n"
