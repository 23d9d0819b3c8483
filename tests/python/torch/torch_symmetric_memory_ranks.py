"""The rank functions of `test_torch_symmetric_memory.py`."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

import unisono

LENGTH = 1000
CPU = torch.device("cpu")


def start(seconds: float = 30) -> tuple[int, int]:
    dist.init_process_group("unisono", timeout=timedelta(seconds=seconds))
    return dist.get_rank(), dist.get_world_size()


def met(length: int = LENGTH, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, Any]:
    """A tensor of this rank, full of its number, and the handle of all."""
    tensor = symm_mem.empty(length, dtype=torch.int32, device="cpu").fill_(dist.get_rank())
    return tensor, symm_mem.rendezvous(tensor, group or dist.group.WORLD)


def exchange() -> None:
    """Write to each other's tensors, by each way that torch has."""
    rank, size = start()
    left, right = (rank - 1) % size, (rank + 1) % size
    assert symm_mem.get_backend("cpu") == "unisono"
    tensor, handle = met()
    # Newer than torch 2.11.
    if hasattr(symm_mem, "is_symm_mem_tensor"):
        assert symm_mem.is_symm_mem_tensor(tensor)
        assert not symm_mem.is_symm_mem_tensor(torch.empty(1))
    assert tensor in unisono.heap()
    assert (handle.rank, handle.world_size, handle.device) == (rank, size, CPU)
    assert (handle.buffer_size, handle.offset, handle.multicast_ptr) == (4 * LENGTH, 0, 0)
    assert handle.buffer_ptrs[rank] == tensor.data_ptr()
    assert len({*handle.buffer_ptrs, *handle.signal_pad_ptrs}) == 2 * size
    for peer in range(size):
        assert handle.get_signal_pad(peer).numel() == symm_mem.get_signal_pad_size() // 4
        assert not handle.get_signal_pad(peer).view(torch.int32).any()
    dist.barrier()
    handle.barrier()
    theirs = handle.get_buffer(right, (10, 100), torch.int32)
    assert (theirs == right).all()
    handle.barrier(channel=1)
    theirs[3] = 100 + rank
    handle.barrier()
    assert tensor[299:401].tolist() == [rank, *[100 + left] * 100, rank]
    part = handle.get_buffer(right, (2,), torch.int32, storage_offset=300)
    assert part.data_ptr() == theirs[3].data_ptr()
    for number in range(200):
        tensor[0] = number
        handle.put_signal(right, channel=2)
        handle.wait_signal(left, channel=2)
        assert handle.get_remote_tensor(left, (1,), torch.int32).item() == number
        handle.put_signal(left, channel=3)
        handle.wait_signal(right, channel=3)
    # A signal to itself.
    handle.put_signal(rank, channel=4)
    handle.wait_signal(rank, channel=4)
    assert not handle.get_signal_pad(rank).view(torch.int32).any()
    dist.barrier()
    torch.ops.symm_mem._barrier(torch.ops.symm_mem._rendezvous(tensor, dist.group.WORLD.group_name))
    dist.destroy_process_group()


def pads() -> None:
    """The words of a pad are those of the signals, and a program may use them by itself."""
    rank, size = start()
    _, handle = met()
    channel = symm_mem.get_signal_pad_size() // 4 // size - 1
    word = channel * size + rank
    other = (rank + 1) % size
    theirs = handle.get_signal_pad(other, (1,), torch.int32, storage_offset=word)
    handle.put_signal(other, channel)
    assert theirs.item() == 1
    handle.barrier()
    theirs.fill_(0)
    handle.barrier()
    # The word that a waiting rank sleeps for.
    if rank == 0:
        time.sleep(0.3)
        theirs.fill_(1)
    if rank == 1:
        handle.wait_signal(0, channel, timeout_ms=20_000)
    handle.barrier()
    dist.destroy_process_group()


