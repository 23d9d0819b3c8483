"""``unisono status``: a job that waits is asked for whom."""

from __future__ import annotations

import json
import os
import pickle
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from status_ranks import CALLS, LATE

from unisono import _c, _status
from unisono._status import ask, elsewhere, ras, words


def run(world: int, what: str, *args: object, torch: bool = False) -> list:
    results = run_ranks(world, f"status_ranks:{what}", *args, timeout=60, torch=torch)
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


def test_waits_in_a_window_are_told() -> None:
    signalled, put = run(3, "waits_in_a_window")[0]
    (culprit,) = (line for line in signalled.lines if line.startswith("  rank 0 (host "))
    # Rank 2 is in the fence by then.
    assert re.search(r"(rank 1 waits|2 ranks wait) for it in (wait_signal|fence #\d), ", culprit)
    (line,) = (line for line in signalled.lines if ": wait_signal for " in line)
    assert line.startswith(f"  rank 1, pid {signalled.pids[1]}: "), signalled
    (culprit,) = (line for line in put.lines if line.startswith("  rank 2 (host "))
    assert "rank 1 waits for it in put, for " in culprit, put


def test_a_group_that_has_failed_says_why() -> None:
    told = run(2, "has_failed")[0]
    assert any("has failed:" in line and "for a test" in line for line in told.lines), told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_hears_nothing() -> None:
    for heard, said in run(2, "is_asked_by_another_user"):
        assert heard == b""
        assert said == "it belongs to user root, and answers that user alone"


def test_a_job_of_torch_is_asked() -> None:
    told = run(2, "asks_through_torch", torch=True)[1]
    assert any("rank 0 waits for it in all_reduce #2" in line for line in told.lines), told


def test_stacks_are_py_spys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "py-spy is not installed" in words._stack(7)[0]
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "$@"; echo "    load (data.py:3)"\n')
    spy.chmod(0o755)
    assert words._stack(7) == ["dump --pid 7", "    load (data.py:3)"]


def test_the_command_prints_the_answers() -> None:
    code, output, pids = run(2, "runs_the_command")[0]
    assert code == 0
    found = {process["pid"]: process["answer"] for process in json.loads(output)}
    for rank, pid in enumerate(pids):
        (group,) = found[pid]["groups"]
        assert (group["rank"], len(group["ranks"]), found[pid]["pid"]) == (rank, 2, pid)


@pytest.mark.check
@pytest.mark.parametrize("door", ["numpy", "torch", "c"])
def test_a_rank_that_is_late_is_named(door: str) -> None:
    if door == "torch":
        pytest.importorskip("torch")
    if door == "c":
        try:
            _c.answer(["--libdir"])
        except FileNotFoundError as error:
            pytest.skip(str(error))
    *others, late = run(8, "is_late", door, torch=door == "torch")
    own = late[0]["waited"]["seconds"]
    for rank, (stats, _) in enumerate(others):
        assert (stats["rank"], stats["collectives"]) == (rank, CALLS)
        waited = stats["waited"]
        # Some wait for a rank that waits for the late one.
        first = waited["by_rank"][0]
        assert first["rank"] == first["global"] != rank, stats
        assert first["process"].startswith("host "), stats
        assert LATE / 2 < first["median_seconds"] < 1, stats
        assert waited["seconds"] > own + 1, stats
        assert set(waited["by_operation"]) == {"all_reduce"}
        # 1,000 numbers, in a class that ends at 4 KiB.
        (size,) = waited["by_operation"]["all_reduce"]["by_size"]
        assert (size["up_to"], size["by_rank"][0]["rank"]) == (4096, first["rank"]), stats
        # The calls of a rank that waits are timed, and take little without the waits.
        (moved,) = stats["called"]["all_reduce"]["by_size"]
        assert moved["timed"] >= size["operations"] > CALLS / 2, stats
        assert moved["moving_seconds"] >= 0, stats
    waits = [by for stats, _ in others for by in stats["waited"]["by_rank"] if by["rank"] == 7]
    lines = [line for line in late[1].lines if " was late: " in line]
    if max(by["seconds"] for by in waits) <= own + words.WORTH_TELLING:
        pytest.skip("a busy machine: ranks waited for others that waited, too")
    assert any(line.startswith("  rank 7 was late: rank ") for line in lines), late[1]


