"""Scenarios of torch.distributed on CUDA tensors, for a real GPU and for the emulated driver.

They run on every rank. ``cuda`` is the device: ``real_cuda_device``, or ``torch_cuda_device`` where
the driver is emulated. A test of one of the two alone has its rank functions beside it.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Iterable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import unisono.torch

if "EMULATED_DEVICE" in os.environ:
    import torch_cuda_device as cuda
    from torch_cuda_device import start, tensor, values
else:
    import real_cuda_device as cuda
    from real_cuda_device import start, tensor, values

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
OTHERS = [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128]
# Every root has its turn with tensors of float32 up to here.
SHORT = 10_000


def data(rank: int, count: int, dtype: torch.dtype = torch.float32, first: int = 0) -> torch.Tensor:
    """A rank's contribution: small numbers that every type holds, different everywhere.

    With ``first`` those from there on, of the same longer tensor.
    """
    places = torch.arange(first, first + count, device=cuda.PLACE)
    return ((places * 3 + rank * 5) % 7).to(dtype)


def wide(source: torch.Tensor) -> torch.Tensor:
    """A type that holds the values of any other, and with which torch can do anything."""
    return source.to(torch.complex128 if source.dtype.is_complex else torch.float64)


def summed(
    world: int, count: int, dtype: torch.dtype = torch.float32, first: int = 0
) -> torch.Tensor:
    return sum(data(rank, count, torch.float64, first) for rank in range(world)).to(dtype)


def joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other, also of types that torch cannot put together."""
    several = list(parts)
    return torch.cat([wide(part) for part in several]).to(several[0].dtype)


def check(actual: torch.Tensor, expected: torch.Tensor, *context: object) -> None:
    found = values(actual)
    assert found.dtype == expected.dtype, context
    assert torch.equal(wide(found), wide(expected)), (found, expected, context)


