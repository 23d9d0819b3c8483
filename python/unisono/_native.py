"""Picks the extension module that fits this process, and loads it.

A wheel carries ``_core.abi3.so``, which knows no torch, and one ``core-torch-2.N.so`` per torch
minor version, which holds the same and the c10d backend: a *door*. torch changes its C++ classes
with every minor version, so the version is compared before anything is loaded: a mismatch would not
fail cleanly, it would crash. For any other torch ``python -m unisono build-torch`` makes a door
(``unisono._build_torch``), which is found in the user's cache.

A free-threaded Python loads no module for abi3. It finds another ``_core`` beside that one, and its
doors, which ``build-torch`` makes, have names of their own.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
from pathlib import Path
from types import ModuleType

from unisono import _cache

FOLDER = Path(__file__).resolve().parent
# The sources of a door, in an installed package. A checkout has the sources themselves.
ARCHIVE = FOLDER / "source.tar.gz"
BUILD = "python -m unisono build-torch"
#: How the names of this Python's doors begin. A free-threaded one loads those of its version alone.
DOOR = "core-torch-"
if "t" in sys.abiflags:
    DOOR = f"core-cp{sys.version_info.major}{sys.version_info.minor}t-torch-"
_PLAIN = "unisono._core"
# Where the torch build goes when the plain one was loaded first. The last part names the init
# function.
_BESIDE = "unisono._beside._core"
# A module is known before it has run, and another thread must not get it then.
_loading = threading.RLock()


def load() -> ModuleType:
    """Return ``unisono._core``: the build for this process's torch, else the plain one."""
    with _loading:
        return _load()


def _load() -> ModuleType:
    module = sys.modules.get(_PLAIN)
    if module is not None:
        return module
    torch = sys.modules.get("torch")
    # Empty while torch is only partly imported.
    path = door(getattr(torch, "__version__", "")) if torch is not None else None
    if path is not None:
        try:
            return _load_file(_PLAIN, path)
        except ImportError:
            # Arrays need no torch. A program that asks for the backend gets the error.
            pass
    try:
        return importlib.import_module(_PLAIN)
    except SystemError as error:
        # That of the module for abi3 on a free-threaded Python that found no other.
        raise ImportError(
            "unisono has no module for this Python without a GIL; it serves those from 3.14 on"
        ) from error


def load_for_torch() -> ModuleType:
    """Return the extension module with the backend for the torch of this process.

    Raises
    ------
    ImportError
        No build for this version of torch is installed, or it does not load; says which are, and
        how to make one.
    """
    import torch

    with _loading:
        return _load_for(torch.__version__)


def _load_for(version: str) -> ModuleType:
    for name in (_PLAIN, _BESIDE):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "TORCH_VERSION"):
            return module
    path = door(version)
    if path is None:
        raise ImportError(unsupported(version))
    try:
        return _load_file(_BESIDE if _PLAIN in sys.modules else _PLAIN, path)
    except ImportError:
        # The linker names a C++ symbol, which tells a user nothing; `python -m unisono` shows it.
        built = path.stem.removeprefix(DOOR)
        raise ImportError(
            f"unisono has a build for torch {built}, and it does not load into this torch "
            f"{version}: `{BUILD}` makes one from source"
        ) from None


def door(version: str) -> Path | None:
    """Return the file of the build for this version of torch, or None."""
    if not version:
        return None
    candidates = [FOLDER / f"{DOOR}{version}.so"]
    release = re.match(r"(\d+\.\d+)\.\d+(rc\d+)?(\+|$)", version)
    if release:
        # Others may change from day to day, and are served by a build of their own alone.
        candidates.append(FOLDER / f"{DOOR}{release[1]}.so")
    cached = cache()
    if cached is not None:
        own = cached / f"{DOOR}{version}.so"
        if _cache.is_trusted(own):
            # It was built here because none of the others served this torch.
            return own
    return next((path for path in candidates if path.exists()), None)


def doors() -> list[str]:
    """Return the versions of torch that there are builds for, oldest first.

    Those in the user's cache are among them, each under its full version.
    """

    def order(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)]

    paths = [*FOLDER.glob(f"{DOOR}*.so")]
    cached = cache()
    if cached is not None:
        paths += filter(_cache.is_trusted, cached.glob(f"{DOOR}*.so"))
    return sorted({path.stem.removeprefix(DOOR) for path in paths}, key=order)


def cache() -> Path | None:
    """Return the folder of the builds made for this installation; None if there is none to trust.

    Code is run from it: ``unisono._cache`` says which folders are none. It may not exist yet.
    """
    try:
        folder = cache_folder()
        return folder if _cache.is_trusted(folder.parent) else None
    except (OSError, RuntimeError):
        return None


def cache_folder() -> Path:
    """Return the folder for the builds of this installation, whether it may be used or not.

    Raises
    ------
    OSError, RuntimeError
        There is no home, or this is no installation but a checkout, which has no archive.
    """
    # Another version of unisono has other sources.
    return _cache.home() / hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()[:16]


def unsupported(version: str) -> str:
    """Return the sentence for a torch that there is no build for."""
    built = doors()
    try:
        why = _cache.problem(cache_folder())
    except (OSError, RuntimeError):
        why = None
    return (
        f"unisono is installed for {'torch ' + ', '.join(built) if built else 'no torch'}, and "
        f"this is torch {version}: `{BUILD}` makes a build for it (needs cargo and g++)"
        f"{f'; what was built before is not used, since {why}' if why else ''}"
    )


def to_load(path: Path) -> str:
    """Return the name by which to load the build `path`.

    Raises
    ------
    ImportError
        Another user may have written to it since :func:`door` found it.
    """
    if path.parent == FOLDER:
        return str(path)
    try:
        return _cache.pinned(path)
    except (OSError, _cache.UntrustedError) as error:
        raise ImportError(f"{path} is not loaded: {error}") from error


def _load_file(name: str, path: Path) -> ModuleType:
    loaded = to_load(path)
    loader = importlib.machinery.ExtensionFileLoader(name, loaded)
    spec = importlib.util.spec_from_loader(name, loader, origin=loaded)
    assert spec is not None  # Only a loader of packages may decline.
    module = importlib.util.module_from_spec(spec)
    spec.origin = module.__file__ = str(path)
    # Before it runs, as an import would, and only for as long as it succeeds.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _forget() -> None:
    """Begin anew in a forked child: a thread of the parent may hold the lock that is there."""
    global _loading  # noqa: PLW0603
    _loading = threading.RLock()


os.register_at_fork(after_in_child=_forget)
