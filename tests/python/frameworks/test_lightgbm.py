"""LightGBM trains over unisono, and learns from the rows of all ranks."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from ranks import free_port, run_ranks

for _module in ("lightgbm", "sklearn"):
    if importlib.util.find_spec(_module) is None:
        pytest.skip(f"{_module} is not installed (pip install {_module})", allow_module_level=True)


@pytest.fixture(scope="module")
def alone() -> np.ndarray:
    (result,) = run_ranks(1, "lightgbm_ranks:alone")
    return np.array(result.value)


@pytest.mark.parametrize("learner, world", [("data", 2), ("data", 3), ("voting", 2)])
def test_training_is_that_of_one_process(learner: str, world: int, alone: np.ndarray) -> None:
    results = run_ranks(world, "lightgbm_ranks:together", learner)
    predictions, models = zip(*(result.value for result in results), strict=True)
    # Each rank finds bins for some features among its own rows, so trees differ from one process.
    for predicted in map(np.array, predictions):
        assert np.corrcoef(predicted, alone)[0, 1] > 0.97
        assert ((predicted > 0.5) == (alone > 0.5)).mean() > 0.96
    if learner == "data":
        assert len(set(models)) == 1, "ranks have different models"
    if world == 2:
        # A sum of two numbers has one correct rounding: to the last bit what LightGBM's own
        # sockets give, also where its voting leaves ranks with different values of inner nodes.
        ports = [free_port(), free_port()]
        expected = run_ranks(world, "lightgbm_ranks:over_sockets", learner, ports)
        assert list(models) == [result.value for result in expected]


def test_scikit_learn_interface() -> None:
    first, second = run_ranks(2, "lightgbm_ranks:multiclass")
    assert first.value == second.value
    assert first.value > 0.93


def test_death_of_a_rank_is_raised_by_training() -> None:
    first, _ = run_ranks(2, "lightgbm_ranks:one_dies", check=False)
    assert first.error is None, first.report()
    assert first.value.startswith("PeerLostError"), first.value
    assert "rank 1" in first.value
