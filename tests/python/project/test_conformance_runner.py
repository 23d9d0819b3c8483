"""The runner that compares programs on gloo and behind gloo sees what it is there to see."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFORMANCE = ROOT / "tests" / "conformance"
RUNNER = CONFORMANCE / "behind_gloo.py"
sys.path.append(str(CONFORMANCE))

import behind_gloo  # noqa: E402
import programs  # noqa: E402
from behind_gloo import ACTS, Difference, Outcome, Program, Reason  # noqa: E402

# Prints the line of unisono, in a program that has no unisono.
SAYS_SO = f"import os; print({ACTS!r} if os.environ['UNISONO_AS_GLOO'] == '1' else 'gloo')\n"


def outcome(text: str = "", **parts: str) -> Outcome:
    return Outcome(parts, seconds=1.0, output=text)


def compared(there: dict[str, str], here: dict[str, str], **options: object) -> behind_gloo.Row:
    program = Program("some program", [], **options)  # type: ignore[arg-type]
    return behind_gloo.compare(program, outcome(**there), outcome(ACTS, **here))


def runner(*arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUNNER), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def test_what_passes_on_both_is_no_difference() -> None:
    row = compared({"a": "passed", "b": "skipped"}, {"a": "passed", "b": "skipped"})
    assert (row.both, row.differences, row.trouble) == (1, [], "")


def test_a_loss_fails_and_a_gain_does_not() -> None:
    row = compared(
        {"lost": "passed", "gone": "passed", "gained": "failed", "odd": "skipped"},
        {"lost": "failed", "gained": "passed", "odd": "failed", "new": "passed"},
    )
    assert row.lost == [
        Difference("gone", "passed", "missing"),
        Difference("lost", "passed", "failed"),
    ]
    assert [each.part for each in row.gained] == ["gained", "new"]
    assert len(row.differences) == 5
    assert row.trouble == "passed on gloo alone: gone, lost"


def test_an_explained_loss_is_told_and_does_not_fail() -> None:
    explained = {"*.test_lost*": Reason("needs threads")}
    row = compared({"a.test_lost_1": "passed"}, {"a.test_lost_1": "failed"}, explained=explained)
    assert row.trouble == ""
    assert "needs threads" in behind_gloo.describe(row)
    line = "| some program: a.test_lost_1 | passed | failed | needs threads |"
    assert line in behind_gloo.table([row]).splitlines()
    # For others it is no excuse.
    row = compared({"other": "passed"}, {"other": "failed"}, explained=explained)
    assert row.trouble == "passed on gloo alone: other"


def test_an_explanation_holds_only_where_the_test_says_so() -> None:
    program = Program("tests", [], explained={"*": Reason("other words", says="rank 1 has left")})
    there, here = outcome(a="passed", b="passed"), outcome(ACTS, a="failed", b="failed")
    here.failures = {"a": "'closed' is not in 'rank 1 has left'", "b": "the values are wrong"}
    row = behind_gloo.compare(program, there, here)
    assert row.trouble == "passed on gloo alone: b"
    assert [each.why for each in row.lost] == ["other words", ""]


@pytest.mark.parametrize("there,here", [("", ""), (ACTS, ACTS), (ACTS, "")])
def test_a_row_fails_where_unisono_did_not_act_alone(there: str, here: str) -> None:
    program = Program("some program", [])
    row = behind_gloo.compare(program, outcome(there, a="passed"), outcome(here, a="passed"))
    assert row.both == 1
    assert "act" in row.trouble
    assert f"FAILED: {row.trouble}" in behind_gloo.describe(row)


def test_the_table_has_a_row_for_each_program() -> None:
    row = compared({"": "passed"}, {"": "exit status 1"})
    assert behind_gloo.table([row, row]).splitlines()[2:4] == [
        "| some program | 0 | 0 | 0 | 1 | 1 s | 1 s |",
        "| some program | 0 | 0 | 0 | 1 | 1 s | 1 s |",
    ]


def test_a_command_is_compared_by_its_status(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SAYS_SO + "import sys; sys.exit(3 * int(os.environ['UNISONO_AS_GLOO']))")
    done = runner("--", sys.executable, str(script))
    assert done.returncode == 1
    assert "the command: passed on gloo, exit status 3 on unisono" in done.stdout
    assert "FAILED: passed on gloo alone: the command" in done.stdout

    script.write_text(SAYS_SO)
    done = runner("--", sys.executable, str(script))
    assert done.returncode == 0, done.stdout
    assert "1 passed on both, 0 gained, 0 lost" in done.stdout
    assert f"| {sys.executable} {script} | 1 | 0 | 0 | 0 |" in done.stdout


def test_a_command_in_which_unisono_does_not_act_fails() -> None:
    done = runner("--", sys.executable, "-c", "print('I have no groups')")
    assert done.returncode == 1
    assert "unisono did not act, so gloo was compared with itself" in done.stdout


def test_each_test_of_a_file_is_compared(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\n"
        "mine = os.environ['UNISONO_AS_GLOO'] == '1'\n"
        f"def test_same(): print({ACTS!r} if mine else '')\n"
        "def test_lost(): assert not mine\n"
        "def test_gained(): assert mine\n"
        "@pytest.mark.skipif(mine, reason='no')\n"
        "def test_left_out(): pass\n"
    )
    done = runner("--tests", str(tmp_path / "test_some.py"))
    assert done.returncode == 1
    assert "1 passed on both, 1 gained, 2 lost" in done.stdout
    assert "test_some.test_lost: passed on gloo, failed on unisono" in done.stdout
    assert "test_some.test_left_out: passed on gloo, skipped on unisono" in done.stdout


def test_what_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """Also what has left its session, as torchrun's workers do, and what ignores the request."""
    script = tmp_path / "script.py"
    script.write_text(
        SAYS_SO
        + "import pathlib, signal, subprocess, sys, time\n"
        + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        + f"open({str(tmp_path / 'children')!r}, 'a').write(f'{{child.pid}}\\n')\n"
        + "time.sleep(600 * int(os.environ['UNISONO_AS_GLOO']))"
    )
    behind_gloo_program = Program("sleeps", [sys.executable, str(script)], limit=3)
    began = time.monotonic()
    there, here = (behind_gloo.run(behind_gloo_program, as_gloo) for as_gloo in (False, True))
    assert there.parts == {"": "passed"}
    assert here.parts == {"": "not ended after 3 s"}
    assert ACTS in here.output
    assert time.monotonic() - began < 60
    children = (tmp_path / "children").read_text().split()
    assert len(children) == 2
    for child in children:
        assert ended(int(child)), f"process {child} is still there"


def ended(pid: int) -> bool:
    """Whether there is no such process, or one that only waits to be asked how it ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_every_program_is_found_or_said_to_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    found, absent = programs.programs()
    assert len({program.name for program in found}) == len(found)
    monkeypatch.setattr(programs, "package", lambda _name: None)
    left, all_absent = programs.programs()
    assert "torch rpc" in [program.name for program in left]
    assert len(all_absent) > len(absent) or not [p for p in found if "example" in p.name]
    assert all("left out" in line for line in all_absent)
