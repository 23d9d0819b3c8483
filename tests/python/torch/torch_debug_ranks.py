"""The ranks of ``test_torch_debug``: torch's debug server, its page of unisono, and health."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server, stop_debug_server

# Within this time a page is as it should be, also on a busy machine.
SOON = 60.0
LIMIT = timedelta(seconds=150)


def page_when(port: int, seen: Callable[[str], bool]) -> str:
    """The page, when it is as it should be."""
    end = time.monotonic() + SOON
    text = ""
    while time.monotonic() < end:
        try:
            with urlopen(f"http://127.0.0.1:{port}/unisono", timeout=SOON) as response:
                text = response.read().decode()
        except URLError as error:
            text = f"no page: {error}"
        if seen(text):
            return text
        time.sleep(0.05)
    raise AssertionError(text)


def is_shown(port: int, early: bool) -> tuple[str, str, list[int]] | None:
    """The last rank is late, and then the middle one is stopped; the last one reads the page."""
    rank = int(os.environ["RANK"])
    handlers = None
    if early:
        # Before the first group, so that the page does not come by itself.
        from torch.distributed.debug._debug_handlers import default_handlers

        from unisono.torch import debug_handler

        # As the launcher's own store, which torchrun has before its ranks start.
        serves = rank == 0
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 3, serves)
        assert not any(one.dump_filename() == "unisono" for one in default_handlers())
        handlers = [*default_handlers(), debug_handler()]
        start_debug_server(port=port, handlers=handlers, start_method="spawn")
        dist.init_process_group("unisono", store=store, rank=rank, world_size=3, timeout=LIMIT)
    else:
        dist.init_process_group("unisono", timeout=LIMIT)
        start_debug_server(port=port)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    pids = [int(pid) for pid in pids]
    found = None
    if rank == 2:
        waits = page_when(port, lambda text: "2 ranks wait for it in all_reduce #2" in text)
        os.kill(pids[1], signal.SIGSTOP)
        try:
            stopped = page_when(port, lambda text: f"pid {pids[1]}, stopped" in text)
        finally:
            os.kill(pids[1], signal.SIGCONT)
        found = waits, stopped, pids
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        stop_debug_server()
    return found


def is_unhealthy(call: str, prefix: str) -> dict[str, Any]:
    """The last of two ranks does not come to a call that has a second's time."""
    from torch._C import _distributed_c10d as native

    dist.init_process_group("unisono", timeout=LIMIT)
    rank, group = dist.get_rank(), dist.group.WORLD
    worker = native._WorkerServer("127.0.0.1", 0)

    def ask(handler: str) -> Any:
        place = f"http://127.0.0.1:{worker.port}/handler/{handler}"
        with urlopen(Request(place, data=b"", method="POST"), timeout=SOON) as response:
            return response.read()

    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    before = json.loads(ask("c10d_health_check"))
    store = dist.distributed_c10d._get_default_store()
    told = None
    if rank == 0:
        c10d = dist.distributed_c10d
        set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
        set_timeout(timedelta(seconds=1), group)
        calls = {
            "all_reduce": lambda: dist.all_reduce(tensor),
            "operator": lambda: torch.ops.unisono.all_reduce_(tensor, group.group_name, "sum"),
        }
        try:
            calls[call]()
        except dist.DistBackendError as error:
            told = str(error)
        end = time.monotonic() + SOON
        while json.loads(ask("c10d_health_check"))["healthy"] and time.monotonic() < end:
            time.sleep(0.01)
        store.set("over", "")
    else:
        store.wait(["over"], timedelta(seconds=SOON))
    # As torch's page does for all ranks, once one of them is unhealthy.
    ask("fr_dump_file?backend=unisono")
    file, entries = Path(f"{prefix}{rank}"), None
    end = time.monotonic() + SOON
    while entries is None and time.monotonic() < end:
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            entries = pickle.loads(file.read_bytes())["entries"]
        time.sleep(0.01)
    # The store is in rank 0.
    if rank == 0:
        store.wait(["done"], timedelta(seconds=SOON))
    else:
        store.set("done", "")
    found = [(entry["profiling_name"], entry["state"]) for entry in entries or ()]
    return {
        "before": before,
        "after": json.loads(ask("c10d_health_check")),
        "told": told,
        "record": found,
    }


def text_of(page: str) -> str:
    """The words of a page, a line for each row of a table and each item."""
    body = page.rpartition("</style>")[2]
    body = re.sub(r"</(tr|li|p|h2|summary)>", "\n", body)
    return re.sub(r" +", " ", re.sub(r"<[^>]*>", " ", body))
