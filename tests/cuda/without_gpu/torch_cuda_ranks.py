"""The rank functions of ``test_torch_emulated_cuda``: torch.distributed on CUDA tensors.

The device is emulated, so streams are real ordered queues that stop at a shut gate: what a call may
not wait for is shut off, and what must come after it is looked at once the gate is open.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch_cuda_device as cuda
from torch_cuda_device import start, statistics, tensor, values

import unisono.torch

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
COUNTS = [0, 1, 3, 1000, 50_001]
SUM, MAX, AVG = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG
DEVICE = torch.device("cuda:0")


def data(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's contribution: small numbers that every type holds, different everywhere."""
    return ((torch.arange(count) * 3 + rank * 5) % 7).to(dtype)


def summed(world: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum(data(rank, count, torch.float64) for rank in range(world)).to(dtype)


def check(actual: torch.Tensor, expected: torch.Tensor, *context: object) -> None:
    found = values(actual)
    assert found.dtype == expected.dtype, context
    assert torch.equal(found.double(), expected.double()), (found, expected, context)


def empty(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return tensor(torch.full((count,), 77).to(dtype))


# Collectives


def carries_collectives(counts: list[int]) -> None:
    rank, world = start()
    for dtype, count in itertools.product(TYPES, counts):
        reduces(rank, world, count, dtype)
        moves(rank, world, count, dtype)
    exchanges_uneven_blocks(rank, world)
    takes_any_strides(rank, world)


def carries_what_asked_for_gloo() -> str:
    """Tensors of both kinds in a group that says gloo, as torch's gloo takes them."""
    rank, world = start(backend="gloo")
    for dtype in (torch.float32, torch.int64):
        reduces(rank, world, 1000, dtype)
        moves(rank, world, 1000, dtype)
    on_host = data(rank, 10)
    dist.all_reduce(on_host)
    assert torch.equal(on_host, summed(world, 10))
    group = dist.new_group(backend="gloo")
    reduced = tensor(data(rank, 10))
    dist.all_reduce(reduced, group=group)
    check(reduced, summed(world, 10), "new_group")
    return group._get_backend(DEVICE).name()


def carries_large_tensors() -> None:
    """More than fits into a window, or into a slot, at once."""
    rank, world = start()
    count = 5_000_003
    reduced = tensor(data(rank, count))
    dist.all_reduce(reduced)
    check(reduced, summed(world, count), "large all_reduce")
    gathered = empty(world * count)
    dist.all_gather_into_tensor(gathered, tensor(data(rank, count)))
    check(gathered, torch.cat([data(peer, count) for peer in range(world)]), "large all_gather")
    moved = tensor(data(rank, count))
    dist.broadcast(moved, world - 1)
    check(moved, data(world - 1, count), "large broadcast")


def carries_operators() -> None:
    """The collectives as operators of the dispatcher, in place and out of place."""
    rank, world = start()
    ops, group = torch.ops.unisono, dist.group.WORLD.group_name
    for dtype, count in itertools.product([torch.float32, torch.bfloat16], [0, 5, 3000]):
        where = (dtype, count)
        total = summed(world, count, dtype)
        mine = tensor(data(rank, count, dtype))
        check(ops.all_reduce(mine, group), total, "all_reduce", *where)
        check(mine, data(rank, count, dtype), "all_reduce's input", *where)
        ops.all_reduce_(mine, group)
        check(mine, total, "all_reduce_", *where)
        mine = tensor(data(rank, count, dtype))
        everything = torch.cat([data(peer, count, dtype) for peer in range(world)])
        check(ops.all_gather(mine, group), everything, "all_gather", *where)
        check(ops.broadcast(mine, group, world - 1), data(world - 1, count, dtype), *where)
        ops.broadcast_(mine, group, 0)
        check(mine, data(0, count, dtype), "broadcast_", *where)
        blocks = tensor(data(rank, world * count, dtype))
        share = slice(rank * count, (rank + 1) * count)
        expected = summed(world, world * count, dtype)[share]
        check(ops.reduce_scatter(blocks, group), expected, "reduce_scatter", *where)
    orders_operators(rank, world)
    # In 8 bits it is for links between hosts, and for the host's memory.
    with pytest.raises(ValueError, match="on the CPU is sent in 8 bits"):
        ops.all_reduce_int8_(tensor(data(rank, 8)), group)


def orders_operators(rank: int, world: int) -> None:
    """An operator does not make the host wait, and comes between what is before and after it."""
    group = dist.group.WORLD.group_name
    mine = tensor(data(rank, 1000))
    with cuda.shut_gate():
        torch.ops.unisono.all_reduce_(mine, group)
    check(mine, summed(world, 1000), "an all_reduce_ behind a gate")


def reduces(rank: int, world: int, count: int, dtype: torch.dtype) -> None:
    where = (dtype, count)
    total = summed(world, count, dtype)
    reduced = tensor(data(rank, count, dtype))
    dist.all_reduce(reduced)
    check(reduced, total, "all_reduce", *where)
    largest = tensor(data(rank, count, dtype))
    dist.all_reduce(largest, MAX)
    everything = torch.stack([data(r, count, torch.float64) for r in range(world)])
    check(largest, everything.amax(0).to(dtype) if count else total, "max", *where)
    for root in range(world):
        mine = tensor(data(rank, count, dtype))
        dist.reduce(mine, root)
        if rank == root:
            check(mine, total, "reduce", *where)
    block = empty(count, dtype)
    dist.reduce_scatter_tensor(block, tensor(data(rank, world * count, dtype)))
    share = slice(rank * count, (rank + 1) * count)
    check(block, summed(world, world * count, dtype)[share], "reduce_scatter_tensor", *where)
    block = empty(count, dtype)
    pieces = [tensor(data(rank + peer, count, dtype)) for peer in range(world)]
    dist.reduce_scatter(block, pieces)
    expected = sum(data(r + rank, count, torch.float64) for r in range(world))
    check(block, expected.to(dtype), "reduce_scatter", *where)


def moves(rank: int, world: int, count: int, dtype: torch.dtype) -> None:
    where = (dtype, count)
    for root in range(world):
        moved = tensor(data(rank, count, dtype))
        dist.broadcast(moved, root)
        check(moved, data(root, count, dtype), "broadcast", *where)
        mine = tensor(data(rank, count, dtype))
        listed = [empty(count, dtype) for _ in range(world)] if rank == root else None
        dist.gather(mine, listed, root)
        for peer, got in enumerate(listed or []):
            check(got, data(peer, count, dtype), "gather", *where)
        given = [tensor(data(p, count, dtype)) for p in range(world)] if rank == root else None
        part = empty(count, dtype)
        dist.scatter(part, given, root)
        check(part, data(rank, count, dtype), "scatter", *where)
    everything = torch.cat([data(peer, count, dtype) for peer in range(world)])
    gathered = empty(world * count, dtype)
    dist.all_gather_into_tensor(gathered, tensor(data(rank, count, dtype)))
    check(gathered, everything, "all_gather_into_tensor", *where)
    in_place = tensor(torch.cat([data(rank, count, dtype)] * world))
    dist.all_gather_into_tensor(in_place, in_place[rank * count : (rank + 1) * count])
    check(in_place, everything, "all_gather_into_tensor in place", *where)
    listed = [empty(count, dtype) for _ in range(world)]
    dist.all_gather(listed, tensor(data(rank, count, dtype)))
    for peer, got in enumerate(listed):
        check(got, data(peer, count, dtype), "all_gather", *where)
    out = empty(world * count, dtype)
    dist.all_to_all_single(out, tensor(data(rank, world * count, dtype)))
    share = slice(rank * count, (rank + 1) * count)
    expected = torch.cat([data(peer, world * count, dtype)[share] for peer in range(world)])
    check(out, expected, "all_to_all_single", *where)


def exchanges_uneven_blocks(rank: int, world: int) -> None:
    send = [rank + peer for peer in range(world)]
    source = tensor(data(rank, sum(send)))
    out = empty(sum(send))
    dist.all_to_all_single(out, source, output_split_sizes=send, input_split_sizes=send)
    expected = []
    for peer in range(world):
        begin = sum(peer + before for before in range(rank))
        expected.append(data(peer, sum(peer + p for p in range(world)))[begin:][: peer + rank])
    check(out, torch.cat(expected), "uneven all_to_all_single")
    listed = [empty(1 + peer) for peer in range(world)]
    dist.all_gather(listed, tensor(data(rank, 1 + rank)))
    for peer, got in enumerate(listed):
        check(got, data(peer, 1 + peer), "uneven all_gather")


def takes_any_strides(rank: int, world: int) -> None:
    """Tensors that are not contiguous are carried beside, and copied in the order of the stream."""
    for asynchronous in (False, True):
        whole = tensor(data(rank, 12).reshape(3, 4))
        turned = whole.t()
        work = dist.all_reduce(turned, async_op=asynchronous)
        if asynchronous:
            work.wait()
        check(whole, summed(world, 12).reshape(3, 4), "transposed", asynchronous)
        outputs = tensor(torch.zeros(2, 3 * world))
        source = tensor(data(rank, 6).reshape(2, 3)).t()
        work = dist.all_gather_into_tensor(outputs.t(), source, async_op=asynchronous)
        if asynchronous:
            work.wait()
        expected = torch.cat([data(peer, 6).reshape(2, 3).t() for peer in range(world)])
        check(outputs, expected.t().contiguous(), "gathered transposed", asynchronous)


# The order of streams


def orders_streams() -> None:
    rank, world = start()
    if world > 1:
        an_asynchronous_call_waits_for_the_current_stream(rank, world)
        a_stream_that_waits_comes_after(rank, world)
    a_synchronous_call_runs_on_the_current_stream(rank, world)
    futures_carry_the_device(rank, world)
    own_streams_do_not_hold_up_the_current_one(rank, world)


def an_asynchronous_call_waits_for_the_current_stream(rank: int, world: int) -> None:
    """The producer of the tensor is late, and no host thread waits for it."""
    with cuda.stream():
        late = empty(1000)
        with cuda.shut_gate() as gate:
            torch.ops.emulated.upload(late, data(rank, 1000))
            work = dist.all_reduce(late, async_op=True)
            assert not work.is_completed()
            work.wait()
            assert not work.is_completed()
            assert not torch.ops.emulated.is_idle(0)
            torch.ops.emulated.open(gate)
        check(late, summed(world, 1000), "late producer")
        assert work.is_completed()
        assert work.is_success()


def a_synchronous_call_runs_on_the_current_stream(rank: int, world: int) -> None:
    with cuda.stream():
        late = empty(1000)
        with cuda.shut_gate() as gate:
            torch.ops.emulated.upload(late, data(rank, 1000))
            dist.all_reduce(late)
            assert not torch.ops.emulated.is_idle(0)
            torch.ops.emulated.open(gate)
        check(late, summed(world, 1000), "late producer, synchronous")


def a_stream_that_waits_comes_after(rank: int, world: int) -> None:
    """A stream that has waited sees the result; the producer's stream need not."""
    with cuda.stream() as producer:
        late = empty(1000)
        with cuda.shut_gate() as gate:
            torch.ops.emulated.upload(late, data(rank, 1000))
            work = dist.all_reduce(late, async_op=True)
            with cuda.stream() as consumer:
                assert consumer != producer
                assert torch.ops.emulated.is_idle(0)
                work.wait()
                assert not torch.ops.emulated.is_idle(0)
                torch.ops.emulated.open(gate)
                check(late, summed(world, 1000), "another stream")


def futures_carry_the_device(rank: int, world: int) -> None:
    with cuda.stream():
        late = empty(1000)
        with cuda.shut_gate() as gate:
            torch.ops.emulated.upload(late, data(rank, 1000))
            work = dist.all_reduce(late, async_op=True)
            future = work.get_future()
            assert future.done()
            doubled = future.then(lambda done: [*done.value(), *done.value()])
            with cuda.stream():
                future.wait()
                assert not torch.ops.emulated.is_idle(0)
                torch.ops.emulated.open(gate)
                check(future.value()[0], summed(world, 1000), "future")
        assert len(doubled.wait()) == 2
        check(doubled.value()[1], summed(world, 1000), "future of a callback")


def own_streams_do_not_hold_up_the_current_one(rank: int, world: int) -> None:
    """Work that the producer's stream gets after the call does not wait for it."""
    with cuda.stream():
        tensors = [tensor(data(rank, 1000)) for _ in range(4)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        assert torch.ops.emulated.current_stream(0) != 0
        other = tensor(data(rank, 10))
        check(other, data(rank, 10), "independent")
        for work, reduced in zip(works, tensors, strict=True):
            work.wait()
            check(reduced, summed(world, 1000), "in flight together")


# Memory


def keeps_memory() -> None:
    """A tensor that its user has dropped is kept until nothing can overtake the call."""
    rank, world = start()
    with cuda.stream() as origin:
        with cuda.shut_gate() as gate:
            dropped = tensor(data(rank, 1000))
            address = dropped.data_ptr()
            work = dist.all_gather_into_tensor(made := empty(world * 1000), dropped, async_op=True)
            del dropped
            assert not torch.ops.emulated.is_free(address)
            with cuda.stream():
                work.wait()
                # This stream comes after the call, but the tensor is not of this stream.
                assert not torch.ops.emulated.is_free(address)
            assert torch.ops.emulated.current_stream(0) == origin
            work.wait()
            # Work that reuses it on the stream it came from comes after the call.
            assert torch.ops.emulated.is_free(address)
            torch.ops.emulated.open(gate)
        check(made, torch.cat([data(r, 1000) for r in range(world)]), "kept")
        # Nothing waits for this one; its memory comes back when the device is done with it.
        dropped = tensor(data(rank, 1000))
        address = dropped.data_ptr()
        dist.all_reduce(dropped, async_op=True)
        del dropped
        torch.ops.emulated.synchronize(0)
        while not torch.ops.emulated.is_free(address):
            time.sleep(0.001)


# Several calls at once


def coalesces() -> None:
    rank, world = start()
    several = [tensor(data(rank + i, 100 * i)) for i in range(4)]
    with dist._coalescing_manager():
        for one in several:
            dist.all_reduce(one)
    for i, one in enumerate(several):
        expected = sum(data(r + i, 100 * i) for r in range(world))
        check(one, expected, "coalesced all_reduce", i)
    outputs = [empty(world * 10 * i) for i in range(1, 4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for i, output in enumerate(outputs, 1):
            dist.all_gather_into_tensor(output, tensor(data(rank, 10 * i)))
    manager.wait()
    for i, output in enumerate(outputs, 1):
        expected = torch.cat([data(r, 10 * i) for r in range(world)])
        check(output, expected, "coalesced all_gather", i)
    mixed = [tensor(data(rank, 10)), tensor(data(rank, 10, torch.int64)), tensor(data(rank, 5))]
    backend = dist.group.WORLD._get_backend(DEVICE)
    backend.allreduce_coalesced(mixed, dist.AllreduceCoalescedOptions()).wait()
    for one in mixed:
        check(one, summed(world, one.numel(), one.dtype), "all_reduce_coalesced")
    # The window over calls of different kinds.
    reduced, moved = tensor(data(rank, 50)), tensor(data(rank, 60))
    with dist._coalescing_manager(device=DEVICE, async_ops=True) as manager:
        dist.all_reduce(reduced, async_op=True)
        dist.broadcast(moved, 0, async_op=True)
    batch = manager.works[0]
    future = batch.get_future()
    future.wait()
    check(reduced, summed(world, 50), "window")
    check(moved, data(0, 60), "window")
    assert len(future.value()) == 2


# Messages


def exchanges_messages() -> None:
    rank, world = start()
    right, left = (rank + 1) % world, (rank - 1) % world
    sent, got = tensor(data(rank, 1000)), empty(1000)
    if rank == 0:
        dist.send(sent, right)
        dist.recv(got, left)
    else:
        dist.recv(got, left)
        dist.send(sent, right)
    check(got, data(left, 1000), "send, recv")

    # Every rank receives first: neither the host nor a stream may stop there.
    for count in (1000, 300_000):
        sent, got = tensor(data(rank, count)), empty(count)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, sent, right)]
        )
        for work in works:
            work.wait()
        check(got, data(left, count), "batch", count)
        got = empty(count)
        receiving = dist.irecv(got, left)
        sending = dist.isend(tensor(data(rank, count)), right)
        receiving.wait()
        sending.wait()
        check(got, data(left, count), "irecv, isend", count)

    # To oneself, in one batch.
    got = empty(10)
    batch = [dist.P2POp(dist.isend, tensor(data(9, 10)), rank), dist.P2POp(dist.irecv, got, rank)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    check(got, data(9, 10), "to oneself")

    # From any rank; the sender is known afterwards.
    if rank == 0:
        senders = set()
        for _ in range(world - 1):
            got = empty(10)
            sender = dist.recv(got)
            check(got, data(sender, 10), "from any rank")
            senders.add(sender)
        assert senders == set(range(1, world))
    else:
        dist.send(tensor(data(rank, 10)), 0)

    # A collective does not wait for a message that has yet to come.
    if rank == 0:
        got = empty(10)
        receiving = dist.irecv(got, 1)
    reduced = tensor(data(rank, 10))
    dist.all_reduce(reduced, async_op=True).wait()
    check(reduced, summed(world, 10), "beside a message")
    dist.barrier()
    if rank == 1:
        dist.send(tensor(data(5, 10)), 0)
    if rank == 0:
        receiving.wait()
        check(got, data(5, 10), "late message")


# The host


def waits_on_the_host() -> None:
    """barrier() waits for the device, wait() with a limit too, and so does the end of a group."""
    rank, world = start()
    opened = False

    def open_later(gate: int) -> None:
        nonlocal opened
        time.sleep(0.3)
        opened = True
        torch.ops.emulated.open(gate)

    late = empty(1000)
    with cuda.stream():
        with cuda.shut_gate() as gate:
            torch.ops.emulated.upload(late, data(rank, 1000))
            dist.all_reduce(late)
            opener = threading.Thread(target=open_later, args=(gate,))
            opener.start()
            dist.barrier()
            assert opened
            assert torch.ops.emulated.is_idle(0)
            opener.join()
        check(late, summed(world, 1000), "before the barrier")

    reduced = tensor(data(rank, 1000))
    with cuda.shut_gate() as gate:
        work = dist.all_reduce(reduced, async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"(?i)timed out"):
            work.wait(timedelta(milliseconds=50))
        torch.ops.emulated.open(gate)
    # A wait that times out does not end the call.
    assert work.wait(timedelta(seconds=60))
    assert work.is_completed()
    check(reduced, summed(world, 1000), "limited wait")

    opened = False
    last = tensor(data(rank, 1000))
    with cuda.shut_gate() as gate:
        dist.all_reduce(last)
        opener = threading.Thread(target=open_later, args=(gate,))
        opener.start()
        dist.destroy_process_group()
        assert opened
        opener.join()
    check(last, summed(world, 1000), "last call")


def tells_durations() -> None:
    rank, _ = start()
    work = dist.all_reduce(tensor(data(rank, 1000)), async_op=True)
    work.wait(timedelta(seconds=60))
    while not work.is_completed():
        time.sleep(0.001)
    assert work._get_duration() > 0
    dist.group.WORLD._enable_collectives_timing()
    dist.group.WORLD._get_backend(DEVICE)._enable_collectives_timing()
    with cuda.shut_gate() as gate:
        work = dist.all_reduce(tensor(data(rank, 1000)), async_op=True)
        work.wait()
        torch.ops.emulated.open(gate)
    torch.ops.emulated.synchronize(0)
    assert work._get_duration() >= 0


# Groups


def mixes_devices() -> None:
    """One group carries tensors of the CPU and of CUDA; one call does not carry both."""
    rank, world = start()
    assert dist.get_backend() == "unisono"
    backends = [dist.group.WORLD._get_backend(torch.device(kind)) for kind in ("cpu", "cuda")]
    assert backends[0] is backends[1]
    for _ in range(3):
        on_host, on_device = data(rank, 100), tensor(data(rank, 100))
        works = [dist.all_reduce(t, async_op=True) for t in (on_host, on_device)]
        for work in works:
            work.wait()
        assert torch.equal(on_host, summed(world, 100))
        check(on_device, summed(world, 100), "mixed")
    listed = [data(rank, 10) for _ in range(world)]
    backend = backends[0]
    with pytest.raises(ValueError, match="must be on one device"):
        backend.allgather([listed], [tensor(data(rank, 10))]).wait()
    with pytest.raises(ValueError, match="must be on one device"):
        both = [data(rank, 10), tensor(data(rank, 10))]
        backend.allreduce_coalesced(both, dist.AllreduceCoalescedOptions()).wait()
    with pytest.raises(ValueError, match="elements"):
        dist.all_gather_into_tensor(empty(7), tensor(data(rank, 4)))
    # The group lives.
    on_device = tensor(data(rank, 100))
    dist.all_reduce(on_device)
    check(on_device, summed(world, 100), "after errors")


def splits_groups() -> None:
    """With a bound device the default group is split, and every part carries both devices."""
    rank, world = start(device_id=DEVICE)
    pairs = [list(range(world))[i : i + 2] for i in range(0, world, 2)]
    mine = next(pair for pair in pairs if rank in pair)
    for _ in range(2):
        part = dist.split_group(split_ranks=pairs)
        assert dist.get_process_group_ranks(part) == mine
        carries_both_devices(part, mine)
    # Ranks that are in no part have nothing to do.
    few = dist.split_group(split_ranks=[[0, 1]])
    assert (few is None or few is dist.GroupMember.NON_GROUP_MEMBER) == (rank > 1)
    if rank <= 1:
        carries_both_devices(few, [0, 1])
    # The group that was split is as it was; limits of its parts are not its own.
    carries_both_devices(dist.group.WORLD, list(range(world)))
    dist.split_group(split_ranks=pairs, timeout=timedelta(seconds=1))
    if rank == 0:
        time.sleep(2)
    dist.all_reduce(data(rank, 10))


def makes_a_mesh() -> None:
    """Its dimensions are splits of the default group, where that has a device."""
    rank, world = start(device_id=DEVICE)
    splits = count_calls(dist.distributed_c10d, "split_group", dist.device_mesh)
    # Answers that a mesh wants from torch's own device, which is not there.
    torch.cuda.is_available = torch.accelerator.is_available = lambda: True
    torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count = lambda: 1
    mesh = dist.init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("outer", "inner"))
    assert len(splits) == 2
    column, row = rank % 2, rank // 2
    carries_both_devices(mesh.get_group("outer"), [column, column + 2])
    carries_both_devices(mesh.get_group("inner"), [2 * row, 2 * row + 1])


def carries_both_devices(group: dist.ProcessGroup, members: list[int]) -> None:
    """One backend does, and its barrier waits for what it has put into streams."""
    rank = dist.get_rank()
    backends = [group._get_backend(torch.device(kind)) for kind in ("cpu", "cuda")]
    assert backends[0] is backends[1]
    assert backends[0].size() == len(members)
    expected = sum(data(r, 100) for r in members)
    for reduced in (tensor(data(rank, 100)), data(rank, 100)):
        dist.all_reduce(reduced, group=group)
        found = values(reduced) if reduced.is_cuda else reduced
        assert torch.equal(found, expected), (reduced.device, members)
    dist.barrier(group)


def count_calls(module: object, name: str, *users: object) -> list[str]:
    """A list that grows with every call of a module's function, by others that imported it too."""
    calls: list[str] = []
    original = getattr(module, name)

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return original(*args, **kwargs)

    for user in (module, *users):
        setattr(user, name, counting)
    return calls


def meets_on_its_device() -> None:
    """A group that is bound to a device: its asynchronous barrier does not block the host."""
    rank, world = start(device_id=DEVICE)
    for waits in (True, rank == 0):
        with cuda.stream():
            late = empty(1000)
            with cuda.shut_gate() as gate:
                torch.ops.emulated.upload(late, data(rank, 1000))
                dist.all_reduce(late)
                if waits:
                    work = dist.barrier(async_op=True)
                    assert not work.is_completed()
                torch.ops.emulated.open(gate)
            # A barrier that blocks meets those that do not.
            if waits:
                work.wait()
                assert work.is_completed()
            else:
                dist.barrier()
            check(late, summed(world, 1000), "before the barrier")


def makes_groups() -> None:
    rank, world = start(device_id=DEVICE)
    pairs = [list(range(world))[i : i + 2] for i in range(0, world, 2)]
    mine = next(pair for pair in pairs if rank in pair)
    made = dist.new_group(mine, use_local_synchronization=True)
    reduced = tensor(data(rank, 100))
    dist.all_reduce(reduced, group=made)
    check(reduced, sum(data(r, 100) for r in mine), "new_group")
    dist.barrier()
    dist.barrier(device_ids=[0])


def uses_several_devices() -> None:
    """A rank's calls may be on one device and then on another, in the same order everywhere."""
    rank, world = start(first_call=False)
    for device in (rank % 2, 1 - rank % 2, rank % 2):
        reduced = tensor(data(rank, 1000), device)
        dist.all_reduce(reduced)
        check(reduced, summed(world, 1000), device)
        work = dist.all_reduce(again := tensor(data(rank, 1000), device), async_op=True)
        work.wait()
        check(again, summed(world, 1000), device)


# Graphs


def is_captured() -> None:
    """A graph of calls, replayed with other values; between the replays calls as ever."""
    rank, world = start()
    reduced, gathered = empty(1000), empty(world * 10)
    source, beside = empty(10), empty(500)
    dist.all_reduce(reduced)
    with cuda.stream():
        torch.ops.emulated.synchronize(0)
        torch.ops.emulated.begin_capture(0)
        dist.all_reduce(reduced)
        dist.all_gather_into_tensor(gathered, source)
        work = dist.all_reduce(beside, async_op=True)
        work.wait()
        dist.all_reduce(reduced)
        graph = torch.ops.emulated.end_capture(0)
        for round_number in range(3):
            torch.ops.emulated.upload(reduced, data(rank + round_number, 1000))
            torch.ops.emulated.upload(source, data(rank * round_number, 10))
            torch.ops.emulated.upload(beside, data(rank - round_number, 500))
            torch.ops.emulated.replay(graph, 0)
            twice = world * sum(data(r + round_number, 1000) for r in range(world))
            check(reduced, twice, "replayed twice", round_number)
            everything = torch.cat([data(r * round_number, 10) for r in range(world)])
            check(gathered, everything, "replayed all_gather", round_number)
            expected = sum(data(r - round_number, 500) for r in range(world))
            check(beside, expected, "replayed asynchronous call", round_number)
            between = tensor(data(rank, 100))
            dist.all_reduce(between)
            check(between, summed(world, 100), "between replays", round_number)


def captures_messages() -> None:
    """A graph of messages, on which the host has no part; between its replays others, as ever."""
    rank, world = start()
    right, left = (rank + 1) % world, (rank - 1) % world
    # Of several pieces each, in both directions at the same time.
    own, got = empty(5_000_001), empty(5_000_001)
    token, seen = empty(3), empty(3)
    with cuda.stream():
        torch.ops.emulated.synchronize(0)
        torch.ops.emulated.begin_capture(0)
        batch = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, own, right)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        dist.all_reduce(got)
        sending = dist.isend(token, right, tag=5)
        dist.recv(seen, left, tag=5)
        sending.wait()
        graph = torch.ops.emulated.end_capture(0)
        for number in range(3):
            torch.ops.emulated.upload(own, data(rank + number, own.numel()))
            torch.ops.emulated.upload(token, data(rank - number, 3))
            torch.ops.emulated.replay(graph, 0)
            everything = sum(data(r + number, got.numel()) for r in range(world))
            check(got, everything, "exchanged and summed", number)
            check(seen, data(left - number, 3), "received", number)
            works = [dist.isend(tensor(data(rank, 10)), right), dist.irecv(more := empty(10), left)]
            for work in works:
                work.wait()
            check(more, data(left, 10), "between replays", number)


# Trouble


def leave(before: dict[str, int]) -> None:
    """End the group, and wait until what a dead peer may have had under way is given back.

    A process that ends earlier leaves that to the driver.
    """
    dist.destroy_process_group()
    deadline = time.monotonic() + 30
    for kind in ("registrations", "allocations"):
        while statistics()[kind] > before[kind]:
            assert time.monotonic() < deadline, (kind, before, statistics())
            time.sleep(0.01)


def has_called(rank: int) -> None:
    dist.distributed_c10d._get_default_store().set(f"rank {rank} has called", "")


def dies_when_called(ranks: Iterable[int]) -> None:
    """End once these ranks have called: a call of theirs that comes later may raise."""
    store = dist.distributed_c10d._get_default_store()
    store.wait([f"rank {rank} has called" for rank in ranks])
    os._exit(0)


def loses_a_peer() -> str:
    """A peer dies while a call waits for it: the stream goes on, and later calls raise."""
    rank, world = start(first_call=False)
    reduced = tensor(data(rank, 1000))
    before = statistics()
    dist.all_reduce(reduced)
    check(reduced, summed(world, 1000), "before")
    dist.barrier()
    if rank == world - 1:
        dies_when_called(range(rank))
    work = dist.all_reduce(reduced, async_op=True)
    has_called(rank)
    # The stream does not hang.
    torch.ops.emulated.synchronize(0)
    deadline = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(dist.DistNetworkError) as raised:
        work.wait()
    with pytest.raises(dist.DistNetworkError):
        dist.all_reduce(reduced)
    assert not work.is_success()
    del work
    # The others go on, with the same memory.
    assert unisono.torch.mask() == list(range(world - 1))
    torch.ops.emulated.upload(reduced, data(rank, 1000))
    dist.all_reduce(reduced)
    check(reduced, summed(world - 1, 1000), "masked")
    blocks = [empty(10) for _ in range(world)]
    dist.all_gather(blocks, tensor(data(rank, 10)))
    for other in range(world - 1):
        check(blocks[other], data(other, 10), "masked")
    check(blocks[world - 1], torch.full((10,), 77.0), "of the one that is gone")
    del blocks
    leave(before)
    return str(raised.value)


def looks_once() -> str:
    """A peer dies, the next call raises, and the program has other things to do."""
    rank, _ = start(first_call=False)
    reduced = tensor(data(rank, 1000))
    before = statistics()
    dist.all_reduce(reduced)
    dist.barrier()
    if rank == 1:
        dies_when_called([0])
    work = dist.all_reduce(reduced, async_op=True)
    has_called(rank)
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline
        try:
            dist.all_reduce(reduced)
        except dist.DistNetworkError as error:
            raised = str(error)
            break
        time.sleep(0.01)
    torch.ops.emulated.synchronize(0)
    time.sleep(12)
    del work
    leave(before)
    return raised


def looks_away(device_failure: str) -> str:
    """A peer dies, and the program calls nothing that would raise the error."""
    os.environ["UNISONO_DEVICE_FAILURE"] = device_failure
    rank, _ = start(first_call=False)
    reduced, gathered = tensor(data(rank, 1000)), [empty(10), empty(10)]
    before = statistics()
    dist.all_reduce(reduced)
    dist.barrier()
    if rank == 1:
        dies_when_called([0])
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.all_gather(gathered, tensor(data(rank, 10)), async_op=True),
    ]
    has_called(rank)
    torch.ops.emulated.synchronize(0)
    time.sleep(8)
    del works
    found = values(reduced), values(gathered[1])
    leave(before)
    return " and ".join("nan" if bool(value.isnan().all()) else str(value) for value in found)


def has_no_driver(backend: str = "unisono") -> str:
    """Without the driver the CPU works as ever, and a CUDA tensor gets a reason."""
    rank, world = start(first_call=False, backend=backend)
    with pytest.raises(ValueError, match="libcuda") as raised:
        dist.all_reduce(empty(10))
    with pytest.raises(ValueError, match="libcuda"):
        dist.all_reduce(empty(10), async_op=True)
    with pytest.raises(ValueError, match="libcuda"):
        dist.isend(empty(10), 1 - rank)
    on_host = data(rank, 10)
    dist.all_reduce(on_host)
    assert torch.equal(on_host, summed(world, 10))
    dist.barrier()
    return str(raised.value)
