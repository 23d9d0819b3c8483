"""Arrays on a real CUDA device through the Python door: of CuPy, JAX, torch and the driver alone.

The driver's need nothing else here, and run over the emulated one too (test_gpu_scripts.py).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from c_programs import SOURCES, MissingError, compile_program, run_programs
from cuda_arrays import KINDS, device_count
from numpy_reference import DTYPES
from ranks import run_ranks

WORLDS = [1, 2, 4, 8]

pytestmark = pytest.mark.skipif(device_count() == 0, reason="there is no CUDA device here")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation(run, kind, world):
    # The expected values are made on the host, in rank order, too.
    env = {"UNISONO_ALGORITHM": "direct"}
    run(world, "cuda_array_ranks:every_operation", kind, DTYPES, timeout=240, env=env)


@pytest.mark.parametrize("world", [2, 4])
def test_every_reduction(run, world):
    # The last in two shots, where there are more than two ranks.
    counts = [1, 1003, 300_007]
    run(world, "cuda_array_ranks:every_reduction", "dlpack", counts, timeout=240)


def test_where_devices_cannot_share_memory(run):
    env = {"UNISONO_WINDOW_BYTES": "0"}
    run(2, "cuda_array_ranks:every_operation", "both", DTYPES, env=env, timeout=240)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_in_the_order_of_the_stream(run, kind, world):
    run(world, "cuda_array_ranks:the_order_of_the_stream", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_given_comes_after_the_arrays_own(run, kind):
    run(2, "cuda_array_ranks:a_stream_of_ones_own", kind)


@pytest.mark.parametrize(
    "name", ["forms_of_a_stream", "refusals", "kept_alive", "closed_at_once", "results_of_its_own"]
)
def test_what_the_emulated_driver_shows_is_so(name):
    kinds = ["both"] if name == "results_of_its_own" else []
    run_ranks(2, f"cuda_array_ranks:{name}", *kinds)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_windows(run, kind, world):
    run(world, "cuda_window_ranks:exchange", kind)


@pytest.mark.parametrize("name", ["comes_after_the_stream", "of_one_rank"])
def test_what_the_emulated_driver_shows_of_windows_is_so(run, name):
    run(2, f"cuda_window_ranks:{name}")


def test_a_peer_of_a_window_that_is_killed(run):
    results = run(3, "cuda_window_ranks:peer_dies", 1, check=False, timeout=120)
    assert [result.exit_code for result in results] == [0, -9, 0], "\n".join(
        result.report() for result in results
    )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_groups_leave_nothing_on_the_device(run, tmp_path, world):
    run(world, "cuda_memory_ranks:forms_groups", str(tmp_path), 20, timeout=120)


def test_a_peer_that_is_killed_leaves_nothing_on_the_device(tmp_path):
    results = run_ranks(
        4, "cuda_memory_ranks:loses_a_peer", str(tmp_path), check=False, timeout=120
    )
    assert [result.exit_code for result in results] == [0, 0, -9, 0], "\n".join(
        result.report() for result in results
    )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_program_in_c(tmp_path: Path, world):
    try:
        program = compile_program(SOURCES / "cuda.c", tmp_path / "cuda")
    except MissingError as reason:
        pytest.skip(str(reason))
    run_programs(world, [program], timeout=120)


def start(run, module: str, libraries: list[str], world: int, name: str) -> None:
    """Run ranks that use a library, if one is here. It is not imported: that opens the device."""
    if not any(map(importlib.util.find_spec, libraries)):
        pytest.skip(f"{' or '.join(libraries)} is not installed")
    # Otherwise JAX takes three quarters of the device's memory in each process.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run(world, f"{module}:{name}", env=env, timeout=120)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "name", ["operations", "current_stream", "graph", "kernels_around", "without_gaps"]
)
def test_cupy(run, name, world):
    start(run, "cupy_ranks", ["cupy"], world, name)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ["operations", "computed_late"])
def test_jax(run, name, world):
    start(run, "jax_ranks", ["jax_cuda13_plugin", "jax_cuda12_plugin"], world, name)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ["operations", "current_stream"])
def test_tensors_of_torch(run, name, world):
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch finds no GPU here (torch.cuda.is_available())")
    start(run, "tensor_ranks", ["torch"], world, name)
