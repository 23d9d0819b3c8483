"""The rank functions of the NumPy tests; `test_numpy_collectives.py` starts them."""

from __future__ import annotations

import threading
import zlib

import numpy as np
import pytest
from numpy_reference import (
    DTYPES,
    FLOATS,
    INTEGERS,
    OPS,
    check,
    contribution,
    dtype_of,
    factor,
    has_meaning,
    reduced,
)

import unisono

COUNTS = [0, 1, 2, 3, 7, 67, 1003]
LARGE = 120_011


class Matrix:
    """Runs every combination on one communicator and checks every result.

    ``seen`` is a checksum of every reduction that all ranks get, in order: ranks that hold the
    same checksum have seen the same bits.
    """

    def __init__(self, comm: unisono.Communicator) -> None:
        self.comm = comm
        self.rank, self.world = comm.rank, comm.size
        self.seen = 0
        self.salt = 0
        self.cases = 0

    def inputs(self, name: str, count: int) -> list[np.ndarray]:
        self.salt += 1
        self.cases += 1
        return [contribution(name, rank, count, self.salt) for rank in range(self.world)]

    def operator(self, op: str, name: str) -> str | unisono.ReduceOp:
        if op == "premul_sum":
            return unisono.ReduceOp.premul_sum(factor(name, self.rank))
        return op

    def reductions(self, name: str, op: str, counts: list[int]) -> None:
        for count in counts:
            self.all_reduce(name, op, count)
        for count in counts[::2]:
            self.reduce(name, op, count)
            self.reduce_scatter(name, op, count)
            self.prefixes(name, op, count)
        self.reduce_scatter_v(name, op)

    def all_reduce(self, name: str, op: str, count: int) -> None:
        inputs = self.inputs(name, count)
        expected = reduced(op, name, inputs)
        mine = inputs[self.rank]
        operator = self.operator(op, name)
        if self.salt % 2:
            out = np.full(count, 0, dtype_of(name))
            before = mine.copy()
            assert self.comm.all_reduce(mine, operator, out=out) is out
            assert mine.tobytes() == before.tobytes()
        else:
            out = mine
            assert self.comm.all_reduce(mine, operator) is mine
        check(out, expected, op, name)
        self.seen = zlib.crc32(out.tobytes(), self.seen)

    def reduce(self, name: str, op: str, count: int) -> None:
        inputs = self.inputs(name, count)
        root = self.salt % self.world
        mine = inputs[self.rank].copy()
        out = np.empty_like(mine) if self.salt % 3 == 0 and self.rank == root else None
        result = self.comm.reduce(mine, self.operator(op, name), root, out=out)
        if self.rank == root:
            assert result is (mine if out is None else out)
            check(result, reduced(op, name, inputs), op, name)
        else:
            assert result is None
            assert mine.tobytes() == inputs[self.rank].tobytes()

    def prefixes(self, name: str, op: str, count: int) -> None:
        inputs = self.inputs(name, count)
        operator = self.operator(op, name)
        is_in_place = self.salt % 2 == 0
        for call, last in ((self.comm.scan, self.rank), (self.comm.exscan, self.rank - 1)):
            mine = inputs[self.rank].copy()
            out = mine if is_in_place else np.ones_like(mine)
            # Rank 0 has no result of exscan.
            expected = reduced(op, name, inputs[: last + 1]) if last >= 0 else out.copy()
            assert call(mine, operator, out=None if is_in_place else out) is out
            if last < 0:
                same(out, expected)
            else:
                check(out, expected, op, name)
            if not is_in_place:
                same(mine, inputs[self.rank])

    def reduce_scatter(self, name: str, op: str, count: int) -> None:
        inputs = self.inputs(name, count * self.world)
        expected = reduced(op, name, inputs).reshape(self.world, count)[self.rank]
        mine = inputs[self.rank].reshape(self.world, count)
        operator = self.operator(op, name)
        if self.salt % 2:
            result = self.comm.reduce_scatter(mine, operator)
        else:
            result = self.comm.reduce_scatter(
                mine.reshape(-1), operator, out=np.empty(count, mine.dtype)
            )
        check(result, expected, op, name)

    def reduce_scatter_v(self, name: str, op: str) -> None:
        counts = uneven(self.world, self.salt)
        inputs = self.inputs(name, 2 * sum(counts))
        ends = np.cumsum([0, *counts])
        expected = reduced(op, name, inputs).reshape(-1, 2)[ends[self.rank] : ends[self.rank + 1]]
        mine = inputs[self.rank].reshape(-1, 2)
        result = self.comm.reduce_scatter_v(mine, counts, self.operator(op, name))
        check(result, expected, op, name)

    def moves(self, name: str, count: int) -> None:
        """Every operation that only moves: bytes must arrive as they were."""
        comm, rank, world = self.comm, self.rank, self.world
        inputs = self.inputs(name, count)
        mine = inputs[rank].copy()
        root = self.salt % world
        stack = np.stack(inputs)

        buffer = mine.copy()
        assert comm.broadcast(buffer, root) is buffer
        same(buffer, inputs[root])

        same(comm.all_gather(mine), stack)
        whole = np.zeros_like(stack)
        whole[rank] = mine
        assert comm.all_gather(whole[rank], out=whole) is whole
        same(whole, stack)

        gathered = comm.gather(mine, root)
        assert (gathered is None) == (rank != root)
        if rank == root:
            same(gathered, stack)

        if rank == root:
            same(comm.scatter(stack, root), mine)
        else:
            same(comm.scatter(root=root, out=np.empty_like(mine)), mine)

        blocks = [
            np.stack([contribution(name, source, count, self.salt + dest) for dest in range(world)])
            for source in range(world)
        ]
        same(comm.all_to_all(blocks[rank]), np.stack([block[rank] for block in blocks]))
        same(mine, inputs[rank])

    def uneven_moves(self, name: str) -> None:
        comm, rank, world = self.comm, self.rank, self.world
        counts = uneven(world, self.salt)
        ends = np.cumsum([0, *counts])
        root = self.salt % world
        rows = self.inputs(name, 3 * sum(counts))[0].reshape(-1, 3)
        mine = rows[ends[rank] : ends[rank + 1]].copy()

        same(comm.all_gather_v(mine, counts), rows)
        gathered = comm.gather_v(mine, counts if rank == root else None, root)
        assert (gathered is None) == (rank != root)
        if rank == root:
            same(gathered, rows)
            same(comm.scatter_v(rows, counts, root), mine)
        else:
            same(comm.scatter_v(root=root, out=np.empty_like(mine)), mine)

        # Row counts by (source, destination), with zeros among them.
        table = [
            [(source * 3 + dest * 5 + self.salt) % 4 for dest in range(world)]
            for source in range(world)
        ]
        parts = [
            [
                contribution(name, source, 2 * table[source][dest], dest).reshape(-1, 2)
                for dest in range(world)
            ]
            for source in range(world)
        ]
        result = comm.all_to_all_v(
            np.concatenate(parts[rank]),
            table[rank],
            [table[source][rank] for source in range(world)],
        )
        same(result, np.concatenate([parts[source][rank] for source in range(world)]))

    def messages(self, name: str, count: int) -> None:
        """Around a ring, with tags crossing: the second message is received first."""
        comm, rank, world = self.comm, self.rank, self.world
        inputs = self.inputs(name, count)
        right, left = (rank + 1) % world, (rank - 1) % world
        second, first = np.empty_like(inputs[left]), np.empty_like(inputs[left])
        receives = [comm.irecv(second, left, tag=2), comm.irecv(first, tag=1)]
        sends = [
            comm.isend(inputs[rank], right, tag=1),
            comm.isend(inputs[rank][::-1], right, tag=2),
        ]
        for work in [*receives, *sends]:
            work.wait()
        assert [work.source for work in receives] == [left, left]
        assert receives[1].result().source == left
        same(first, inputs[left])
        same(second, inputs[left][::-1])
        message = comm.sendrecv(inputs[rank][::-1], right, first, left, tag=3)
        assert (message.source, message.count) == (left, first.size)
        same(first, inputs[left][::-1])
        comm.barrier()
        assert comm.sendrecv(first, right, second).source == left
        same(second, inputs[(rank - 2) % world][::-1])


