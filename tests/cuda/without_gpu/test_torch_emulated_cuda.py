"""torch.distributed on CUDA tensors over the emulated driver: everything but the GPU itself.

The rank functions are in ``cuda_scenarios``, as those of ``tests/cuda/with_gpu``, and in
``torch_cuda_ranks``, where they shut a gate of the emulated device.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ranks import RankResult, run_ranks
from torch_cuda_device import build

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

# torch 2.14 and newer.
TIMES = hasattr(dist.Backend, "_ensure_backend_registered")

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
# How a group goes: directly between windows, or staged through host memory.
WAYS = {
    "direct": {},
    "staged": {"CUDA_EMULATOR_IPC": "refuse-import"},
}


@pytest.fixture(scope="module")
def emulated() -> dict[str, str]:
    return build()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, emulated: dict[str, str]) -> dict[str, str]:
    return {**emulated, **WAYS[request.param]}


def run(
    world: int, name: str, env: dict[str, str], *args: object, **options: object
) -> list[RankResult]:
    return run_ranks(world, name, *args, torch=True, env=env, **options)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_carries_collectives(world: int, way: dict[str, str]) -> None:
    run(world, "cuda_scenarios:carries_collectives", way, TYPES, [0, 1, 1000], timeout=120)


def test_carries_large_tensors(way: dict[str, str]) -> None:
    run(2, "cuda_scenarios:carries_large_tensors", way, timeout=120)


@pytest.mark.parametrize("world", [1, 3])
def test_carries_operators(world: int, way: dict[str, str]) -> None:
    run(world, "torch_cuda_ranks:carries_operators", way)


@pytest.mark.parametrize("world", [1, 2])
def test_orders_streams(world: int, way: dict[str, str]) -> None:
    run(world, "torch_cuda_ranks:orders_streams", way)


def test_keeps_memory(way: dict[str, str]) -> None:
    run(2, "torch_cuda_ranks:keeps_memory", way)


def test_coalesces(way: dict[str, str]) -> None:
    run(2, "cuda_scenarios:coalesces", way)


def test_exchanges_messages(way: dict[str, str]) -> None:
    run(3, "cuda_scenarios:exchanges_messages", way)


def test_waits_on_the_host(way: dict[str, str]) -> None:
    run(2, "torch_cuda_ranks:waits_on_the_host", way)


@pytest.mark.skipif(not TIMES, reason="torch 2.11 has no durations of plugins")
def test_tells_durations(way: dict[str, str]) -> None:
    run(2, "cuda_scenarios:tells_durations", way)


def test_mixes_devices(way: dict[str, str]) -> None:
    run(2, "cuda_scenarios:mixes_devices", way)


def test_makes_groups(way: dict[str, str]) -> None:
    run(4, "cuda_scenarios:makes_groups", way)


def test_meets_on_its_device(way: dict[str, str]) -> None:
    run(2, "torch_cuda_ranks:meets_on_its_device", way)


def test_splits_groups(way: dict[str, str]) -> None:
    run(4, "cuda_scenarios:splits_groups", way)


def test_makes_a_mesh_of_parts(way: dict[str, str]) -> None:
    run(4, "cuda_scenarios:makes_a_mesh", way, True)


def test_uses_several_devices(way: dict[str, str]) -> None:
    run(2, "torch_cuda_ranks:uses_several_devices", {**way, "CUDA_EMULATOR_DEVICES": "2"})


def test_is_captured_into_a_graph(emulated: dict[str, str]) -> None:
    run(2, "cuda_scenarios:is_captured", emulated, 1000, 500)


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "new_window"), reason="this torch has no windows: 2.15 has"
)
@pytest.mark.parametrize("world", [1, 3])
def test_makes_windows(world: int, emulated: dict[str, str]) -> None:
    run(world, "torch_cuda_ranks:makes_windows", emulated)


def test_reads_and_writes_one_sided(emulated: dict[str, str]) -> None:
    pytest.importorskip("torch.distributed._transport", reason="this torch has no transports")
    run(2, "cuda_scenarios:reads_and_writes_one_sided", emulated)


@pytest.mark.parametrize("world", [2, 3])
def test_captures_messages(world: int, emulated: dict[str, str]) -> None:
    run(world, "cuda_scenarios:captures_messages", emulated, 5_000_001)


def test_a_peer_that_dies_leaves_no_stream_waiting(way: dict[str, str]) -> None:
    results = run(3, "cuda_scenarios:loses_a_peer", way, check=False)
    for result in results[:2]:
        assert result.ok, result.report()
        assert "rank 2" in result.value, result.value
        # A program that never checks the work still has it in the log.
        assert result.output.count("streams go on, with NaN or zeros for results") == 1


def test_a_program_that_does_not_look_ends(emulated: dict[str, str]) -> None:
    results = run(2, "torch_cuda_ranks:looks_away", emulated, "end", check=False)
    assert results[0].exit_code == -signal.SIGABRT, results[0].report()
    assert "so the process ends before it uses what its streams hold" in results[0].output


def test_a_program_that_has_heard_of_it_goes_on(emulated: dict[str, str]) -> None:
    results = run(2, "torch_cuda_ranks:looks_once", emulated, check=False)
    assert results[0].ok, results[0].report()
    assert "rank 1" in results[0].value


def test_a_program_may_go_on_with_nan(emulated: dict[str, str]) -> None:
    results = run(2, "torch_cuda_ranks:looks_away", emulated, "raise", check=False)
    assert results[0].ok, results[0].report()
    assert results[0].value == "nan and nan"


def test_carries_what_asked_for_gloo(way: dict[str, str]) -> None:
    for result in run(2, "cuda_scenarios:carries_what_asked_for_gloo", way):
        assert result.value == "unisono"


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_says_what_is_missing_without_a_driver(backend: str, emulated: dict[str, str]) -> None:
    env = dict(emulated)
    path = env.pop("LD_LIBRARY_PATH").split(os.pathsep)[0]
    # Under its own name, which no code looks for.
    env["EMULATED_DRIVER"] = str((Path(path) / "libcuda.so.1").resolve())
    for result in run(2, "torch_cuda_ranks:has_no_driver", env, backend):
        assert "libcuda.so.1" in result.value
