"""Finds the torch to build for, or fetches what is needed of it from torch's own wheels.

    python -m unisono_build.torches [--machine aarch64] 2.11.0 2.15.0

fetches, and prints a folder for each version, fit for ``UNISONO_TORCH_DIR``: torch's headers, the
two libraries that define what the backend derives from, and ``version.py``. Nothing is installed,
and what was fetched is kept in ``target/torch``: a wheel of torch is most of a gigabyte.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from unisono_build import toolchain

ROOT = Path(__file__).resolve().parent.parent.parent
# The oldest torch 2 that csrc/ is written for; rust/torch/build.rs has it too.
OLDEST_MINOR = 11
_HEADER = "include/torch/headeronly/version.h"
_LIBRARIES = ("libtorch_cpu.so", "libc10.so")
# Any Python will do: its part of a wheel is not unpacked. Every supported torch has wheels for this
# one.
_PYTHON = "3.12"


def find() -> Path | None:
    """Return the folder of the torch that a build from source is for; None if there is none.

    ``UNISONO_TORCH_DIR`` names it (``none``: build without). Else it is the one that this Python
    imports. A front end that isolates the build hides that one; the environment it installs into
    still is the one this interpreter belongs to, or the one that is active.
    """
    named = os.environ.get("UNISONO_TORCH_DIR")
    if named is not None:
        return None if named in ("", "none") else Path(named)
    folders = [
        *map(Path, sys.path),
        Path(sysconfig.get_path("platlib")),
        Path(sysconfig.get_path("purelib")),
    ]
    active = os.environ.get("VIRTUAL_ENV")
    if active:
        minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
        folders.append(Path(active) / "lib" / minor / "site-packages")
    for folder in folders:
        torch = folder / "torch"
        if (torch / "lib" / "libtorch_cpu.so").exists() and minor_of(torch) is not None:
            return torch
    return None


def minor_of(torch: Path) -> int | None:
    """Return N of the torch 2.N in this folder; None if it is too old, or has no headers."""
    header = torch / _HEADER
    if not header.exists():
        return None
    numbers = dict(
        re.findall(r"^#define TORCH_VERSION_(MAJOR|MINOR) (\d+)", header.read_text(), re.MULTILINE)
    )
    minor = int(numbers.get("MINOR", 0))
    return minor if numbers.get("MAJOR") == "2" and minor >= OLDEST_MINOR else None


def door_of(torch: Path) -> str:
    """Return the file name of the door for the torch in this folder.

    The releases of a minor version share one. Anything else (a nightly, a build from torch's
    sources before a release) may differ from day to day, and gets a name of its own. So does the
    door for a free-threaded Python. ``unisono._native`` looks for these names.
    """
    found = re.search(r"^__version__ = '(.+)'", (torch / "version.py").read_text(), re.MULTILINE)
    version = found[1] if found else ""
    release = re.match(r"(2\.\d+)\.\d+(rc\d+)?(\+|$)", version)
    name = f"torch-{release[1] if release else version}.so"
    if toolchain.IS_FREE_THREADED:
        return f"core-cp{sys.version_info.major}{sys.version_info.minor}t-{name}"
    return f"core-{name}"


def fetch(version: str, machine: str, cache: Path = ROOT / "target" / "torch") -> Path:
    """Return the folder of torch `version` for `machine`, downloaded unless it is in the cache."""
    folder = cache / f"{version}-{machine}"
    if not (folder / "torch").is_dir():
        print(
            f"fetching torch {version} for {machine} (a large download)",
            file=sys.stderr,
            flush=True,
        )
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            wheel = _download(version, machine, Path(scratch))
            _unpack(wheel, Path(scratch) / "unpacked")
            shutil.rmtree(folder, ignore_errors=True)
            (Path(scratch) / "unpacked").rename(folder)
    return folder / "torch"


def _download(version: str, machine: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--python-version", _PYTHON, "--dest", str(folder)]
    command += ["--platform", f"manylinux_2_28_{machine}", f"torch=={version}"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    wanted = {f"torch/lib/{library}" for library in _LIBRARIES} | {"torch/version.py"}
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n in wanted or n.startswith("torch/include/")]
        missing = wanted.difference(names)
        if missing:
            raise SystemExit(f"{wheel.name} does not hold {', '.join(sorted(missing))}")
        archive.extractall(folder, names)


def main() -> None:
    """Fetch the versions that the command line names."""
    parser = argparse.ArgumentParser(description="Fetch torch's headers and libraries.")
    parser.add_argument("--machine", default=platform.machine(), help="x86_64 or aarch64")
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="such as 2.15.0")
    chosen = parser.parse_args()
    for version in chosen.versions:
        print(fetch(version, chosen.machine), flush=True)


if __name__ == "__main__":
    main()
