"""DDP and what is built around it train on unisono as one process does, and as on gloo."""

from __future__ import annotations

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch")
import torch_ddp_ranks as scenarios  # noqa: E402

# Scenarios whose ranks end with different weights: local SGD ends between two averages.
RANKS_DIFFER = {"hierarchical_sgd"}


def run(world: int, names: list[str]) -> dict[str, list]:
    """How each scenario ended on every rank. One launch for all: importing torch is what costs."""
    results = run_ranks(
        world, "torch_ddp_ranks:run_scenarios", "unisono", names, torch=True, timeout=90
    )
    return {name: [result.value[name] for result in results] for name in names}


def names(scenarios_: list) -> list[str]:
    return [scenario.__name__ for scenario in scenarios_]


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list]:
    return run(2, names(scenarios.ON_TWO_RANKS))


@pytest.fixture(scope="module")
def nested_on_two_ranks() -> dict[str, list]:
    # A future has no timeout: if these hang, they shall not take the others along.
    return run(2, names(scenarios.NESTED_ON_TWO_RANKS))


@pytest.fixture(scope="module")
def on_four_ranks() -> dict[str, list]:
    return run(4, names(scenarios.ON_FOUR_RANKS))


def examine(name: str, outcomes: list) -> None:
    failed = [f"rank {rank}: {one.error}" for rank, one in enumerate(outcomes) if one.error]
    assert not failed, "\n".join(failed)
    if outcomes[0].skipped:
        pytest.skip(outcomes[0].skipped)
    if name not in RANKS_DIFFER:
        for outcome in outcomes[1:]:
            torch.testing.assert_close(outcome.tensors, outcomes[0].tensors, rtol=0, atol=0)


@pytest.mark.parametrize("name", names(scenarios.ON_TWO_RANKS))
def test_on_two_ranks(name: str, on_two_ranks: dict[str, list]) -> None:
    examine(name, on_two_ranks[name])


@pytest.mark.parametrize("name", names(scenarios.NESTED_ON_TWO_RANKS))
def test_nested_on_two_ranks(name: str, nested_on_two_ranks: dict[str, list]) -> None:
    examine(name, nested_on_two_ranks[name])


@pytest.mark.parametrize("name", names(scenarios.ON_FOUR_RANKS))
def test_on_four_ranks(name: str, on_four_ranks: dict[str, list]) -> None:
    examine(name, on_four_ranks[name])
