"""torch's symmetric memory on the CPU: tensors that ranks of a host use in each other's memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("torch")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "torch.md"
RANKS = "torch_symmetric_memory_ranks"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_write_to_each_others_tensors(world):
    run_ranks(world, f"{RANKS}:exchange", torch=True)


@pytest.mark.parametrize(
    "case",
    [
        "views",
        "persistent",
        "group_ends",
        "timeouts",
        "others_run",
        "threads",
        "forks",
        "left_open",
    ],
)
def test_two_ranks(case):
    run_ranks(2, f"{RANKS}:{case}", torch=True)


@pytest.mark.parametrize("case", ["pads", "reuse", "refusals"])
def test_three_ranks(case):
    run_ranks(3, f"{RANKS}:{case}", torch=True)


def test_groups_have_signals_of_their_own():
    run_ranks(4, f"{RANKS}:groups", torch=True)


def test_ranks_that_share_no_memory_are_named():
    env = {"UNISONO_TRANSPORT": "tcp"}
    for result in run_ranks(2, f"{RANKS}:elsewhere", torch=True, env=env):
        assert f"rank {1 - result.rank}" in result.value


@pytest.mark.parametrize("call", ["barrier", "wait_signal", "put_signal"])
def test_the_end_of_a_process_ends_the_waits_of_the_others(call):
    results = run_ranks(3, f"{RANKS}:peer_dies", call, torch=True, check=False)
    assert results[1].exit_code == -9
    for result in (results[0], results[2]):
        assert result.ok, result.report()
        took, text = result.value
        assert took < 10
        assert "rank 1" in text
        assert call in text


def test_the_rest_is_refused_by_torch():
    run_ranks(2, f"{RANKS}:not_on_cpu", torch=True)


def test_the_program_of_the_page_runs(tmp_path):
    found = re.search(r"(?s)\n## Symmetric memory\n.*?```python\n(.*?)```", PAGE.read_text())
    assert found
    (tmp_path / "page.py").write_text(found[1])
    run_ranks(3, tmp_path / "page.py", torch=True)