def uneven(world: int, salt: int) -> list[int]:
    """Rows per rank, with zeros among them."""
    return [(rank * 5 + salt) % 7 for rank in range(world)]


def same(result: np.ndarray, expected: np.ndarray) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.tobytes() == expected.tobytes()


def every_combination() -> int:
    with unisono.init(timeout=60) as comm:
        matrix = Matrix(comm)
        for name in DTYPES:
            for op in OPS:
                if has_meaning(op, name):
                    # Every count for one operator; the others differ in the kernel alone.
                    counts = COUNTS if op in ("sum", "max") else [3, 67]
                    matrix.reductions(name, op, counts)
                else:
                    refused(comm, name, op)
            for count in COUNTS:
                matrix.moves(name, count)
            matrix.uneven_moves(name)
            matrix.messages(name, 67)
            comm.barrier()
        for name in ("float32", "bfloat16", "uint8"):
            matrix.all_reduce(name, "sum", LARGE)
            matrix.reduce(name, "sum", LARGE)
            matrix.prefixes(name, "sum", LARGE)
            matrix.prefixes(name, "sum", LARGE)
            matrix.reduce_scatter(name, "sum", LARGE // comm.size)
            matrix.moves(name, LARGE // comm.size)
            matrix.messages(name, LARGE)
        seen = comm.all_gather(np.array(matrix.seen, np.uint32))
        assert len(set(seen.tolist())) == 1, "ranks hold different bits"
        assert comm.error is None
        return matrix.cases


def prefixes_are_loops() -> None:
    """Each prefix has the bits of a loop over the ranks, whichever of them are in place."""
    with unisono.init(timeout=60) as comm:
        for name in ("float32", "bfloat16", "complex128"):
            for count in (1, 1003, LARGE):
                every = [contribution(name, rank, count, 7) for rank in range(comm.size)]
                wide = np.dtype(np.float32) if name == "bfloat16" else every[0].dtype
                total = every[0].astype(wide)
                totals = [total]
                for one in every[1:]:
                    total = total + one.astype(wide)
                    totals.append(total)
                is_in_place = comm.rank % 2 == 1
                for call, last in ((comm.scan, comm.rank), (comm.exscan, comm.rank - 1)):
                    mine = every[comm.rank].copy()
                    out = mine if is_in_place else np.zeros_like(mine)
                    expected = totals[last].astype(mine.dtype) if last >= 0 else out.copy()
                    call(mine, out=None if is_in_place else out)
                    same(out, expected)


def refused(comm: unisono.Communicator, name: str, op: str) -> None:
    operator = unisono.ReduceOp.premul_sum(2) if op == "premul_sum" else op
    with pytest.raises(unisono.UnsupportedError, match=f"{op} has no meaning for {name}"):
        comm.all_reduce(np.ones(3, dtype_of(name)), operator)


def nan_and_extremes() -> None:
    """NaN wins in min and max, on whichever rank it is; integers wrap; infinities stay."""
    with unisono.init(timeout=30) as comm:
        for name in FLOATS:
            for op in ("min", "max"):
                array = np.full(9, comm.rank, dtype_of(name))
                array[comm.rank] = np.nan
                comm.all_reduce(array, op)
                assert np.isnan(array.astype(np.float64)).nonzero()[0].tolist() == list(
                    range(comm.size)
                )
        for name in INTEGERS:
            info = np.iinfo(name)
            array = np.full(33, info.max, name)
            expected = np.add.reduce(np.stack([array] * comm.size), axis=0, dtype=name)
            assert comm.all_reduce(array).tolist() == expected.tolist()
        array = np.array([np.inf, -np.inf, np.inf * (-1) ** comm.rank], np.float32)
        comm.all_reduce(array)
        assert array[0] == np.inf
        assert array[1] == -np.inf
        assert comm.size == 1 or np.isnan(array[2])


def many_in_flight() -> None:
    """Collectives on a communicator and on parts of it, started together, awaited in any order."""
    with unisono.init(timeout=60) as comm:
        half = comm.split(comm.rank % 2, key=-comm.rank)
        whole = comm.split(0)
        assert half is not None
        assert whole is not None
        groups = [comm, half, whole]
        members = [
            list(range(comm.size)),
            sorted(range(comm.rank % 2, comm.size, 2), reverse=True),
            list(range(comm.size)),
        ]
        assert half.rank == members[1].index(comm.rank)
        random = np.random.default_rng(comm.rank)
        for turn in range(5):
            started = []
            # Each rank takes the groups in an order of its own; inside a group it is the same.
            for which in random.permutation(3):
                group, ranks = groups[which], members[which]
                for index in range(12):
                    count = [1, 50, 3000, 40_000][index % 4]
                    array = np.full(count, float(comm.rank + index), np.float64)
                    expected = float(sum(rank + index for rank in ranks))
                    started.append((group.all_reduce(array, async_op=True), array, expected))
            for which in random.permutation(len(started)):
                work, array, expected = started[which]
                assert work.result() is array
                assert work.done()
                assert work.exception() is None
                assert work.duration is not None
                assert (array == expected).all(), turn
        assert comm.split(None) is None
        half.close()
        whole.close()


def works_outlive_their_arrays() -> None:
    """Dropping the arrays and the Work of an operation under way is safe."""
    with unisono.init(timeout=60) as comm:
        for index in range(200):
            comm.all_reduce(np.ones(5000, np.float32), async_op=True)
            comm.all_gather(np.ones(700, np.int64), async_op=True)
            if index % 10 == 0:
                sent = comm.isend(np.arange(100_000), (comm.rank + 1) % comm.size)
                received = comm.irecv(np.empty(100_000, np.int64))
        # The last messages come last. Leaving with messages under way would abort the group.
        sent.wait()
        received.wait()
        comm.barrier()
        array = np.ones(3, np.float32)
        assert comm.all_reduce(array).tolist() == [comm.size] * 3


def operations_that_share_an_array() -> None:
    """An operation on bytes that an earlier one still uses comes after it."""
    with unisono.init(timeout=60) as comm:
        array = np.ones(50_000, np.float64)
        works = [comm.all_reduce(array, async_op=True) for _ in range(6)]
        works[-1].wait()
        assert (array == float(comm.size) ** 6).all()
        for work in works:
            work.wait()


def threads() -> None:
    """Each thread has a group of its own, all at once, and messages on a common one."""
    with unisono.init(timeout=60) as comm:
        groups = [comm.split(0) for _ in range(4)]
        failures: list[BaseException] = []

        def work(index: int, group: unisono.Communicator) -> None:
            try:
                for turn in range(100):
                    array = np.full(1 + 37 * turn, float(index), np.float64)
                    group.all_reduce(array)
                    assert (array == index * comm.size).all()
                    got = np.empty(3, np.int64)
                    sent = comm.isend(np.full(3, turn), (comm.rank + 1) % comm.size, tag=index)
                    comm.recv(got, (comm.rank - 1) % comm.size, tag=index)
                    sent.wait()
                    assert got.tolist() == [turn] * 3
            except BaseException as failure:
                failures.append(failure)

        started = [
            threading.Thread(target=work, args=(index, group))
            for index, group in enumerate(groups)
            if group is not None
        ]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        assert not failures, failures