def test_a_timeout_says_that_the_rank_was_late_before() -> None:
    said, none = run(2, "is_late_and_does_not_come")
    assert none is None
    assert re.search(
        r"timed out .* \(rank 1 was also waited for longest in \d+ of the \d+ operations before "
        r"that waited, \d+\.\d ms in the median\); is that rank stuck",
        said,
    ), said


def test_those_that_pass_a_delay_on_are_not_late() -> None:
    def state(rank: int, seconds: float, *by_rank: tuple[int, float]) -> dict:
        waited = [
            {"rank": peer, "seconds": time, "last": 90, "median_seconds": 0.004}
            for peer, time in by_rank
        ]
        return {**answer(rank), "waited": {"seconds": seconds, "by_rank": waited}}

    # Rank 2 waits for rank 1, and that for rank 0.
    told = [state(0, 0.2, (2, 0.1)), state(1, 5.0, (0, 5.0)), state(2, 5.0, (1, 5.0))]
    found = [process(rank, one) for rank, one in enumerate(told)]
    (group,) = words.groups(found)
    (line,) = words.late(group).values()
    assert line == (
        "rank 0 was late: rank 1 has waited 5.0 s for it, longest in 90 of 6 operations, "
        "4.0 ms in the median; it has waited 0.2 s"
    )
    assert "  rank 0 was late" in words.text(found)
    # Where rank 0 does not answer, nothing is said of its waits.
    (group,) = words.groups(found[1:])
    (line,) = words.late(group).values()
    assert line.startswith("rank 0 may have been late: rank 1 has waited 5.0 s for it"), line
    assert line.endswith("; how long it has waited itself is not known"), line


def answer(rank: int, name: str = "", *, number: int = 7, waits_for: list[int] | None = None):
    """The state of a rank of three in a collective, or in none before the one with `number`."""
    operation = {"name": name, "number": number, "seconds": 2.0, "waits_for": waits_for or []}
    return {
        "id": "ab",
        "rank": rank,
        "ranks": [{"global": n, "process": f"host h, pid {10 + n}"} for n in range(3)],
        "failure": None,
        "failure_code": None,
        "failure_rank": None,
        "operations": [operation] if name else [],
        "collectives": number if name else number - 1,
        "messages": 0,
        "called": {
            "all_reduce": {
                "operations": number + 1,
                "bytes": 8 * number + (1 << 40),
                "by_size": [
                    {
                        "up_to": 256,
                        "operations": number,
                        "bytes": 8 * number,
                        "moving_seconds": 0.25,
                    },
                    {"up_to": None, "operations": 1, "bytes": 1 << 40, "moving_seconds": 2.5},
                ],
            }
        },
        "links": [],
        "waited": {"seconds": 0.0, "operations": 0, "by_rank": [], "by_operation": {}},
        "last": None,
    }


def process(rank: int, *states: dict) -> ask.Process:
    answered = {"host": "h", "groups": list(states)}
    return ask.Process(10 + rank, 10 + rank, "train", "running", answered)


def blamed(*found: ask.Process) -> dict[int, str]:
    (group,) = words.groups(found)
    return words.blamed(group, found)


def test_another_collective_with_the_same_number_is_named() -> None:
    told = blamed(
        process(0, answer(0, "all_reduce #7", waits_for=[2])),
        process(1, answer(1, "all_reduce #7", waits_for=[0])),
        process(2, answer(2, "all_gather #7", waits_for=[1])),
    )
    assert "is in all_gather #7; rank 0 waits for it in all_reduce #7" in told[2]
    # Rank 0 is where rank 1 is, and rank 2 waits for rank 1 in another operation.
    assert sorted(told) == [1, 2]


