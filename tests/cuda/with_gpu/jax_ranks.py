"""The rank functions for JAX's arrays, for test_arrays_cuda.py.

These arrays never change, so each operation writes to memory that JAX does not own: here, of the
driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_arrays import BothArray, Stream, cuda

import unisono


@contextmanager
def joined() -> Iterator[unisono.Communicator]:
    """Each rank on a device, several on one where there are fewer."""
    devices = jax.devices("gpu")
    number = int(os.environ["LOCAL_RANK"]) % len(devices)
    cuda().enter(number)
    with jax.default_device(devices[number]), unisono.init(timeout=60) as comm:
        yield comm


def operations() -> None:
    """JAX's arrays are read, in place; what is to be written is asked for."""
    with joined() as comm:
        for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.complex64):
            mine = jnp.full((3, 5), comm.rank + 1, dtype)
            total = comm.size * (comm.size + 1) // 2
            out = BothArray(np.zeros((3, 5), mine.dtype))
            assert comm.all_reduce(mine, out=out) is out
            assert (out.numpy() == np.array(total, mine.dtype)).all()
            assert (np.asarray(mine) == np.array(comm.rank + 1, mine.dtype)).all()
            gathered = BothArray(np.zeros((comm.size, 3, 5), mine.dtype))
            comm.all_gather(mine, out=gathered)
            assert [block[0, 0] for block in gathered.numpy()] == list(range(1, comm.size + 1))
        with pytest.raises(unisono.InvalidArgumentError, match="pass out="):
            comm.all_gather(mine)
        with pytest.raises(unisono.InvalidArgumentError, match="pass out="):
            comm.all_reduce(mine)
        assert comm.error is None


def computed_late() -> None:
    """The stream waits for an array that JAX still computes when an operation begins."""
    with joined() as comm:
        square = jax.jit(lambda matrix: matrix @ matrix / matrix.shape[0])
        stream = Stream()
        out = BothArray(np.zeros((1024, 1024), np.float32), stream=stream)
        for turn in range(20):
            matrix = jnp.full((1024, 1024), 1.0 + (comm.rank + turn) % 2, jnp.float32)
            for _ in range(3):
                matrix = square(matrix)
            comm.all_reduce(matrix, out=out, stream=stream.handle)
            del matrix
            expected = sum((1.0 + (rank + turn) % 2) ** 8 for rank in range(comm.size))
            np.testing.assert_allclose(out.numpy(), expected, rtol=1e-3)
