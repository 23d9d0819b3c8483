"""The committed PTX of the CUDA kernels, under NVIDIA's compilers; none of them needs a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", CHECKOUT / "target"))


def load_build() -> ModuleType:
    path = CHECKOUT / "rust/core/src/transport/cuda/kernels/build.py"
    spec = importlib.util.spec_from_file_location("kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()
each_dtype = pytest.mark.parametrize("dtype", build.DTYPES)


def entry_points(ptx: str) -> list[str]:
    return sorted(re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE))


@each_dtype
def test_the_sources_compile_to_the_committed_modules(dtype: str) -> None:
    library = build.find_nvrtc(TARGET / "nvrtc")
    if library is None:
        pytest.skip(f"{build.REQUIREMENT} is not installed: make nvrtc")
    nvrtc = build.Nvrtc(library)
    if nvrtc.version != build.VERSION:
        pytest.skip(f"{library} is version {nvrtc.version}, the modules are made by another")
    assert nvrtc.compile(dtype) == build.committed(dtype), "run `make ptx`"


# One for each kind of code: the newer compiler warns of more, and compiles for newer GPUs alone.
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "uint8", "bool", "complex64"])
def test_the_compiler_beside_torch_accepts_the_sources(dtype: str) -> None:
    libraries = (build.find_nvrtc(Path(folder)) for folder in sys.path)
    library = next(filter(None, libraries), None)
    if library is None:
        pytest.skip("no NVRTC is installed in this environment (torch for CUDA brings one)")
    nvrtc = build.Nvrtc(library)
    architecture = next(n for n in nvrtc.architectures() if n >= build.ARCHITECTURE)
    ptx = nvrtc.compile(dtype, architecture)
    assert entry_points(ptx) == entry_points(build.committed(dtype))


def nvidia_tool(name: str) -> Path:
    """Find one of the programs that come with triton, or skip the test."""
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("triton is not installed, which brings ptxas")
    tool = Path(spec.submodule_search_locations[0]) / "backends/nvidia/bin" / name
    if not tool.exists():
        pytest.skip(f"this triton has no {name}")
    return tool


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@dataclass
class Compiled:
    """The code that ptxas makes of an entry point, as the driver will."""

    registers: int
    stack: int
    spilled: int
    instructions: list[str]

    def positions(self, name: str) -> list[int]:
        return [i for i, text in enumerate(self.instructions) if name in text]


def assemble(dtype: str, architecture: str, folder: Path) -> dict[str, Compiled]:
    cubin = folder / "module.cubin"
    ptx = folder / "module.ptx"
    ptx.write_text(build.committed(dtype))
    said = run(nvidia_tool("ptxas"), "-v", f"--gpu-name={architecture}", ptx, "-o", cubin)
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        said,
        re.DOTALL,
    )
    code = run(nvidia_tool("nvdisasm"), "-c", cubin)
    sections = dict(
        re.findall(
            r"^\s+\.section\s+\.text\.(\w+),(.*?)(?=^\s+\.section\s|\Z)",
            code,
            re.MULTILINE | re.DOTALL,
        )
    )
    return {
        name: Compiled(
            registers=int(registers),
            stack=int(stack),
            spilled=int(stores) + int(loads),
            instructions=re.findall(
                r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", sections[name], re.MULTILINE
            ),
        )
        for name, stack, stores, loads, registers in found
    }


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@each_dtype
def test_the_modules_become_lean_code(dtype: str, architecture: str, tmp_path: Path) -> None:
    compiled = assemble(dtype, architecture, tmp_path)
    assert sorted(compiled) == entry_points(build.committed(dtype))
    for name, entry in compiled.items():
        what = f"{name} of {dtype}"
        # 64 keep four blocks of 256 threads on a multiprocessor. Sums of 16-bit floats may take
        # more, since they look after a failure and give their result to others, and keep three.
        sums = {f"unisono_reduce_{op}" for op in ("sum", "prod", "avg")}
        most = 72 if dtype in ("float16", "bfloat16") and name in sums else 64
        assert entry.registers <= most, f"{what} takes {entry.registers} registers"
        # These keep one address aside.
        aside = ("unisono_copy", "unisono_reduce_max", "unisono_reduce_min")
        assert max(entry.spilled, entry.stack) <= 8 * (name in aside), f"{what} spills"
        # They look after a failure or find places, and move nothing.
        if name not in ("unisono_poison", "unisono_look", "unisono_place"):
            assert entry.positions("LDG.E.128"), f"{what} loads no vectors"
            assert entry.positions("STG.E.128"), f"{what} stores no vectors"
        fused = entry.positions("FFMA") + entry.positions("DFMA")
        # A division is made of them; it comes out rounded once all the same.
        assert not fused or name == "unisono_reduce_avg", f"{what} fuses products and sums"


@pytest.mark.parametrize(
    "dtype, addition", [("float32", "FADD"), ("float64", "DADD"), ("float16", "FADD")]
)
def test_loads_are_under_way_before_the_first_is_used(
    dtype: str, addition: str, tmp_path: Path
) -> None:
    total = assemble(dtype, "sm_90", tmp_path)["unisono_reduce_sum"]
    loads = total.positions("LDG.E.128")
    assert len(loads) == 4
    assert max(loads) < min(total.positions(addition))
