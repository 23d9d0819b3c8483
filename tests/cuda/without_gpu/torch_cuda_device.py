"""CUDA tensors of torch on the emulated driver, for tests on machines without a GPU.

``build`` makes what they need: the emulated driver, and ``tests/cuda/torch_device/``, which puts it
under c10's CUDA device. A rank calls ``start``, and then has tensors by ``tensor`` and looks at
them by ``values``.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import cuda_emulator
import pytest

ROOT = Path(__file__).resolve().parents[3]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
SOURCE = ROOT / "tests" / "cuda" / "torch_device"
BUILD_LIMIT = 600.0


def build(**settings: object) -> dict[str, str]:
    """Build the driver and the device; return the environment of ranks that use them.

    ``settings`` are the driver's. With ``EMULATED_DRIVER``, the path of the driver, instead of
    ``LD_LIBRARY_PATH`` the device is there, but code that looks for a driver finds none.
    """
    try:
        variables = cuda_emulator.environment(**settings)
    except cuda_emulator.MissingError as missing:
        pytest.skip(f"the emulated CUDA driver cannot be built: {missing}")
    # Registration comes when `start` says so, also with a torch that does it at import.
    return variables | {
        "EMULATED_DEVICE": str(_build_device()),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


@functools.cache
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

# Expected values are computed there: the device computes nothing.
PLACE = "cpu"


def start(
    timeout: float = 60.0, *, first_call: bool = True, backend: str = "unisono", **options: Any
) -> tuple[int, int]:
    """Put the emulated device under torch, and form the default group over CPU and CUDA.

    Its first call on the device, which asks the driver for much that may wait for the device, has
    been made then. The backend may be gloo, whose place unisono takes then.
    """
    import torch
    import torch.distributed as dist

    import unisono.torch

    torch.ops.load_library(os.environ["EMULATED_DEVICE"])
    torch.ops.emulated.install()
    # After unisono's groups have ended, which they do last: the driver's report is about these.
    atexit.register(torch.ops.emulated.end)
    # Answers that torch's Python code wants from the runtime library.
    torch.cuda.get_device_capability = lambda _device=None: (8, 0)
    torch.accelerator.device_count = lambda: int(os.environ.get("CUDA_EMULATOR_DEVICES", "1"))
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    unisono.torch._may_have_gpu = lambda: True
    unisono.torch.register()
    if backend == "gloo":
        unisono.torch.replace_gloo()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **options)
    if first_call:
        dist.all_reduce(tensor(torch.ones(1)))
    return dist.get_rank(), dist.get_world_size()


def statistics() -> dict[str, int]:
    """The emulated driver's counts in this process: its report at the moment."""
    driver = ctypes.CDLL("libcuda.so.1")
    text = ctypes.create_string_buffer(1 << 20)
    driver.cuEmulatorStatistics(text, ctypes.c_size_t(len(text)))
    return json.loads(text.value)


def tensor(source: Any, device: int = 0) -> Any:
    """A CUDA tensor with the values of a tensor of the CPU, in the order of the current stream."""
    import torch

    made = torch.ops.emulated.make(source.shape, source.dtype, device)
    torch.ops.emulated.upload(made, source)
    return made


def values(source: Any) -> Any:
    """The content of a CUDA tensor once the current stream has got here."""
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


def own_device() -> Any:
    """Return the device of this rank."""
    import torch

    return torch.device("cuda:0")


def upload(target: Any, source: Any) -> None:
    """Fill a CUDA tensor with the values of one of the CPU, in the order of the current stream."""
    import torch

    torch.ops.emulated.upload(target, source)


def synchronize() -> None:
    """Wait for all streams of the device."""
    import torch

    torch.ops.emulated.synchronize(0)


class Graph:
    """Calls that have been captured."""

    number: int

    def replay(self) -> None:
        """Put them into the current stream once more."""
        import torch

        torch.ops.emulated.replay(self.number, 0)


@contextmanager
def capture() -> Iterator[Graph]:
    """Calls inside become a graph, whole after the block."""
    import torch

    graph = Graph()
    with stream():
        torch.ops.emulated.synchronize(0)
        torch.ops.emulated.begin_capture(0)
        yield graph
        graph.number = torch.ops.emulated.end_capture(0)


def answer_for_a_mesh() -> None:
    """Give the answers that a mesh wants from torch's own device, which is not there."""
    import torch

    torch.cuda.is_available = torch.accelerator.is_available = lambda: True
    torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count = lambda: 1
