"""torch's ways to train, on two hosts of two ranks each, made of network namespaces."""

from __future__ import annotations

from typing import Any

import pytest
from namespaces import Hosts, hosts, limit, place_of, why_not
from ranks import RankResult, run_ranks

torch = pytest.importorskip("torch")
TROUBLE = why_not()
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")

# On a square of ranks, so one dimension of the mesh lies inside the hosts and one between them.
SHARDING = ["hsdp_trains", "hsdp_mixes_precision_and_factors", "sharded_data_and_tensor_parallel"]


def run(
    net: Hosts, target: str, *args: Any, host_of: list[int], check: bool = True, **more: str
) -> list[RankResult]:
    def variables(rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": net.address(host_of[0]),
            "MASTER_PORT": "29519",
            **place_of(rank, host_of),
            **more,
        }

    def host(rank: int) -> str:
        return net.names[host_of[rank]]

    world = len(host_of)
    return run_ranks(
        world, target, *args, torch=True, timeout=120, env=variables, check=check, host=host
    )


@pytest.mark.parametrize("host_of", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]], ids=str)
def test_ddp_trains_as_one_process_does_and_goes_in_two_levels(host_of):
    with hosts() as net:
        # Far less than the memory carries: the choice does not hang on what is measured.
        limit(net, 1000)
        results = run(net, "torch_hosts_ranks:ddp", host_of=host_of, UNISONO_LOG="debug")
    for result in results:
        assert result.value < 1e-12, result
    # Nothing asked for it. Where two ranks of a host follow each other, halving crosses between
    # hosts as rarely, and is predicted to take the same time within a hundredth.
    chosen = ["hierarchical", "halving"] if host_of == [0, 0, 1, 1] else ["hierarchical"]
    output = results[0].output
    assert any(f"messages={name} " in output for name in chosen), results[0].report()


@pytest.mark.parametrize("host_of", [[0, 0, 1, 1], [0, 1, 1]], ids=str)
def test_ddp_trains_with_gradients_in_8_bits(host_of):
    with hosts() as net:
        results = run(net, "torch_hosts_ranks:ddp_in_8_bits", host_of=host_of)
    for result in results:
        for dtype, difference in result.value.items():
            # Weights of bfloat16 are coarse themselves. The rounding shows, and does not matter.
            limit = 0.5 if "bfloat16" in dtype else 0.03
            assert 0 < difference < limit, (dtype, result)


@pytest.mark.parametrize("host_of", [[0, 0], [0, 1]], ids=str)
def test_the_hook_of_8_bits_has_groups_of_its_own(host_of):
    target = "torch_hosts_ranks:ddp_in_8_bits_beside_the_map_of_unused_parameters"
    with hosts() as net:
        run(net, target, host_of=host_of)


def test_every_rank_hears_of_a_death_while_gradients_travel_in_8_bits():
    with hosts() as net:
        results = run(net, "torch_hosts_ranks:death_in_8_bits", host_of=[0, 0, 1, 1], check=False)
    for result in results[:-1]:
        message, seconds = result.value
        assert "rank 3" in message, result
        assert "unisono" in message, result
        assert seconds < 20, result


@pytest.mark.parametrize("host_of", [[0, 0, 1, 1], [0, 1, 0, 1]], ids=str)
def test_sharded_training_between_hosts(host_of):
    with hosts() as net:
        results = run(net, "torch_sharding_ranks:run", SHARDING, host_of=host_of)
    for result in results:
        assert result.value == dict.fromkeys(SHARDING), result
