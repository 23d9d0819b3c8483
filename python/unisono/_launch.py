"""Calls the launcher, and lets it call itself.

The launcher runs in several processes (see ``rust/launch``). The first one comes through
``python -m unisono launch``; for the others it runs this file, by its path, in a Python that reads
nothing but the extension module beside it.
"""

from __future__ import annotations

import signal
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from os.path import exists
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

#: The variables in which launchers give a rank (rust/core/src/rendezvous/launcher/launchers.rs).
RANK_VARIABLES = (
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
)


def launch(arguments: list[str], core: ModuleType, note: str | None = None) -> int:
    """Launch what `arguments` ask for, and return the status to exit with.

    `note` is said where a script or a module is launched: see ``unisono._python``.
    """
    # The launcher's own handlers take over, and Python's would be called beside them.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    again = [sys.executable, "-I", "-S", __file__]
    status: int = core.launch(arguments, again=again, interpreter=sys.executable, note=note)
    return status


def _core() -> ModuleType:
    name = "unisono._core"
    beside = __file__.removesuffix("_launch.py") + "_core"
    # The order in which an import looks: the first one is for this Python.
    paths = [beside + suffix for suffix in EXTENSION_SUFFIXES]
    path = next(filter(exists, paths), paths[-1])
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], _core()))