def test_ranks_that_come_late_are_named_though_they_are_not_awaited_yet() -> None:
    told = blamed(
        process(0, answer(0, "barrier #7", waits_for=[1])),
        process(1, answer(1)),
        process(2, answer(2)),
    )
    assert sorted(told) == [1, 2]
    assert all("rank 0 waits for it in barrier #7" in line for line in told.values())


def test_a_rank_without_the_group_is_told_from_one_that_is_not_here() -> None:
    waits = process(0, answer(0, "barrier #7", waits_for=[1]))
    assert "has not made this group yet, or has closed it" in blamed(waits, process(1))[1]
    assert "is no process here that can be asked" in blamed(waits)[1]
    stopped = ask.Process(500, 11, "", "stopped", trouble="no answer", host="h")
    assert "is stopped: no answer" in blamed(waits, stopped)[1]
    waits.answer["host"] = "elsewhere"
    assert "is on another host, which was not asked or has not answered" in blamed(waits)[1]


def test_groups_that_wait_for_each_other_are_told_before_all() -> None:
    def state(name: str, rank: int, waits_for: int | None = None) -> dict:
        waits = answer(rank, "barrier #7", waits_for=[waits_for]) if waits_for is not None else {}
        return {**answer(rank), **waits, "id": name}

    found = [
        process(0, state("ab", 0, 1)),
        process(1, state("ab", 1), state("cd", 1, 2)),
        process(2, state("cd", 2)),
    ]
    assert words.circle(words.groups(found)) is None
    found[2] = process(2, state("cd", 2), state("ef", 2, 0))
    found[0].answer["groups"].append(state("ef", 0))
    line, *_ = words.text(found).splitlines()
    assert line.startswith("groups ab and cd and ef wait for each other: rank 0 of ab (host h, "), (
        line
    )
    # Answers of different moments, of a job that goes well.
    found[1].answer["groups"][1]["operations"][0]["seconds"] = 0.01
    assert words.circle(words.groups(found)) is None
    # Ranks of one group that wait for each other are no circle of groups.
    ring = [process(rank, answer(rank, "barrier #7", waits_for=[1 - rank])) for rank in (0, 1)]
    assert words.circle(words.groups(ring)) is None


def test_the_form_of_ncclras_has_the_ranks_that_are_missing() -> None:
    failed = {**answer(1), "failure": "for a test", "failure_code": "Aborted"}
    stopped = ask.Process(12, 12, "train", ask.STOPPED, trouble="no answer", host="h")
    found = [process(1, failed), stopped]
    (communicator,) = ras.report(found)["communicators"]
    assert (communicator["hash"], communicator["size"]) == ("0xab", 3)
    (rank,) = communicator["ranks"]
    assert (rank["rank"], rank["host"], rank["pid"]) == (1, "h", 11)
    assert (rank["status"]["async_error"], rank["collective_counts"]) == (6, {"all_reduce": 8})
    missing = {one["rank"]: one["status"] for one in communicator["missing_ranks"]}
    assert communicator["missing_ranks_count"] == len(missing) == 2
    # One is gone, and one does not answer.
    assert missing[0] == {"unresponsive": True, "considered_dead": True}
    assert missing[2] == {"unresponsive": True, "considered_dead": False}


