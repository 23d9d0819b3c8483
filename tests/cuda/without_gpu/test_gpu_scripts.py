"""The tests that need a GPU: what can be seen of them without one.

Without a device all of them are collected, and skip. Over the emulated driver those run that need
neither CuPy, JAX nor torch's CUDA.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cuda_emulator
import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
ARRAYS = "test_arrays_cuda.py::test_"
SANITIZER = "test_sanitizer.py::test_arrays[memcheck]"

# In the place of compute-sanitizer: runs the program, and reports what the test asks for.
STAND_IN = """#!{python}
import subprocess, sys
command = sys.argv[sys.argv.index({python!r}):]
status = subprocess.run(command).returncode
print({report!r})
sys.exit(status or {found})
"""


def run_tests(*tests: str, **variables: str) -> tuple[int, str]:
    """Run tests of with_gpu in a pytest of their own; return its status and what it printed."""
    paths = [f"tests/cuda/with_gpu/{test}" for test in tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *paths],
        cwd=CHECKOUT,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return done.returncode, done.stdout + done.stderr


def outcomes(output: str) -> dict[str, int]:
    last = output.strip().splitlines()[-1]
    return {
        name: int(count) for count, name in re.findall(r"(\d+) ([a-z]+)", last.split(" in ")[0])
    }


@pytest.fixture(scope="module")
def emulated() -> dict[str, str]:
    try:
        return cuda_emulator.environment()
    except cuda_emulator.MissingError as reason:
        pytest.skip(str(reason))


def test_without_a_gpu_they_skip_and_say_why() -> None:
    status, output = run_tests("", CUDA_VISIBLE_DEVICES="")
    assert status == 0, output
    assert outcomes(output).keys() == {"skipped"}, output
    assert "there is no CUDA device here" in output
    reasons = "there is no CUDA device here|torch finds no GPU here|torch 2.11|could not import"
    for line in output.splitlines():
        assert not line.startswith("SKIPPED") or re.search(reasons, line), line


@pytest.mark.parametrize(
    "tests",
    [
        [f"{ARRAYS}every_operation[one device-both-2]"],
        [f"{ARRAYS}every_reduction[one device-4]"],
        [f"{ARRAYS}groups_leave_nothing_on_the_device[one device-2]"],
        [f"{ARRAYS}a_peer_that_is_killed_leaves_nothing_on_the_device"],
    ],
)
def test_over_the_emulated_driver_they_pass(emulated: dict[str, str], tests: list[str]) -> None:
    status, output = run_tests(*tests, **emulated)
    assert status == 0, output
    assert outcomes(output) == {"passed": len(tests)}, output


@pytest.mark.parametrize(
    "report, found, outcome",
    [
        ("========= ERROR SUMMARY: 0 errors", 0, "passed"),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, "passed"),
        ("========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 1 error", 9, "failed"),
        ("========= ERROR SUMMARY: 0 errors", 9, "failed"),
        ("nothing at all", 0, "failed"),
        ("========= Error: Device not supported", 1, "skipped"),
    ],
)
def test_what_the_sanitizer_says_is_heard(
    emulated: dict[str, str], tmp_path: Path, report: str, found: int, outcome: str
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(STAND_IN.format(python=sys.executable, report=report, found=found))
    program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    _, output = run_tests(SANITIZER, **emulated, PATH=path)
    assert outcomes(output) == {outcome: 1}, output
    if outcome == "skipped":
        assert "compute-sanitizer does not support this device" in output
