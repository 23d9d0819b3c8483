"""The rank functions of `test_torch_transports.py`: ranks read and write each other's tensors."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed._transport import Transport, new_transport, new_transport_rank, wait_all

import unisono
from unisono.transports import UnisonoRemoteBuffer, UnisonoTransport

RANK = int(os.environ.get("RANK", "0"))
PEER = 1 - RANK


def store() -> dist.Store:
    """Meet without a process group."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, 2, RANK == 0, timeout=timedelta(seconds=30))


def swap(meeting: dist.Store, key: str, value: bytes) -> bytes:
    """Give the peer some bytes, and return its own."""
    meeting.set(f"{key}/{RANK}", value)
    return meeting.get(f"{key}/{PEER}")


def leave(meeting: dist.Store) -> None:
    """Wait until the peer needs neither this process nor, from rank 0, its store."""
    swap(meeting, "end", b"yes")
    if RANK == 0:
        meeting.get("left")
    else:
        meeting.set("left", b"yes")


def pattern(size: int, seed: int) -> torch.Tensor:
    return ((torch.arange(size) * 7 + seed) % 251).to(torch.uint8)


def exchange(sizes: list[int], in_heap: bool) -> float:
    """Write to the peer and read it again, both ranks at once; return the seconds that it took."""
    meeting = store()
    transport = new_transport_rank("unisono", "cpu", store=meeting, peer_rank=PEER, rank=RANK)
    assert transport.connected()
    took = 0.0
    for size in sizes:
        mine = pattern(size, RANK)
        theirs = torch.empty_like(mine)
        if in_heap:
            theirs = torch.from_numpy(unisono.empty(size, "uint8"))
        source = transport.register_memory(mine)
        target = transport.register_memory(theirs.zero_())
        data = swap(meeting, f"target/{size}", target.to_remote_buffer().serialize())
        remote = UnisonoRemoteBuffer.deserialize(data)
        assert remote.size() == size
        began = time.perf_counter()
        assert transport.write(source.to_view(), remote) == 0
        took += time.perf_counter() - began
        swap(meeting, f"written/{size}", b"yes")
        torch.testing.assert_close(theirs, pattern(size, PEER), rtol=0, atol=0)
        # Of what was written, read the second half into the first half of what was sent.
        half = size // 2
        view = source.to_mutable_view(0, size - half)
        assert transport.read(view, remote.part(half, size - half)) == 0
        expected = pattern(size, RANK)
        torch.testing.assert_close(mine[: size - half], expected[half:], rtol=0, atol=0)
        swap(meeting, f"read/{size}", b"yes")
        transport.unregister_memory(source)
        transport.unregister_memory(target)
    leave(meeting)
    transport.close()
    return took


def target_does_nothing() -> float:
    """The target holds Python's lock in a call of C; the initiator needs nothing of it."""
    meeting = store()
    transport = UnisonoTransport("cpu")
    memory = transport.register_memory(pattern(1 << 20, RANK))
    url = swap(meeting, "url", transport.bind())
    remote = UnisonoRemoteBuffer.deserialize(
        swap(meeting, "memory", memory.to_remote_buffer().serialize())
    )
    took = 0.0
    if RANK == 0:
        transport.connect(url)
        meeting.wait(["sleeps"])
        began = time.perf_counter()
        for _ in range(20):
            transport.read(memory.to_mutable_view(), remote)
        took = time.perf_counter() - began
    else:
        meeting.set("sleeps", b"yes")
        # As a long call of a library that keeps the lock.
        ctypes.PyDLL(None).usleep(6_000_000)
    leave(meeting)
    transport.close()
    return took


def prepare(size: int) -> tuple[dist.Store, Transport, torch.Tensor, UnisonoRemoteBuffer, int]:
    meeting = store()
    transport = new_transport_rank("unisono", store=meeting, peer_rank=PEER, rank=RANK)
    tensor = pattern(size, RANK)
    memory = transport.register_memory(tensor)
    data = swap(meeting, "memory", memory.to_remote_buffer().serialize())
    pid = int(swap(meeting, "pid", str(os.getpid()).encode()))
    return meeting, transport, tensor, UnisonoRemoteBuffer.deserialize(data), pid


def death() -> tuple[str, float] | None:
    """The target dies amid transfers."""
    meeting, transport, tensor, remote, pid = prepare(8 << 20)
    if RANK == 1:
        meeting.wait(["begun"])
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    memory = transport.register_memory(tensor)
    transport.write(memory.to_view(), remote)
    meeting.set("begun", b"yes")
    began = time.perf_counter()
    with pytest.raises(unisono.PeerLostError) as failed:
        while time.perf_counter() - began < 30:
            transport.write(memory.to_view(), remote)
    took = time.perf_counter() - began
    assert not transport.connected()
    transport.close()
    # Another of the same process still works.
    with new_transport("unisono") as one, new_transport("unisono") as other:
        one.connect(other.bind())
    return f"{failed.value} {pid}", took


