"""The rank functions for windows over arrays on CUDA devices, of tests with a GPU and without."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import numpy as np
import pytest
from cuda_array_ranks import maker
from cuda_arrays import Memory, Stream, cuda

import unisono

LENGTH = 1000


def numbers(rank: int) -> np.ndarray:
    return np.full(LENGTH, rank, np.int32)


def read(array: object) -> np.ndarray:
    """The content of anything on a device that has ``__cuda_array_interface__``."""
    interface = array.__cuda_array_interface__  # type: ignore[attr-defined]
    result = np.empty(interface["shape"], interface["typestr"])
    place, source = result.ctypes.data, ctypes.c_uint64(interface["data"][0])
    cuda().call("cuMemcpyDtoH_v2", ctypes.c_void_p(place), source, ctypes.c_size_t(result.nbytes))
    return result


def exchange(kind: str, why: str | None = None, hosts: str | None = None) -> None:
    """Put, get, signal and map around the ring, from and to arrays of the host and of the device.

    `why`: the reason for which the others' arrays cannot be mapped. `hosts`: a label for each rank.
    """
    if hosts:
        os.environ["UNISONO_HOST"] = hosts[int(os.environ["RANK"])]
    cuda().enter()
    with unisono.init(timeout=60) as comm:
        rank, size = comm.rank, comm.size
        left, right = (rank - 1) % size, (rank + 1) % size
        make = maker(kind)
        array, edge, got = make(numbers(rank)), make(np.zeros(3, np.int32)), np.zeros(2, np.int32)
        fetched = make(np.zeros(2, np.int32))
        with comm.window(array) as window:
            assert window.array is array
            for number in range(6):
                sent = np.full(3, 100 * number + rank, np.int32)
                edge.fill(sent)
                window.put(sent if number % 2 else edge, right, offset=10)
                window.signal(right)
                window.wait_signal(left)
                came = array.numpy()[9:14].tolist()
                assert came == [rank, *[100 * number + left] * 3, rank]
                assert window.get(got, left, offset=LENGTH - 2).tolist() == [left] * 2
                assert window.get(fetched, left, offset=LENGTH - 2) is fetched
                assert fetched.numpy().tolist() == [left] * 2
                # That this rank has read what it got, and the next may put again.
                window.signal(left)
                window.wait_signal(right)
            assert window.map(rank) is array
            window.fence()
            theirs = None
            if why and not (hosts and hosts[left] == hosts[rank]):
                assert not window.can_map(left)
                with pytest.raises(unisono.UnsupportedError, match=why):
                    window.map(left)
            elif size > 1:
                assert window.can_map(left)
                theirs = window.map(left)
                assert (theirs.shape, theirs.dtype) == ((LENGTH,), np.int32)
                assert read(theirs)[-1] == left
            window.fence()
            # An array like any other for what reads such arrays.
            if rank == 0 and theirs is not None:
                window.put(theirs, rank)
                assert array.numpy()[-1] == left
            del theirs


def comes_after_the_stream() -> None:
    """A window and a put begin when the array's stream has done its work."""
    cuda().enter()
    with unisono.init(timeout=60) as comm:
        other = comm.rank ^ 1
        stream = Stream()
        make = maker("both", stream)
        array, edge = make(numbers(0)), make(numbers(0))
        gate = stream.gate()
        array.fill(numbers(comm.rank + 1))
        threading.Timer(0.2, gate.open).start()
        with comm.window(array) as window:
            assert window.get(numbers(0), other)[0] == other + 1
            window.fence()
            gate = stream.gate()
            edge.fill(numbers(comm.rank + 5))
            threading.Timer(0.2, gate.open).start()
            window.put(edge, other)
            window.signal(other)
            window.wait_signal(other)
            assert array.numpy()[0] == other + 5


def of_one_rank() -> None:
    """One rank alone has its array on a device."""
    cuda().enter()
    with unisono.init(timeout=60) as comm:
        rank, size = comm.rank, comm.size
        make = maker("interface")
        array: Memory | np.ndarray
        if rank == 0:
            array = make(numbers(0))
        else:
            array = unisono.empty(LENGTH, "int32") if rank == 1 else np.empty(LENGTH, np.int32)
            array[:] = rank
        with comm.window(array) as window:
            edge = make(np.full(2, 50 + rank, np.int32))
            window.put(edge, (rank + 1) % size)
            window.signal((rank + 1) % size)
            window.wait_signal((rank - 1) % size)
            held = array.numpy() if rank == 0 else array
            assert held[:3].tolist() == [50 + (rank - 1) % size] * 2 + [rank]
        with comm.window(unisono.empty(4, "int32")) as window:
            with pytest.raises(unisono.UnsupportedError, match="no rank of the window exposes"):
                window.put(edge, 0)
            with pytest.raises(unisono.UnsupportedError, match="no rank of the window exposes"):
                window.get(edge, 0)


def peer_dies(victim: int) -> tuple[str, float]:
    """Rank `victim` kills itself; return another's error, and how long it took."""
    cuda().enter()
    comm = unisono.init(timeout=60)
    array = maker("both")(numbers(0))
    window = comm.window(array)
    window.fence()
    if comm.rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic() + 0.3
    with pytest.raises(unisono.PeerLostError) as raised:
        window.wait_signal(victim)
    took = time.monotonic() - begin
    window.close()
    left = comm.shrink()
    with left.window(array) as new:
        new.put(numbers(7), (left.rank + 1) % left.size)
        new.fence()
        assert array.numpy()[0] == 7
    left.close()
    comm.close()
    return str(raised.value), took
