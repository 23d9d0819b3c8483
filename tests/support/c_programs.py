"""Build libunisono and programs in C and C++ against it, and run them as ranks.

``run_programs`` starts one process per rank with the variables torchrun would set, and enforces a
hard limit. A rank that outlives it is reported with the last lines it wrote, which say what it was
in, and with what the kernel knows its threads to wait for; then it is killed, with what it started
and nothing else.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ranks import free_port, left_in_the_driver, reporting

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = CHECKOUT / "tests" / "c"
INCLUDE = CHECKOUT / "include"
WARNINGS = ("-Wall", "-Wextra", "-pedantic", "-Werror")
BUILD_SECONDS = 600
OUTPUT_LINES = 30
# The programs may leave memory and streams that they made in the driver, but none of these.
LEFT_IN_THE_DRIVER = (
    "registrations",
    "imports",
    "freed_while_imported",
    "unfinished_operations",
    "events",
    "error",
)
# How long the others may take to notice that one has failed, before they are killed.
GRACE = 15.0


class MissingError(Exception):
    """Something cannot be tested here; the message says why."""


@functools.cache
def library() -> Path:
    """Build libunisono, or take the one that is installed, and return the folder it lies in."""
    cargo = shutil.which(os.environ.get("CARGO", "cargo"))
    if cargo is None:
        from unisono import _c

        installed = _c.FOLDER / "lib"
        if (installed / "libunisono.so").exists():
            return installed
        raise MissingError("cargo is not installed, nor a C library with the package")
    target = Path(os.environ.get("CARGO_TARGET_DIR", str(CHECKOUT / "target"))).resolve()
    command = ["sh", str(CHECKOUT / "rust/capi/build.sh"), str(target / "c")]
    done = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS
    )
    assert done.returncode == 0, f"build.sh failed:\n{done.stderr}"
    return target / "c"


@functools.cache
def compiler(name: str) -> str:
    """Find a compiler, or raise `MissingError`."""
    path = shutil.which(name)
    if path is None:
        raise MissingError(f"{name} is not installed")
    return path


def compile_program(source: Path, program: Path, *flags: str, driver: str = "") -> Path:
    """Compile and link one file against libunisono, with every warning an error."""
    is_cxx = source.suffix == ".cpp"
    driver = driver or ("g++" if is_cxx else "gcc")
    standard = [] if any(flag.startswith("-std=") for flag in flags) else ["-std=gnu99"]
    if is_cxx and standard:
        standard = ["-std=c++17"]
    folder = library()
    command = [compiler(driver), *standard, *WARNINGS, "-g", *flags, "-I", str(INCLUDE)]
    command += [str(source), "-o", str(program), f"-L{folder}", "-lunisono"]
    command += [f"-Wl,-rpath,{folder}", "-lm", "-ldl", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return program


def check_syntax(name: str, text: str, driver: str, *flags: str) -> None:
    """Compile a text that includes a header, with every warning an error."""
    with tempfile.TemporaryDirectory(prefix="unisono-c-") as folder:
        source = Path(folder) / name
        source.write_text(text)
        command = [compiler(driver), *flags, *WARNINGS, "-fsyntax-only", "-I", str(INCLUDE)]
        done = subprocess.run(
            [*command, str(source)], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


@dataclass
class Ended:
    """How one rank ended: its exit code (negative for a signal), and all it wrote."""

    rank: int
    exit_code: int
    output: str


def run_programs(
    world: int,
    command: Sequence[str | Path],
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    expected: Mapping[int, int] | None = None,
) -> list[Ended]:
    """Run ``command`` on ``world`` ranks and return how each ended, in rank order.

    Fails unless each ends with 0, or with what ``expected`` says of its rank.
    """
    port = str(free_port())
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="unisono-c-") as name:
        outputs = [Path(name) / f"output-{rank}" for rank in range(world)]
        try:
            for rank, output in enumerate(outputs):
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    **reporting(Path(name), rank),
                }
                with output.open("wb") as file:
                    process = subprocess.Popen(
                        [str(word) for word in command],
                        env={**os.environ, **variables, **(env or {})},
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                processes.append(process)
            expected = expected or {}
            late = _wait(processes, timeout, expected)
        finally:
            for process in processes:
                # Until it is reaped no other process can get its pid, nor its group.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        ended = [
            Ended(rank, process.returncode, outputs[rank].read_text(errors="replace"))
            for rank, process in enumerate(processes)
        ]
        ended_well = {one.rank: one.exit_code == 0 for one in ended}
        left = left_in_the_driver(Path(name), ended_well, kinds=LEFT_IN_THE_DRIVER)
    wrong = [one for one in ended if one.exit_code != expected.get(one.rank, 0)]
    if wrong or late:
        raise AssertionError("\n".join([" ".join(map(str, command)), *_reports(ended, late)]))
    assert not left, "\n".join([f"{command}: left in the emulated CUDA driver", *left])
    return ended


def _wait(
    processes: list[subprocess.Popen[bytes]], timeout: float, expected: Mapping[int, int]
) -> dict[int, str]:
    """Wait for all. Returns what those that had to be given up on were in."""
    deadline, shortened = time.monotonic() + timeout, False
    while running := [rank for rank, process in enumerate(processes) if process.poll() is None]:
        if time.monotonic() > deadline:
            return {rank: _threads(processes[rank].pid) for rank in running}
        failed = any(
            process.returncode not in (None, expected.get(rank, 0))
            for rank, process in enumerate(processes)
        )
        if failed and not shortened:
            deadline, shortened = min(deadline, time.monotonic() + GRACE), True
        time.sleep(0.005)
    return {}


def _threads(pid: int) -> str:
    """The waits of a process's threads, as far as the kernel tells."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            name, waits = (task / "comm").read_text().strip(), (task / "wchan").read_text()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        lines.append(f"thread {name}: state {state}, in {waits or '?'}")
    return "\n    ".join(lines)


def _reports(ended: list[Ended], late: Mapping[int, str]) -> list[str]:
    reports = []
    for one in ended:
        how = f"exit code {one.exit_code}"
        if one.rank in late:
            how = f"outlived its time, killed\n    {late[one.rank]}"
        tail = "\n    ".join(one.output.splitlines()[-OUTPUT_LINES:])
        reports.append(f"rank {one.rank}: {how}\n  last output:\n    {tail}")
    return reports