def views() -> None:
    """A view stands for its whole allocation, and each later rendezvous gives the same."""
    rank, _ = start()
    tensor, handle = met()
    view = tensor[500:].view(5, 100)
    again = symm_mem.rendezvous(view, dist.group.WORLD.group_name)
    assert again.buffer_ptrs == handle.buffer_ptrs
    assert again.signal_pad_ptrs == handle.signal_pad_ptrs
    other = 1 - rank
    again.get_buffer(other, view.shape, torch.int32, view.storage_offset()).fill_(7 + rank)
    again.barrier()
    assert (view == 7 + other).all()
    assert (tensor[:500] == rank).all()
    # A type whose elements have another size, and no elements at all.
    assert handle.get_buffer(other, (4 * LENGTH,), torch.uint8).numel() == 4 * LENGTH
    nothing = symm_mem.empty(0, device="cpu")
    symm_mem.rendezvous(nothing, dist.group.WORLD).barrier()
    dist.destroy_process_group()


def groups() -> None:
    """Each group has signals of its own for the same tensor."""
    rank, size = start()
    tensor, all_ranks = met()
    pair = dist.new_group([0, 1])
    if rank < 2:
        two = symm_mem.rendezvous(tensor, pair)
        assert two.world_size == 2
        assert two.buffer_ptrs[rank] == all_ranks.buffer_ptrs[rank]
        assert not set(two.signal_pad_ptrs) & set(all_ranks.signal_pad_ptrs)
        two.put_signal(1 - rank)
        # The signal of the other group does not end this barrier.
        if rank == 1:
            time.sleep(0.2)
            tensor[0] = 1000
    all_ranks.barrier()
    assert all_ranks.get_buffer(1, (1,), torch.int32).item() == 1000
    if rank < 2:
        two.wait_signal(1 - rank)
        two.barrier()
    all_ranks.barrier()
    # The last one has other ranks than its numbers.
    last = dist.new_group([size - 2, size - 1])
    if rank >= size - 2:
        handle = symm_mem.rendezvous(tensor, last)
        other = 1 - handle.rank
        handle.get_buffer(other, (LENGTH,), torch.int32).fill_(rank)
        handle.barrier()
        assert (tensor == size - 2 + other).all()
    all_ranks.barrier()
    dist.destroy_process_group()


def reuse() -> None:
    """Memory is freed with its tensor, and a fresh tensor has a fresh handle."""
    rank, size = start()
    right = (rank + 1) % size
    in_use = []
    for number in range(8):
        tensor, handle = met(1 << 20)
        theirs = handle.get_buffer(right, (1 << 20,), torch.int32)
        assert (theirs[::4096] == right).all()
        handle.barrier()
        theirs[0] = number
        handle.barrier()
        assert tensor[0] == number
        del tensor, handle, theirs
        gc.collect()
        dist.barrier()
        in_use.append(unisono.heap().in_use)
    # Memory that others still looked at goes with the next rendezvous.
    assert max(in_use) < 3 * (4 << 20), in_use
    # The handle keeps the memory of a tensor that is gone.
    tensor, handle = met()
    handle.barrier()
    del tensor
    gc.collect()
    handle.barrier()
    handle.get_buffer(right, (1,), torch.int32).fill_(50)
    handle.barrier()
    assert handle.get_buffer(rank, (1,), torch.int32).item() == 50
    # A rank that lets go of its handle does not pull the memory away from the others.
    tensor, handle = met()
    theirs = handle.get_buffer(right, (LENGTH,), torch.int32)
    handle.barrier()
    if rank == 0:
        del tensor, handle
        gc.collect()
    dist.barrier()
    fresh = [symm_mem.empty(LENGTH, device="cpu").fill_(-1) for _ in range(8)]
    dist.barrier()
    if rank == size - 1:
        assert (theirs == right).all()
        with pytest.raises(dist.DistError, match=r"rank 0.*(closed|left)"):
            handle.barrier()
    dist.barrier()
    del fresh
    dist.destroy_process_group()


def persistent() -> None:
    """An allocation with a number is the same memory whenever it is asked for."""
    rank, _ = start()
    name = dist.group.WORLD.group_name

    def allocate() -> torch.Tensor:
        return _SymmetricMemory.empty_strided_p2p((LENGTH,), (1,), torch.int32, CPU, name, 7)

    tensor = allocate()
    # The group that the allocation names.
    handle = _SymmetricMemory.rendezvous(tensor)
    address = tensor.data_ptr()
    with pytest.raises(RuntimeError, match="still active"):
        allocate()
    del tensor
    tensor = allocate()
    assert tensor.data_ptr() == address
    again = _SymmetricMemory.rendezvous(tensor)
    assert again.buffer_ptrs == handle.buffer_ptrs
    again.get_buffer(1 - rank, (1,), torch.int32).fill_(rank)
    again.barrier()
    assert tensor[0] == 1 - rank
    dist.destroy_process_group()


