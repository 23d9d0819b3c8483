"""The emulated CUDA driver of tests/cuda/emulator, built and put where a loader finds it.

A process that is started with ``LD_LIBRARY_PATH`` as in ``environment()`` loads it as
``libcuda.so.1``. Nothing but the GPU is missing then: memory, streams, events and kernels behave as
CUDA says they do.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD_SECONDS = 600


class MissingError(Exception):
    """Why there is no emulator here."""


@functools.cache
def folder() -> Path:
    """Build the emulator and return the folder in which it is called libcuda.so.1."""
    cargo = shutil.which(os.environ.get("CARGO", "cargo"))
    if cargo is None:
        raise MissingError("cargo is not installed")
    target = Path(os.environ.get("CARGO_TARGET_DIR", str(CHECKOUT / "target"))).resolve()
    command = [cargo, "build", "--release", "-p", "unisono-cuda-emulator"]
    done = subprocess.run(
        [*command, "--target-dir", str(target)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_SECONDS,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    place = target / "cuda-emulator"
    place.mkdir(exist_ok=True)
    for name in ("libcuda.so", "libcuda.so.1"):
        link = place / f"{name}.{os.getpid()}"
        link.symlink_to(target / "release" / "libunisono_cuda_emulator.so")
        link.replace(place / name)
    return place


def environment(**settings: object) -> dict[str, str]:
    """Variables for a process that is to find the emulator; ``settings`` are the emulator's own."""
    paths = [str(folder()), os.environ.get("LD_LIBRARY_PATH", "")]
    variables = {"LD_LIBRARY_PATH": ":".join(filter(None, paths))}
    return variables | {f"CUDA_EMULATOR_{name.upper()}": str(settings[name]) for name in settings}
