"""unisono in torch's debug server: each rank answers it, and its pages get one of unisono's.

The server (``torch.distributed.debug.start_debug_server``) has a worker in every rank, which calls
handlers by their names, and one process beside rank 0 that has the pages. The page is in
``_torch_page``, which takes packages that torch does not install.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from unisono._status.ask import Process
    from unisono._torch_page import Page

# The name of the handler of each rank.
NAME = "unisono"
# Where torch makes the list of its pages, when a server starts.
_PAGES = "torch.distributed.debug._debug_handlers"


def serve() -> None:
    """Let this process answer the page, and have servers that start from now on show it."""
    from torch._C import _distributed_c10d as native

    if not hasattr(native, "_register_handler"):
        return
    # torch drops the function after the interpreter has gone. It must not be the last to hold it,
    # for then the function would be freed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
    native._register_handler(NAME, _answer)
    if _PAGES in sys.modules:
        _add_page(sys.modules[_PAGES])
    else:
        sys.meta_path.insert(0, _AtImport())


def handler() -> Page:
    """Return the page, for ``start_debug_server(handlers=[...])``.

    Raises
    ------
    ImportError
        This torch has no debug server, or a package that it needs is not installed.
    """
    try:
        from unisono._torch_page import Page
    except ImportError as error:
        missing = error.name or str(error)
        why = "`pip install aiohttp jinja2 tabulate` brings what it needs"
        if missing.startswith("torch"):
            why = "torch 2.11 to 2.15 have one, where torch.distributed is built in"
        raise ImportError(
            f"unisono.torch.debug_handler: torch's debug server cannot be had here, for there is "
            f"no {missing}; {why}",
            name=error.name,
        ) from error
    return Page()


def _answer(_request: Any, response: Any) -> None:
    """Tell the state of the processes of this job on this host, as ``status --json`` does.

    Whoever reaches the port of the server hears it, so nothing is told of other jobs.
    """
    from unisono._status import ask

    found = [vars(process) for process in of_job(ask.processes(), os.getpid())]
    for process in found:
        for group in (process["answer"] or {}).get("groups", ()):
            # The page shows none of them.
            group.pop("recent", None)
    response.set_content(json.dumps(found), "application/json")
    response.set_status(200)


def of_job(found: list[Process], pid: int) -> list[Process]:
    """Return the processes of the job of the process with this pid, without command lines."""
    from unisono._status import jobs

    chosen = jobs.with_pid(found, pid)
    for process in chosen:
        process.command = ""
    return chosen


def _add_page(module: Any) -> None:
    genuine = getattr(module, "default_handlers", None)
    if genuine is None:
        return

    @functools.wraps(genuine)
    def default_handlers() -> list[Any]:
        found = genuine()
        try:
            return [*found, handler()]
        except Exception as error:
            # The server goes without a page that its user has not asked for.
            warnings.warn(f"torch's debug server has no page of unisono: {error}", stacklevel=2)
            return list(found)

    module.default_handlers = default_handlers


class _AtImport(MetaPathFinder):
    """Adds the page when the module with torch's pages is imported, which few programs do.

    It stays: a tool may look for the module, or import it anew.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _PAGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _add_page(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
