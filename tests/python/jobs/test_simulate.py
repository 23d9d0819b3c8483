"""``unisono simulate``: jobs that are not run, their times, and the errors that a fault gives."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.check


def simulate(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "simulate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def ranks(*arguments: str, status: int = 0) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = json.loads(
        simulate("--json", *arguments, status=status).stdout
    )["ranks"]
    return found


def test_the_wire_decides_the_time() -> None:
    # Two hosts swap half of it: 4 MiB out of each, and as much again; 4 ranks share the way out.
    for count in ("2", "8"):
        job = ("all_reduce:8M", "--hosts", "2", "--rate", "1", "--latency", "10")
        calls = [rank[0] for rank in ranks(*job, "--ranks", count)]
        assert {call["error"] for call in calls} == {None}
        last = max(call["ended"] for call in calls)
        assert 8.38e-3 < last < 1.1 * 8.39e-3


def test_ranks_take_their_turns_at_the_same_time() -> None:
    # Six rounds, 20 us each.
    calls = [rank[0] for rank in ranks("barrier", "--ranks", "64", "--hosts", "64")]
    assert 120e-6 <= max(call["ended"] for call in calls) < 130e-6
    calls = [rank[0] for rank in ranks("barrier", "--ranks", "16", "--hosts", "1")]
    assert max(call["ended"] for call in calls) < 10e-6


def test_a_job_without_an_end_is_given_up() -> None:
    job = ("all_reduce:1M", "--hosts", "4", "--set", "timeout=none", "--dark", "1@100us")
    assert "has not ended after a day of its time" in simulate(*job, status=1).stderr


def test_descriptors_that_are_not_there_are_asked_for() -> None:
    command = [
        sys.executable,
        "-m",
        "unisono",
        "simulate",
        "barrier",
        "--ranks",
        "32",
        "--hosts",
        "1",
    ]
    limited = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "raise the limit (ulimit -n), or ask for fewer ranks" in done.stderr


def test_too_short_a_timeout_is_no_fault() -> None:
    found = ranks("all_reduce:16M", "--rate", "0.001", "--set", "timeout=5", status=1)
    assert all("timed out after 5.000 s" in call["error"] for [call] in found)


def test_a_host_that_is_cut_off_takes_all_of_its_ranks_along() -> None:
    job = ("all_reduce:1M", "--ranks", "4", "--hosts", "2", "--set", "timeout=10")
    for rank, [call] in enumerate(ranks(*job, "--dark", "1@100us", status=1)):
        assert "timed out" in call["error"]
        other = ("host 1", "host 0")[rank // 2]
        assert other in call["error"]


def test_every_collective_ends_with_its_result() -> None:
    names = ["reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter"]
    calls = [f"{name}:96K:1" for name in names]
    calls += ["all_to_all:96K", "scan:96K", "exscan", "barrier"]
    for rank in ranks(*calls, "--ranks", "6", "--hosts", "3"):
        assert [call["call"] for call in rank] == list(range(10))
        assert all(call["ended"] and not call["error"] for call in rank)
        assert all(call["algorithm"] for call in rank)


def test_a_death_in_a_ring_reaches_all_and_names_the_rank() -> None:
    job = ("all_reduce:1M", "--ranks", "8", "--hosts", "8", "--set", "algorithm=ring")
    found = ranks(*job, "--dies", "3@400us", status=1)
    for rank, [call] in enumerate(found):
        assert call["algorithm"] == "ring"
        if rank == 3:
            assert call["ended"] is None
            continue
        assert "rank 3 (host 3) is gone" in call["error"]
        # The news goes from rank to rank.
        assert 400e-6 < call["ended"] < 1e-3
    assert all(call["ended"] < 2e-3 and not call["error"] for [call] in ranks(*job))


@pytest.mark.parametrize(
    "event, words, ends",
    [
        (("--dark", "1@100us"), "timed out after 10.000 s", 10.0),
        (("--skips", "1@0"), "the operation differs", 0.0),
        # Until both sides have seen it and the way is open again.
        (("--breaks", "1@100us+2s"), None, 2.0),
        (("--stops", "1@100us+3s"), None, 3.0),
    ],
)
def test_faults_end_as_in_a_job(event: tuple[str, str], words: str | None, ends: float) -> None:
    job = ("all_reduce:1M", "barrier", "--ranks", "4", "--hosts", "4", "--set", "timeout=10")
    found = ranks(*job, *event, status=0 if words is None else 1)
    last = max(call["ended"] for rank in found for call in rank)
    assert ends <= last < ends + 4
    errors = [call["error"] for rank in found for call in rank]
    assert all(words in error for error in errors if error) if words else not any(errors)


def test_a_seed_gives_the_same_story_again() -> None:
    job = ("all_to_all:64K", "--ranks", "4", "--hosts", "2", "--story")
    first = simulate(*job).stdout
    assert first == simulate(*job).stdout
    assert first != simulate(*job, "--seed", "1").stdout
    assert simulate("--world", "7").stdout == simulate("--world", "7").stdout


def test_the_table_has_the_calls_and_each_error_once() -> None:
    text = simulate("all_reduce:1M", "barrier", "--ranks", "4").stdout.splitlines()
    assert text[0].startswith("4 ranks on 2 hosts 20 us apart with 1.2 GB/s out of each")
    assert [line.split()[0] for line in text[3:]] == ["all_reduce", "barrier"]
    assert all(line.endswith("  all") for line in text[3:])
    job = ("all_reduce:1M", "--ranks", "4", "--hosts", "4", "--dies", "3@100us")
    text = simulate(*job, status=1).stdout.splitlines()
    assert text[3].endswith("  0 of 4")
    assert any("rank 3 (host 3) is gone" in line for line in text[5:])


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "no call"),
        (("foo",), "none of all_reduce"),
        (("send",), "send is a message"),
        (("barrier", "--ranks", "65", "--hosts", "2"), "2 to 64 can be simulated"),
        (("all_reduce:1G",), "ask for fewer"),
        (("barrier", "--dies", "4@1ms"), "there is no rank 4 among 4"),
        (("barrier", "--skips", "1@1"), "there is no call 1 among 1"),
        (("barrier", "--dies", "1"), "has not the form RANK@TIME"),
        (("barrier", "--dies", "1@1ms+2s"), "has not the form RANK@TIME"),
        (("barrier", "--stops", "1@1ms"), "has not the form RANK@TIME+TIME"),
        (("barrier", "--skips", "1@0.5"), "is no number"),
        (("barrier", "--dies", "1@1e19s"), "no time like 400us"),
        (("barrier", "--latency", "1e24"), "is more than a day"),
        (("barrier", "--seed", "-1"), "is no number"),
        (("all_reduce:9223372036854775808", "all_reduce:9223372036854775808"), "ask for fewer"),
        (("all_reduce:4",), "an element of 4 bytes each at least"),
        (("barrier", "--dies", "1@soon"), "no time like 400us"),
        (("barrier", "--dies", "1@1ms", "--dark", "1@1ms"), "one event at a time"),
        (("barrier", "--rate", "0"), "0 bytes a second"),
        (("barrier", "--set", "x=1"), "there is no setting x"),
        (("barrier", "--hosts", "5"), "each host has one at least"),
    ],
)
def test_jobs_that_cannot_be_are_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in simulate(*arguments, status=2).stderr