def group_ends() -> None:
    """A handle outlives its group, and one of the same name after it has another."""
    rank, _ = start()
    tensor, handle = met()
    handle.barrier()
    name = dist.group.WORLD.group_name
    dist.destroy_process_group()
    handle.barrier()
    start()
    assert dist.group.WORLD.group_name == name
    fresh = symm_mem.rendezvous(tensor, name)
    fresh.get_buffer(1 - rank, (1,), torch.int32).fill_(70 + rank)
    fresh.barrier()
    assert tensor[0] == 71 - rank
    assert not set(fresh.signal_pad_ptrs) & set(handle.signal_pad_ptrs)
    handle.barrier()
    dist.destroy_process_group()


def refusals() -> None:
    rank, size = start()
    other = (rank + 1) % size
    tensor, handle = met()
    group = dist.group.WORLD
    channels = symm_mem.get_signal_pad_size() // 4 // size
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: symm_mem.rendezvous(torch.empty(4), group), "not symmetric"),
        (lambda: _SymmetricMemory.rendezvous(tensor), "group: it is needed"),
        (lambda: handle.put_signal(size), rf"rank {size} is out of range"),
        (lambda: handle.wait_signal(-1), "rank -1 is out of range"),
        (lambda: handle.barrier(channels), rf"channel {channels} is out of range"),
        (lambda: handle.put_signal(other, -1), "-1 is no channel"),
    ]
    for call, text in calls:
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(RuntimeError, match="exceeds"):
        handle.get_buffer(other, (LENGTH + 1,), torch.int32)
    on_gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="not served by unisono"):
        symm_mem.rendezvous(tensor, on_gloo)
    # All ranks are told who has which size, and all goes on.
    length = LENGTH + 1 if rank == size - 1 else LENGTH
    with pytest.raises(ValueError, match=rf"rank 0 has 4000 bytes.*rank {size - 1} has 4004"):
        met(length)
    handle.barrier()
    with pytest.raises(torch.OutOfMemoryError, match="UNISONO_HEAP_BYTES"):
        symm_mem.empty(1 << 45, dtype=torch.uint8, device="cpu")
    dist.barrier()
    dist.destroy_process_group()


def elsewhere() -> str:
    """Rendezvous ranks that do not share memory; return the error."""
    start()
    tensor = symm_mem.empty(LENGTH, device="cpu")
    with pytest.raises(ValueError, match="cannot be mapped") as raised:
        symm_mem.rendezvous(tensor, dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    return str(raised.value)


def timeouts() -> None:
    rank, _ = start()
    other = 1 - rank
    _, handle = met()
    _, second = met()

    def late(call: Callable[[], object], text: str) -> None:
        begin = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=rf"Timed out.*rank {other}.*{text}"):
            call()
        assert time.monotonic() - begin >= 0.19

    late(lambda: handle.wait_signal(other, 0, timeout_ms=200), "within 0.200 s")
    dist.barrier()
    handle.put_signal(other, 0, timeout_ms=200)
    # It is not taken yet.
    late(lambda: handle.put_signal(other, 0, timeout_ms=200), "not taken .* within 0.200 s")
    # Neither has changed anything.
    dist.barrier()
    handle.wait_signal(other, 0)
    with pytest.raises(dist.DistBackendError, match="no signal came"):
        handle.wait_signal(other, 0, timeout_ms=1)
    handle.barrier(channel=7)
    # A barrier that fails leaves some with signals that others wait for: it is over for all.
    if rank == 0:
        late(lambda: second.barrier(0, timeout_ms=200), "within 0.200 s")
        with pytest.raises(dist.DistBackendError, match="no further use"):
            second.put_signal(1)
    dist.barrier()
    if rank == 1:
        begin = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"rank 0.*closed"):
            second.wait_signal(0, 1)
        assert time.monotonic() - begin < 10
    handle.barrier()
    dist.destroy_process_group()


