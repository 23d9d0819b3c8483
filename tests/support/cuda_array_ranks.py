"""The rank functions for arrays on CUDA devices, for test_numpy_cuda.py and tests on a real GPU."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda_arrays import KINDS, LEGACY, DLPackArray, InterfaceArray, Memory, Stream, cuda
from cuda_arrays import stream_keyword as on
from numpy_reference import (
    DTYPES,
    OPS,
    check,
    contribution,
    dtype_of,
    factor,
    has_meaning,
    reduced,
)

import unisono

COUNTS = [0, 1, 67, 5000]
Make = Callable[[np.ndarray], Memory]


def maker(kind: str, stream: Stream | None = None) -> Make:
    """Makes arrays of a kind, in a stream of their own."""
    stream = stream or Stream()
    return lambda values: KINDS[kind](values, stream=stream)


def every_operation(kind: str, names: list[str]) -> None:
    """Each operation gives what it gives on the host."""
    cuda().enter()
    with unisono.init(timeout=60) as comm:
        make = maker(kind)
        for name in names:
            for count in COUNTS:
                reductions(comm, make, name, count)
                moves(comm, make, name, count)
            uneven(comm, make, name)
            messages(comm, make, name)
        assert comm.error is None


def every_reduction(kind: str, counts: list[int]) -> None:
    """Every operator on every type gives what NumPy does."""
    cuda().enter()
    with unisono.init(timeout=60) as comm:
        make = maker(kind)
        combinations = itertools.product(DTYPES, OPS, counts)
        for name, op, count in combinations:
            if not has_meaning(op, name):
                continue
            operator: str | unisono.ReduceOp = op
            if op == "premul_sum":
                operator = unisono.ReduceOp.premul_sum(factor(name, comm.rank))
            contributions = inputs(comm, name, count)
            array = make(contributions[comm.rank])
            comm.all_reduce(array, operator, **on(array))
            check(array.numpy(), reduced(op, name, contributions), op, name)


def inputs(comm: unisono.Communicator, name: str, count: int) -> list[np.ndarray]:
    return [contribution(name, rank, count, salt=count) for rank in range(comm.size)]


def same(result: Memory, expected: np.ndarray) -> None:
    got = result.numpy()
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.reshape(-1), expected.reshape(-1))


def reductions(comm: unisono.Communicator, make: Make, name: str, count: int) -> None:
    for op in ("sum", "max") if has_meaning("max", name) else ("sum",):
        # On the host, where every operator of every type has a test against NumPy.
        expected = comm.all_reduce(inputs(comm, name, count)[comm.rank], op)
        array = make(inputs(comm, name, count)[comm.rank])
        assert comm.all_reduce(array, op, **on(array)) is array
        same(array, expected)

        source, out = make(inputs(comm, name, count)[comm.rank]), make(np.zeros_like(expected))
        assert comm.all_reduce(source, op, out=out, **on(source)) is out
        same(out, expected)
        same(source, inputs(comm, name, count)[comm.rank])

        root = comm.size - 1
        result = comm.reduce(source, op, root, **on(source))
        assert result is (source if comm.rank == root else None)
        same(source, expected if comm.rank == root else inputs(comm, name, count)[comm.rank])

    whole = np.concatenate([contribution(name, comm.rank, count, salt=3)] * comm.size)
    expected = comm.reduce_scatter(whole.reshape(comm.size, count))
    out = make(np.zeros_like(expected))
    source = make(whole)
    assert comm.reduce_scatter(source, out=out, **on(source)) is out
    same(out, expected)


def moves(comm: unisono.Communicator, make: Make, name: str, count: int) -> None:
    rank, size, root = comm.rank, comm.size, count % comm.size
    all_of_them = inputs(comm, name, count)
    whole = np.concatenate(all_of_them)
    mine = make(all_of_them[rank])
    out = make(np.zeros_like(whole))

    assert comm.all_gather(mine, out=out, **on(mine)) is out
    same(out, whole)
    own = make(all_of_them[rank] if rank == root else np.zeros_like(all_of_them[rank]))
    assert comm.broadcast(own, root, **on(own)) is own
    same(own, all_of_them[root])
    if rank == root:
        out = make(np.zeros_like(whole))
        assert comm.gather(mine, root, out=out, **on(mine)) is out
        same(out, whole)
        source = make(whole)
        assert comm.scatter(source, root, out=own, **on(own)) is own
    else:
        assert comm.gather(mine, root, **on(mine)) is None
        assert comm.scatter(None, root, out=own, **on(own)) is own
    same(own, all_of_them[rank])
    # Block d of rank s: a cut out of what s brings.
    blocks = [
        [contribution(name, source, count, salt=dest) for dest in range(size)]
        for source in range(size)
    ]
    source, out = make(np.concatenate(blocks[rank])), make(np.zeros_like(whole))
    assert comm.all_to_all(source, out=out, **on(source)) is out
    same(out, np.concatenate([blocks[other][rank] for other in range(size)]))


def uneven(comm: unisono.Communicator, make: Make, name: str) -> None:
    rank, size = comm.rank, comm.size
    counts = [(other * 5 + 1) % 4 for other in range(size)]
    rows = contribution(name, 0, 3 * sum(counts)).reshape(-1, 3)
    ends = np.cumsum([0, *counts])
    part = rows[ends[rank] : ends[rank + 1]]
    mine, out = make(part), make(np.zeros_like(rows))
    comm.all_gather_v(mine, counts, out=out, **on(mine))
    same(out, rows)
    expected = comm.reduce_scatter_v(rows, counts)
    source, own = make(rows), make(np.zeros_like(part))
    comm.reduce_scatter_v(source, counts, out=own, **on(source))
    same(own, expected)
    if rank == 0:
        out = make(np.zeros_like(rows))
        comm.gather_v(mine, counts, out=out, **on(mine))
        same(out, rows)
        comm.scatter_v(source, counts, out=own, **on(own))
    else:
        comm.gather_v(mine, **on(mine))
        comm.scatter_v(out=own, **on(own))
    same(own, part)
    table = [[(s + 2 * d) % 3 for d in range(size)] for s in range(size)]
    sent = [
        [contribution(name, s, 2 * table[s][d], salt=d).reshape(-1, 2) for d in range(size)]
        for s in range(size)
    ]
    expected = np.concatenate([sent[other][rank] for other in range(size)])
    source, out = make(np.concatenate(sent[rank])), make(np.zeros_like(expected))
    taken = [table[other][rank] for other in range(size)]
    comm.all_to_all_v(source, table[rank], taken, out=out, **on(source))
    same(out, expected)


def messages(comm: unisono.Communicator, make: Make, name: str) -> None:
    """Around a ring; the first message has a tag that the second does not."""
    rank, size = comm.rank, comm.size
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    values = inputs(comm, name, 67)
    first, second = make(np.zeros_like(values[0])), make(np.zeros_like(values[0]))
    sources = [make(values[rank]), make(values[rank][::-1].copy())]
    # Sends first: a stream waits for what it receives, and gets to nothing behind it before.
    works = [
        comm.isend(sources[0], right, tag=1, **on(sources[0])),
        comm.isend(sources[1], right, tag=2, **on(sources[1])),
        comm.irecv(second, tag=2, **on(second)),
        comm.irecv(first, left, tag=1, **on(first)),
    ]
    for work in works:
        work.wait()
    assert works[2].result().source == left
    same(first, values[left])
    same(second, values[left][::-1])
    # Blocking: one after the other, rank 0 first.
    if rank == 0:
        comm.send(sources[0], right, tag=3, **on(first))
        assert comm.recv(first, tag=3, **on(first)).source == left
    else:
        assert comm.recv(first, left, tag=3, **on(first)).source == left
        comm.send(first, right, tag=3, **on(first))
    same(first, values[0])


def results_of_its_own(kind: str) -> None:
    """Without `out` the array's library makes one; if it cannot, the error asks for `out`."""
    cuda().enter()
    with unisono.init(timeout=60) as comm:

        class Tensor(KINDS[kind]):  # type: ignore[misc]
            def new_empty(self, shape: tuple[int, ...]) -> Memory:
                return Tensor(np.zeros(shape, self.dtype), stream=self.stream)

        array = Tensor(np.full((2, 3), comm.rank, np.float32), stream=Stream())
        result = comm.all_gather(array, **on(array))
        assert type(result) is Tensor
        assert result.numpy().shape == (comm.size, 2, 3)
        assert [block[0, 0] for block in result.numpy()] == list(range(comm.size))
        plain = KINDS[kind](np.ones(3, np.float32))
        with pytest.raises(unisono.InvalidArgumentError, match=r"cannot make another.*pass out="):
            comm.all_gather(plain)
        comm.barrier()


