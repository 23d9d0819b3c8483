"""The harness that runs ranks must itself notice every way in which a rank can go wrong."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import RanksError, run_ranks, run_torchrun

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


# The functions that the ranks run.


def add_to_rank(number: int) -> tuple[int, int]:
    return int(os.environ["RANK"]) + number, int(os.environ["WORLD_SIZE"])


def complain_on_rank(rank: int) -> int:
    print(f"hello from {os.environ['RANK']}")
    if int(os.environ["RANK"]) == rank:
        raise ValueError("the milk is sour")
    return 7


def sleep_long_on_rank(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


def die_on_rank(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def die_or_sleep() -> None:
    die_on_rank(0)
    sleep_long_on_rank(1)


def start_a_grandchild(path: str) -> None:
    grandchild = os.fork()
    if grandchild != 0:
        Path(path).write_text(str(grandchild))
    time.sleep(600)


def read_variable(name: str) -> str:
    return os.environ[name]


# The results that the harness makes of them.


def outlived(run: Callable[[float], object], expected: str, first: float = 3) -> RanksError:
    """The error of ``run(limit)`` once it matches the pattern ``expected``.

    On a busy machine ranks may need longer than the first limit to get to where they hang.
    """
    for limit in (first, 5 * first, 25 * first):
        with pytest.raises(RanksError, match=f"outlived {limit} s") as failure:
            run(limit)
        if re.search(expected, str(failure.value), re.DOTALL):
            return failure.value
    raise failure.value


def test_values_come_back_in_rank_order():
    results = run_ranks(3, "test_ranks:add_to_rank", 10)
    assert [result.value for result in results] == [(10, 3), (11, 3), (12, 3)]
    assert all(result.ok for result in results)


def test_an_exception_is_reported_with_the_output_of_its_rank():
    with pytest.raises(RanksError) as failure:
        run_ranks(2, "test_ranks:complain_on_rank", 1)
    text = str(failure.value)
    assert "ranks [1] of 2 failed" in text
    assert "ValueError: the milk is sour" in text
    assert "hello from 1" in text


def test_without_check_a_failed_rank_is_a_result():
    first, second = run_ranks(2, "test_ranks:complain_on_rank", 1, check=False)
    assert first.ok
    assert first.value == 7
    assert not second.ok
    assert second.exit_code == 1
    assert "the milk is sour" in second.error


def test_a_rank_that_hangs_is_shown_where_it_was_and_killed():
    def run(limit):
        run_ranks(2, "test_ranks:sleep_long_on_rank", 1, timeout=limit)

    error = outlived(run, "in sleep_long_on_rank")
    assert "ranks [1] of 2 outlived" in str(error)
    assert [result.exit_code for result in error.results] == [0, None]


def test_a_rank_that_dies_is_named_with_its_signal():
    with pytest.raises(RanksError, match="rank 0: killed by SIGKILL"):
        run_ranks(2, "test_ranks:die_on_rank", 0)


def test_the_others_get_a_grace_and_not_the_whole_timeout(monkeypatch):
    monkeypatch.setattr("ranks.GRACE", 1.0)
    started = time.monotonic()
    with pytest.raises(RanksError, match=r"ranks \[0, 1\] of 2 failed"):
        run_ranks(2, "test_ranks:die_or_sleep", timeout=200)
    assert time.monotonic() - started < 60


def test_what_a_rank_started_goes_with_it(tmp_path):
    marker = tmp_path / "pid"

    def run(limit):
        run_ranks(1, "test_ranks:start_a_grandchild", str(marker), timeout=limit)

    outlived(run, "in start_a_grandchild")
    # The process that adopts it may take a moment to see that it has ended.
    patience = time.monotonic() + 10
    while is_running(int(marker.read_text())) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not is_running(int(marker.read_text()))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")


def test_a_script_gets_its_arguments_and_its_variables(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nenv = os.environ\nprint(env['RANK'], env['EXTRA'], *sys.argv[1:])\n"
    )
    results = run_ranks(2, script, "--steps", 3, env={"EXTRA": "x"})
    assert [result.output.strip() for result in results] == ["0 x --steps 3", "1 x --steps 3"]


def test_variables_may_differ_by_rank():
    results = run_ranks(
        2, "test_ranks:read_variable", "HOST", env=lambda rank: {"HOST": f"h{rank}"}
    )
    assert [result.value for result in results] == ["h0", "h1"]


@needs_torch
def test_torchrun_returns_what_was_printed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(f\"rank {os.environ['RANK']} {sys.argv[1]}\\n\", end='')\n"
    )
    output = run_torchrun(script, 2, ["seven"])
    assert "rank 0 seven" in output
    assert "rank 1 seven" in output


@needs_torch
def test_torchrun_that_hangs_is_shown_where_its_workers_were(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import time
        def wait_for_nothing():
            time.sleep(600)
        wait_for_nothing()
        """)
    )
    both = "rank-0 was in.*in wait_for_nothing.*rank-1 was in.*in wait_for_nothing"
    outlived(lambda limit: run_torchrun(script, 2, timeout=limit), both, first=10)


@needs_torch
def test_torchrun_that_fails_is_an_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(RanksError, match="failed"):
        run_torchrun(script, 2)


def test_no_two_modules_have_one_name():
    """Ranks find the function they run by the name of its module, whichever folder it is in."""
    tests = Path(__file__).resolve().parents[2]
    names = Counter(path.name for path in tests.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) > 80


def meet_the_server(folder: str) -> tuple[bool, int, str, str]:
    import forkserver
    import torch  # noqa: F401

    rank = os.environ["RANK"]
    Path(folder, f"here{rank}").touch()
    print(f"printed by {rank}")
    return (
        forkserver.__name__ in sys.modules and "_main" in vars(sys.modules["__main__"]),
        os.getsid(0) - os.getpid(),
        os.environ.get("UNISONO_TIMEOUT", ""),
        os.environ["RANK"],
    )


@needs_torch
def test_ranks_with_torch_are_forks_with_an_environment_and_a_session_of_their_own(tmp_path):
    results = run_ranks(
        2,
        "test_ranks:meet_the_server",
        str(tmp_path),
        torch=True,
        env=lambda rank: {"UNISONO_TIMEOUT": str(7 + rank)},
    )
    assert [r.value for r in results] == [(True, 0, "7", "0"), (True, 0, "8", "1")]
    assert [r.output.strip() for r in results] == ["printed by 0", "printed by 1"]


@needs_torch
def test_a_fork_that_dies_hangs_or_fails_is_told_as_a_process_is():
    with pytest.raises(RanksError, match="rank 0: killed by SIGKILL"):
        run_ranks(2, "test_ranks:die_on_rank", 0, torch=True)
    with pytest.raises(RanksError, match="the milk is sour"):
        run_ranks(2, "test_ranks:complain_on_rank", 1, torch=True)
    error = outlived(
        lambda limit: run_ranks(2, "test_ranks:sleep_long_on_rank", 1, timeout=limit, torch=True),
        "in sleep_long_on_rank",
    )
    assert [result.exit_code for result in error.results] == [0, None]
