"""One rank of torch.distributed under commands: torch_rank.py FOLDER WORLD BACKENDS RANK.

Every backend has its process group in the same processes, made by `new_group(backend=...)`; a
command names the one it is for, as in `time gloo/all_reduce 8 1000`. The words are those of
commands.py.

The backend `fake` is torch's own, whose operations do nothing. Here each of its calls is followed
by a yield, as in a wait for other ranks: what is measured is torch itself, and the caches that the
ranks of one core take from each other.
"""

from __future__ import annotations

import abc
import datetime
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from commands import Clock, serve

WAIT = datetime.timedelta(seconds=300)
FAKE = "fake"

Call = Callable[[dist.ProcessGroup], None]


class Collective(abc.ABC):
    """One collective on buffers of its own. `size` is that of the whole tensor in bytes."""

    # The group in whose shared heap buffers are made; None: each process's own memory.
    heap: dist.ProcessGroup | None = None

    def __init__(self, size: int, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.dtype = torch.uint8 if size % 4 else torch.float32
        self.count = max(1, size // self.dtype.itemsize)
        self.shard = max(1, self.count // world)
        self.root = 0

    @abc.abstractmethod
    def call(self, group: dist.ProcessGroup) -> None:
        """Run once."""

    @abc.abstractmethod
    def check(self, group: dist.ProcessGroup) -> bool:
        """Run on known data, and tell whether the result is right."""

    def zeros(self, count: int) -> torch.Tensor:
        # Written, so that no page of it is the kernel's page of zeros.
        if self.heap is None:
            return torch.ones(count, dtype=self.dtype).zero_()
        cpu = torch.device("cpu")
        backend = self.heap._get_backend(cpu)
        return backend.allocate_tensor(count, dtype=self.dtype, device=cpu).fill_(1).zero_()

    def next_root(self) -> int:
        """Move the root on by one rank, so that no root can run ahead of its receivers."""
        root, self.root = self.root, (self.root + 1) % self.world
        return root

    def ranks_in_order(self) -> torch.Tensor:
        return torch.arange(1, self.world + 1, dtype=self.dtype).unsqueeze(1)


def alone(call: Call) -> Call:
    """Return `call`, which never waits, with a yield to the other ranks after it."""

    def call_and_yield(group: dist.ProcessGroup) -> None:
        call(group)
        os.sched_yield()

    return call_and_yield


def equal(result: torch.Tensor, expected: torch.Tensor | float) -> bool:
    return bool((result == expected).all())


class AllReduce(Collective):
    """In place, sum."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        super().__init__(size, rank, world)
        self.tensor = self.zeros(self.count)

    def call(self, group: dist.ProcessGroup) -> None:
        dist.all_reduce(self.tensor, group=group)

    def check(self, group: dist.ProcessGroup) -> bool:
        self.tensor.fill_(self.rank + 1)
        self.call(group)
        right = equal(self.tensor, self.world * (self.world + 1) / 2)
        self.tensor.zero_()  # or the sums would grow without end
        return right


class AllReduceInt8(AllReduce):
    """`torch.ops.unisono.all_reduce_int8_`: float32 that travels between hosts in 8 bits."""

    def call(self, group: dist.ProcessGroup) -> None:
        if dist.get_backend(group) != "unisono" or self.dtype != torch.float32:
            raise RuntimeError(f"{dist.get_backend(group)} does not support {self.dtype} in 8 bits")
        torch.ops.unisono.all_reduce_int8_(self.tensor, group.group_name)

    def check(self, group: dist.ProcessGroup) -> bool:
        steps = torch.arange(self.count, dtype=self.dtype) % 64
        torch.add(steps, self.rank, out=self.tensor)
        self.call(group)
        expected = self.world * steps + self.world * (self.world - 1) / 2
        most = self.world * (63 + self.world)
        right = bool(((self.tensor - expected).abs() <= most / 100).all())
        self.tensor.zero_()
        return right


class Broadcast(Collective):
    def __init__(self, size: int, rank: int, world: int) -> None:
        super().__init__(size, rank, world)
        self.tensor = self.zeros(self.count)

    def call(self, group: dist.ProcessGroup) -> None:
        dist.broadcast(self.tensor, src=self.next_root(), group=group)

    def check(self, group: dist.ProcessGroup) -> bool:
        right = True
        for _ in range(self.world):
            root = self.root
            self.tensor.fill_(self.rank + 1)
            self.call(group)
            right &= equal(self.tensor, root + 1)
        return right


class AllGather(Collective):
    """`all_gather_into_tensor`: every rank brings a shard, all get the whole."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        super().__init__(size, rank, world)
        self.input, self.output = self.zeros(self.shard), self.zeros(self.shard * world)

    def call(self, group: dist.ProcessGroup) -> None:
        dist.all_gather_into_tensor(self.output, self.input, group=group)

    def check(self, group: dist.ProcessGroup) -> bool:
        self.input.fill_(self.rank + 1)
        self.output.zero_()
        self.call(group)
        return equal(self.output.view(self.world, self.shard), self.ranks_in_order())


class ReduceScatter(Collective):
    """`reduce_scatter_tensor`, sum: every rank brings the whole, and gets its shard of the sum."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        super().__init__(size, rank, world)
        self.input, self.output = self.zeros(self.shard * world), self.zeros(self.shard)

    def call(self, group: dist.ProcessGroup) -> None:
        dist.reduce_scatter_tensor(self.output, self.input, group=group)

    def check(self, group: dist.ProcessGroup) -> bool:
        self.input.view(self.world, self.shard).copy_(self.ranks_in_order() * (self.rank + 1))
        self.output.zero_()
        self.call(group)
        return equal(self.output, (self.rank + 1) * self.world * (self.world + 1) / 2)


class AllToAll(Collective):
    """`all_to_all_single`: every rank has a block for every rank."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        super().__init__(size, rank, world)
        self.input, self.output = (self.zeros(self.shard * world) for _ in range(2))

    def call(self, group: dist.ProcessGroup) -> None:
        dist.all_to_all_single(self.output, self.input, group=group)

    def check(self, group: dist.ProcessGroup) -> bool:
        self.input.fill_(self.rank + 1)
        self.output.zero_()
        self.call(group)
        return equal(self.output.view(self.world, self.shard), self.ranks_in_order())


class PingPong(Collective):
    """Half a round trip between ranks 2k and 2k + 1."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        super().__init__(size, rank, world)
        self.input, self.output = (self.zeros(self.count) for _ in range(2))
        self.peer = rank ^ 1

    def call(self, group: dist.ProcessGroup) -> None:
        if self.peer >= self.world:
            return
        if self.rank % 2 == 0:
            dist.send(self.input, self.peer, group=group)
        dist.recv(self.output, self.peer, group=group)
        if self.rank % 2 == 1:
            dist.send(self.input, self.peer, group=group)

    def check(self, group: dist.ProcessGroup) -> bool:
        self.input.fill_(self.rank + 1)
        self.call(group)
        return self.peer >= self.world or equal(self.output, self.peer + 1)


COLLECTIVES: dict[str, type[Collective]] = {
    "all_reduce": AllReduce,
    "all_reduce_int8": AllReduceInt8,
    "broadcast": Broadcast,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "all_to_all": AllToAll,
    "ping_pong": PingPong,
}


class Barrier(Collective):
    def call(self, group: dist.ProcessGroup) -> None:
        dist.barrier(group=group)

    def check(self, group: dist.ProcessGroup) -> bool:
        self.call(group)
        return True


COLLECTIVES["barrier"] = Barrier


class Rank:
    """Answers commands with the collectives of one cell at a time."""

    def __init__(self, rank: int, world: int, backends: list[str]) -> None:
        self.rank, self.world, self.clock = rank, world, Clock()
        if FAKE in backends:
            # Makes the backend known.
            import torch.testing._internal.distributed.fake_pg  # noqa: F401
        self.groups = {
            name: dist.new_group(backend=name.removesuffix("-heap"), timeout=WAIT)
            for name in backends
        }
        # The same for all backends, so that none profits from its own barrier.
        self.meeting = next(iter(self.groups.values()))
        self.cell: tuple[str, str, int] | None = None
        self.collective: Collective | None = None

    def answer(self, line: str) -> str:
        verb, *words = line.split()
        if verb == "free":
            self.cell = self.collective = None
            return "ok"
        if verb == "cold":
            return self.clock.cold(int(words[0]))
        if verb not in ("check", "time"):
            return f"no {verb} is no command"
        backend, _, name = words[0].partition("/")
        if name not in COLLECTIVES or backend not in self.groups:
            return f"no there is no {words[0]} here"
        group, collective = self.groups[backend], self.prepare(backend, name, int(words[1]))
        if verb == "check":
            return "ok" if backend == FAKE else self.check(collective, group)
        call = collective.call
        if backend == FAKE:
            call = alone(call)
        meet = functools.partial(dist.barrier, group=self.meeting)
        seconds = self.clock.seconds(functools.partial(call, group), meet, int(words[2]))
        return f"ok {seconds / 2 if name == 'ping_pong' else seconds:.9f}"

    def prepare(self, backend: str, name: str, size: int) -> Collective:
        cell = backend if backend.endswith("-heap") else "", name, size
        if self.cell != cell or self.collective is None:
            self.cell, self.collective = cell, None  # the old one goes first
            Collective.heap = self.groups[backend] if cell[0] else None
            self.collective = COLLECTIVES[name](size, self.rank, self.world)
        return self.collective

    def check(self, collective: Collective, group: dist.ProcessGroup) -> str:
        """Check the result; a backend that does not have the collective says so."""
        try:
            return "ok" if collective.check(group) else "wrong result"
        except RuntimeError as error:
            message = str(error).splitlines()[0]
            if "support" in message.lower() or "implement" in message.lower():
                return f"no {message}"
            raise


def main() -> None:
    folder, world, backends, rank = sys.argv[1:]
    torch.set_num_threads(1)

    def join() -> Callable[[str], str]:
        # Gloo's default group carries what making the other groups needs, and is idle afterwards.
        dist.init_process_group(
            "gloo",
            init_method=Path(folder, "rendezvous").as_uri(),
            rank=int(rank),
            world_size=int(world),
            timeout=WAIT,
        )
        return Rank(int(rank), int(world), backends.split(",")).answer

    serve(folder, rank, join)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
