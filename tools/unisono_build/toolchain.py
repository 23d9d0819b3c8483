"""What a build needs besides Python, asked for before it starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

RUST = "https://rust-lang.org/tools/install"


class MissingError(SystemExit):
    """A tool is missing or too old.

    As an exit it reaches the screen as one sentence, without a traceback.
    """


def cargo() -> str:
    """Return the command that runs cargo."""
    return os.environ.get("CARGO", "cargo")


def check(root: Path, *, torch: Path | None, what: str = "building unisono from source") -> None:
    """Make sure that the compilers are there.

    Raises
    ------
    MissingError
        Says in one sentence what to install.
    """
    missing = []
    if shutil.which(cargo()) is None:
        missing.append(f"cargo, which comes with Rust ({RUST})")
    if shutil.which(os.environ.get("CC", "cc")) is None:
        missing.append("a C compiler (Debian: apt-get install gcc)")
    if torch is not None and shutil.which(os.environ.get("CXX", "c++")) is None:
        missing.append("a C++ compiler for the torch backend (Debian: apt-get install g++)")
    if missing:
        raise MissingError(f"unisono: {what} needs {', and '.join(missing)}; nothing was built")
    _check_rust(root, what)


def _check_rust(root: Path, what: str) -> None:
    needed = re.search(
        r'^rust-version = "([\d.]+)"', (root / "Cargo.toml").read_text(), re.MULTILINE
    )
    said = subprocess.run([cargo(), "--version"], capture_output=True, text=True, check=False)
    found = re.match(r"cargo (\d+\.\d+)", said.stdout)
    if needed is None or found is None:
        return  # cargo itself will say what is wrong.
    if _order(found[1]) < _order(needed[1]):
        raise MissingError(
            f"unisono: {what} needs Rust {needed[1]} or newer, and this is {found[1]}: "
            f"run `rustup update`, or see {RUST}"
        )


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
