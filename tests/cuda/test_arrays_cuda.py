"""Arrays on a real CUDA device through the Python door: CuPy's, and those of the driver alone."""

from __future__ import annotations

import ctypes
import importlib.util

import pytest
from cuda_arrays import KINDS
from ranks import run_ranks

WORLDS = [1, 2, 4, 8]
DTYPES = ["float32", "float16", "bfloat16", "int64", "uint8", "complex64"]


def devices() -> int:
    """How many devices there are; the driver is not kept in use by this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


pytestmark = pytest.mark.skipif(devices() == 0, reason="there is no CUDA device here")
with_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"
)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation(kind, world):
    run_ranks(world, "cuda_array_ranks:every_operation", kind, DTYPES, timeout=180)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_in_the_order_of_the_stream(kind, world):
    run_ranks(world, "cuda_array_ranks:the_order_of_the_stream", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_given_comes_after_the_arrays_own(kind):
    run_ranks(2, "cuda_array_ranks:a_stream_of_ones_own", kind)


@pytest.mark.parametrize("name", ["forms_of_a_stream", "refusals", "kept_alive"])
def test_what_the_emulated_driver_shows_is_so(name):
    run_ranks(2, f"cuda_array_ranks:{name}")


@with_cupy
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "name", ["operations", "current_stream", "graph", "kernels_around", "without_gaps"]
)
def test_cupy(name, world):
    run_ranks(world, f"cupy_ranks:{name}", timeout=120)
