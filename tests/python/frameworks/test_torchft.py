"""torchft with unisono as process group: its own tests of one, and a replica that comes back."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from launching import run

pytest.importorskip("torch")
pytest.importorskip("torchft")
pytest.importorskip("parameterized")

from torchft.process_group_test import _ALL_COLLECTIVES, MultiPgBaseTest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "frameworks" / "torchft_digits.py"


class TestGroup(MultiPgBaseTest):
    """torchft's own tests: three ranks, each a thread of this process."""

    WORLD_SIZE = 3

    @classmethod
    def _create_pg(cls, backend: str):
        del backend
        from unisono.torchft import ProcessGroupUnisono

        return ProcessGroupUnisono(timeout=timedelta(seconds=1))

    def assertRaisesRegex(self, expected, pattern, *rest, **more):  # noqa: N802 -- unittest's
        """Take unisono's words, too, where gloo's and NCCL's are asked for."""
        ours = "has left the group|aborted the group"
        with_ours = f"{pattern}|{ours}"
        return super().assertRaisesRegex(expected, with_ours, *rest, **more)  # noqa: PT027

    def test_collectives(self) -> None:
        for collective in _ALL_COLLECTIVES:
            with self.subTest(collective):
                self._run_parallel(collective)

    def test_resiliency(self) -> None:
        for collective in _ALL_COLLECTIVES:
            with self.subTest(collective):
                self._run_with_resiliency(collective)


def test_a_replica_is_killed_and_comes_back() -> None:
    pytest.importorskip("sklearn")
    # Five processes import torch and scikit-learn.
    done = run([sys.executable, str(EXAMPLE)], limit=240, env={"OMP_NUM_THREADS": "1"})
    assert done.code == 0, done
    assert "replica 2 is gone: SIGKILL" in done.out, done
    (undisturbed,) = (line for line in done.out if line.startswith("undisturbed: "))
    loss = undisturbed.removeprefix("undisturbed: ")
    for number in range(3):
        line = f"replica {number}: 60 steps, 2 to 3 replicas, {loss}"
        assert any(line in one for one in done.out), done
