"""Which arrays the Python door takes, and that it takes them without a copy."""

from __future__ import annotations

import array
import gc
import pickle
import sys
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import ml_dtypes
import numpy as np
import pytest
from ranks import run_ranks

import unisono

NAMES = [
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128"),
]
SMALL = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.fixture
def comm() -> Iterator[unisono.Communicator]:
    """A world of one: everything is checked and carried out, without peers."""
    with unisono.init(rank=0, world_size=1) as comm:
        yield comm


def twice(comm: unisono.Communicator, array, **options):
    """Shows that the very memory was used: the sum of one rank is twice its array."""
    return comm.all_reduce(array, unisono.ReduceOp.premul_sum(2), **options)


def made_ones(comm: unisono.Communicator, twos, name: str):
    """Shows the same for every type."""
    op = unisono.ReduceOp.premul_sum(0.5) if name.startswith("complex") else "lor"
    return comm.all_reduce(twos, op)


@pytest.mark.parametrize("name", [*NAMES, *SMALL])
def test_numpy_types(comm, name):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    twos = np.full((2, 3), 2, dtype)
    assert made_ones(comm, twos, name) is twos
    assert (twos == np.ones((2, 3), dtype)).all()


MOVED = ["float8_e8m0fnu", "float4_e2m1fn", "float8_e4m3fnuz", "float6_e2m3fn", "int4", "uint2"]


@pytest.mark.parametrize("name", MOVED)
def test_types_without_arithmetic_are_moved(comm, name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    given = np.arange(6, dtype=np.uint8).reshape(2, 3).view(dtype)
    gathered = comm.all_gather(given)
    assert gathered.dtype == dtype
    assert (gathered.view(np.uint8) == given.view(np.uint8)[None]).all()
    assert comm.broadcast(given) is given
    for out in (None, np.zeros((2, 3), dtype)):
        with pytest.raises(unisono.UnsupportedError, match=f"array is {name}, .* not reduced"):
            comm.all_reduce(given, "sum", out=out)
    with pytest.raises(unisono.InvalidArgumentError, match=f"out is uint8, but array is {name}"):
        comm.all_gather(given, out=np.zeros((1, 2, 3), np.uint8))


@pytest.mark.parametrize("name", [*NAMES[:7], "uint8", "uint64", "bool"])
def test_what_has_no_fractions_is_not_multiplied(comm, name):
    array = np.ones(3, name)
    refused = {"f": (), "b": ("avg", unisono.ReduceOp.premul_sum(1))}
    for op in ("avg", unisono.ReduceOp.premul_sum(1)):
        if op not in refused.get(array.dtype.kind, refused["b"][1:]):
            comm.all_reduce(array, op)
            assert (array == 1).all()
            continue
        with pytest.raises(unisono.UnsupportedError, match=f"no meaning for {name}; "):
            comm.all_reduce(array, op)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ones((), np.float32),
        lambda: np.ones((0,), np.float32),
        lambda: np.ones((3, 0, 2), np.float32),
        lambda: np.ones((1, 1, 1), np.float32),
        lambda: np.ones((4, 5, 6), np.float32)[2],
        lambda: np.ones((4, 6), np.float32)[1:2, :3],
        lambda: np.ones((5, 1), np.float32).T,
        lambda: np.ones(30, np.uint8)[3:19].view(np.float32),
        lambda: np.ma.masked_array(np.ones(3, np.float32)),
    ],
    ids=["scalar", "empty", "no-rows", "one", "slice", "row", "column", "unaligned", "subclass"],
)
def test_shapes(comm, make):
    array = make()
    expected = np.array(array) * 2
    assert twice(comm, array) is array
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("array", [np.ones((4, 6))[:, 1], np.ones((4, 6)).T, np.ones(9)[::-1]])
def test_an_input_with_gaps_is_copied(comm, array):
    result = comm.all_gather(array)
    assert result.shape == (1, *array.shape)
    np.testing.assert_array_equal(result[0], array)


def test_bytes_like_objects(comm):
    target = bytearray(b"\x02\x00\x03")
    assert made_ones(comm, target, "uint8") is target
    assert target == b"\x01\x00\x01"
    target = bytearray(b"\x02\x00\x03")
    view = memoryview(target)[1:]
    assert made_ones(comm, view, "uint8") is view
    assert target == b"\x02\x00\x01"
    doubles = array.array("d", [1.0, 2.0])
    assert twice(comm, doubles).tolist() == [2.0, 4.0]
    assert comm.all_gather(b"ab").tobytes() == b"ab"
    assert comm.broadcast(target) is target
    assert comm.all_gather(np.float64(3)).tolist() == [3.0]


