"""The rank functions of ``test_torch_emulated_cuda`` that only an emulated device can run.

Others are in ``cuda_scenarios``. Here streams are ordered queues that stop at a shut gate: what a
call may not wait for is shut off, and what must come after it is looked at once the gate is open.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch_cuda_device as cuda
from cuda_scenarios import check, data, dies_when_called, empty, has_called, leave, summed
from torch_cuda_device import start, statistics, tensor, values

# Collectives


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


# Groups


def meets_on_its_device() -> None:
    """A group that is bound to a device: its asynchronous barrier does not block the host."""
    rank, world = start(device_id=cuda.own_device())
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


# Trouble


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


# Windows


def makes_windows() -> None:
    rank, world = start()
    left, right = (rank - 1) % world, (rank + 1) % world
    exposed = tensor(torch.full((1000,), rank, dtype=torch.int32))
    window = dist.group.WORLD.new_window(exposed)
    for number in range(4):
        sent = torch.full((3,), 100 * number + rank, dtype=torch.int32)
        window.put(sent if number % 2 else tensor(sent), right, 10, async_op=False)
        window.signal(right, async_op=False)
        window.wait_signal(left, async_op=False)
        assert values(exposed)[9:14].tolist() == [rank, *[100 * number + left] * 3, rank]
        window.signal(left, async_op=False)
        window.wait_signal(right, async_op=False)
    if world > 1:
        theirs = window.map_remote_tensor(left)
        assert (theirs.device, theirs.dtype) == (exposed.device, torch.int32)
        assert theirs.shape == (1000,)
        assert values(theirs)[-1] == left
        del theirs
    # A put comes after what the current stream has under way on its tensor.
    late = tensor(torch.zeros(3, dtype=torch.int32))
    with cuda.shut_gate() as gate:
        torch.ops.emulated.upload(late, torch.full((3,), 7, dtype=torch.int32))
        threading.Timer(0.2, torch.ops.emulated.open, [gate]).start()
        window.put(late, right, 20, async_op=False)
    window.signal(right, async_op=False)
    window.wait_signal(left, async_op=False)
    assert values(exposed)[20:23].tolist() == [7] * 3
    window.tensor_deregister()
    on_host = dist.group.WORLD.new_window(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="no rank of the window exposes a tensor on a device"):
        on_host.put(exposed, right, 0, async_op=False)
    on_host.tensor_deregister()
    dist.destroy_process_group()
