"""Threads that call at once, on a Python with a GIL and on one without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ranks import run_ranks
from test_numpy_collectives import TRANSPORTS, environment


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_threads_with_a_communicator_each(transport):
    run_ranks(3, "numpy_threads_ranks:one_each", env=environment(transport))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_threads_share_a_communicator(transport):
    run_ranks(2, "numpy_threads_ranks:shared", env=environment(transport))


def test_threads_join_and_leave(tmp_path):
    run_ranks(2, "numpy_threads_ranks:come_and_go", str(tmp_path))


def test_threads_wait_for_one_operation():
    run_ranks(2, "numpy_threads_ranks:wait_for_one")


def test_an_abort_ends_the_calls_of_all_threads():
    run_ranks(2, "numpy_threads_ranks:aborted")


def test_arrays_are_given_up_once():
    run_ranks(2, "numpy_threads_ranks:given_up")


def test_no_gil_comes_back():
    """An import of a module that needs a GIL brings it back, for the whole process."""
    if "t" not in sys.abiflags:
        pytest.skip("this Python has a GIL (make test-free-threaded FREE_THREADED=python3.14t)")
    program = (
        "import sys, numpy\n"
        "before = sys._is_gil_enabled()\n"
        "import unisono\n"
        "with unisono.init(rank=0, world_size=1) as comm:\n"
        "    comm.all_reduce(numpy.ones(3))\n"
        "print(before, sys._is_gil_enabled())"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    variables.pop("PYTHON_GIL", None)
    said = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=variables,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (said.stdout, said.stderr) == ("False False\n", "")