def empty(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return tensor(torch.full((count,), 77, device=cuda.PLACE).to(dtype))


def roots(world: int, count: int, dtype: torch.dtype) -> Iterable[int]:
    is_quick = count <= SHORT and dtype == torch.float32
    return range(world) if is_quick else [count % world]


# Collectives


def carries_collectives(types: list[torch.dtype], counts: list[int]) -> None:
    rank, world = start()
    for dtype, count in itertools.product(types, counts):
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
    on_host = data(rank, 10).cpu()
    dist.all_reduce(on_host)
    assert torch.equal(on_host, summed(world, 10).cpu())
    group = dist.new_group(backend="gloo")
    reduced = tensor(data(rank, 10))
    dist.all_reduce(reduced, group=group)
    check(reduced, summed(world, 10), "new_group")
    return group._get_backend(cuda.own_device()).name()


def carries_large_tensors() -> None:
    """More than fits into a window, or into a slot, at once."""
    rank, world = start()
    count = 5_000_003
    reduced = tensor(data(rank, count))
    dist.all_reduce(reduced)
    check(reduced, summed(world, count), "large all_reduce")
    gathered = empty(world * count)
    dist.all_gather_into_tensor(gathered, tensor(data(rank, count)))
    check(gathered, joined(data(peer, count) for peer in range(world)), "large all_gather")
    moved = tensor(data(rank, count))
    dist.broadcast(moved, world - 1)
    check(moved, data(world - 1, count), "large broadcast")


def reduces(rank: int, world: int, count: int, dtype: torch.dtype) -> None:
    where = (dtype, count)
    total = summed(world, count, dtype)
    reduced = tensor(data(rank, count, dtype))
    dist.all_reduce(reduced)
    check(reduced, total, "all_reduce", *where)
    if dtype in (*FLOATS, *INTEGERS):
        largest = tensor(data(rank, count, dtype))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        everything = torch.stack([data(r, count, torch.float64) for r in range(world)])
        check(largest, everything.amax(0).to(dtype) if count else total, "max", *where)
    for root in roots(world, count, dtype):
        mine = tensor(data(rank, count, dtype))
        dist.reduce(mine, root)
        if rank == root:
            check(mine, total, "reduce", *where)
    block = empty(count, dtype)
    dist.reduce_scatter_tensor(block, tensor(data(rank, world * count, dtype)))
    check(block, summed(world, count, dtype, rank * count), "reduce_scatter_tensor", *where)
    block = empty(count, dtype)
    pieces = [tensor(data(rank + peer, count, dtype)) for peer in range(world)]
    dist.reduce_scatter(block, pieces)
    expected = sum(data(r + rank, count, torch.float64) for r in range(world))
    check(block, expected.to(dtype), "reduce_scatter", *where)


def moves(rank: int, world: int, count: int, dtype: torch.dtype) -> None:
    where = (dtype, count)
    for root in roots(world, count, dtype):
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
    everything = joined(data(peer, count, dtype) for peer in range(world))
    gathered = empty(world * count, dtype)
    dist.all_gather_into_tensor(gathered, tensor(data(rank, count, dtype)))
    check(gathered, everything, "all_gather_into_tensor", *where)
    in_place = tensor(joined([data(rank, count, dtype)] * world))
    dist.all_gather_into_tensor(in_place, in_place[rank * count : (rank + 1) * count])
    check(in_place, everything, "all_gather_into_tensor in place", *where)
    listed = [empty(count, dtype) for _ in range(world)]
    dist.all_gather(listed, tensor(data(rank, count, dtype)))
    for peer, got in enumerate(listed):
        check(got, data(peer, count, dtype), "all_gather", *where)
    out = empty(world * count, dtype)
    dist.all_to_all_single(out, tensor(data(rank, world * count, dtype)))
    expected = joined(data(peer, count, dtype, rank * count) for peer in range(world))
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
    check(out, joined(expected), "uneven all_to_all_single")
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
        outputs = tensor(torch.zeros(2, 3 * world, device=cuda.PLACE))
        source = tensor(data(rank, 6).reshape(2, 3)).t()
        work = dist.all_gather_into_tensor(outputs.t(), source, async_op=asynchronous)
        if asynchronous:
            work.wait()
        expected = joined(data(peer, 6).reshape(2, 3).t() for peer in range(world))
        check(outputs, expected.t().contiguous(), "gathered transposed", asynchronous)


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
        expected = joined(data(r, 10 * i) for r in range(world))
        check(output, expected, "coalesced all_gather", i)
    mixed = [tensor(data(rank, 10)), tensor(data(rank, 10, torch.int64)), tensor(data(rank, 5))]
    backend = dist.group.WORLD._get_backend(cuda.own_device())
    backend.allreduce_coalesced(mixed, dist.AllreduceCoalescedOptions()).wait()
    for one in mixed:
        check(one, summed(world, one.numel(), one.dtype), "all_reduce_coalesced")
    # The window over calls of different kinds.
    reduced, moved = tensor(data(rank, 50)), tensor(data(rank, 60))
    with dist._coalescing_manager(device=cuda.own_device(), async_ops=True) as manager:
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


# One-sided transfers


def listed(held: torch.Tensor) -> list[int]:
    """The elements of a tensor, wherever it lies."""
    return (values(held) if held.is_cuda else held).tolist()


def reads_and_writes_one_sided() -> None:
    """Tensors of the device and of the host, by unisono as a transport of torch."""
    from torch.distributed._transport import new_transport

    from unisono.transports import UnisonoRemoteBuffer

    rank, _ = start()
    store, numbers = dist.distributed_c10d._get_default_store(), itertools.count()

    def swap(own: bytes) -> bytes:
        number = next(numbers)
        store.set(f"one-sided/{number}/{rank}", own)
        return store.get(f"one-sided/{number}/{1 - rank}")

    cases = [([True, True], 1000), ([True, False], 1000), ([False, True], 1000)]
    # A long one, which a process copies from the other's memory.
    for on_device, count in [*cases, ([True, True], 1_000_000)]:
        transport = new_transport("unisono")
        transport.connect(swap(transport.bind()))
        mine = torch.arange(count, dtype=torch.int32, device=cuda.PLACE) + count * rank
        held = tensor(mine) if on_device[rank] else mine.to("cpu", copy=True)
        cuda.synchronize()
        content = functools.partial(listed, held)
        memory = transport.register_memory(held)
        remote = UnisonoRemoteBuffer.deserialize(swap(memory.to_remote_buffer().serialize()))
        part = 4 * count // 2
        if rank == 0:
            transport.write(memory.to_view(0, part), remote.part(part // 2, part))
        dist.barrier()
        if rank == 1:
            expected = mine.tolist()
            expected[count // 4 : count // 4 + count // 2] = range(count // 2)
            assert content() == expected
            transport.read(memory.to_mutable_view(), remote)
            assert content() == list(range(count))
        dist.barrier()
        transport.close()
    dist.destroy_process_group()


# The host


def tells_durations() -> None:
    rank, _ = start()
    work = dist.all_reduce(tensor(data(rank, 1000)), async_op=True)
    work.wait(timedelta(seconds=60))
    while not work.is_completed():
        time.sleep(0.001)
    assert work._get_duration() > 0
    dist.group.WORLD._enable_collectives_timing()
    dist.group.WORLD._get_backend(cuda.own_device())._enable_collectives_timing()
    work = dist.all_reduce(tensor(data(rank, 1000)), async_op=True)
    work.wait()
    cuda.synchronize()
    assert 0 <= work._get_duration() < 10_000


# Groups


def mixes_devices() -> None:
    """One group carries tensors of the CPU and of CUDA; one call does not carry both."""
    rank, world = start()
    assert dist.get_backend() == "unisono"
    backends = [dist.group.WORLD._get_backend(torch.device(kind)) for kind in ("cpu", "cuda")]
    assert backends[0] is backends[1]
    for _ in range(3):
        on_host, on_device = data(rank, 100).cpu(), tensor(data(rank, 100))
        works = [dist.all_reduce(t, async_op=True) for t in (on_host, on_device)]
        for work in works:
            work.wait()
        assert torch.equal(on_host, summed(world, 100).cpu())
        check(on_device, summed(world, 100), "mixed")
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert [entry["rank"] for entry in objects] == list(range(world))
    listed = [data(rank, 10).cpu() for _ in range(world)]
    backend = backends[0]
    with pytest.raises(ValueError, match="must be on one device"):
        backend.allgather([listed], [tensor(data(rank, 10))]).wait()
    with pytest.raises(ValueError, match="must be on one device"):
        both = [data(rank, 10).cpu(), tensor(data(rank, 10))]
        backend.allreduce_coalesced(both, dist.AllreduceCoalescedOptions()).wait()
    with pytest.raises(ValueError, match="elements"):
        dist.all_gather_into_tensor(empty(7), tensor(data(rank, 4)))
    # The group lives.
    on_device = tensor(data(rank, 100))
    dist.all_reduce(on_device)
    check(on_device, summed(world, 100), "after errors")


def splits_groups() -> None:
    """With a bound device the default group is split, and every part carries both devices."""
    rank, world = start(device_id=cuda.own_device())
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
    dist.all_reduce(data(rank, 10).cpu())


def makes_a_mesh(bound: bool) -> None:
    """Its dimensions are splits of the default group, where that has a device."""
    rank, world = start(**({"device_id": cuda.own_device()} if bound else {}))
    splits = count_calls(dist.distributed_c10d, "split_group", dist.device_mesh)
    cuda.answer_for_a_mesh()
    half = world // 2
    mesh = dist.init_device_mesh("cuda", (2, half), mesh_dim_names=("outer", "inner"))
    if bound and half > 1:
        assert len(splits) == 2
    row, column = divmod(rank, half)
    carries_both_devices(mesh.get_group("outer"), [column, column + half])
    carries_both_devices(mesh.get_group("inner"), list(range(row * half, (row + 1) * half)))


def carries_both_devices(group: dist.ProcessGroup, members: list[int]) -> None:
    """One backend does, and its barrier waits for what it has put into streams."""
    rank = dist.get_rank()
    backends = [group._get_backend(torch.device(kind)) for kind in ("cpu", "cuda")]
    assert backends[0] is backends[1]
    assert backends[0].size() == len(members)
    expected = sum(data(r, 100) for r in members)
    for reduced in (tensor(data(rank, 100)), data(rank, 100).cpu()):
        dist.all_reduce(reduced, group=group)
        found = values(reduced) if reduced.is_cuda else reduced.to(expected.device)
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


def makes_groups() -> None:
    rank, world = start(device_id=cuda.own_device())
    pairs = [list(range(world))[i : i + 2] for i in range(0, world, 2)]
    mine = next(pair for pair in pairs if rank in pair)
    made = dist.new_group(mine, use_local_synchronization=True)
    reduced = tensor(data(rank, 100))
    dist.all_reduce(reduced, group=made)
    check(reduced, sum(data(r, 100) for r in mine), "new_group")
    dist.barrier()
    dist.barrier(device_ids=[cuda.own_device().index])


# Graphs


def is_captured(count: int, beside_count: int) -> None:
    """A graph of calls, replayed with other values; between the replays calls as ever."""
    rank, world = start()
    reduced, gathered = empty(count), empty(world * 10)
    source, beside = empty(10), empty(beside_count)
    dist.all_reduce(reduced)
    dist.all_reduce(beside)
    with cuda.capture() as graph:
        work = dist.all_reduce(beside, async_op=True)
        dist.all_reduce(reduced)
        dist.all_gather_into_tensor(gathered, source)
        work.wait()
        dist.all_reduce(reduced)
    with cuda.stream():
        for round_number in range(3):
            cuda.upload(reduced, data(rank + round_number, count))
            cuda.upload(source, data(rank * round_number, 10))
            cuda.upload(beside, data(rank - round_number, beside_count))
            graph.replay()
            twice = world * sum(data(r + round_number, count) for r in range(world))
            check(reduced, twice, "replayed twice", round_number)
            everything = joined(data(r * round_number, 10) for r in range(world))
            check(gathered, everything, "replayed all_gather", round_number)
            expected = sum(data(r - round_number, beside_count) for r in range(world))
            check(beside, expected, "replayed asynchronous call", round_number)
            between = tensor(data(rank, 100))
            dist.all_reduce(between)
            check(between, summed(world, 100), "between replays", round_number)


def captures_messages(count: int) -> None:
    """A graph of messages, on which the host has no part; between its replays others, as ever."""
    rank, world = start()
    right, left = (rank + 1) % world, (rank - 1) % world
    # Of several pieces each, in both directions at the same time.
    own, got = empty(count), empty(count)
    token, seen = empty(3), empty(3)
    dist.all_reduce(own)
    with cuda.capture() as graph:
        batch = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, own, right)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        dist.all_reduce(got)
        sending = dist.isend(token, right, tag=5)
        dist.recv(seen, left, tag=5)
        sending.wait()
    with cuda.stream():
        for number in range(3):
            cuda.upload(own, data(rank + number, own.numel()))
            cuda.upload(token, data(rank - number, 3))
            graph.replay()
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
        while (now := cuda.statistics()) and now[kind] > before[kind]:
            assert time.monotonic() < deadline, (kind, before, now)
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
    before = cuda.statistics()
    dist.all_reduce(reduced)
    check(reduced, summed(world, 1000), "before")
    dist.barrier()
    if rank == world - 1:
        dies_when_called(range(rank))
    work = dist.all_reduce(reduced, async_op=True)
    has_called(rank)
    # The stream does not hang.
    cuda.synchronize()
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
    cuda.upload(reduced, data(rank, 1000))
    dist.all_reduce(reduced)
    check(reduced, summed(world - 1, 1000), "masked")
    blocks = [empty(10) for _ in range(world)]
    dist.all_gather(blocks, tensor(data(rank, 10)))
    for other in range(world - 1):
        check(blocks[other], data(other, 10), "masked")
    check(blocks[world - 1], torch.full((10,), 77.0, device=cuda.PLACE), "of the one that is gone")
    del blocks
    leave(before)
    return str(raised.value)
