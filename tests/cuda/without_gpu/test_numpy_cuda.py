"""Arrays on CUDA devices through the Python door, over the emulated driver."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence

import cuda_emulator
import pytest
from cuda_arrays import KINDS
from ranks import RankResult, run_ranks

WORLDS = [1, 2, 3]
DTYPES = ["float32", "float16", "int64", "uint8", "complex64"]
# Those that __cuda_array_interface__ can say only by the name of the array's dtype.
SMALL = ["bfloat16", "float8_e4m3fn"]


@pytest.fixture(scope="module")
def run():
    """Run a function of cuda_array_ranks on ranks that find the emulated driver."""
    try:
        cuda_emulator.folder()
    except cuda_emulator.MissingError as reason:
        pytest.skip(str(reason))

    def start(
        world: int,
        function: str,
        *arguments: object,
        prefix: Callable[[int], Sequence[str]] | None = None,
        **settings: object,
    ) -> list[RankResult]:
        env = cuda_emulator.environment(**settings)
        target = f"cuda_array_ranks:{function}"
        return run_ranks(world, target, *arguments, env=env, timeout=120, prefix=prefix)

    return start


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation(run, kind, world):
    run(world, "every_operation", kind, [*DTYPES, *SMALL] if world == 2 else DTYPES[:1])


@pytest.mark.parametrize("world", [2, 3])
def test_every_reduction(run, world):
    run(world, "every_reduction", "dlpack", [1, 1003])


def test_where_devices_cannot_share_memory(run):
    said_why(run(2, "every_operation", "both", DTYPES[:2], ipc="refuse-import"))


# The program after it is the first process of a new PID namespace, as in a container.
CONTAINED = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def test_where_processes_do_not_see_each_other(run):
    try:
        subprocess.run([*CONTAINED, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"PID namespaces cannot be made here: {error}")
    results = run(2, "every_operation", "both", DTYPES[:2], prefix=lambda _rank: CONTAINED)
    said_why(results)
    # One whose number is that of a process which can be seen there.
    said_why(run(2, "every_operation", "both", DTYPES[:1], prefix=lambda rank: CONTAINED * rank))


def said_why(results):
    """Collectives went through host memory, and every rank has said so once."""
    for result in results:
        warnings = [line for line in result.output.splitlines() if "WARN" in line]
        assert len(warnings) == 1, result.report()
        assert "go through host memory" in warnings[0]
        assert "PID and IPC namespaces" in warnings[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_made_by_the_arrays_library_or_not_at_all(run, kind):
    run(2, "results_of_its_own", kind)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_in_the_order_of_the_stream(run, kind, world):
    run(world, "the_order_of_the_stream", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_given_comes_after_the_arrays_own(run, kind):
    run(2, "a_stream_of_ones_own", kind)


@pytest.mark.parametrize("world", [1, 2])
def test_forms_of_a_stream(run, world):
    run(world, "forms_of_a_stream")


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_wrong_is_said(run, world):
    run(world, "refusals", devices=2)


def test_arrays_are_kept_until_the_stream_has_got_past_them(run):
    run(2, "kept_alive")


@pytest.mark.parametrize("world", WORLDS)
def test_closing_waits_for_the_stream(run, world):
    run(world, "closed_at_once")


def test_without_a_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        run_ranks(1, "cuda_array_ranks:without_a_driver")
    else:
        pytest.skip("there is a CUDA driver here")
