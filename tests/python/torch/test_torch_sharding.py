"""Sharded parallelism over unisono: FSDP, DTensor, tensor parallelism, meshes, pipelines.

The rank functions and their expected values are in torch_sharding_ranks.py. All scenarios
for a number of ranks share one start of the ranks, since importing torch costs more than all of
them together.
"""

from __future__ import annotations

from functools import cache

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch")

TWO_RANKS = [
    "fsdp2_trains",
    "fsdp2_clips_gradients",
    "fsdp2_accumulates_without_communication",
    "fsdp2_mixes_precision",
    "fsdp2_reduces_in_half_precision",
    "fsdp2_divides_by_another_factor",
    "fsdp1_trains",
    "dtensor_redistributes",
    "dtensor_computes",
    "dtensor_shards_a_module",
    "tensor_parallel_by_columns_and_rows",
    "tensor_parallel_with_sequences",
    "tensor_parallel_loss",
    "pipeline_gpipe",
    "pipeline_1f1b",
    "pipeline_with_a_group_per_edge",
    "pipeline_interleaved_1f1b",
    "pipeline_interleaved_zero_bubble",
    "pipeline_zbv_zero_bubble",
]
FOUR_RANKS = [
    "mesh_has_groups",
    "dtensor_redistributes_on_two_dimensions",
    "hsdp_trains",
    "hsdp_mixes_precision_and_factors",
    "sharded_data_and_tensor_parallel",
]

# Scenarios that torch 2.11 cannot run.
if torch.torch_version.TorchVersion(torch.__version__) < (2, 15):
    NOT_IN_THIS_TORCH = {
        "pipeline_with_a_group_per_edge": "this torch has no groups per edge of a pipeline",
        "pipeline_zbv_zero_bubble": "in this torch a stage sends to its own rank, also with gloo",
    }
else:
    NOT_IN_THIS_TORCH = {}


@cache
def outcomes(world: int) -> list[dict[str, str | None]]:
    """Run the scenarios for ``world`` ranks, once, and return what became of them on each."""
    scenarios = {2: TWO_RANKS, 4: FOUR_RANKS}[world]
    names = [name for name in scenarios if name not in NOT_IN_THIS_TORCH]
    results = run_ranks(world, "torch_sharding_ranks:run", names, torch=True, timeout=200)
    return [result.value for result in results]


@pytest.mark.parametrize("scenario", TWO_RANKS)
def test_on_two_ranks(scenario: str) -> None:
    check(scenario, 2)


@pytest.mark.parametrize("scenario", FOUR_RANKS)
def test_on_four_ranks(scenario: str) -> None:
    check(scenario, 4)


def check(scenario: str, world: int) -> None:
    if scenario in NOT_IN_THIS_TORCH:
        pytest.skip(NOT_IN_THIS_TORCH[scenario])
    failed = [
        f"rank {rank}:\n{outcome[scenario]}"
        for rank, outcome in enumerate(outcomes(world))
        if outcome[scenario] is not None
    ]
    assert not failed, "\n".join(failed)
