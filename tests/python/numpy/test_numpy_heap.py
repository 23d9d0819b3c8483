"""Arrays in the shared heap: what they are, how many there can be, and that nothing is left."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from numpy_heap_ranks import ELEMENTS
from ranks import run_ranks

import unisono

MIB = 1 << 20


@pytest.mark.parametrize(
    "shape, dtype",
    [
        (5, "float32"),
        ((), "int64"),
        ((3, 4), np.complex128),
        ([2, 3, 4], ml_dtypes.bfloat16),
        (np.int64(7), np.dtype("uint8")),
        ((2, 2), [("x", "f4"), ("y", "i2")]),
        ((1000, 1001), ">f8"),
    ],
)
def test_an_array_of_the_heap_is_a_numpy_array(shape, dtype):
    array = unisono.empty(shape, dtype)
    like = np.empty(shape, dtype)
    assert type(array) is np.ndarray
    assert (array.shape, array.dtype, array.strides) == (like.shape, like.dtype, like.strides)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    assert array.ctypes.data % 64 == 0
    array[...] = np.zeros((), dtype)
    assert array.tobytes() == bytes(array.nbytes)
    plain = np.dtype(dtype).fields is None and np.dtype(dtype).isnative
    if plain:
        assert array in unisono.heap()
        assert like not in unisono.heap()


def test_memory_lives_as_long_as_an_array_over_it():
    gc.collect()
    before = unisono.heap()
    array = unisono.empty((100, 100), "int32")
    array[:] = 5
    row = array[3].view("uint32")
    assert unisono.heap().blocks == before.blocks + 1
    assert unisono.heap().in_use >= before.in_use + array.nbytes
    del array
    assert (row == 5).all()
    assert row in unisono.heap()
    assert unisono.heap().blocks == before.blocks + 1
    del row
    assert unisono.heap().blocks == before.blocks
    assert unisono.heap().peak >= 40_000


def test_nothing_needs_no_memory():
    before = unisono.heap().blocks
    assert unisono.empty((0, 3), "float32").shape == (0, 3)
    assert unisono.heap().blocks == before
    assert unisono.empty(3).dtype == np.float64


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        (-1, "float32", "negative"),
        ((2, -3), "float32", "negative"),
        ("many", "float32", "int or a sequence"),
        (1.5, "float32", "int or a sequence"),
        ((1 << 40, 1 << 40), "float32", "larger than any memory"),
        (3, object, "objects"),
        (3, [("x", "O")], "objects"),
    ],
)
def test_what_cannot_be_an_array_is_refused(shape, dtype, message):
    with pytest.raises(unisono.InvalidArgumentError, match=message):
        unisono.empty(shape, dtype)


def test_the_heap_tells_what_it_holds():
    array = unisono.empty(1000)
    heap = unisono.heap()
    assert 0 < heap.in_use <= heap.peak <= heap.limit
    assert heap.in_use <= heap.reserved <= heap.limit
    assert heap.segments >= 1
    assert f"blocks={heap.blocks}, segments={heap.segments}" in repr(heap)
    del array


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_operations_on_the_heap_leave_nothing(transport):
    results = run_ranks(3, "numpy_heap_ranks:sums", env={"UNISONO_TRANSPORT": transport})
    for result in results:
        value = result.value
        assert value["in_heap"]
        # Three times the sum of 1, 2 and 3, which then is gathered from three ranks.
        assert value["values"] == [6, 6, 18 * ELEMENTS, 60]
        assert value["blocks"] == [2, 1, 0]
        assert value["in_use"][0] >= 16 * ELEMENTS
        assert value["in_use"][1] == 0
        assert value["files"][0] > 0
        assert value["files"][1] == 0
        assert value["segments"] == 0


def test_without_a_heap_memory_is_private():
    for result in run_ranks(2, "numpy_heap_ranks:sums", env={"UNISONO_HEAP_BYTES": "0"}):
        value = result.value
        assert not value["in_heap"]
        assert value["values"] == [3, 3, 6 * ELEMENTS, 30]
        assert value["limit"] == 0
        assert value["files"] == [0, 0]
        assert value["blocks"] == [0, 0, 0]


def test_a_full_heap_is_logged_once_and_memory_is_private():
    [result] = run_ranks(1, "numpy_heap_ranks:make_and_free", env={"UNISONO_HEAP_BYTES": "5M"})
    value = result.value
    assert value["where"] == [True, False, False, True, True]
    assert value["sums"] == [1e6, 2e6, 3e6]
    assert value["reserved"] == value["limit"] == 5 * MIB
    assert result.output.count("the shared heap has no room") == 1, result.output


def test_a_forked_child_has_the_arrays_for_itself_and_a_heap_of_its_own():
    results = run_ranks(2, "numpy_heap_ranks:fork_in_between")
    assert [result.value for result in results] == [[1, 3, 3], [2, 3, 3]]
