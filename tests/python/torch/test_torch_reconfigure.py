"""torch's reconfigure: a process group whose members leave and come, without a store.

The cases are those that torch's documentation of it names: the same members again, fewer, more, one
alone, parts that merge, after an abort, and numbers that were used.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ranks import RankResult, run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Backend, "reconfigure"),
    reason="this torch has no reconfigure (2.15 has)",
)


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_a_group_changes_its_members(backend: str, tmp_path: Path) -> None:
    env = {"UNISONO_AS_GLOO": "1"} if backend == "gloo" else {}
    what = "torch_reconfigure_ranks:changes_members"
    run_ranks(4, what, backend, str(tmp_path), torch=True, timeout=60, env=env)


def test_a_process_takes_the_place_of_one_that_died(tmp_path: Path) -> None:
    what = "torch_reconfigure_ranks:replaces"
    results = run_ranks(4, what, str(tmp_path), torch=True, timeout=60, check=False)
    report = "\n".join(map(RankResult.report, results))
    assert results[1].exit_code == -signal.SIGKILL, report
    assert all(result.ok for result in results if result.rank != 1), report
