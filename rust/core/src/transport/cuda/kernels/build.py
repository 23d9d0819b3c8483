"""Compile the CUDA kernels to PTX, one module per element type: ``make ptx``.

The modules are committed, so that neither a build nor a user needs a CUDA compiler, and compressed;
``zcat`` shows them. They are for compute capability 6.0 and in the PTX of CUDA 12.0: the driver
makes them into code of its GPU when a module is first used, and every driver since 12.0 understands
them.

The compiler is NVRTC, the library NVIDIA puts on PyPI, of exactly the version below: a newer one
would write PTX that older drivers refuse. The same NVRTC gives the same bytes, which a test
compares. A module's first line says what it was made from::

    // float32 sha256 91c0… nvrtc 12.0 --gpu-architecture=compute_60 …
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import gzip
import hashlib
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENT = "nvidia-cuda-nvrtc-cu12==12.0.140"
VERSION = (12, 0)

# In the order of their numbers in `rust/reduce/src/types.rs`, from 1.
DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
    "complex128",
)

# A product and a sum must be rounded apart, as on the processor.
OPTIONS = ("--fmad=false", "--std=c++17")
ARCHITECTURE = 60


def ptx_file(dtype: str) -> Path:
    """Return where the module of an element type is kept."""
    return HERE / "ptx" / f"{dtype}.ptx.gz"


def committed(dtype: str) -> str:
    """Return the committed module of an element type."""
    return gzip.decompress(ptx_file(dtype).read_bytes()).decode()


def digest() -> str:
    """Return the SHA-256 of the sources: of each file its name, a zero byte and its bytes."""
    state = hashlib.sha256()
    for path in sorted((*HERE.glob("*.cu"), *HERE.glob("*.cuh")), key=lambda path: path.name):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def find_nvrtc(folder: Path) -> Path | None:
    """Return an NVRTC library that pip has installed somewhere under `folder`, if there is one."""
    found = sorted(folder.glob("nvidia/*/lib/libnvrtc.so.[0-9]*"))
    return next((path for path in found if ".alt." not in path.name), None)


class Nvrtc:
    """NVIDIA's run-time compiler.

    Parameters
    ----------
    library
        The path of ``libnvrtc.so.N``. Its ``libnvrtc-builtins`` lies beside it.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def architectures(self) -> list[int]:
        """Return the compute capabilities it can compile for, 60 for 6.0, lowest first."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def compile(self, dtype: str, architecture: int = ARCHITECTURE) -> str:
        """Return the module of an element type.

        Raises
        ------
        RuntimeError
            With what the compiler said, be it an error or a warning.
        """
        shown = (f"--gpu-architecture=compute_{architecture}", *OPTIONS)
        number = DTYPES.index(dtype) + 1
        options = [*shown, f"--define-macro=UNISONO_DTYPE={number}", f"--include-path={HERE}"]
        program = ctypes.c_void_p()
        source = (HERE / "kernels.cu").read_bytes()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source, b"kernels.cu", 0, None, None
        )
        try:
            arguments = (ctypes.c_char_p * len(options))(*(text.encode() for text in options))
            # The compiler changes its thread's locale, and with it how Python reads files there.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                compiling = self._library.nvrtcCompileProgram, program, len(options), arguments
                failed = thread.submit(*compiling).result()
            said = self._text("ProgramLog", program)
            if failed or said.strip():
                raise RuntimeError(f"{dtype}: {said}")
            ptx = self._text("PTX", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))
        made_by = f"nvrtc {self.version[0]}.{self.version[1]} {' '.join(shown)}"
        return f"// {dtype} sha256 {digest()} {made_by}\n{_trimmed(ptx)}"

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.value.decode()

    def _call(self, name: str, *arguments: object) -> None:
        failed = getattr(self._library, name)(*arguments)
        if failed:
            reason = self._library.nvrtcGetErrorString(failed).decode()
            raise RuntimeError(f"{name}: {reason}")


def _trimmed(ptx: str) -> str:
    """Leave out the constants that nothing uses, and the comments around inline code."""
    constants = re.findall(r"^\.global .*?([\w$]+)(?:\[\d+\])?(?: = .*)?;$", ptx, re.MULTILINE)
    uses = {
        name: len(re.findall(rf"(?<![\w$]){re.escape(name)}(?![\w$])", ptx)) for name in constants
    }
    unused = {name for name, count in uses.items() if count == 1}
    kept = (
        line
        for line in ptx.splitlines()
        if not re.fullmatch(r"\s*// (begin|end) inline asm", line)
        and not (line.startswith(".global") and unused & set(re.findall(r"[\w$]+", line)))
    )
    return "\n".join(kept).rstrip() + "\n"


def main() -> None:
    """Write all modules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "nvrtc", type=Path, nargs="?", help=f"the folder where pip has put {REQUIREMENT}"
    )
    parser.add_argument("--requirement", action="store_true", help="print what pip is to install")
    arguments = parser.parse_args()
    if arguments.requirement:
        print(REQUIREMENT)
        return
    library = find_nvrtc(arguments.nvrtc) if arguments.nvrtc else None
    if library is None:
        sys.exit("no NVRTC found: run `make ptx`, which installs it")
    nvrtc = Nvrtc(library)
    if nvrtc.version != VERSION:
        sys.exit(
            f"{library} is NVRTC {nvrtc.version}, not {VERSION}: older drivers would refuse its PTX"
        )
    for dtype in DTYPES:
        path = ptx_file(dtype)
        path.parent.mkdir(exist_ok=True)
        text = nvrtc.compile(dtype)
        # Other versions of zlib compress the same text to other bytes.
        if not path.exists() or committed(dtype) != text:
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
