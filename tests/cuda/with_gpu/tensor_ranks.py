"""The rank functions for torch's tensors through the Python door, for test_arrays_cuda.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import unisono


@contextmanager
def joined() -> Iterator[unisono.Communicator]:
    """Each rank on a device, several on one where there are fewer."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    with unisono.init(timeout=60) as comm:
        yield comm


def operations() -> None:
    """Results are torch's tensors, also where no `out` is given."""
    with joined() as comm:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.complex64):
            tensor = torch.full((3, 5), comm.rank + 1, dtype=dtype, device="cuda")
            total = comm.size * (comm.size + 1) // 2
            assert comm.all_reduce(tensor) is tensor
            assert (tensor == total).all()
            gathered = comm.all_gather(torch.full((2,), comm.rank, dtype=dtype, device="cuda"))
            assert isinstance(gathered, torch.Tensor)
            assert (gathered.dtype, gathered.device) == (dtype, tensor.device)
            expected = torch.arange(comm.size, device="cuda").to(dtype)
            assert (gathered == expected[:, None]).all()
            blocks = torch.arange(comm.size * 4, device="cuda").reshape(comm.size, 4).to(dtype)
            assert (comm.reduce_scatter(blocks) == blocks[comm.rank] * comm.size).all()
            swapped = comm.all_to_all(torch.full((comm.size, 2), comm.rank, device="cuda"))
            assert swapped[:, 0].tolist() == list(range(comm.size))
        with pytest.raises(unisono.InvalidArgumentError, match="not contiguous"):
            comm.all_reduce(torch.ones(4, 4, device="cuda").t()[1:])
        with pytest.raises(unisono.InvalidArgumentError, match="on the host"):
            comm.all_gather(tensor, out=torch.empty(comm.size, 3, 5, dtype=dtype))
        assert comm.error is None


def current_stream() -> None:
    """Without `stream` an operation is in torch's current stream, whichever that is."""
    with joined() as comm:
        stream, other = torch.cuda.Stream(), torch.cuda.Stream()
        for turn in range(20):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                tensor = torch.full((100_003,), comm.rank + turn, device="cuda")
                comm.all_reduce(tensor)
                tensor *= 2
                if turn % 2:
                    # In another stream than the current one: it comes after what that has so far.
                    comm.all_reduce(tensor, stream=other)
                else:
                    other.wait_stream(stream)
            other.synchronize()
            total = sum(rank + turn for rank in range(comm.size))
            assert (tensor == 2 * total * (comm.size if turn % 2 else 1)).all()