@pytest.mark.parametrize(
    "dtype, says",
    [
        ([("count", "i4"), ("sum", "f8")], "array has elements with fields (count, sum)"),
        ([("count", ">i4"), ("rest", "V3")], "array has elements with fields (count, rest)"),
        ("V5", "array is void40"),
        ("U5", "array is str160"),
        (">U5", "array is str160"),
        ("M8[s]", "array is datetime64[s]"),
        (np.longdouble, f"array is {np.dtype(np.longdouble).name}"),
    ],
)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (), (0,)])
def test_what_is_no_number_is_refused_for_what_it_is_and_moves_as_bytes(comm, dtype, says, shape):
    original = np.zeros(shape, dtype)
    with pytest.raises(unisono.UnsupportedError) as caught:
        comm.all_gather(original)
    assert says in str(caught.value), str(caught.value)
    assert "byte order" not in str(caught.value)
    advice = "np.ascontiguousarray(array).view(np.uint8)"
    assert f"{advice} moves it as bytes" in str(caught.value)
    moved = comm.all_gather(eval(advice, {"np": np, "array": original}))
    assert moved.tobytes() == original.tobytes()
    if original.dtype.names and original.dtype.names[0] == "sum":
        assert comm.all_gather(original["sum"]).shape == (1, *shape)


@pytest.mark.parametrize("dtype", [object, [("number", "i4"), ("thing", object)]])
def test_python_objects_are_refused_with_what_moves_them(comm, dtype):
    original = np.zeros(3, dtype)
    with pytest.raises(unisono.UnsupportedError, match="holds Python objects") as caught:
        comm.all_gather(original)
    advice = str(caught.value).partition("pickle them: ")[2]
    moved = comm.all_gather(eval(advice, {"np": np, "pickle": pickle, "array": original}))
    assert (pickle.loads(moved.tobytes()) == original).all()


def test_numbers_in_another_byte_order_are_refused_with_advice_that_works(comm):
    original = np.arange(3, dtype=">f8")
    with pytest.raises(unisono.UnsupportedError, match="byte order; pass ") as caught:
        comm.all_gather(original)
    advice = str(caught.value).partition("pass ")[2]
    assert comm.all_gather(eval(advice, {"array": original})).tolist() == [[0, 1, 2]]


def test_an_array_with_the_array_interface_alone(comm):
    class Wrapper:
        def __init__(self, inner):
            self.__array_interface__ = inner.__array_interface__
            self.inner = inner

    wrapped = Wrapper(np.ones(3, np.float32))
    assert twice(comm, wrapped) is wrapped
    assert wrapped.inner.tolist() == [2.0] * 3


