"""Which Python runs the scripts that are given to ``unisono launch`` and ``unisono run``.

It is the one that runs unisono. ``unisono`` is a command of that Python's environment, and stays
that when another environment comes first on PATH: then its user may expect the other one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

# Between the question and the answer of another Python.
_LIMIT = 10.0


def note(command: str) -> str | None:
    """Return what to say where PATH leads to another Python than this one, else None.

    `command` is the one that runs scripts. Who writes ``python -m unisono`` has chosen the Python.
    """
    if Path(sys.argv[0]).name != "unisono":
        return None
    found = _first_on_path()
    if found is None or _belongs_here(found):
        return None
    return (
        f"{sys.executable} runs the program, for unisono is installed there, and not {found}, "
        f"which is the first on PATH; `{found} -m unisono {command}` takes that one, if unisono is "
        "installed there too"
    )


def _first_on_path() -> Path | None:
    for folder in os.get_exec_path():
        for name in ("python", "python3"):
            found = shutil.which(name, path=folder) if folder else None
            if found:
                return Path(found)
    return None


def _belongs_here(python: Path) -> bool:
    # The file itself says little: in an environment it is a link to the Python that made it.
    if python.parent.resolve() == Path(sys.executable).parent.resolve():
        return True
    # A Python that is elsewhere may be a link, or a shim that chooses a Python.
    try:
        said = subprocess.run(
            [python, "-I", "-c", "import sys; print(sys.prefix)"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_LIMIT,
        )
    except (OSError, subprocess.SubprocessError):
        return True  # It runs nothing, so nobody expects it.
    return Path(said.stdout.strip()).resolve() == Path(sys.prefix).resolve()
