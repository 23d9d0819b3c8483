"""Every collective, type, operator and world size on each transport, against NumPy."""

from __future__ import annotations

import pytest
from ranks import run_ranks

TRANSPORTS = ["shm", "tcp", "mixed"]


def environment(transport: str):
    """Settings per rank; ``mixed`` pretends that the ranks sit on two hosts in turn."""
    if transport == "mixed":
        return lambda rank: {"UNISONO_HOST": ["left", "right"][rank % 2]}
    return {"UNISONO_TRANSPORT": transport}


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_combination(transport, world):
    results = run_ranks(
        world, "numpy_collectives_ranks:every_combination", timeout=120, env=environment(transport)
    )
    assert all(result.value > 1000 for result in results)


@pytest.mark.parametrize(
    "algorithm",
    ["direct", "ring", "tree", "recursive_doubling", "halving", "bruck", "windows", "in_place"],
)
def test_every_combination_by_each_algorithm(algorithm):
    run_ranks(
        3,
        "numpy_collectives_ranks:every_combination",
        timeout=120,
        env={"UNISONO_ALGORITHM": algorithm},
    )


@pytest.mark.parametrize("world", [3, 4])
def test_every_combination_between_hosts_by_hierarchy(world):
    run_ranks(
        world,
        "numpy_collectives_ranks:every_combination",
        timeout=120,
        env=lambda rank: {
            "UNISONO_ALGORITHM": "hierarchical",
            "UNISONO_HOST": ["left", "right"][rank % 2],
        },
    )


@pytest.mark.parametrize("algorithm", ["auto", "direct", "ring", "bruck", "windows"])
def test_prefixes_have_the_bits_of_a_loop(algorithm):
    run_ranks(5, "numpy_collectives_ranks:prefixes_are_loops", env={"UNISONO_ALGORITHM": algorithm})


@pytest.mark.parametrize("world", [1, 3, 4])
def test_nan_infinity_and_overflow(world):
    run_ranks(world, "numpy_collectives_ranks:nan_and_extremes")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_operations_in_flight_on_several_groups(transport):
    run_ranks(4, "numpy_collectives_ranks:many_in_flight", env=environment(transport))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operations_may_be_forgotten(transport):
    run_ranks(3, "numpy_collectives_ranks:works_outlive_their_arrays", env=environment(transport))


def test_operations_on_the_same_array_keep_their_order():
    run_ranks(3, "numpy_collectives_ranks:operations_that_share_an_array")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_threads(transport):
    run_ranks(3, "numpy_collectives_ranks:threads", env=environment(transport))
