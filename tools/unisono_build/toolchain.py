"""The tools that a build needs besides Python, asked for before it starts.

cargo reads configuration from the folder it works in and all above it, and rustup there reads which
toolchain to run: programs, both. The sources may lie in /tmp, where pip unpacks them, and others
may have written there. So everything here is run in ``ANYWHERE``, and the programs of the toolchain
that rustup chooses there are named to all that they start.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

RUST = "https://rust-lang.org/tools/install"
# The folder to run compilers in. Only root can have written there, and there is none above.
ANYWHERE = "/"
# The modules are for the stable ABI. Asked for its version, each interpreter would have them
# compiled anew, and another machine's could not be asked. A free-threaded one has an ABI of its
# own.
IS_FREE_THREADED = "t" in sys.abiflags
FOR_PYTHON = {"PYO3_PYTHON": sys.executable} if IS_FREE_THREADED else {"PYO3_NO_PYTHON": "1"}


class MissingError(SystemExit):
    """A tool is missing or too old.

    As an exit it reaches the screen as one sentence, without a traceback.
    """


def cargo() -> str:
    """Return the command that runs cargo."""
    return os.environ.get("CARGO", "cargo")


def variables() -> dict[str, str]:
    """Return the environment in which cargo and rustc are programs of one toolchain.

    Those of rustup look anew for which toolchain to run whenever they are called, beginning with
    the folder that they are called in: cargo calls rustc where the sources lie.
    """
    found = os.environ | FOR_PYTHON
    if IS_FREE_THREADED:
        found.pop("PYO3_NO_PYTHON", None)
    try:
        said = subprocess.run(
            [os.environ.get("RUSTC", "rustc"), "--print", "sysroot"],
            cwd=ANYWHERE,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return found  # cargo will say what is wrong.
    programs = Path(said.stdout.strip()) / "bin"
    path = os.environ.get("PATH", os.defpath)
    if (programs / "rustc").exists() and str(programs) not in path.split(os.pathsep):
        found["PATH"] = f"{programs}{os.pathsep}{path}"
    return found


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
    said = subprocess.run(
        [cargo(), "--version"], cwd=ANYWHERE, capture_output=True, text=True, check=False
    )
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
