"""``unisono chaos``: rounds that are right, and that it sees those that are not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unisono import _c, _chaos
from unisono._chaos import hosts, job, plan

TROUBLE = hosts.why_not()


def chaos(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "unisono", "chaos", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ranks_of_a_host_are_killed_and_stopped() -> None:
    # The last one may be killed while it is stopped.
    faults = ["kill@2:8", "stop@0:10/0.2", "delay@3:12/0.05", "stop@1:14/1", "kill@1:14"]
    asked_for = [word for fault in faults for word in ("--fault", fault)]
    [outcome] = chaos("-n", "4", "--operations", "20", *asked_for)
    met = outcome["faults"]
    assert (met["kill"], met["delay"]) == (2, 1)
    assert met["stop"] in (1, 2)
    assert len(outcome["recoveries"]) >= 2
    assert outcome["operations"] > 20


def test_killed_ranks_are_replaced() -> None:
    # This seed has them replaced.
    seed = next(seed for seed in range(100) if plan.Round.choose(seed, plan.Wishes()).replaces)
    kill = ("--fault", "kill@1:8", "--fault", "kill@0:9")
    [outcome] = chaos("-n", "3", "--operations", "20", "--seed", str(seed), *kill)
    assert "replaced" in outcome["round"]
    assert outcome["faults"] == {"kill": 2}


def test_connections_break() -> None:
    faults = ("--fault", "drop@0:5", "--fault", "close@1:8")
    [outcome] = chaos("-n", "3", "--transport", "tcp", "--operations", "20", *faults)
    assert (outcome["faults"], outcome["recoveries"]) == ({"drop": 1, "close": 1}, [])


@pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")
def test_hosts_are_cut_off() -> None:
    faults = ("--fault", "cut@3:5/0.5", "--fault", "reset@0:8", "--fault", "kill@1:15")
    [outcome] = chaos("-n", "4", "--hosts", "2", "--operations", "20", *faults)
    assert outcome["faults"] == {"cut": 1, "reset": 1, "kill": 1}


@pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")
def test_a_host_is_given_up() -> None:
    [outcome] = chaos("-n", "5", "--hosts", "3", "--operations", "20", "--fault", "isolate@2:8/24")
    assert outcome["faults"] == {"isolate": 1}
    # The three that are left.
    assert len(outcome["recoveries"]) == 3


def test_faults_go_on() -> None:
    [outcome] = chaos(
        *("-n", "3", "--transport", "tcp", "--faults", "close", "--seconds", "3", "--every", "0.2")
    )
    assert outcome["faults"]["close"] > 3
    assert outcome["seconds"] > 3


def test_torch() -> None:
    pytest.importorskip("torch")
    faults = ("--fault", "kill@1:8", "--fault", "delay@0:10/0.1")
    [outcome] = chaos("-n", "3", "--door", "torch", "--operations", "20", *faults)
    assert outcome["faults"] == {"kill": 1, "delay": 1}


def test_c() -> None:
    try:
        _c.answer(["--libdir"])
    except FileNotFoundError as error:
        pytest.skip(str(error))
    faults = ("--fault", "kill@1:8", "--fault", "delay@0:10/0.1")
    [outcome] = chaos("-n", "3", "--door", "c", "--operations", "20", *faults)
    assert outcome["faults"] == {"kill": 1, "delay": 1}


def test_a_majority_goes_on() -> None:
    def left_behind(hosts: list[int], isolated: int) -> set[int]:
        fault = plan.Fault(1, isolated, "isolate", 9.0)
        return plan.Round(1, "numpy", "auto", hosts, 20, False, faults=[fault]).left_behind()

    assert left_behind([0, 0, 1, 1, 2], 2) == {2, 3}
    assert left_behind([0, 0, 1, 1, 1], 0) == {0, 1}
    assert left_behind([0, 0, 1, 1, 1], 4) == {0, 1}
    assert left_behind([0, 0, 1, 1], 3) == {2, 3}
    assert left_behind([0, 0, 1, 1], 0) == {2, 3}


def test_a_seed_gives_a_round() -> None:
    wishes = plan.Wishes(hosts=(1, 2, 3), doors=plan.DOORS, has_networks=True)
    rounds = [plan.Round.choose(seed, wishes) for seed in range(300)]
    assert rounds == [plan.Round.choose(seed, wishes) for seed in range(300)]
    assert {fault.kind for one in rounds for fault in one.faults} == set(plan.KINDS)
    assert {one.replaces for one in rounds} == {False, True}
    for one in rounds:
        killed = {fault.rank for fault in one.faults if fault.kind == "kill"}
        assert len(killed) < one.world
        for fault in one.faults:
            assert (fault.kind == "kill") <= fault.operation < one.operations
            assert plan.Fault.parse(str(fault)).kind == fault.kind
    with pytest.raises(ValueError, match="KIND@RANK:OPERATION"):
        plan.Fault.parse("kill@1:2/3")


def judged(*events: tuple[int, dict[str, Any]], killed: int | None = None) -> list[str]:
    """The troubles of a round of three ranks that told this."""
    wishes = plan.Wishes(ranks=(3,), faults=(plan.Fault(1, 0, "delay"),))
    played = job.Job(plan.Round.choose(1, wishes), None)
    now = time.monotonic()
    if killed is not None:
        played.killed[killed] = now
    for number, event in events:
        played.told[number].append({"at": now, "step": 1, "text": "", **event})
    played._judge()
    return played.outcome.troubles


def test_it_sees_wrong_rounds() -> None:
    def end(*numbers: int, left: int = 0) -> dict[str, Any]:
        return {"event": "done", "steps": 9, "numbers": list(numbers), "left": left}

    failed = {"event": "failed", "culprit": 2}
    assert judged(*[(number, end(0, 1, 2)) for number in range(3)]) == []
    assert judged((0, failed), (0, end(0, 1)), (1, end(0, 1)), killed=2) == []
    [trouble] = judged((0, failed), (0, end(0, 1, 2)))
    assert "named rank 2, which lived" in trouble
    [trouble] = judged((0, {**failed, "culprit": None}), (0, end(0, 1)), killed=2)
    assert "named no rank" in trouble
    [trouble] = judged((1, {"event": "wrong", "text": "3 of 4 are wrong"}))
    assert "3 of 4 are wrong" in trouble
    assert "not [0, 1]" in judged((0, end(0)), killed=2)[0]
    assert "different groups" in judged((0, end(0)), (1, end(1)), killed=2)[-1]
    assert "4 descriptors left" in judged((0, end(0, 1, 2, left=4)))[0]


def test_wishes_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, why in (
        (["--faults", "flood"], "flood"),
        (["--fault", "kill@1"], "KIND@RANK:OPERATION"),
        (["-n", "0"], "write 4, or 2-8"),
    ):
        with pytest.raises(SystemExit):
            _chaos.chaos(arguments, "unisono")
        assert why in capsys.readouterr().err


def test_a_door_that_is_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(_c, "FOLDER", tmp_path)
    with pytest.raises(SystemExit):
        _chaos.chaos(["--door", "numpy,c"], "unisono")
    assert "does not hold the C library" in capsys.readouterr().err
