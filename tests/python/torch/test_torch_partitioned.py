"""Models whose data is cut into parts, as of graphs and of the weather: all_to_all inside them."""

from __future__ import annotations

import importlib.util

import pytest
from ranks import run_ranks

pytest.importorskip("torch")

RANKS = "torch_partitioned_ranks"
HARMONICS = importlib.util.find_spec("torch_harmonics") is not None


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_graph_in_parts_is_trained_as_a_whole(world: int) -> None:
    run_ranks(world, f"{RANKS}:trains_a_graph", torch=True, timeout=120)


@pytest.mark.skipif(
    not HARMONICS,
    reason="torch-harmonics is not installed (pip install --no-deps torch-harmonics)",
)
@pytest.mark.parametrize("polar, azimuth", [(1, 2), (2, 1), (3, 1), (2, 2)])
def test_a_sphere_in_parts_is_transformed_as_a_whole(polar: int, azimuth: int) -> None:
    world = polar * azimuth
    name = f"{RANKS}:transforms_a_sphere"
    run_ranks(world, name, polar, azimuth, torch=True, timeout=120)
