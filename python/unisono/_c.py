"""Where the C header and libunisono are, for programs that are compiled against them.

They come with the wheel, in ``unisono/c``; in a checkout ``make c`` puts them there. A package of
conda has them in the environment's own ``include`` and ``lib``.
"""

from __future__ import annotations

import sys
from pathlib import Path


def _folder() -> Path:
    own, prefix = Path(__file__).resolve().parent / "c", Path(sys.prefix)
    return own if own.exists() or not (prefix / "include" / "unisono.h").exists() else prefix


FOLDER = _folder()
# The flags that ``python -m unisono`` answers, and the answer to each.
FLAGS = {
    "--includedir": "the folder of unisono.h and unisono.hpp",
    "--libdir": "the folder of libunisono",
    "--cmakedir": "for CMake's -Dunisono_DIR=",
    "--cflags": "what a compiler takes to find the headers",
    "--libs": "what a linker takes to link with libunisono, and to find it where it is",
}


def answer(flags: list[str]) -> str:
    """Return what each of `flags`, keys of `FLAGS`, asks for, in one line.

    Raises
    ------
    FileNotFoundError
        This installation has no C library; the message says how to get it.
    """
    include, lib = FOLDER / "include", FOLDER / "lib"
    if not (include / "unisono.h").exists() or not (lib / "libunisono.so").exists():
        raise FileNotFoundError(
            f"{FOLDER} does not hold the C library: install a wheel of unisono, or run `make c` in "
            "its checkout"
        )
    answers = {
        "--includedir": str(include),
        "--libdir": str(lib),
        "--cmakedir": str(lib / "cmake" / "unisono"),
        "--cflags": f"-I{include}",
        "--libs": f"-L{lib} -lunisono -Wl,-rpath,{lib}",
    }
    return " ".join(answers[flag] for flag in flags)
