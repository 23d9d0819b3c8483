"""The rank functions of test_torch_signals.py.

Rank 0 waits and gets the signals; the other comes late or not at all. A wait that is deaf to
signals ends after `LIMIT` seconds, with an error of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ranks import free_port
from test_torch_collectives import dist, start, torch

LIMIT = 20
SOON = 0.2


def backward(group: object) -> None:
    """A collective in the backward pass, as DDP and others have them."""

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=group)
            return gradient

    Reduced.apply(torch.ones(3, requires_grad=True)).sum().backward()


def exchange(group: object) -> None:
    """Rank 0 receives, and the other one sends."""
    message = torch.zeros(3)
    if dist.get_rank() == 0:
        dist.recv(message, 1, group=group)
    else:
        dist.send(message, 0, group=group)


def batch(group: object) -> None:
    call, peer = (dist.irecv, 1) if dist.get_rank() == 0 else (dist.isend, 0)
    for work in dist.batch_isend_irecv([dist.P2POp(call, torch.zeros(3), peer, group=group)]):
        work.wait()


WAITS: dict[str, Callable[[Any], Any]] = {
    "call": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "large call": lambda group: dist.all_reduce(torch.ones(1 << 20), group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "monitored barrier": lambda group: dist.monitored_barrier(group=group),
    "work": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(),
    "limited wait": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(
        timedelta(seconds=LIMIT)
    ),
    "message": exchange,
    "batch": batch,
    "objects": lambda group: dist.all_gather_object([None, None], "here", group=group),
    "backward": backward,
}


class AlarmError(Exception):
    """The exception that a handler raises."""


@contextlib.contextmanager
def alarm(handler: Callable[[], Any]) -> Iterator[None]:
    """Call `handler` for a signal that comes soon."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, SOON)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def waits_for_what_a_handler_does() -> None:
    rank, _ = start(timeout=LIMIT)
    store = dist.distributed_c10d._get_default_store()
    for name, wait in WAITS.items():
        if rank == 0:
            with alarm(lambda name=name: store.set(f"come to {name}", "")):
                wait(None)
        else:
            store.wait([f"come to {name}"])
            wait(None)


def is_interrupted() -> None:
    rank, _ = start(timeout=LIMIT)
    store = dist.distributed_c10d._get_default_store()
    groups = {name: dist.new_group([0, 1]) for name in WAITS}
    dist.barrier()
    for name, wait in WAITS.items():
        group = groups[name]
        if rank == 0:
            began = time.monotonic()
            raised = KeyboardInterrupt if name == "call" else AlarmError
            with alarm(lambda raised=raised, name=name: throw(raised(name))):
                # The very exception, through torch's C++ code.
                with pytest.raises(raised, match=name):
                    wait(group)
                assert time.monotonic() - began < LIMIT / 2, name
            with pytest.raises(dist.DistBackendError, match="interrupted in"):
                wait(group)
            store.set(f"done with {name}", "")
        else:
            store.wait([f"done with {name}"])
            # Data that rank 0 had sent before may suffice for a call.
            end = time.monotonic() + LIMIT / 2
            with pytest.raises(RuntimeError, match=r"rank 0 aborted the group: interrupted in"):
                while time.monotonic() < end:
                    wait(group)
    dist.barrier()


def throw(error: BaseException) -> None:
    raise error


def interrupt() -> None:
    """Have the main thread interrupted soon."""
    threading.Timer(2 * SOON, os.kill, (os.getpid(), signal.SIGINT)).start()


def is_interrupted_while_joining(who: int) -> None:
    rank = int(os.environ["RANK"])
    path = Path(tempfile.gettempdir()) / f"unisono-signals-{os.environ['MASTER_PORT']}"
    limit = timedelta(seconds=LIMIT)
    began = time.monotonic()

    def join() -> None:
        # The third one never comes.
        store = dist.FileStore(str(path), 3)
        dist.init_process_group("unisono", store=store, rank=rank, world_size=3, timeout=limit)

    try:
        if rank == who:
            time.sleep(2 * SOON)
            interrupt()
            with pytest.raises(KeyboardInterrupt):
                join()
        else:
            with pytest.raises(dist.DistBackendError, match="interrupted: KeyboardInterrupt"):
                join()
        assert time.monotonic() - began < LIMIT / 2
    finally:
        # The other rank has what this one has left there.
        if rank != who:
            path.unlink(missing_ok=True)


def is_interrupted_at_the_store() -> None:
    began = time.monotonic()
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        dist.init_process_group(
            "unisono",
            init_method=f"tcp://127.0.0.1:{free_port()}",
            rank=0,
            world_size=2,
            timeout=timedelta(seconds=LIMIT),
        )
    assert time.monotonic() - began < LIMIT / 2
    # Its thread waits on, and is no hindrance.
    os._exit(0)


def another_thread_waits_on() -> None:
    rank, _ = start(timeout=LIMIT)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"])
        dist.barrier()
        return
    seen: list[BaseException | None] = []

    def wait() -> None:
        try:
            dist.barrier()
        except BaseException as error:
            seen.append(error)
        else:
            seen.append(None)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
        time.sleep(LIMIT)
    store.set("interrupted", "")
    waiting.join(LIMIT)
    assert seen == [None]
