"""``unisono.torch.mask``: a process group goes on without ranks that are gone."""

from __future__ import annotations

import signal

import pytest
from ranks import RankResult, run_ranks

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("gone", [[2], [0, 3]])
def test_training_goes_on_with_the_average_of_those_that_are_left(gone: list[int]) -> None:
    from torch_mask_ranks import alone

    world = 4
    what = "torch_mask_ranks:train"
    results = run_ranks(world, what, gone, torch=True, timeout=60, check=False)
    report = "\n".join(map(RankResult.report, results))
    assert all(results[rank].exit_code == -signal.SIGKILL for rank in gone), report
    expected = pytest.approx(alone(world, gone), rel=1e-4, abs=1e-6)
    for result in results:
        assert result.rank in gone or (result.ok and result.value == expected), report