class Shared:
    """The array of another library: DLPack and nothing else."""

    def __init__(self, inner, device=(1, 0), old=False):
        self.inner, self.device, self.old = inner, device, old

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.old and options:
            raise TypeError("what is max_version?")
        return self.inner.__dlpack__(**options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
def test_dlpack(comm, name, old):
    inner = np.full((3, 2), 2, name)
    shared = Shared(inner, old=old)
    assert made_ones(comm, shared, name) is shared
    assert (inner == np.ones((3, 2), name)).all()


def test_dlpack_lets_go_of_the_memory(comm):
    inner = np.ones(1000)
    before = sys.getrefcount(inner)
    for old in (False, True):
        shared = Shared(inner, old=old)
        twice(comm, shared)
        twice(comm, shared, async_op=True).wait()
        comm.barrier(async_op=True).wait()
        del shared
    gc.collect()
    # Objects that a completion dropped are given back when Python is entered next.
    deadline = time.monotonic() + 10
    while sys.getrefcount(inner) != before and time.monotonic() < deadline:
        comm.barrier()
    assert sys.getrefcount(inner) == before


def test_dlpack_refusals(comm):
    frozen = np.ones(3)
    frozen.flags.writeable = False
    with pytest.raises(unisono.InvalidArgumentError, match="read-only"):
        comm.all_reduce(Shared(frozen))
    assert comm.all_gather(Shared(frozen)).tolist() == [[1.0] * 3]
    with pytest.raises(unisono.UnsupportedError, match="Metal device 1"):
        comm.all_reduce(Shared(np.ones(3), device=(8, 1)))
    with pytest.raises(unisono.InvalidArgumentError, match="not contiguous"):
        comm.all_reduce(Shared(np.ones((3, 4))[:, 1]))
    with pytest.raises(unisono.InvalidArgumentError, match="cannot be shared"):
        comm.all_reduce(Shared(np.array(["text"])))


def test_results_are_numpy_arrays_unless_the_library_can_make_its_own(comm):
    assert type(comm.all_gather(Shared(np.ones(3, np.int16)))) is np.ndarray
    assert comm.all_gather(Shared(np.ones(3, np.int16))).dtype == np.int16


def test_arrays_live_as_long_as_their_operation(comm):
    base = np.ones(10)
    view = base[:]
    alive = weakref.ref(view)
    work = comm.irecv(view, 0)
    del view
    gc.collect()
    assert alive() is not None
    comm.send(np.full(10, 7.0), 0)
    work.wait()
    assert work.source == 0
    assert base.tolist() == [7.0] * 10
    # Whatever the completion dropped is given back when Python is entered next.
    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:
        comm.barrier()
    assert alive() is None


def test_a_world_of_one(comm):
    ones = np.ones((1, 3), np.float32)
    assert comm.rank == 0
    assert comm.size == comm.world_size == 1
    assert comm.all_reduce(ones) is ones
    assert comm.reduce(ones, "max") is ones
    assert comm.broadcast(ones) is ones
    for result in (comm.reduce_scatter(ones), comm.scatter(ones)):
        assert result.tolist() == [1.0] * 3
    assert comm.gather(ones).shape == (1, 1, 3)
    assert comm.all_to_all(ones).tolist() == ones.tolist()
    assert comm.all_gather_v(ones, [1]).tolist() == ones.tolist()
    assert comm.reduce_scatter_v(ones, np.array([1])).tolist() == ones.tolist()
    assert comm.all_to_all_v(ones, (1,), iter([1])).tolist() == ones.tolist()
    assert comm.barrier() is None
    comm.monitored_barrier()
    part = comm.split(3)
    assert part is not None
    assert repr(part) == "<unisono.Communicator rank 0 of 1>"


def test_operators():
    op = unisono.ReduceOp
    assert repr(op.SUM) == "ReduceOp.SUM"
    assert op.premul_sum(0.5) == op.premul_sum(0.5) != op.premul_sum(2)
    assert len({op.SUM, op.SUM, op.MAX, op.premul_sum(1)}) == 3
    assert (op.premul_sum(0.5).factor, op.MIN.factor) == (0.5, None)
    assert (op.LXOR.name, op.premul_sum(1).name) == ("lxor", "premul_sum")
    assert op.SUM != "sum"


def test_timeouts_are_seconds_or_timedeltas(comm):
    comm.timeout = timedelta(seconds=2.5)
    assert comm.timeout == 2.5
    comm.timeout = None
    assert comm.timeout is None
    comm.all_reduce(np.ones(3), timeout=timedelta(minutes=1))
    with pytest.raises(unisono.InvalidArgumentError):
        comm.timeout = -1


def test_options():
    options = unisono.Options(timeout=30, ring_bytes="64K", transport=None)
    assert dict(options) == {"timeout": "30", "ring_bytes": "65536"}
    assert len(options) == 2
    assert "timeout" in repr(options)
    with unisono.init(rank=0, world_size=1, options=options) as comm:
        assert comm.timeout == 30
    with unisono.init(rank=0, world_size=1, options=options, timeout=5) as comm:
        assert comm.timeout == 5


def by_url(url: str, world: int) -> list[float]:
    import os

    rank = int(os.environ.pop("RANK"))
    with unisono.init(url, rank=rank, world_size=world, timeout=30) as comm:
        return comm.all_reduce(np.array([1.0, comm.rank])).tolist()


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_meeting_at_a_url(scheme, tmp_path):
    from ranks import free_port

    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meeting"
    results = run_ranks(3, "test_numpy_arrays:by_url", url, 3)
    assert [result.value for result in results] == [[3.0, 3.0]] * 3


def with_tensors() -> None:
    import torch

    with unisono.init(timeout=30) as comm:
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.int64):
            tensor = torch.ones(5, dtype=torch.float32).to(dtype)
            assert comm.all_reduce(tensor) is tensor
            expected = torch.full((5,), float(comm.size)).to(dtype)
            assert torch.equal(tensor.float(), expected.float())
        gathered = comm.all_gather(torch.tensor([comm.rank, 7]))
        assert isinstance(gathered, torch.Tensor)
        assert gathered.tolist() == [[rank, 7] for rank in range(comm.size)]
        out = np.empty((comm.size, 3), np.float32)
        assert comm.all_gather(torch.arange(6.0).reshape(2, 3).T[:, 1], out=out) is out
        assert out.tolist() == [[3.0, 4.0, 5.0]] * comm.size
        with pytest.raises(unisono.InvalidArgumentError, match="gradient"):
            comm.all_reduce(torch.ones(3, requires_grad=True))
        work = comm.all_reduce(torch.ones(100_000), async_op=True)
        assert work.result()[0] == comm.size


def test_torch_tensors():
    pytest.importorskip("torch")
    run_ranks(2, "test_numpy_arrays:with_tensors", torch=True)
