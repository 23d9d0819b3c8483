"""Builds the door for a torch that this installation was not built for.

``python -m unisono build-torch``. The package carries the sources; cargo and g++ must be there, and
cargo fetches the crates that ``Cargo.lock`` names. The result goes to the user's cache, where
``unisono._native`` finds it; in a checkout, beside the package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono import _native

if TYPE_CHECKING:
    from collections.abc import Iterator

# It must be the one that a program gets, and say why if it is not.
_TRY = "import torch; from unisono import _native; _native.load_for_torch()"


def build_torch() -> int:
    """Build for the torch of this Python, and return the exit status."""
    torch = torch_folder()
    if torch is None:
        print("unisono: no torch is installed for this Python", file=sys.stderr)
        return 1
    version = torch_version(torch)
    with _sources() as root:
        sys.path.insert(0, str(root / "tools"))
        from unisono_build import parts, toolchain  # type: ignore[import-not-found]

        toolchain.check(root, torch=torch, what=f"building for torch {version}")
        folder, name = _place(version)
        print(f"building for torch {version}; this takes some minutes", flush=True)
        began = time.monotonic()
        how = parts.Build(root, root / "target")
        try:
            made = parts.torch_door(how, torch, folder, name)
        except subprocess.CalledProcessError as error:
            print(
                f"unisono: `{' '.join(error.cmd)}` failed; what it said is above", file=sys.stderr
            )
            return 1
    tried = subprocess.run([sys.executable, "-c", _TRY], check=False)
    if tried.returncode:
        print(f"unisono: {made} was built and does not load", file=sys.stderr)
        return 1
    print(f"built {made} in {time.monotonic() - began:.0f} s; programs started from now on use it")
    return 0


def torch_folder() -> Path | None:
    """Return the folder of the torch that this Python would import, which is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def torch_version(torch: Path) -> str:
    """Return ``torch.__version__`` of the torch in this folder."""
    found = re.search(r"^__version__ = '(.+)'", (torch / "version.py").read_text(), re.MULTILINE)
    return found[1] if found else "of an unknown version"


def checkout() -> Path | None:
    """Return the checkout that this package runs from, or None if it is installed."""
    root = _native.FOLDER.parent.parent
    return root if (root / "rust" / "python" / "Cargo.toml").exists() else None


def _place(version: str) -> tuple[Path, str | None]:
    """Where the door goes, and its name if it is not the usual one."""
    if checkout() is not None:
        return _native.FOLDER, None
    home = _native.cache_home()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = _native.cache()
    if folder is None:
        raise SystemExit(
            f"unisono: another user may write to {home}, or owns it: nothing is run from there"
        )
    return folder, f"core-torch-{version}.so"


@contextlib.contextmanager
def _sources() -> Iterator[Path]:
    root = checkout()
    if root is not None:
        yield root
        return
    with (
        tempfile.TemporaryDirectory(prefix="unisono-") as scratch,
        tarfile.open(_native.ARCHIVE) as archive,
    ):
        arguments: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(scratch, **arguments)
        yield Path(scratch)
