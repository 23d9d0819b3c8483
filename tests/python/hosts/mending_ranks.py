"""The rank functions of the tests of broken connections; `test_mending.py` starts them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import unisono

COUNTS = [1, 100, 5000, 100_000, 1_000_000]


def meet(comm: unisono.Communicator, folder: str, what: str) -> None:
    """Tell the test that this rank has come there, and wait for it to go on."""
    Path(folder, f"{what}-{comm.rank}").touch()
    while not Path(folder, what).exists():
        time.sleep(0.01)


def exchange(folder: str, seconds: float) -> tuple[int, float]:
    """Check sums and messages for so long. Returns how many rounds, and the longest in seconds."""
    comm = unisono.init()
    random = np.random.default_rng(7)
    rank, world = comm.rank, comm.size
    comm.all_reduce(np.ones(1))
    meet(comm, folder, "joined")
    end, longest, step, is_over = time.monotonic() + seconds, 0.0, 0, np.zeros(1, np.int64)
    while not is_over[0]:
        count = int(random.choice(COUNTS))
        began = time.monotonic()
        total = comm.all_reduce(np.full(count, float(rank + step), np.float32))
        np.testing.assert_array_equal(total, sum(range(step, step + world)))
        message, received = np.full(count, 10 * step + rank), np.empty(count, np.int64)
        sent = comm.isend(message, (rank + 1) % world, tag=step % 5)
        comm.recv(received, (rank - 1) % world, tag=step % 5)
        sent.wait()
        np.testing.assert_array_equal(received, 10 * step + (rank - 1) % world)
        longest = max(longest, time.monotonic() - began)
        step += 1
        is_over[0] = time.monotonic() > end
        comm.broadcast(is_over, 0)
    comm.close()
    return step, longest


def through_torch(folder: str, seconds: float) -> tuple[int, float]:
    """As `exchange`, through torch."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("unisono")
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(1))
    Path(folder, f"joined-{rank}").touch()
    while not Path(folder, "joined").exists():
        time.sleep(0.01)
    end, longest, step, is_over = time.monotonic() + seconds, 0.0, 0, torch.zeros(1)
    while not is_over[0]:
        count = COUNTS[step % len(COUNTS)]
        began = time.monotonic()
        total = torch.full((count,), float(rank + step))
        gathered = [torch.empty(count) for _ in range(world)]
        pending = dist.all_gather(gathered, torch.full((count,), float(rank)), async_op=True)
        dist.all_reduce(total)
        pending.wait()
        assert (total == sum(range(step, step + world))).all()
        assert all((part == float(other)).all() for other, part in enumerate(gathered))
        longest = max(longest, time.monotonic() - began)
        step += 1
        is_over[0] = time.monotonic() > end
        dist.broadcast(is_over, 0)
    return step, longest


def after_rest(folder: str) -> float:
    """Go on after all connections have been forgotten while no rank used them; seconds it took."""
    comm = unisono.init()
    data = np.full(1000, float(comm.rank))
    comm.all_reduce(data)
    other = 1 - comm.rank
    comm.send(data, other) if comm.rank == 0 else comm.recv(data, other)
    meet(comm, folder, "joined")
    began = time.monotonic()
    total = comm.all_reduce(np.full(1000, 2.0))
    assert (total == 4.0).all()
    comm.recv(data, other) if comm.rank == 0 else comm.send(data, other)
    took = time.monotonic() - began
    comm.close()
    return took


def sent_before_the_end(folder: str) -> None:
    """The same of a rank that leaves."""
    sent_before_rest(folder, leaves=True)


def sent_before_rest(folder: str, leaves: bool = False) -> None:
    """Receive what a rank has sent that does nothing since, over connections that have broken."""
    comm = unisono.init()
    data, first = np.arange(3000.0), np.zeros(1)
    comm.send(first, 1) if comm.rank == 0 else comm.recv(first, 0)
    comm.barrier()
    meet(comm, folder, "joined")
    if comm.rank == 0:
        comm.send(data, 1)  # nothing goes at this moment
    Path(folder, f"sent-{comm.rank}").touch()
    if comm.rank == 0:
        # It does nothing with the group before the other has the message, or it leaves.
        while not Path(folder, "reset" if leaves else "received").exists():
            time.sleep(0.001)
    else:
        received = np.empty_like(data)
        comm.recv(received, 0)
        np.testing.assert_array_equal(received, data)
        Path(folder, "received").touch()
    if not leaves:
        comm.barrier()
    comm.close()