def the_order_of_the_stream(kind: str) -> None:
    """A call returns before its input is there, and later work in the stream sees its result."""
    cuda().enter()
    with unisono.init(timeout=60) as comm:
        stream = Stream()
        make = maker(kind, stream)
        array, out = make(np.zeros(1000, np.float32)), make(np.zeros(1000, np.float32))
        # Once before, so that what is made at the first call is there.
        comm.all_reduce(array, out=out, **on(array))
        stream.synchronize()
        gate = stream.gate()
        array.fill(np.full(1000, comm.rank + 1, np.float32))
        comm.all_reduce(array, out=out, **on(array))
        work = comm.all_reduce(out, async_op=True, **on(out))
        result = out.later()
        assert not work.done()
        with pytest.raises(unisono.TimeoutError, match="goes on"):
            work.wait(timeout=0.01)
        gate.open()
        work.wait(timeout=30)
        stream.synchronize()
        total = comm.size * (comm.size + 1) // 2
        assert (result.array == total * comm.size).all()
        assert work.done()
        assert work.duration is not None


def a_stream_of_ones_own(kind: str) -> None:
    """With `stream` the operation is in another stream than the arrays', and comes after theirs."""
    cuda().enter()
    with unisono.init(timeout=60) as comm:
        producer, mine = Stream(), Stream()
        array = KINDS[kind](np.zeros(500, np.int64), stream=producer)
        comm.all_reduce(array, stream=mine.handle)
        mine.synchronize()
        gate = producer.gate()
        array.fill(np.full(500, comm.rank, np.int64))
        work = comm.all_reduce(array, stream=mine.handle, async_op=True)
        assert not work.done()
        array.stream = mine
        result = array.later()
        gate.open()
        mine.synchronize()
        assert (result.array == sum(range(comm.size))).all()
        work.wait()


