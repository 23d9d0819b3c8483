"""One rank of the NumPy door under commands: numpy_rank.py FOLDER WORLD RANK.

A command names the memory of the buffers, as in `time private/all_reduce 8 1000`: `private`, each
process's own, or `heap`, which the ranks share. The words are those of commands.py.

Which unisono that is, PYTHONPATH says: this program runs with the packages of several commits, so
it uses only what all of them have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from commands import Clock, serve

import unisono

LINE = 64  # bytes of a cache line, at whose multiples buffers begin
MEMORIES = ("private", "heap")


class Cell:
    """The buffers of one collective. `size` is that of the whole in bytes."""

    def __init__(self, comm: unisono.Communicator, memory: str, size: int) -> None:
        self.comm, self.memory = comm, memory
        self.dtype = np.uint8 if size % 4 else np.float32
        self.count = max(1, size // np.dtype(self.dtype).itemsize)
        self.shard = max(1, self.count // comm.world_size)
        self.root = 0
        self.buffers: dict[str, np.ndarray] = {}

    def buffer(self, name: str, count: int) -> np.ndarray:
        """Return the buffer of that name, which is made and written when it is first asked for."""
        if name not in self.buffers:
            self.buffers[name] = self.memory_of(count)
            self.buffers[name][:] = 0
        return self.buffers[name]

    def memory_of(self, count: int) -> np.ndarray:
        if self.memory == "heap":
            return unisono.empty(count, dtype=self.dtype)
        size = count * np.dtype(self.dtype).itemsize
        room = np.empty(size + LINE, np.uint8)
        start = -room.ctypes.data % LINE
        return room[start : start + size].view(self.dtype)

    def whole(self, name: str = "whole") -> np.ndarray:
        return self.buffer(name, self.count)

    def blocks(self, name: str) -> np.ndarray:
        """Return a block for each rank."""
        flat = self.buffer(name, self.shard * self.comm.world_size)
        return flat.reshape(self.comm.world_size, self.shard)

    def block(self, name: str) -> np.ndarray:
        return self.buffer(name, self.shard)

    def next_root(self) -> int:
        """Move the root on by one rank, so that no root can run ahead of its receivers."""
        root, self.root = self.root, (self.root + 1) % self.comm.world_size
        return root

    # The collectives, by name.

    def all_reduce(self) -> None:
        self.comm.all_reduce(self.whole())

    def reduce(self) -> None:
        root = self.next_root()
        out = self.whole("sum") if root == self.comm.rank else None
        self.comm.reduce(self.whole(), root=root, out=out)

    def broadcast(self) -> None:
        self.comm.broadcast(self.whole(), root=self.next_root())

    def all_gather(self) -> None:
        self.comm.all_gather(self.block("own"), out=self.blocks("all"))

    def reduce_scatter(self) -> None:
        self.comm.reduce_scatter(self.blocks("all"), out=self.block("own"))

    def gather(self) -> None:
        root = self.next_root()
        out = self.blocks("all") if root == self.comm.rank else None
        self.comm.gather(self.block("own"), root=root, out=out)

    def scatter(self) -> None:
        root = self.next_root()
        array = self.blocks("all") if root == self.comm.rank else None
        self.comm.scatter(array, root=root, out=self.block("own"))

    def all_to_all(self) -> None:
        self.comm.all_to_all(self.blocks("all"), out=self.blocks("received"))

    def ping_pong(self) -> None:
        """Send there and back between ranks 2k and 2k + 1."""
        peer = self.comm.rank ^ 1
        if peer >= self.comm.world_size:
            return
        if self.comm.rank % 2 == 0:
            self.comm.send(self.whole(), peer)
        self.comm.recv(self.whole("received"), peer)
        if self.comm.rank % 2 == 1:
            self.comm.send(self.whole(), peer)

    def send_recv(self) -> None:
        """Send to the next rank and receive from the previous one at once."""
        rank, world = self.comm.rank, self.comm.world_size
        work = self.comm.irecv(self.whole("received"), (rank - 1) % world)
        self.comm.send(self.whole(), (rank + 1) % world)
        work.wait()

    def barrier(self) -> None:
        self.comm.barrier()

    def check(self, name: str) -> bool:
        """Run on known data, once for each root, and tell whether all results are right."""
        roots = range(self.comm.world_size if name in ROOTED else 1)
        for _ in roots:
            getattr(self, name)()  # makes the buffers, some of them on the root alone
        right = True
        for root in roots:
            for buffer in self.buffers.values():
                buffer[:] = self.comm.rank + 1
            self.root = root
            getattr(self, name)()
            right &= self.is_right(name, root)
        for buffer in self.buffers.values():
            buffer[:] = 0  # or sums would grow without end
        return right

    def is_right(self, name: str, root: int) -> bool:
        """Tell whether each rank's number, from 1 on, has arrived where it should."""
        rank, world = self.comm.rank, self.comm.world_size
        everywhere, from_each = (
            world * (world + 1) // 2,
            np.repeat(np.arange(world) + 1, self.shard),
        )
        output, expected = {
            "all_reduce": ("whole", everywhere),
            "reduce": ("sum", everywhere),
            "broadcast": ("whole", root + 1),
            "all_gather": ("all", from_each),
            "reduce_scatter": ("own", everywhere),
            "gather": ("all", from_each),
            "scatter": ("own", root + 1),
            "all_to_all": ("received", from_each),
            "ping_pong": ("received", (rank ^ 1) + 1),
            "send_recv": ("received", (rank - 1) % world + 1),
            "barrier": ("", 0),
        }[name]
        if output not in self.buffers or (name in TO_ROOT and rank != root):
            return True
        result = self.buffers[output]
        return bool((result == np.asarray(expected).astype(result.dtype)).all())


COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "ping_pong",
    "send_recv",
    "barrier",
)
TO_ROOT = ("reduce", "gather")
ROOTED = (*TO_ROOT, "broadcast", "scatter")


class Rank:
    """Answers commands with the collectives of one cell at a time."""

    def __init__(self, comm: unisono.Communicator) -> None:
        self.comm, self.clock = comm, Clock()
        self.cell: tuple[tuple[str, str, int], Cell] | None = None

    def answer(self, line: str) -> str:
        verb, *words = line.split()
        if verb == "free":
            self.cell = None
            return "ok"
        if verb == "cold":
            return self.clock.cold(int(words[0]))
        if verb not in ("check", "time"):
            return f"no {verb} is no command"
        memory, _, name = words[0].partition("/")
        if name not in COLLECTIVES or memory not in MEMORIES:
            return f"no there is no {words[0]} here"
        cell = self.prepare(memory, name, int(words[1]))
        if verb == "check":
            return "ok" if cell.check(name) else "wrong result"
        call: Callable[[], None] = getattr(cell, name)
        seconds = self.clock.seconds(call, self.comm.barrier, int(words[2]))
        return f"ok {seconds / 2 if name == 'ping_pong' else seconds:.9f}"

    def prepare(self, memory: str, name: str, size: int) -> Cell:
        key = memory, name, size
        if self.cell is None or self.cell[0] != key:
            self.cell = None  # the old one goes first
            self.cell = key, Cell(self.comm, memory, size)
        return self.cell[1]


def main() -> None:
    folder, world, rank = sys.argv[1:]

    def join() -> Callable[[str], str]:
        url = Path(folder, "store").as_uri()
        return Rank(unisono.init(url, rank=int(rank), world_size=int(world))).answer

    serve(folder, rank, join)


if __name__ == "__main__":
    main()
