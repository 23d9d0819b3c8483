"""Runs a program of torchstore 0.1.2 with a Monarch newer than it.

    torchstore_running.py PROGRAM

The controller of torchstore 0.1.2 has endpoints that are coroutines and others that are not, which
Monarch refuses from 0.2 on, and Monarch 0.1.2 itself does not load without CUDA. Here all endpoints
are coroutines; nothing else of torchstore is changed.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torchstore.api
from monarch.actor import endpoint
from torchstore.controller import Controller


def as_coroutine(name: str) -> Any:
    method = getattr(Controller, name)._method

    async def call(self: Controller, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    call.__name__ = name
    return endpoint(call)


class Repaired(Controller):
    get_controller_strategy = as_coroutine("get_controller_strategy")
    locate_volumes = as_coroutine("locate_volumes")
    notify_put = as_coroutine("notify_put")
    notify_delete = as_coroutine("notify_delete")
    keys = as_coroutine("keys")


if __name__ == "__main__":
    # By the name by which other processes import it.
    import torchstore_running

    torchstore.api.Controller = torchstore_running.Repaired
    runpy.run_path(sys.argv[1], run_name="__main__")