def forms_of_a_stream() -> None:
    """A number, and what CUDA's own protocol, CuPy and torch have."""
    cuda().enter()

    class Named:
        def __init__(self, **attributes: Any) -> None:
            self.__dict__.update(attributes)

    class Protocol:
        def __init__(self, pair: tuple[int, int]) -> None:
            self.pair = pair

        def __cuda_stream__(self) -> tuple[int, int]:
            return self.pair

    with unisono.init(timeout=60) as comm:
        stream = Stream()
        array = DLPackArray(np.zeros(3), stream=stream)
        forms = [
            stream.handle,
            np.int64(stream.handle),
            Protocol((0, stream.handle)),
            Named(__cuda_stream__=(0, stream.handle)),
            Named(ptr=stream.handle),
            Named(cuda_stream=stream.handle),
        ]
        for form in forms:
            array.asked.clear()
            comm.all_reduce(array, stream=form)
            assert array.asked == [stream.handle]
        for default in (None, 0, LEGACY):
            array.asked.clear()
            comm.all_reduce(array, stream=default)
            assert array.asked == [LEGACY]
        for wrong in ("stream", True, 1.5, object(), Named(handle=1)):
            with pytest.raises(TypeError, match="a stream is the address of a CUstream"):
                comm.all_reduce(array, stream=wrong)  # type: ignore[call-overload]
        with pytest.raises(unisono.InvalidArgumentError, match="-1"):
            comm.all_reduce(array, stream=-1)
        with pytest.raises(unisono.InvalidArgumentError, match="version 1 of __cuda_stream__"):
            comm.all_reduce(array, stream=Protocol((1, 5)))
        comm.barrier(stream=stream.handle)
        comm.barrier(stream=stream.handle, async_op=True).wait()
        stream.synchronize()
        assert comm.error is None


def refusals() -> None:
    """An invalid array gets an error, nothing is sent, and the communicator lives."""
    cuda().enter(0)
    invalid = unisono.InvalidArgumentError
    with unisono.init(timeout=60) as comm:
        for kind in KINDS.values():
            array, host = kind(np.zeros((4, 3), np.float32)), np.zeros((4, 3), np.float32)
            with pytest.raises(invalid, match=r"out is on the host, but array on CUDA device 0"):
                comm.all_reduce(array, out=host)
            with pytest.raises(invalid, match=r"out is on CUDA device 0, but array on the host"):
                comm.all_reduce(host, out=array)
            with pytest.raises(invalid, match="leave stream= out"):
                comm.all_reduce(host, stream=array.stream.handle)
            with pytest.raises(invalid, match="leave stream= out"):
                comm.send(host, 0, stream=array.stream.handle)
            array.strides = (4, 16)
            with pytest.raises(invalid, match="not contiguous"):
                comm.all_reduce(array)
            with pytest.raises(invalid, match="not contiguous"):
                comm.isend(array, 0)
            array.strides = None
            assert array.numpy().tobytes() == host.tobytes()
        refused_interfaces(comm)
        if cuda().devices > 1:
            refused_devices(comm)
        assert InterfaceArray(np.ones(3)) not in unisono.heap()
        comm.barrier()
        assert comm.error is None


