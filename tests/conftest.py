"""Shared by all Python tests: which of them are quick or slow, and what is being tested."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

# pytest has put this folder on the path, where `cuda` and `wheel` would pass for packages.
sys.path.remove(str(Path(__file__).resolve().parent))

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "unisono"
# `make test-slow` runs these and `make test` does not: programs of others, packages, and the tests
# of the tools. Files, folders and single tests.
SLOW = (
    "tests/cuda/without_gpu/test_cuda_kernels.py",
    "tests/cuda/without_gpu/test_gpu_scripts.py",
    "tests/python/c/test_c_install.py",
    "tests/python/frameworks/",
    "tests/python/hosts/test_hosts_many.py::test_two_hundred_hosts_form_a_group",
    "tests/python/launch/test_engines.py",
    "tests/python/launch/test_slurm.py",
    "tests/python/project/test_benchmarks.py",
    "tests/python/project/test_conda_package.py::test_the_package_is_built_and_installed",
    "tests/python/project/test_conformance_runner.py",
    "tests/python/project/test_install.py",
    "tests/python/project/test_release.py",
    "tests/python/project/test_site.py",
    "tests/python/project/test_tutorial.py::test_the_commands_print_what_the_page_says",
    "tests/python/torch/test_torch_as_gloo.py::test_a_program_that_nobody_here_wrote",
    "tests/python/torch/test_torch_profiler.py::test_hta_finds_them",
)
# Of the slow ones, those that hold times against a bound run alone: the others wait until they have
# ended.
BENCHMARKS = "tests/python/project/test_benchmarks.py"
QUIET = (
    f"{BENCHMARKS}::test_every_collective_is_right_on_every_peer",
    f"{BENCHMARKS}::test_ranks_do_not_wait_for_time_slices_beside_programs_that_compute",
    f"{BENCHMARKS}::test_time_of_children_is_not_that_of_others",
)
# `make check` runs these: of each door the tests that tell most in little time.
CHECK = {
    "tests/python/c/test_c.py": r"test_(programs|failures|a_rank|the_header_stands)",
    "tests/python/launch/test_launch.py": r"test_(every|a_rank|the_first)",
    "tests/python/numpy/test_numpy_arrays.py": "",
    "tests/python/numpy/test_numpy_failures.py": r"test_(bad|a_mismatch|timeouts|abort)",
    "tests/python/numpy/test_numpy_collectives.py": r"test_every_combination\[.*-[23]\]",
    "tests/python/project/test_layers.py": "",
    "tests/python/project/test_stub.py": "",
    "tests/python/project/test_versioning.py": "",
    "tests/python/torch/test_torch_collectives.py": "",
    "tests/python/torch/test_torch_errors.py": "",
    "tests/python/torch/test_torch_threads.py": "",
    "tests/python/torch/test_torch_types.py": "",
}


def pytest_report_header() -> list[str]:
    built = sorted(path.name for path in PACKAGE.glob("*.so"))
    torch = version("torch") if importlib.util.find_spec("torch") else "absent"
    python = ".".join(map(str, sys.version_info[:3]))
    return [f"unisono: Python {python}, torch {torch}, built: {', '.join(built) or 'nothing'}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path, _, name = item.nodeid.partition("::")
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
            if item.nodeid.startswith(QUIET):
                item.add_marker(pytest.mark.quiet)
        elif path in CHECK and re.match(CHECK[path], name):
            item.add_marker(pytest.mark.check)


def pytest_configure() -> None:
    named = [name.partition("::")[0] for name in (*SLOW, *QUIET, *CHECK)]
    gone = [name for name in named if not (ROOT / name).exists()]
    assert not gone, f"tests/conftest.py names files that do not exist: {gone}"
    # A process that a script starts in the background, or under nohup, ignores signals, and so do
    # the programs that it starts. A handler that does nothing is the same to this process, and
    # those programs do not inherit it.
    for ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, lambda *_: None)


@pytest.fixture
def alone_with_ray() -> Iterator[None]:
    """Let no other test start Ray meanwhile: its processes look for the only one of the host."""
    path = Path(tempfile.gettempdir()) / f"unisono-tests-ray-{os.getuid()}"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
