"""The ranks of ``test_trace``: they write a trace, one of them late or killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

import unisono
from unisono._trace.job import Job

STEPS = 30
LATE = 0.02
# Messages of a rank to the next, short and long, of two tags.
LENGTHS = (3, 200_000, 3, 40_000)


def is_late(late: int) -> int:
    """Make collectives, for which one rank is late, then messages, and some at the same time."""
    comm = unisono.init()
    data, small = np.ones(16384, np.float32), np.ones(4)
    for _ in range(STEPS):
        if comm.rank == late:
            time.sleep(LATE)
        comm.all_reduce(data)
    comm.broadcast(small, 0)
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    receives = []
    for tag, length in enumerate(LENGTHS):
        receives.append(comm.irecv(np.zeros(length), before, tag=tag % 2))
    for tag, length in enumerate(LENGTHS):
        comm.send(np.zeros(length), after, tag=tag % 2)
    for receive in receives:
        receive.wait()
    # From any rank.
    comm.send(small, after, tag=9)
    comm.recv(small, unisono.ANY_SOURCE, tag=9)
    works = [comm.all_reduce(np.ones(300_000), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    # Not closed: the end of the process writes the rest.
    return os.getpid()


def one_is_killed() -> str:
    """The last rank is killed when operations are in its file; the others tell their error."""
    comm = unisono.init()
    begin = looked = time.monotonic()
    while True:
        comm.barrier()
        if comm.rank == comm.world_size - 1 and time.monotonic() - looked > 0.5:
            if _has_written():
                os.kill(os.getpid(), signal.SIGKILL)
            looked = time.monotonic()
        if comm.rank == 0 and time.monotonic() - begin > 40.0:
            return "it was not killed"
        try:
            comm.all_reduce(np.ones(4))
        except unisono.Error as error:
            return str(error)


def _has_written() -> bool:
    """Return whether operations of this process are in its file, which is written now and then."""
    job = Job.read(Path(os.environ["UNISONO_TRACE"]))
    return any(
        process.pid == os.getpid() and any(process.operations()) for process in job.processes
    )


def is_profiled(folder: str) -> None:
    """Train through torch under its profiler, whose trace goes into the same folder."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("unisono")
    rank, data = dist.get_rank(), torch.ones(1000)
    dist.all_reduce(data)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(3):
            time.sleep(0.4)
            dist.all_reduce(data)
    name = f"profile-{rank}.json" + (".gz" if rank else "")
    profile.export_chrome_trace(str(Path(folder) / name))
    dist.destroy_process_group()