def refused_interfaces(comm: unisono.Communicator) -> None:
    """Errors in a `__cuda_array_interface__`."""
    good = InterfaceArray(np.ones(3, np.float32))

    class Changed:
        def __init__(self, **changes: Any) -> None:
            self.__cuda_array_interface__ = good.__cuda_array_interface__ | changes

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            comm.all_reduce(Changed(**changes))

    invalid, unsupported = unisono.InvalidArgumentError, unisono.UnsupportedError
    assert good.numpy().tolist() == [1.0] * 3
    refused(invalid, "read-only", data=(good.address, True))
    refused(invalid, "without a valid data", data=None)
    refused(invalid, "without a valid shape", shape=(-3,))
    refused(invalid, "without a valid strides", strides=(4, 4))
    refused(invalid, "without a valid typestr", typestr=None)
    refused(invalid, "without a valid stream", stream=0)
    refused(invalid, "no memory of a CUDA device", data=(good.staged.address, False))
    refused(invalid, "no memory of a CUDA device", data=(id(good), False))
    refused(unsupported, "mask", mask=good)
    refused(unsupported, "byte order", typestr=">f4")
    refused(unsupported, 'type "<M8', typestr="<M8[s]")
    freed = InterfaceArray(np.ones(300_000, np.float32))
    freed.free()
    with pytest.raises(unisono.Error, match="was it freed"):
        comm.all_reduce(freed)
    # To be read, it may be read-only.
    out = InterfaceArray(np.zeros((comm.size, 3), np.float32))
    comm.all_gather(Changed(data=(good.address, True)), out=out)
    assert (out.numpy() == 1).all()


def refused_devices(comm: unisono.Communicator) -> None:
    """Arrays on two devices."""
    here = InterfaceArray(np.ones(3, np.float32))
    cuda().enter(1)
    there, other = InterfaceArray(np.ones(3, np.float32)), DLPackArray(np.ones(3, np.float32))
    stream = Stream()
    cuda().enter(0)
    for array in (there, other):
        message = r"out is on CUDA device 1, but array on CUDA device 0"
        with pytest.raises(unisono.InvalidArgumentError, match=message):
            comm.all_reduce(here, out=array)
    with pytest.raises(unisono.InvalidArgumentError, match="device 1"):
        comm.all_reduce(here, stream=stream.handle)


def kept_alive() -> None:
    """Arrays live until the stream has got past their operation, even if the caller drops them."""
    cuda().enter()
    with unisono.init(timeout=60) as comm:
        stream = Stream()
        warm = DLPackArray(np.ones(10), stream=stream)
        comm.all_reduce(warm, stream=stream.handle)
        stream.synchronize()
        for kind in KINDS.values():
            array = kind(np.ones(1000), stream=stream)
            alive = weakref.ref(array)
            gate = stream.gate()
            comm.all_reduce(array, stream=stream.handle)
            comm.all_reduce(array, stream=stream.handle, async_op=True)
            del array
            gc.collect()
            assert alive() is not None
            gate.open()
            stream.synchronize()
            # Objects that a completion lets go of are given back when Python is entered next.
            for _ in until(lambda alive=alive: alive() is None):
                repr(comm.error)
                gc.collect()


def closed_at_once() -> None:
    """Closing waits for what is in a stream: the call has returned, so it is taken for done."""
    cuda().enter()
    stream = Stream()
    array = InterfaceArray(np.zeros(1000, np.float32), stream=stream)
    with unisono.init(timeout=60) as comm:
        # The set-up of the first call may wait for the device.
        comm.all_reduce(array)
        gate = stream.gate()
        array.fill(np.full(1000, comm.rank, np.float32))
        comm.all_reduce(array)
        opener = threading.Timer(0.2, gate.open)
        opener.start()
    assert (array.numpy() == sum(range(comm.size))).all()
    opener.join()


def until(condition: Callable[[], bool], timeout: float = 20) -> Iterator[None]:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        yield
        time.sleep(0.001)


def without_a_driver() -> None:
    """There is no CUDA here, and an array that says it is on a device gets an error."""

    class Interface:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (3,),
            "typestr": "<f4",
            "data": (0x7F0000000000, False),
            "version": 3,
        }

    class Elsewhere(DLPackArray):
        """The address is never looked at."""

        def __init__(self) -> None:
            self.stream, self.device, self.asked = Stream(LEGACY), 0, []
            self.shape, self.strides, self.dtype = (3,), None, dtype_of("float32")
            self.address = 0x7F0000000000

    with unisono.init(timeout=60) as comm:
        for array in (Interface(), Elsewhere()):
            with pytest.raises(unisono.UnsupportedError, match="CUDA driver"):
                comm.all_reduce(array)
        with pytest.raises(unisono.UnsupportedError, match="CUDA driver"):
            comm.barrier(stream=1)
        ones = np.ones(3)
        comm.all_reduce(ones)
        assert ones.tolist() == [float(comm.size)] * 3
