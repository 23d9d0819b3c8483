"""The rank functions for CuPy's arrays, for test_arrays_cuda.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import cupy
import numpy as np
import pytest

import unisono


@contextmanager
def joined() -> Iterator[unisono.Communicator]:
    """Each rank on a device, several on one where there are fewer."""
    device = int(os.environ["LOCAL_RANK"]) % cupy.cuda.runtime.getDeviceCount()
    with cupy.cuda.Device(device), unisono.init(timeout=60) as comm:
        yield comm


def operations() -> None:
    """Results are CuPy's arrays, also where no `out` is given."""
    with joined() as comm:
        for dtype in (cupy.float32, cupy.float16, cupy.int32, cupy.complex128):
            array = cupy.full((3, 5), comm.rank + 1, dtype)
            total = comm.size * (comm.size + 1) // 2
            assert comm.all_reduce(array) is array
            assert (array == total).all()
            gathered = comm.all_gather(cupy.full((2,), comm.rank, dtype))
            assert isinstance(gathered, cupy.ndarray)
            assert gathered.dtype == dtype
            assert gathered.get().tolist() == [[rank, rank] for rank in range(comm.size)]
            blocks = cupy.arange(comm.size * 4).reshape(comm.size, 4).astype(dtype)
            part = comm.reduce_scatter(blocks)
            cupy.testing.assert_array_equal(part, blocks[comm.rank] * comm.size)
            swapped = comm.all_to_all(cupy.full((comm.size, 2), comm.rank, dtype))
            assert swapped.get()[:, 0].tolist() == list(range(comm.size))
            own = comm.scatter(blocks if comm.rank == 0 else None, out=cupy.empty(4, dtype))
            cupy.testing.assert_array_equal(own, blocks[comm.rank])
        mine, theirs = cupy.full(7, comm.rank), cupy.empty(7, int)
        works = [
            comm.isend(mine, (comm.rank + 1) % comm.size),
            comm.irecv(theirs, (comm.rank - 1) % comm.size),
        ]
        for work in works:
            work.wait()
        assert theirs.get().tolist() == [(comm.rank - 1) % comm.size] * 7
        with pytest.raises(unisono.InvalidArgumentError, match="on the host"):
            comm.all_gather(mine, out=np.empty((comm.size, 7), int))


def current_stream() -> None:
    """Without `stream` an operation is in CuPy's current stream, whichever that is."""
    with joined() as comm:
        stream = cupy.cuda.Stream(non_blocking=True)
        other = cupy.cuda.Stream(non_blocking=True)
        for _ in range(50):
            with stream:
                array = cupy.ones(1 << 20, cupy.float32)
                array *= comm.rank + 1
                comm.all_reduce(array)
                array *= 2
            assert (array.get(stream=stream) == comm.size * (comm.size + 1)).all()
            # In another stream than the array's: it comes after, and the array's goes on after it.
            with stream:
                array = cupy.full(1 << 20, comm.rank, cupy.float32)
                comm.all_reduce(array, stream=other)
                stream.wait_event(other.record())
                array += 1
            assert (array.get(stream=stream) == sum(range(comm.size)) + 1).all()


def graph() -> None:
    """A captured operation is carried out at each launch of its graph."""
    with joined() as comm:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            array = cupy.ones(5000, cupy.float32)
            comm.all_reduce(array)
            stream.synchronize()
            array.fill(1)
            stream.begin_capture()
            comm.all_reduce(array)
            captured = stream.end_capture()
            for _ in range(5):
                captured.launch(stream)
        assert (array.get(stream=stream) == comm.size**5).all()


def kernels_around() -> None:
    """A slow producer before, a consumer behind, many times without a wait of the host."""
    with joined() as comm:
        slow = cupy.RawKernel(
            """extern "C" __global__ void slow(float* x, int n, float value) {
              long long start = clock64();
              while (clock64() - start < 200000) {}
              int step = gridDim.x * blockDim.x;
              for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) x[i] = value;
            }""",
            "slow",
        )
        results = []
        for turn in range(100):
            array = cupy.empty(10_000, cupy.float32)
            slow((8,), (128,), (array, np.int32(array.size), np.float32(turn + comm.rank)))
            comm.all_reduce(array)
            results.append(array.sum() / array.size)
        for turn, mean in enumerate(results):
            assert float(mean) == sum(turn + rank for rank in range(comm.size))


def without_gaps() -> None:
    """An array with gaps is refused, with what to do."""
    with joined() as comm:
        array = cupy.ones((4, 4))[:, 1]
        with pytest.raises(unisono.InvalidArgumentError, match="not contiguous"):
            comm.all_reduce(array)
        comm.all_reduce(cupy.ascontiguousarray(array))
