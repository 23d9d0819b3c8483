"""CUDA tensors of torch on the emulated driver, for tests on machines without a GPU.

``build`` makes what they need: the driver (a crate of this workspace) in a folder that goes in
front of the loader's path, and ``tests/torch_cuda/``, which puts it under c10's CUDA device. A rank
calls ``start``, and then has tensors by ``tensor`` and looks at them by ``values``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
SOURCE = ROOT / "tests" / "torch_cuda"
CRATE = "unisono-cuda-emulator"
BUILD_LIMIT = 600.0


def build() -> dict[str, str]:
    """Build both libraries and return the environment of ranks that use them.

    With ``EMULATED_DRIVER``, the path of the driver, instead of ``LD_LIBRARY_PATH`` the device is
    there, but whoever looks for a driver finds none.
    """
    driver = _build_driver()
    library = _build_device()
    path = os.pathsep.join(filter(None, [str(driver), os.environ.get("LD_LIBRARY_PATH")]))
    return {
        "LD_LIBRARY_PATH": path,
        "EMULATED_DEVICE": str(library),
        # Registration comes when `start` says so, also with torch that does it at import.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def _build_driver() -> Path:
    cargo = os.environ.get("CARGO", "cargo")
    if shutil.which(cargo) is None:
        pytest.skip("cargo is not installed, and the emulated CUDA driver is built by it")
    command = [cargo, "build", "--release", "-p", CRATE, "--target-dir", str(TARGET)]
    _run(command, cwd=ROOT)
    folder = TARGET / "cuda-emulator"
    folder.mkdir(exist_ok=True)
    for name in ("libcuda.so", "libcuda.so.1"):
        link = folder / name
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(TARGET / "release" / "libunisono_cuda_emulator.so")
    return folder


def _build_device() -> Path:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed, and the emulated CUDA device is built by it")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    torch = Path(spec.submodule_search_locations[0])
    sources = sorted(SOURCE.glob("*.?pp"))
    digest = hashlib.sha256((torch / "version.py").read_bytes())
    for source in sources:
        digest.update(source.read_bytes())
    library = TARGET / "torch-cuda" / f"device-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    beside = library.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-Wall", "-Werror"]
    command += ["-isystem", str(torch / "include"), str(SOURCE / "device.cpp"), "-o", str(beside)]
    command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ldl"]
    _run(command)
    beside.rename(library)
    return library


def _run(command: list[str], **options: Any) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BUILD_LIMIT, check=False, **options
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


# In a rank


def start(timeout: float = 60.0, **options: Any) -> tuple[int, int]:
    """Put the emulated device under torch, and form the default group over CPU and CUDA."""
    import torch
    import torch.distributed as dist

    import unisono.torch

    torch.ops.load_library(os.environ["EMULATED_DEVICE"])
    torch.ops.emulated.install()
    unisono.torch._may_have_gpu = lambda: True
    unisono.torch.register()
    dist.init_process_group("unisono", timeout=timedelta(seconds=timeout), **options)
    return dist.get_rank(), dist.get_world_size()


def tensor(source: Any, device: int = 0) -> Any:
    """A CUDA tensor with the values of a tensor of the CPU, in the order of the current stream."""
    import torch

    made = torch.ops.emulated.make(source.shape, source.dtype, device)
    torch.ops.emulated.upload(made, source)
    return made


def values(source: Any) -> Any:
    """What a CUDA tensor holds once the current stream has got here."""
    import torch

    return torch.ops.emulated.download(source)


@contextmanager
def stream(device: int = 0) -> Iterator[int]:
    """A new stream, current inside the block."""
    import torch

    made = torch.ops.emulated.new_stream(device)
    before = torch.ops.emulated.use_stream(device, made)
    try:
        yield made
    finally:
        torch.ops.emulated.use_stream(device, before)


@contextmanager
def shut_gate(device: int = 0) -> Iterator[int]:
    """A gate at which the current stream stops until ``torch.ops.emulated.open``, or the end."""
    import torch

    gate = torch.ops.emulated.new_gate()
    torch.ops.emulated.stop_at(gate, device)
    try:
        yield gate
    finally:
        torch.ops.emulated.open(gate)