def stopped() -> None:
    """The target is stopped: waits end, the transfer goes on when it does, and nothing is lost."""
    meeting, transport, tensor, remote, pid = prepare(8 << 20)
    if RANK == 1:
        meeting.wait(["end"], timedelta(seconds=60))
        torch.testing.assert_close(tensor, pattern(8 << 20, 0), rtol=0, atol=0)
        transport.close()
        return
    memory = transport.register_memory(tensor)
    twin = transport.register_memory(tensor)
    view = memory.to_view()
    os.kill(pid, signal.SIGSTOP)
    try:
        work = transport.write(view, remote, async_op=True, timeout=0.3)
        future = work.get_future()
        for wait in (work.wait, lambda: work.wait(timedelta(seconds=0.1))):
            with pytest.raises(TimeoutError, match="goes on"):
                wait()
        assert not work.is_completed()
        assert not future.done()
        with pytest.raises(RuntimeError, match="pending"):
            transport.unregister_memory(twin)
        with pytest.raises(TimeoutError, match="after 0 s"):
            transport.write(view, remote, timeout=0)
        with pytest.raises(TimeoutError):
            asyncio.run(transport.read_async(memory.to_mutable_view(), remote, timeout=0.2))
        for patience in (0.2, 0):
            with pytest.raises(TimeoutError, match="not closed"):
                transport.close(timeout=patience)
    finally:
        os.kill(pid, signal.SIGCONT)
    work.wait(timedelta(seconds=20))
    assert future.wait() == []
    transport.close()
    transport.close()
    meeting.set("end", b"yes")


def in_use_at_the_target() -> None:
    """The initiator is stopped amid a write: the target cannot take the memory back."""
    meeting, transport, tensor, remote, pid = prepare(48 << 20)
    if RANK == 0:
        memory = transport.register_memory(tensor)
        meeting.set("begins", b"yes")
        with pytest.raises((unisono.PeerLostError, unisono.AbortedError), match="closed its port"):
            for _ in range(10_000):
                transport.write(memory.to_view(), remote)
        transport.close()
        return
    memory = transport.register_memory(tensor)
    meeting.wait(["begins"])
    time.sleep(0.3)
    os.kill(pid, signal.SIGSTOP)
    try:
        # Whether it was caught amid a write is chance; that no close waits for it is not.
        began = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            transport.unregister_memory(memory, timeout=0.3)
        with contextlib.suppress(TimeoutError):
            transport.close(timeout=5)
        assert time.perf_counter() - began < 15
    finally:
        os.kill(pid, signal.SIGCONT)
    transport.close()


def late_first_transfer() -> None:
    """The time that a connection may take says nothing of transfers."""
    meeting = store()
    transport = new_transport("unisono")
    tensor = pattern(1000, RANK)
    memory = transport.register_memory(tensor)
    url = swap(meeting, "url", transport.bind())
    remote = swap(meeting, "memory", memory.to_remote_buffer().serialize())
    pid = int(swap(meeting, "pid", str(os.getpid()).encode()))
    if RANK == 0:
        transport.connect(url, timeout=3)
        os.kill(pid, signal.SIGSTOP)
        try:
            work = transport.write(
                memory.to_view(), UnisonoRemoteBuffer.deserialize(remote), async_op=True
            )
            time.sleep(5)
        finally:
            os.kill(pid, signal.SIGCONT)
        work.wait()
    leave(meeting)
    torch.testing.assert_close(tensor, pattern(1000, 0), rtol=0, atol=0)
    transport.close()


def many() -> float:
    """Many small transfers under way at once."""
    meeting, transport, tensor, remote, _ = prepare(4 << 20)
    took = 0.0
    if RANK == 0:
        memory = transport.register_memory(tensor)
        began = time.perf_counter()
        works = [
            transport.write(memory.to_view(at, 4 << 10), remote.part(at, 4 << 10), async_op=True)
            for at in range(0, 4 << 20, 4 << 10)
        ]
        asyncio.run(wait_all(works, timeout=30))
        took = time.perf_counter() - began
        assert all(work.is_success() for work in works)
    swap(meeting, "written", b"yes")
    torch.testing.assert_close(tensor, pattern(4 << 20, 0), rtol=0, atol=0)
    leave(meeting)
    transport.close()
    return took


def ends_without_closing() -> None:
    """The program ends while transfers are under way, and while a peer may start more."""
    meeting, transport, tensor, remote, pid = prepare(8 << 20)
    if RANK == 0:
        memory = transport.register_memory(tensor)
        # It needs the store no longer.
        meeting.get("mine")
        os.kill(pid, signal.SIGSTOP)
        work = transport.write(memory.to_view(), remote, async_op=True)
        work.get_future()
        # After the end of this process.
        if os.fork() == 0:
            time.sleep(1.0)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
    else:
        meeting.set("mine", b"yes")
        time.sleep(0.5)
    # Kept until the interpreter goes.
    ends_without_closing.kept = (meeting, transport)  # type: ignore[attr-defined]
