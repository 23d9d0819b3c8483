"""torch's windows: puts, signals, tensors of neighbours, works, and the ends of peers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "torch.md"
pytestmark = pytest.mark.skipif(
    not hasattr(torch.distributed.ProcessGroup, "new_window"),
    reason="this torch has no windows: 2.15 has",
)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ranks_write_to_each_others_tensors(shared, transport):
    env = {"UNISONO_TRANSPORT": transport}
    run_ranks(3, "torch_windows_ranks:exchange", shared, torch=True, env=env)


def test_a_tensor_of_a_neighbour_is_its_memory():
    run_ranks(2, "torch_windows_ranks:mapped", torch=True)


def test_wrong_arguments_are_refused_and_cost_nothing():
    run_ranks(2, "torch_windows_ranks:refusals", torch=True)


def test_the_end_of_a_process_ends_the_waits_of_the_others():
    results = run_ranks(3, "torch_windows_ranks:peer_dies", torch=True, check=False)
    assert results[1].exit_code == -9
    for result in (results[0], results[2]):
        assert result.ok, result.report()
        took, text = result.value
        assert took < 10
        assert "wait_signal of rank 1" in text


def test_the_program_of_the_page_runs(tmp_path):
    found = re.search(r"(?s)\n## Windows\n.*?```python\n(.*?)```", PAGE.read_text())
    assert found
    (tmp_path / "page.py").write_text(found[1])
    run_ranks(3, tmp_path / "page.py", torch=True)