def peer_dies(call: str) -> tuple[float, str]:
    """Rank 1 is killed; return how long the others' wait took from then on, and its error."""
    rank, _ = start()
    _, handle = met()
    if call == "put_signal" and rank != 1:
        handle.put_signal(1)
    handle.barrier(channel=5)
    begin = time.monotonic() + 0.5
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    arguments = () if call == "barrier" else (1,)
    with pytest.raises(dist.DistNetworkError) as raised:
        getattr(handle, call)(*arguments)
    took = time.monotonic() - begin
    with pytest.raises(dist.DistNetworkError, match="no further use"):
        handle.barrier()
    return took, str(raised.value)


def others_run() -> None:
    """While a rank waits other threads of its process run, and handlers of signals."""
    rank, _ = start()
    _, handle = met()
    ticks = 0
    over = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.01):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    if rank == 1:
        time.sleep(1)
    handle.barrier()
    over.set()
    thread.join()
    assert ticks > 20, ticks
    # An exception of a handler ends the wait, and changes nothing.
    if rank == 0:

        def ring(*_: object) -> None:
            raise KeyError("rung")

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begin = time.monotonic()
        with pytest.raises(KeyError, match="rung"):
            handle.wait_signal(1)
        assert time.monotonic() - begin < 5
    dist.barrier()
    handle.put_signal(1 - rank)
    handle.wait_signal(1 - rank)
    dist.destroy_process_group()


def threads() -> None:
    """Threads wait on channels of their own, in whatever order the signals come."""
    rank, _ = start()
    _, handle = met()
    failures: list[Exception] = []

    def play(channel: int) -> None:
        try:
            for _ in range(50):
                handle.put_signal(1 - rank, channel)
                handle.wait_signal(1 - rank, channel, timeout_ms=20_000)
        except Exception as error:
            failures.append(error)

    waiting = [threading.Thread(target=play, args=(channel,)) for channel in range(4)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert not failures, failures
    dist.destroy_process_group()


def forks() -> None:
    """A forked child may drop what it has of its parent, and use nothing of it."""
    rank, _ = start()
    tensor, handle = met()
    handle.barrier()
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(Exception, match="fork"):
                handle.barrier()
            tensor.fill_(99)
            del tensor, handle
            gc.collect()
            symm_mem.empty(LENGTH, device="cpu").fill_(1)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    handle.barrier()
    assert (tensor == rank).all()
    assert (handle.get_buffer(1 - rank, (LENGTH,), torch.int32) == 1 - rank).all()
    handle.barrier()
    dist.destroy_process_group()


KEPT: list[object] = []


def left_open() -> None:
    """A process ends well with all of it alive."""
    start()
    KEPT.extend(met())
    KEPT[1].barrier()
    KEPT.append(KEPT[1].get_buffer(1 - dist.get_rank(), (LENGTH,), torch.int32))


def not_on_cpu() -> None:
    """The functions that torch refuses on the CPU, as the table of docs/torch.md has them."""
    start()
    tensor, handle = met()
    group = dist.group.WORLD
    name = group.group_name
    assert not symm_mem.is_symm_mem_enabled_for_group(name)
    same = torch.zeros(LENGTH, dtype=torch.int32)
    calls: list[Callable[[], object]] = [
        lambda: symm_mem.get_symm_mem_workspace(name, 1024),
        lambda: symm_mem.get_mem_pool("cpu"),
        lambda: symm_mem.get(same, handle, 0),
        lambda: symm_mem.put_signal(tensor, handle, 0),
        lambda: symm_mem.wait_signal(handle, 0),
        lambda: _SymmetricMemory.memset32(tensor, 0, 1),
        lambda: _SymmetricMemory.stream_write_value32(tensor, 0, 1),
        lambda: torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name),
        lambda: torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", name),
        lambda: torch.ops.symm_mem.fused_all_gather_matmul(same, [same], 0, name),
        lambda: torch.ops.symm_mem.get_remote_tensors(tensor, name),
    ]
    for call in calls:
        with pytest.raises((RuntimeError, ValueError, NotImplementedError, AttributeError)):
            call()
    dist.destroy_process_group()