def test_a_command_of_another_user_moves_no_cursor() -> None:
    program = "print('there', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "\x1b[2J"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        # From then on the command line is its own.
        assert other.stdout.readline() == b"there\n"
        command = ask._command(other.pid)
        other.communicate(b"\n")
    assert command.endswith(f"{program} ?[2J")


def test_as_many_are_asked_at_a_time_as_a_process_has_threads_for() -> None:
    turns = Path(__file__).parents[3] / "rust/core/src/transport/endpoint/turns.rs"
    assert f"const MOST_WORKING: usize = {elsewhere.AT_A_TIME};" in turns.read_text()


def test_records_are_of_one_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = [process(rank, answer(rank)) for rank in range(3)]
    found += [process(3 + rank, {**answer(rank), "id": "cd"}) for rank in range(2)]
    for one in found:
        one.host = platform.node()
        one.answer["seconds"] = 1.0
        (state,) = one.answer["groups"]
        state["recent"] = []
    for one in found[3:]:
        (state,) = one.answer["groups"]
        state["ranks"] = [{"global": n, "process": f"host h, pid {13 + n}"} for n in range(2)]
    monkeypatch.setattr(ask, "processes", lambda: found)
    written = ["--here", "--records", str(tmp_path / "rank_")]
    assert _status.status(written, "unisono") == 2
    assert "2 jobs run here" in (told := capsys.readouterr().err), told
    assert "--pid (10, 13)" in told
    assert _status.status([*written, "--pid", "14"], "unisono") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0", "rank_1"]
    assert _status.status([*written, "--pid", "15"], "unisono") == 1


def from_elsewhere(*, records: bool) -> dict[str, Any]:
    """The answer of rank 1, which waits for rank 0, to a process of another host."""
    state = answer(1, "all_reduce #7", waits_for=[0])
    if records:
        one = {"number": 7, "state": "completed", "seconds": 2.0, "took": 1.0}
        one |= {"count": 4, "dtype": "float32", "uneven": False, "peer": None, "tag": None}
        state["recent"] = [{"name": "all_reduce", **one}]
    program = {"command": "train", "machine": "x86_64", "call": "", "file": ""}
    told = {"form": ask.FORM, "host": "h", "seconds": 9.0, "program": program, "groups": [state]}
    # As it comes, with nothing that two answers share.
    return json.loads(json.dumps(told))


NOTHING = object()


@pytest.mark.parametrize(
    "path, value",
    [
        ("form", 2),
        ("program", NOTHING),
        ("program/call", 7),
        ("host", NOTHING),
        ("groups", 7),
        ("groups/0", None),
        ("groups/0/rank", 3),
        ("groups/0/rank", -1),
        ("groups/0/ranks", [{}]),
        ("groups/0/operations/0/seconds", "long"),
        ("groups/0/operations/0/waits_for", [3]),
        ("groups/0/called", NOTHING),
        ("groups/0/called", {"all_reduce": 7}),
        ("groups/0/messages", "many"),
        ("groups/0/messages", float("inf")),
        ("groups/0/waited", {"seconds": 1.0}),
        ("seconds", NOTHING),
        ("seconds", 1e300),
        ("groups/0/recent", NOTHING),
        ("groups/0/recent/0/count", {}),
        ("groups/0/recent/0/took", float("inf")),
        ("groups/0/ranks/1/global", "/../1"),
    ],
)
def test_an_answer_of_another_form_is_told_as_none(path: str, value: object) -> None:
    told = from_elsewhere(records=True)
    *parents, name = [int(part) if part.isdecimal() else part for part in path.split("/")]
    at: Any = told
    for part in parents:
        at = at[part]
    if value is NOTHING:
        del at[name]
    else:
        at[name] = value
    group = words.Group("ab", answer(1)["ranks"])
    found = elsewhere._process(group, 1, {"answer": told}, records=True)
    assert (found.answer, found.state) == (None, "silent")
    assert "has another form" in found.trouble
    assert (found.host, found.pid) == ("h", 11)


@pytest.mark.parametrize("records", [True, False])
def test_an_answer_of_another_host_is_told(records: bool) -> None:
    group = words.Group("ab", answer(1)["ranks"])
    told = from_elsewhere(records=records)
    found = elsewhere._process(group, 1, {"answer": told}, records=records)
    assert found.answer == told, found.trouble
    # Where records are wanted, one without them is none.
    other = elsewhere._process(group, 1, {"answer": told}, records=True)
    assert (other.answer is None) != records


@pytest.mark.parametrize(
    "answered, told",
    [
        (
            b'{"form": 3, "trouble": "this process does not understand the question"}',
            "answers: this process does not understand the question",
        ),
        (b'{"form": 3, "groups": []}', "answers in another form"),
        (b"[]", "answers in another form"),
        (b"7", "answers in another form"),
        (b'{"elsewhere": 7}', "answers in another form"),
        (b'{"elsewhere": [{"answer": {}}]}', "answers in another form"),
        (b'{"elsewhere": [{"ra', "does not answer: "),
        (b'{"elsewhere": [{"rank": 1, "trouble": "gone"}]}', ""),
    ],
)
def test_the_reason_why_a_process_does_not_ask_others_is_told(answered: bytes, told: str) -> None:
    name = f"@unisono-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name[1:])
        listener.listen()

        def serve() -> None:
            stream, _ = listener.accept()
            with stream:
                while stream.recv(1 << 16):
                    pass
                stream.sendall(answered)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        asker = ask.Process(7, 7, "train", "running", socket=name)
        found, trouble = ask.question(asker, {"group": "ab"}, 10.0)
        thread.join(10)
    if told:
        assert not found
        assert trouble.startswith("pid 7 here, which was to ask it, " + told), trouble
    else:
        assert (found, trouble) == ({1: {"rank": 1, "trouble": "gone"}}, "")


def test_without_jobs_there_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ask, "processes", list)
    assert _status.status([], "unisono") == 1
    assert capsys.readouterr().out == "no process with a group of unisono runs here\n"


