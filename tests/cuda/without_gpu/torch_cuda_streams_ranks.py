"""The rank functions of ``test_torch_emulated_cuda_streams``.

Which streams calls are put into, in which order, and what becomes of calls that a capture cannot
hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch_cuda_device as cuda
from cuda_scenarios import check, data, empty, summed
from torch_cuda_device import start, statistics, tensor

# As many as torch's pool has.
POOL = 32
# For what would not come at all.
LIMIT = timedelta(seconds=30)
emulated = torch.ops.emulated


@contextmanager
def current(stream: int) -> Iterator[None]:
    before = emulated.use_stream(0, stream)
    try:
        yield
    finally:
        emulated.use_stream(0, before)


def pool() -> list[int]:
    """Every stream of torch's pool."""
    streams = {emulated.pool_stream(0) for _ in range(POOL)}
    assert len(streams) == POOL
    return sorted(streams)


def keeps_off_torchs_pool() -> None:
    """Work in the streams of torch's pool, of any kind, holds up no call."""
    rank, world = start()
    peer = 1 - rank
    streams = pool()
    gate = emulated.new_gate()
    for stream in streams:
        with current(stream):
            emulated.stop_at(gate, 0)
    try:
        for _ in range(2):
            reduced, got = tensor(data(rank, 1000)), empty(10)
            works = [dist.all_reduce(reduced, async_op=True)]
            works += [dist.irecv(got, peer), dist.isend(tensor(data(rank, 10)), peer)]
            for work in works:
                assert work.wait(LIMIT)
                work.wait()
            check(reduced, summed(world, 1000), "beside the pool")
            check(got, data(peer, 10), "beside the pool")
    finally:
        emulated.open(gate)


def holds_up_no_stream() -> None:
    """A receive whose message is late, and a future of it, hold up no stream of torch's pool."""
    rank, _ = start()
    peer = 1 - rank
    got = empty(10)
    with dist._coalescing_manager(device=cuda.own_device(), async_ops=True) as manager:
        dist.irecv(got, peer)
    future = manager.works[0].get_future()
    for stream in pool():
        with current(stream):
            assert emulated.is_idle(0)
    # Other messages go on beside it.
    early = empty(10)
    receiving = dist.irecv(early, tag=7)
    dist.send(tensor(data(rank + 5, 10)), peer, tag=7)
    receiving.wait()
    check(early, data(peer + 5, 10), "beside a late message")
    dist.send(tensor(data(rank, 10)), peer)
    future.wait()
    check(got, data(peer, 10), "late message")
    check(future.value()[0], data(peer, 10), "late message")


def gives_streams_back() -> None:
    """Groups that come and go leave no streams behind, nor tensors that know one."""
    rank, world = start()
    peer = 1 - rank
    kept, counts = [], []
    for _ in range(12):
        group = dist.new_group(list(range(world)))
        # The results of such a call are put into place in the group's own stream, which torch's
        # allocator then knows to be a user of this memory.
        turned = tensor(data(rank, 12).reshape(3, 4))
        dist.all_reduce(turned.t(), group=group, async_op=True).wait()
        got = empty(10)
        receiving = dist.irecv(got, peer, group=group)
        dist.send(tensor(data(rank, 10)), peer, group=group)
        receiving.wait()
        check(got, data(peer, 10), "a group of many")
        check(turned, summed(world, 12).reshape(3, 4), "a group of many")
        kept.append(turned)
        dist.barrier(group)
        emulated.synchronize(0)
        dist.destroy_process_group(group)
        del group
        counts.append(statistics()["streams"])
    assert counts[-1] <= counts[3], counts
    address = kept[0].data_ptr()
    kept.clear()
    emulated.synchronize(0)
    assert emulated.is_free(address)


def sends_before_it_receives() -> None:
    """In a batch: a receive that waits must not be ahead of a send in the GPU's one queue."""
    rank, world = start()
    peer = 1 - rank
    for count in (10, 100_000):
        got, more = empty(count), empty(count)
        operations = [
            dist.P2POp(dist.irecv, got, peer),
            dist.P2POp(dist.isend, tensor(data(rank, count)), peer),
            dist.P2POp(dist.irecv, more, peer),
            dist.P2POp(dist.isend, tensor(data(rank + 2, count)), peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            assert work.wait(LIMIT)
            work.wait()
        check(got, data(peer, count), "batch", count)
        check(more, data(peer + 2, count), "the second of a batch", count)
    # An error is raised at the call, not at the end of the batch.
    backend = dist.group.WORLD._get_backend(cuda.own_device())
    backend._start_coalescing()
    with pytest.raises(ValueError, match="out of range"):
        backend.recv([empty(3)], world, 0)
    backend._end_coalescing()
    reduced = tensor(data(rank, 10))
    dist.all_reduce(reduced)
    check(reduced, summed(world, 10), "after a refusal")


def refuses_in_a_capture(captures_collectives: bool) -> None:
    """A call that cannot be part of a graph says so, and the capture goes on unharmed."""
    rank, world = start()
    peer = 1 - rank
    reduced, got = empty(100), empty(10)
    dist.barrier()
    with cuda.capture() as graph:
        with pytest.raises(ValueError, match="before the capture begins"):
            dist.barrier()
        with pytest.raises(ValueError, match="names its rank"):
            dist.recv(got)
        if not captures_collectives:
            for call in (dist.isend, dist.irecv):
                with pytest.raises(ValueError, match="cannot be captured"):
                    call(got, peer)
            batch = [dist.P2POp(dist.irecv, got, peer), dist.P2POp(dist.isend, got, peer)]
            with pytest.raises(ValueError, match="cannot be captured"):
                dist.batch_isend_irecv(batch)
        for asynchronous in (True, False):
            if captures_collectives:
                work = dist.all_reduce(reduced, async_op=asynchronous)
                if asynchronous:
                    work.wait()
                with pytest.raises(ValueError, match="after the end of the capture"):
                    dist.destroy_process_group()
                with pytest.raises(ValueError, match="before the capture begins"):
                    dist.barrier()
            else:
                with pytest.raises(ValueError, match="cannot be captured"):
                    dist.all_reduce(reduced, async_op=asynchronous)
        # The host's alone: it happens now.
        dist.monitored_barrier(timeout=LIMIT)
        on_host = data(rank, 10)
        dist.all_reduce(on_host)
        assert torch.equal(on_host, summed(world, 10))
    with cuda.stream():
        for _ in range(2):
            emulated.upload(reduced, data(rank, 100))
            graph.replay()
            factor = world if captures_collectives else None
            expected = data(rank, 100) if factor is None else factor * summed(world, 100)
            check(reduced, expected, "replayed")
    # And the group lives.
    dist.barrier()
    receiving = dist.irecv(got, peer)
    dist.send(tensor(data(rank, 10)), peer)
    receiving.wait()
    check(got, data(peer, 10), "after the capture")
    emulated.synchronize(0)
    dist.destroy_process_group()
