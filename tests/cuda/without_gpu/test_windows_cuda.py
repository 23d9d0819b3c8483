"""Windows over arrays on CUDA devices, over the emulated driver."""

from __future__ import annotations

import subprocess

import cuda_emulator
import pytest
from cuda_arrays import KINDS
from ranks import run_ranks

# The program after it is the first process of a new PID namespace, as in a container.
CONTAINED = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture(scope="module")
def run():
    """Run a function of cuda_window_ranks on ranks that find the emulated driver."""
    try:
        cuda_emulator.folder()
    except cuda_emulator.MissingError as reason:
        pytest.skip(str(reason))

    def start(world: int, function: str, *arguments: object, options=None, **driver):
        env = cuda_emulator.environment(**driver)
        target = f"cuda_window_ranks:{function}"
        return run_ranks(world, target, *arguments, env=env, timeout=120, **(options or {}))

    return start


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_write_to_each_others_arrays(run, kind):
    run(3 if kind == "both" else 2, "exchange", kind, delay="copy:1000")


def test_a_rank_alone_has_a_window(run):
    run(1, "exchange", "both")


def test_ranks_with_a_device_each(run):
    run(2, "exchange", "both", devices=2)


def test_a_window_comes_after_the_arrays_stream(run):
    run(2, "comes_after_the_stream")


def test_some_arrays_are_on_the_host(run):
    run(3, "of_one_rank")


def test_between_hosts(run):
    run(3, "exchange", "both", "not on this host", "aba", delay="copy:1000")


@pytest.mark.parametrize("ipc", ["refuse-import", "refuse-export"])
def test_where_the_driver_shares_no_memory(run, ipc):
    run(2, "exchange", "both", "of another process|only memory of cuMemAlloc", ipc=ipc)


def test_where_processes_do_not_see_each_other(run):
    try:
        subprocess.run([*CONTAINED, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"PID namespaces cannot be made here: {error}")
    # The number of one rank is that of a process which the other one sees.
    contained = {"prefix": lambda rank: CONTAINED * rank}
    run(2, "exchange", "both", "PID and IPC namespaces", options=contained)


def test_the_end_of_a_process_ends_the_waits_of_the_others(run):
    results = run(3, "peer_dies", 1, options={"check": False})
    assert results[1].exit_code == -9
    for result in (results[0], results[2]):
        assert result.ok, result.report()
        text, took = result.value
        assert "wait_signal of rank 1" in text
        assert took < 4