def test_flight_records_tell_torchs_analyzer_which_rank_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("torch", minversion="2.15")
    *_, printed = run(3, "writes_flight_records", tmp_path)
    assert printed.split() == [str(tmp_path / f"rank_{rank}") for rank in range(3)]
    records = [pickle.loads((tmp_path / f"rank_{rank}").read_bytes()) for rank in range(3)]
    for rank, record in enumerate(records):
        states = [(entry["profiling_name"], entry["state"]) for entry in record["entries"]]
        assert ("unisono:all_gather", "completed") in states
        assert (("unisono:all_reduce", "started") in states) == (rank != 2)
        gathered = next(one for one in record["entries"] if one["input_sizes"] == [[3]])
        assert (gathered["output_sizes"], gathered["input_dtypes"]) == ([[9]], ["float32"])
    # An operation that others wait in has begun, and not ended.
    waiting = next(one for one in records[1]["entries"] if one["state"] == "started")
    assert 0 < waiting["time_discovered_started_ns"] <= time.time_ns(), waiting
    assert waiting["time_discovered_completed_ns"] is waiting["duration_ms"] is None, waiting
    # Messages have their peers and tags; the analyzer is told of those under way.
    messages = [
        [(one["profiling_name"], one["peer"], one["tag"], one["state"]) for one in told["messages"]]
        for told in records
    ]
    sent, wanted = ("unisono:send", 1, 7, "completed"), ("unisono:recv", 2, 9, "started")
    assert messages == [[sent, wanted], [("unisono:recv", 0, 7, "completed")], []]
    (entry,) = (one for one in records[0]["entries"] if one["is_p2p"])
    assert (entry["profiling_name"], entry["output_sizes"]) == ("unisono:recv 0<-1", [[5]])
    assert entry["process_group"][0].endswith(" 2->0 tag 9"), entry
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", tmp_path]
    done = subprocess.run(
        [*command, "-p", "rank_"], capture_output=True, text=True, timeout=60, check=False
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert re.search(r"(?i)all_reduce.*\n?.*missing ranks.*\{2\}", told), told
    assert re.search(r"(?i)recv 0<-1.*\n?.*missing ranks.*\{2\}", told), told
    # Its other mode prints an entry so (and needs tabulate).
    from torch.distributed.flight_recorder.components.types import Op

    name, _ = entry["process_group"]
    assert "recv(s=2 d=0, " in repr(Op(entry, {name: {0, 2}}, name))
