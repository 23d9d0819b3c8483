"""Builds the door for a torch that this installation was not built for.

``python -m unisono build-torch``. The package carries the sources; cargo and g++ must be there, and
cargo fetches the crates that ``Cargo.lock`` names. The result goes to the user's cache, where
``unisono._native`` finds it; in a checkout, beside the package.

cargo, rustup and Python obey files of the folder they work in, cargo and rustup those of all
folders above it too. On a host that users share, others may have put them there. So every program
is run in ``/``, and the sources lie in the cache, which only this user may write to.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono import _cache, _native

if TYPE_CHECKING:
    from collections.abc import Iterator

# It must be the one that a program gets, and say why if it is not.
_TRY = "import torch; from unisono import _native; _native.load_for_torch()"
# How the folders of builds under way begin.
_BUILD = "build-"


def build_torch() -> int:
    """Build for the torch of this Python, and return the exit status."""
    torch = torch_folder()
    if torch is None:
        print("unisono: no torch is installed for this Python", file=sys.stderr)
        return 1
    version = torch_version(torch)
    try:
        return _build_for(torch, version)
    except (_cache.UntrustedError, OSError, RuntimeError) as error:
        print(f"unisono: nothing was built: {error}", file=sys.stderr)
        return 1


def _build_for(torch: Path, version: str) -> int:
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
    tried = run_python(_TRY)
    if tried.returncode:
        print(f"{tried.stderr}unisono: {made} was built and does not load", file=sys.stderr)
        return 1
    print(f"built {made} in {time.monotonic() - began:.0f} s; programs started from now on use it")
    return 0


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python that imports what this one would, and nothing of this folder."""
    here = [str(Path(entry).absolute()) for entry in sys.path if entry]
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(here)},
        capture_output=True,
        text=True,
        check=False,
    )


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
    folder = _native.cache_folder()
    _cache.make(folder)
    return folder, f"{_native.DOOR}{version}.so"


@contextlib.contextmanager
def _sources() -> Iterator[Path]:
    root = checkout()
    if root is not None:
        yield root
        return
    home = _cache.home()
    _cache.make(home)
    _remove_what_was_left(home)
    with (
        tempfile.TemporaryDirectory(prefix=_BUILD, dir=home) as scratch,
        _locked(Path(scratch)),
        tarfile.open(_native.ARCHIVE) as archive,
    ):
        arguments: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(scratch, **arguments)
        yield Path(scratch)


def _remove_what_was_left(home: Path) -> None:
    """Remove the folders of builds that were killed, which hold a gigabyte."""
    for left in home.glob(f"{_BUILD}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep others from removing the folder.

    Raises
    ------
    BlockingIOError
        Another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
