"""The ranks of test_numpy_messages.py."""

from __future__ import annotations

import os
import pickle
import signal
import time

import numpy as np
import pytest

import unisono

# Elements of the longest message. The others are short, announced, offered or lent.
ROOM = 300_000
LENGTHS = [0, 1, 5_000, 20_000, 200_000, ROOM]


def shorter() -> None:
    comm = unisono.init(timeout=20)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for tag, length in enumerate(LENGTHS):
        whole = np.arange(length, dtype=np.int32)
        for order in ("receive first", "send first", "sendrecv", "to oneself"):
            got = np.full(ROOM, -1, np.int32)
            if order == "receive first":
                receive = comm.irecv(got, left, tag)
                comm.barrier()
                comm.send(whole, right, tag)
                message = receive.result()
            elif order == "send first":
                work = comm.isend(whole, right, tag)
                comm.barrier()
                message = comm.recv(got, tag=tag)
                work.wait()
            elif order == "sendrecv":
                message = comm.sendrecv(whole, right, got, left, tag)
            else:
                work = comm.isend(whole, comm.rank, tag)
                message = comm.recv(got, comm.rank, tag)
                work.wait()
            source = comm.rank if order == "to oneself" else left
            assert (message.source, message.count, message.dtype) == (source, length, "int32")
            assert (got[:length] == whole).all(), (order, length)
            assert (got[length:] == -1).all(), (order, length)
            comm.barrier()
    comm.close()


def probes() -> None:
    comm = unisono.init(timeout=20)
    comm.barrier()
    # A rank that polls keeps its records.
    for _ in range(300):
        assert comm.probe(timeout=0) is None
    assert any("barrier" in line for line in comm.recent_operations())
    assert comm.stats()["called"].keys() == {"barrier"}
    began = time.monotonic()
    assert comm.probe(0, tag=9, timeout=0.2) is None
    assert 0.2 <= time.monotonic() - began < 5
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for length in LENGTHS:
        if comm.rank == 0:
            for _ in others:
                message = comm.probe(tag=4)
                assert message == comm.probe(message.source, tag=4, timeout=0)
                assert (message.count, message.dtype) == (length + message.source, "float64")
                got = np.empty(message.count, message.dtype)
                assert comm.recv(got, message.source, tag=4) == message
                assert (got == message.source).all()
            assert comm.probe(tag=4, timeout=0) is None
        else:
            comm.send(np.full(length + comm.rank, float(comm.rank)), 0, tag=4)
        comm.barrier()
    # One that waits does not take what a receive of the same thread's asks for.
    if comm.rank == 1:
        comm.send(np.ones(2), 0, tag=1)
        comm.send(np.ones(3), 0, tag=1)
    elif comm.rank == 0:
        got = np.zeros(3)
        receive = comm.irecv(got, 1, tag=1)
        assert comm.probe(1, tag=1).count == 3
        assert receive.result().count == 2
        assert comm.recv(got, tag=1).count == 3
        # Nothing tells the wait for a message from the time that it moves.
        received = comm.stats()["called"]["recv"]
        assert (received["timed"], received["moving_seconds"]) == (0, 0)
    comm.barrier()
    with pytest.raises(unisono.InvalidArgumentError, match="source 7 is out of range"):
        comm.probe(7)
    comm.close()


def probe_of_the_dead() -> str:
    comm = unisono.init(timeout=20)
    if comm.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(unisono.PeerLostError) as caught:
        comm.probe()
    return str(caught.value)


def objects() -> None:
    comm = unisono.init(timeout=20)
    rank, world = comm.rank, comm.size
    mine = {"rank": rank, "list": list(range(rank * 1000))}
    everything = comm.all_gather_object(mine)
    assert [one["rank"] for one in everything] == list(range(world))
    assert everything[rank] == mine
    for root in range(world):
        gathered = comm.gather_object(mine, root)
        assert (gathered == everything) if rank == root else (gathered is None)
        given = comm.broadcast_object(mine if rank == root else None, root)
        assert given == everything[root]
        own = comm.scatter_object(everything if rank == root else None, root)
        assert own == mine
    if rank:
        comm.send_object(mine, 0, tag=3)
    else:
        got = [comm.recv_object(tag=3) for _ in range(1, world)]
        assert sorted(got, key=lambda one: one["rank"]) == everything[1:]
        with pytest.raises(unisono.InvalidArgumentError, match="2 objects for 3 ranks"):
            comm.scatter_object([1, 2])
    comm.barrier()
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        comm.all_gather_object(lambda: None)
    comm.close()
