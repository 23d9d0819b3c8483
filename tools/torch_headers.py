"""Fetches what is compiled and linked against from torch's own wheels, without installing them.

    python tools/torch_headers.py [--machine aarch64] 2.11.0 2.15.0

prints a folder for each version, fit for ``UNISONO_TORCH_DIR``: torch's headers, its two libraries that
define what the backend derives from, and ``version.py``. They are kept in a cache (``UNISONO_TORCH_CACHE``,
by default ``target/torch``), since a wheel of torch is most of a gigabyte.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("libtorch_cpu.so", "libc10.so")
# Any Python will do: its part of a wheel is not unpacked. Every supported torch has wheels for this one.
PYTHON = "3.12"


def cache() -> Path:
    """Return the folder that keeps what was fetched."""
    chosen = os.environ.get("UNISONO_TORCH_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "torch"


def fetch(version: str, machine: str) -> Path:
    """Return the folder of torch `version` for `machine`, downloaded unless it is in the cache."""
    folder = cache() / f"{version}-{machine}"
    if not (folder / "torch").is_dir():
        print(f"fetching torch {version} for {machine} (a large download)", file=sys.stderr, flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            wheel = _download(version, machine, Path(scratch))
            _unpack(wheel, Path(scratch) / "unpacked")
            shutil.rmtree(folder, ignore_errors=True)
            (Path(scratch) / "unpacked").rename(folder)
    return folder / "torch"


def _download(version: str, machine: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--dest", str(folder)]
    command += ["--platform", f"manylinux_2_28_{machine}", f"torch=={version}"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    wanted = {f"torch/lib/{library}" for library in LIBRARIES} | {"torch/version.py"}
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
