"""The rank functions of the tests of offers: ranks read and write what others offer."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import unisono
from unisono import _offers


def arrays() -> list[np.ndarray]:
    in_heap = unisono.empty((3, 5), "float32")
    in_heap[:] = np.arange(15).reshape(3, 5)
    return [np.arange(1000), np.empty((0, 3)), np.array(2.5), in_heap]


def read_and_write() -> bool:
    comm = unisono.init()
    mine = arrays()
    offers = comm.all_gather_object(_offers.offer_all(mine).offers)
    # All ranks read those of the next one, and of their own.
    for rank in ((comm.rank + 1) % comm.size, comm.rank):
        got = [_offers.empty(array.shape, array.dtype) for array in mine]
        _offers.read(offers[rank], got).wait(20)
        for one, other in zip(got, arrays(), strict=True):
            np.testing.assert_array_equal(one, other)
    comm.barrier()
    peer = (comm.rank + 1) % comm.size
    _offers.write([np.full(1000, comm.rank)], offers[peer][:1]).wait(20)
    comm.barrier()
    assert set(mine[0]) == {(comm.rank - 1) % comm.size}
    comm.barrier()
    return True


def wrong_arrays() -> bool:
    comm = unisono.init()
    own = np.arange(12).reshape(3, 4)
    with pytest.raises(ValueError, match="only contiguous arrays"):
        _offers.offer_all([own, own.T])
    # The first is not offered either.
    assert not _offers._process.own().regions._counted
    with pytest.raises(ValueError, match="an array of objects"):
        _offers.offer_all([np.array([None])])
    first, second = _offers.offer_all([own]), _offers.offer_all([own])
    for offers in comm.all_gather_object(first.offers):
        with pytest.raises(ValueError, match=r"an array of 8 bytes for an offer of 96"):
            _offers.read(offers, [np.empty(1)])
    comm.barrier()
    # The other offer of the same memory stays.
    second.withdraw()
    second.withdraw()
    peers = comm.all_gather_object(first.offers)
    got = np.empty_like(own)
    _offers.read(peers[1 - comm.rank], [got]).wait(20)
    np.testing.assert_array_equal(got, own)
    comm.barrier()
    first.withdraw()
    comm.barrier()
    with pytest.raises(unisono.InvalidArgumentError, match="no such memory registered"):
        _offers.read(peers[1 - comm.rank], [got]).wait(20)
    comm.barrier()
    return True


def a_peer_that_dies() -> str:
    comm = unisono.init()
    array = np.ones(1 << 20)
    offers = comm.all_gather_object((os.getpid(), *_offers.offer_all([array]).offers))
    if comm.rank == 1:
        time.sleep(60)
    peer, offer = offers[1]
    got = np.empty_like(array)
    _offers.read([offer], [got]).wait(20)
    os.kill(peer, signal.SIGKILL)
    with pytest.raises(unisono.PeerLostError, match=f"pid {peer}"):
        while True:
            _offers.read([offer], [got]).wait(20)
    return "lost"


def a_wait_that_is_stopped() -> bool:
    comm = unisono.init()
    array = np.ones(64 << 20, np.uint8)
    pid, offer = comm.all_gather_object((os.getpid(), *_offers.offer_all([array]).offers))[1]
    if comm.rank == 1:
        comm.barrier()
        return True
    got = np.empty_like(array)
    _offers.read([offer], [got]).wait(20)
    # A peer that does nothing at all, from private memory that its own thread would copy.
    os.kill(pid, signal.SIGSTOP)
    try:
        transfers = _offers.read([offer], [got])
        with pytest.raises(unisono.TimeoutError, match=r"not ended after 0\.2 s"):
            transfers.wait(0.2)
        with pytest.raises(unisono.AbortedError, match="was stopped"):
            transfers.wait(20, lambda: True)
        assert not transfers.done()
        # Without its reader; the memory is kept for the transfer all the same.
        del transfers, got
        another = _offers.read([offer], [np.empty_like(array)])
        assert not another.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    another.wait(20)
    comm.barrier()
    return True


def forked() -> bool:
    comm = unisono.init()
    array = np.arange(100)
    offers = comm.all_gather_object(_offers.offer_all([array]).offers)
    got = np.empty_like(array)
    _offers.read(offers[1 - comm.rank], [got]).wait(20)
    child = os.fork()
    if child == 0:
        # A process of its own, with ports of its own.
        try:
            copy = np.empty_like(array)
            (mine,) = _offers.offer_all([array]).offers
            assert mine.url != offers[comm.rank][0].url
            _offers.read([*offers[1 - comm.rank], mine], [copy, np.empty_like(array)]).wait(20)
            os._exit(0 if (copy == array).all() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    comm.barrier()
    return True
