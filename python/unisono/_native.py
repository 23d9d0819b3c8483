"""Picks the extension module that fits this process, and loads it.

A wheel carries ``_core.abi3.so``, which knows no torch, and one ``core-torch-2.N.so`` per torch
minor version, which holds the same and the c10d backend. torch changes its C++ classes with every
minor version, so the version is compared before anything is loaded: a mismatch would not fail
cleanly, it would crash.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent
_PLAIN = "unisono._core"
# Where the torch build goes when the plain one was loaded first. The last part names the init
# function.
_BESIDE = "unisono._beside._core"


def load() -> ModuleType:
    """Return ``unisono._core``: the build for this process's torch, else the plain one."""
    module = sys.modules.get(_PLAIN)
    if module is not None:
        return module
    torch = sys.modules.get("torch")
    path = _torch_build(torch) if torch is not None else None
    if path is not None:
        return _load_file(_PLAIN, path)
    return importlib.import_module(_PLAIN)


def load_for_torch() -> ModuleType:
    """Return the extension module with the backend for the torch of this process.

    Raises
    ------
    ImportError
        No build for this version of torch is installed; says which are, and how to make one.
    """
    import torch

    for name in (_PLAIN, _BESIDE):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "TORCH_VERSION"):
            return module
    path = _torch_build(torch)
    if path is None:
        raise ImportError(_unsupported(torch))
    return _load_file(_BESIDE if _PLAIN in sys.modules else _PLAIN, path)


def _minor(torch: ModuleType) -> str:
    """``2.15`` for ``2.15.0+cpu``; empty while torch is only partly imported."""
    match = re.match(r"\d+\.\d+", getattr(torch, "__version__", ""))
    return match[0] if match else ""


def _torch_build(torch: ModuleType) -> Path | None:
    path = _FOLDER / f"core-torch-{_minor(torch)}.so"
    return path if path.exists() else None


def _unsupported(torch: ModuleType) -> str:
    def order(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    names = (path.stem.removeprefix("core-torch-") for path in _FOLDER.glob("core-torch-*.so"))
    built = sorted((name for name in names if re.fullmatch(r"\d+\.\d+", name)), key=order)
    return (
        f"unisono is installed for {'torch ' + ', '.join(built) if built else 'no torch'}, and "
        f"this is torch {torch.__version__}: in a checkout of unisono, run `make setup` in this "
        "environment, or build the crate unisono-python with the feature `torch` and "
        f"UNISONO_TORCH_DIR={torch.__path__[0]}"
    )


def _load_file(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader, origin=str(path))
    assert spec is not None  # Only a loader of packages may decline.
    module = importlib.util.module_from_spec(spec)
    # Before it runs, as an import would, and only for as long as it succeeds.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
