"""NVIDIA's compute-sanitizer finds nothing wrong in what ranks do on a real GPU.

One sanitizer watches a program that starts the ranks, and with it all of them. It runs where it is
installed: on the PATH, or with the toolkit in /usr/local/cuda.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from cuda_arrays import device_count

pytestmark = pytest.mark.skipif(device_count() == 0, reason="there is no CUDA device here")

LIMIT = 270
FOUND = 9
# The kernels have neither shared memory nor atomics, and one barrier that all threads of a block
# reach, so
# racecheck and synccheck have nothing to find.
# initcheck does not see what other processes write to memory that they share by IPC, and would
# take it for uninitialised; so it watches the way through the host.
TOOLS = {
    "memcheck": {},
    "initcheck": {"UNISONO_WINDOW_BYTES": "0"},
}


def watched(
    tool: str, *call: object, torch: bool = False, env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run two ranks under the sanitizer; return its exit status, and what it has printed."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    sanitizer = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    options = {"torch": torch, "timeout": LIMIT - 20}
    program = f"from ranks import run_ranks; run_ranks(2, *{call!r}, **{options!r})"
    command = [sanitizer, "--tool", tool, "--target-processes", "all"]
    command += ["--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        # Calls that the driver refuses are how it is asked, and what goes wrong is raised.
        command += ["--report-api-errors", "no"]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [*command, sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        # The ranks end with the program that has started them.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{tool} outlived {LIMIT} s:\n{output}")
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device")
    return process.returncode, output


def assert_clean(outcome: tuple[int, str]) -> None:
    status, output = outcome
    summaries = re.findall(r"SUMMARY: (\d+) (?:error|hazard)", output)
    assert summaries, output
    assert set(summaries) == {"0"}, output
    assert status == 0, output


@pytest.mark.parametrize("tool", TOOLS)
def test_arrays(tool: str) -> None:
    call = ("cuda_array_ranks:every_operation", "both", ["float32", "bfloat16"])
    assert_clean(watched(tool, *call, env=TOOLS[tool]))


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here (torch.cuda.is_available())")
    call = "test_torch_cuda:rank_reduces_to_the_same_bits"
    assert_clean(watched("memcheck", call, torch=True))


def test_it_sees_what_ranks_do() -> None:
    status, output = watched("memcheck", "cuda_faults:writes_beyond")
    assert status != 0, output
    assert "Invalid __global__ write" in output, output
