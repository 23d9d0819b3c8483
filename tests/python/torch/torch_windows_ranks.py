"""The rank functions of `test_torch_windows.py`."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

LENGTH = 1000


def group() -> dist.ProcessGroup:
    dist.init_process_group("unisono", timeout=timedelta(seconds=30))
    return dist.group.WORLD


def exposed(*, shared: bool, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor of this rank, full of its number, in the heap or not."""
    cpu = torch.device("cpu")
    backend = dist.group.WORLD._get_backend(cpu)
    tensor = (
        backend.allocate_tensor(LENGTH, dtype=dtype, device=cpu)
        if shared
        else torch.empty(LENGTH, dtype=dtype)
    )
    return tensor.fill_(dist.get_rank())


def exchange(shared: bool) -> None:
    pg = group()
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    assert pg.supports_window
    tensor = exposed(shared=shared)
    window = pg.new_window(tensor)
    for number in range(10):
        sent = torch.full((3,), 100 * number + rank, dtype=torch.int32)
        window.put(sent, right, 10, async_op=False)
        window.signal(right, async_op=False)
        window.wait_signal(left, async_op=False)
        assert tensor[9:14].tolist() == [rank, *[100 * number + left] * 3, rank]
        window.signal(left, async_op=False)
        window.wait_signal(right, async_op=False)
    # Asynchronous: a signal comes after all puts before it.
    parts = [torch.full((1,), number, dtype=torch.int32) for number in range(8)]
    works = [window.put(part, right, 20 + part.item(), async_op=True) for part in parts]
    waiting = window.wait_signal(left, async_op=True)
    window.signal(right, async_op=True).wait()
    assert all(work.wait() for work in works)
    assert waiting.wait(timedelta(seconds=20))
    assert waiting.is_completed()
    assert tensor[20:28].tolist() == list(range(8))
    assert window.get_attr(left).access_type == c10d.WindowAccessType.UNIFIED
    window.tensor_deregister()
    with pytest.raises(ValueError, match="no tensor"):
        window.signal(right, async_op=False)
    # The same window, another tensor, of a shape and type of its own.
    other = exposed(shared=shared, dtype=torch.float64).view(10, -1)
    window.tensor_register(other)
    window.put(torch.ones(1, dtype=torch.float64), right, LENGTH - 1, async_op=False)
    window.signal(right, async_op=False)
    window.wait_signal(left, async_op=False)
    assert other[-1, -1] == 1
    window.tensor_deregister()
    dist.destroy_process_group()


def mapped() -> None:
    """The tensor of a neighbour is its memory, as long as there is one over it."""
    pg = group()
    rank = dist.get_rank()
    other = 1 - rank
    tensor = exposed(shared=True, dtype=torch.bfloat16).view(2, -1)
    window = pg.new_window(tensor)
    theirs = window.map_remote_tensor(other)
    assert theirs.shape == tensor.shape
    assert theirs.dtype == torch.bfloat16
    theirs[1] = 7 + rank
    window.signal(other, async_op=False)
    window.wait_signal(other, async_op=False)
    assert (tensor[1] == 7 + other).all()
    assert (tensor[0] == rank).all()
    assert window.map_remote_tensor(rank).data_ptr() == tensor.data_ptr()
    window.tensor_deregister()
    del window, tensor
    dist.barrier()
    fresh = [exposed(shared=True, dtype=torch.bfloat16) for _ in range(8)]
    dist.barrier()
    assert (theirs[1] == 7 + rank).all()
    del fresh
    dist.destroy_process_group()


def refusals() -> None:
    pg = group()
    other = 1 - dist.get_rank()
    window = pg.new_window()
    with pytest.raises(ValueError, match="no tensor"):
        window.map_remote_tensor(other)
    with pytest.raises(ValueError, match="contiguous"):
        window.tensor_register(torch.zeros(4, 4).t())
    window.tensor_register(torch.zeros(4))
    one = torch.ones(1)
    for call, text in (
        (lambda: window.put(one, 2, 0, False), "rank 2 is out of range"),
        (lambda: window.put(one, other, 4, False), "do not lie in the 16 bytes"),
        (lambda: window.put(one, other, -1, False), "no place"),
        (lambda: window.put(one.double(), other, 0, False), "of Double"),
        (lambda: window.put(torch.ones(2, 2).t(), other, 0, False), "contiguous"),
        (lambda: window.signal(-1, False), "out of range"),
        (lambda: window.map_remote_tensor(other), "cannot be mapped"),
        (lambda: window.tensor_register(one), "deregister"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    options = c10d.WaitSignalOptions()
    options.timeout = timedelta(seconds=0.1)
    with pytest.raises(dist.DistBackendError, match="Timed out"):
        window.wait_signal(other, False, options)
    waiting = window.wait_signal(other, True)
    assert not waiting.is_completed()
    with pytest.raises(dist.DistBackendError, match="goes on"):
        waiting.wait(timedelta(seconds=0.1))
    dist.barrier()
    window.signal(other, False)
    assert waiting.wait()
    window.put(one, other, 3, False)
    window.tensor_deregister()
    dist.destroy_process_group()


def peer_dies() -> tuple[float, str]:
    """Rank 1 is killed; return how long the others' wait for its signal took, and its error."""
    pg = group()
    window = pg.new_window(exposed(shared=True))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic() + 0.3
    waiting = window.wait_signal(1, async_op=True)
    with pytest.raises(dist.DistNetworkError) as raised:
        waiting.wait()
    took = time.monotonic() - begin
    with pytest.raises(dist.DistNetworkError, match="make a new window"):
        window.signal(2, async_op=False)
    return took, str(raised.value)
