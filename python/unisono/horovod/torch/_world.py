"""The job as Horovod sees it: its ranks, its hosts and its process sets.

``init`` meets through ``unisono.init()``, which knows every launcher, and then forms a group of
``torch.distributed`` on the backend ``"unisono"`` at a store of rank 0. A default group that exists
already is used as it is if it runs on unisono; beside any other one a group on unisono is made.

The communicator of ``unisono.init()`` stays, unused, for the case that ranks are gone: those that
are left go on from it, and take in others, without the launcher and without a store; see `recover`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unisono.horovod.torch._call import Call

# torch has no "for ever".
_TIMEOUT = timedelta(days=1)
# How long the connection to the store of rank 0 may take, which is there.
_CONNECTING = timedelta(seconds=60)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# How many calls a rank remembers for ranks that have joined; see `_join`.
_REMEMBERED = 10_000
_HOST_BYTES = 320
# How often ranks that are left try to form the job anew while further ones go.
_ATTEMPTS = 10


class ProcessSet:
    """Some ranks of the job, which communicate among themselves.

    Parameters
    ----------
    ranks
        The ranks of the job that belong to it, each once.

    Attributes
    ----------
    ranks : list of int
        Its members, in ascending order.
    process_set_id : int or None
        Its number, once :func:`add_process_set` or :func:`init` has made it known.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] = sorted(ranks)
        self.process_set_id: int | None = None
        self._group: Any = None
        # Its members by the numbers that they were started with, once ranks have been lost.
        self._started: set[int] | None = None
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a rank appears twice in the process set {list(ranks)}")

    def size(self) -> int:
        """Return how many ranks it has."""
        self._known()
        return len(self.ranks)

    def rank(self) -> int:
        """Return this rank's place in it; -1 for a rank outside."""
        self._known()
        mine = rank()
        return self.ranks.index(mine) if mine in self.ranks else -1

    def included(self) -> bool:
        """Return whether this rank belongs to it."""
        self._known()
        return rank() in self.ranks

    def _known(self) -> None:
        world()
        if self.process_set_id is None:
            raise ValueError(f"{self} is not known; call add_process_set() on every rank first")

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks. The object stays the same from one ``init`` to the next."""

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, all ranks)"


global_process_set: Final[ProcessSet] = _GlobalProcessSet([])


@dataclass
class World:
    """The job as this rank knows it, between ``init`` and ``shutdown``."""

    rank: int
    size: int
    hosts: list[str]
    store: Any
    owns_group: bool
    # The communicator in which the ranks met, and what number each was started with.
    comm: Any = None
    started: list[int] = field(default_factory=list)
    # How many ranks were started.
    launched: int = 0
    # The rank whose state counts.
    root: int = 0
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    next_set: int = 1
    # The calls on all ranks so far, and the last of them. `_join` shows them to ranks without data.
    sequence: int = 0
    recent: deque[tuple[int, Call]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    epoch: int = 0
    joined: int = 0
    published: int = -1
    # Hooks of the optimizer run on threads of autograd; calls are started one at a time.
    lock: Any = field(default_factory=threading.RLock)

    def local(self) -> list[int]:
        """Return the ranks on this host, in ascending order."""
        mine = self.hosts[self.rank]
        return [other for other, host in enumerate(self.hosts) if host == mine]


_world: World | None = None


def world() -> World:
    """Return the job.

    Raises
    ------
    ValueError
        Before ``init``.
    """
    if _world is None:
        raise ValueError("unisono.horovod is not initialized; call init() first")
    return _world


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Join the job. A second call does nothing until ``shutdown``.

    Started by ``unisono launch``, torchrun, mpirun or Slurm, it finds the other ranks through what
    the launcher has set. It blocks until all are there.

    Parameters
    ----------
    comm
        None or all ranks: communicators of MPI and parts of the job are for process sets.
    process_sets
        Sets to make at once, the same on every rank.

    Raises
    ------
    ValueError
        `comm` is something else.
    unisono.Error
        The other ranks did not come, or no launcher's variables are set.
    """
    global _world  # noqa: PLW0603
    if _world is not None:
        return
    if dist.is_initialized():
        joined = _from_default_group()
    else:
        joined = _from_launcher()
    if comm and list(comm) != list(range(joined.size)):
        raise ValueError(f"comm={comm!r}: only all ranks can be initialized; use process sets")
    _world = joined
    _know(joined)
    for process_set in process_sets or ():
        add_process_set(process_set)


def shutdown(*, aborts: bool = False) -> None:
    """Leave the job. The default process group is destroyed if ``init`` made it.

    Parameters
    ----------
    aborts
        Whether the group is dead or shall be, so that no rank waits for this one, and the default
        process group goes in any case.
    """
    global _world
    if _world is None:
        return
    leaving, _world = _world, None
    _leave(leaving, aborts=aborts)
    if leaving.comm is not None:
        leaving.comm.close()


def _leave(leaving: World, *, aborts: bool) -> None:
    everything = leaving.owns_group or aborts
    for number, process_set in sorted(leaving.sets.items(), reverse=True):
        # torch's own group is None where it is the default one, which is the user's.
        if not everything and process_set._group is not None:
            _destroy(process_set._group)
        process_set._group = None
        process_set.process_set_id = None
        if number == 0:
            process_set.ranks = []
    if everything and dist.is_initialized():
        dist.destroy_process_group()


def _destroy(group: Any) -> None:
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)


def recover(patience: float) -> None:
    """Form the job anew of the ranks that are left, and of processes that take others' places.

    All ranks that are left call it, after an operation has failed. They keep their order, and with
    all there again their numbers.

    Parameters
    ----------
    patience
        Seconds to wait for processes in the places of those that are gone. Without them the job
        goes on with fewer ranks.

    Raises
    ------
    unisono.Error
        A rank that lives has not called it, or further ones went with each attempt.
    """
    global _world  # noqa: PLW0603
    leaving = world()
    sets = [one for number, one in sorted(leaving.sets.items()) if number]
    for process_set in sets:
        if process_set._started is None:
            process_set._started = {leaving.started[member] for member in process_set.ranks}
    _leave(leaving, aborts=True)
    failures = 0
    while True:
        _heal(leaving, patience)
        try:
            _world = _form(leaving.comm, leaving)
            _know(_world)
            for process_set in sets:
                _take_over(process_set)
            return
        except _failures():
            # Another one is gone.
            _world, failures = leaving, failures + 1
            if dist.is_initialized():
                dist.destroy_process_group()
            if failures == _ATTEMPTS:
                raise


def _take_over(process_set: ProcessSet) -> None:
    """Make a set of the job before known, with those of its members that are there."""
    here = world()
    members = process_set._started or set()
    process_set.ranks = [at for at, number in enumerate(here.started) if number in members]
    # All ranks make a group, also of the ranks of another set, and of none.
    some = process_set.ranks or [0]
    process_set._group = dist.new_group(some, backend="unisono")
    if not process_set.ranks:
        _destroy(process_set._group)
        process_set._group = dist.GroupMember.NON_GROUP_MEMBER
    process_set.process_set_id = here.next_set
    here.sets[here.next_set] = process_set
    here.next_set += 1


def _heal(job: World, patience: float) -> None:
    """Give `job` the communicator of the ranks that are left and of those that come."""
    import unisono

    before = job.comm
    job.comm = left = before.shrink()
    before.close()
    assert left.former_ranks is not None, "it was shrunk"
    job.started = [job.started[member] for member in left.former_ranks]
    if left.size == job.launched:
        return
    try:
        job.comm = left.grow(timeout=patience)
    except unisono.Error:
        # All ranks get the larger group or none does. If one more is gone, the next step fails.
        return
    left.close()
    job.started = list(range(job.launched))


def _failures() -> tuple[type[Exception], ...]:
    import unisono

    return (unisono.Error, dist.DistError)


def _from_launcher() -> World:
    import unisono

    comm = unisono.init()
    try:
        return _form(comm)
    except BaseException:
        comm.close()
        raise


def _form(comm: Any, before: World | None = None) -> World:
    """Form torch's group of the ranks of `comm`."""
    import numpy as np

    hosts = _exchange_hosts(comm)
    port = np.zeros(1, np.int64)
    is_first = before is None or before.started[0] == 0
    address = _address_of_rank_0(hosts, comm.rank, is_first=is_first)
    store = None
    if comm.rank == 0:
        store = dist.TCPStore(
            address, 0, comm.size, True, timeout=_CONNECTING, wait_for_workers=False
        )
        port[0] = store.port
    name = np.zeros(_HOST_BYTES, np.uint8)
    name[: len(address)] = np.frombuffer(address.encode(), np.uint8)
    comm.broadcast(port)
    comm.broadcast(name)
    if store is None:
        store = dist.TCPStore(
            name.tobytes().rstrip(b"\0").decode(), int(port[0]), comm.size, False,
            timeout=_CONNECTING,
        )  # fmt: skip
    store.set_timeout(_TIMEOUT)
    rank, size = comm.rank, comm.size
    dist.init_process_group("unisono", store=store, rank=rank, world_size=size, timeout=_timeout())
    # A rank that closed early would look lost to those that still meet.
    comm.barrier()
    job = World(rank, size, hosts, store, owns_group=True, comm=comm)
    job.started = list(range(size)) if before is None else before.started
    job.launched = size if before is None else before.launched
    return job


def _know(joined: World) -> None:
    """Make the set of all ranks that of this job."""
    global_process_set.ranks = list(range(joined.size))
    global_process_set.process_set_id = 0
    joined.sets[0] = global_process_set


def _timeout() -> timedelta | None:
    """Return the limit of an operation where the environment sets one, else None: torch's own."""
    chosen = os.environ.get("UNISONO_TIMEOUT", "")
    try:
        return timedelta(seconds=float(chosen))
    except ValueError:
        return _TIMEOUT if chosen == "none" else None


def _from_default_group() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, _host())
    store = dist.PrefixStore("unisono.horovod", dist.distributed_c10d._get_default_store())
    if dist.get_backend() != "unisono":
        global_process_set._group = dist.new_group(backend="unisono")
    return World(rank, size, hosts, store, owns_group=False)


def _host() -> str:
    # Hosts may share a name ("localhost"); containers of one host are hosts of their own.
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()[:255]} {boot}"


def _exchange_hosts(comm: Any) -> list[str]:
    import numpy as np

    mine = np.zeros(_HOST_BYTES, np.uint8)
    encoded = _host().encode()[:_HOST_BYTES]
    mine[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return [row.tobytes().rstrip(b"\0").decode() for row in comm.all_gather(mine)]


def _address_of_rank_0(hosts: Sequence[str], rank: int, *, is_first: bool) -> str:
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    # Launchers set it to the host of the rank 0 that they started.
    named = os.environ.get("MASTER_ADDR") if is_first else None
    return named or (socket.gethostname() if rank == 0 else "")


def is_initialized() -> bool:
    """Return whether ``init`` has been called, and ``shutdown`` not since."""
    return _world is not None


def rank() -> int:
    """Return this rank's number in the job. ValueError before ``init``."""
    return world().rank


def size() -> int:
    """Return how many ranks the job has. ValueError before ``init``."""
    return world().size


def local_rank() -> int:
    """Return this rank's place among those of its host. ValueError before ``init``."""
    return world().local().index(world().rank)


def local_size() -> int:
    """Return how many ranks this host has. ValueError before ``init``."""
    return len(world().local())


def cross_rank() -> int:
    """Return the place of this host among those with as many ranks as to have this local rank."""
    return _hosts_with(local_rank()).index(world().hosts[rank()])


def cross_size() -> int:
    """Return how many hosts have a rank with the local rank of this one."""
    return len(_hosts_with(local_rank()))


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    hosts = world().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def _hosts_with(place: int) -> list[str]:
    hosts = world().hosts
    return [host for host in dict.fromkeys(hosts) if hosts.count(host) > place]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set known. Every rank calls it, for the same sets in the same order.

    Parameters
    ----------
    process_set
        A :class:`ProcessSet`, or its ranks.

    Raises
    ------
    ValueError
        It has no ranks or ranks that do not exist, or a set of the same ranks is known.
    """
    here = world()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    known = next((one for one in here.sets.values() if one.ranks == process_set.ranks), None)
    if known is not None:
        raise ValueError(f"a process set of the same ranks is known: {known}")
    if not process_set.ranks or not set(process_set.ranks) <= set(range(here.size)):
        raise ValueError(f"{process_set} does not name ranks of a job of {here.size}")
    process_set._group = dist.new_group(process_set.ranks, backend="unisono")
    process_set.process_set_id = here.next_set
    here.sets[here.next_set] = process_set
    here.next_set += 1
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set, on every rank. Return whether it was known; the global one stays."""
    here = world()
    number = process_set.process_set_id
    if number in (None, 0) or here.sets.get(number) is not process_set:
        return False
    del here.sets[number]
    _destroy(process_set._group)
    process_set.process_set_id = None
    process_set._group = None
    return True


def mpi_threads_supported() -> bool:
    """Return False: there is no MPI below."""
    return False


def mpi_enabled() -> bool:
    """Return False: there is no MPI below."""
    return False


def mpi_built() -> bool:
    """Return False: there is no MPI below."""
    return False


def gloo_enabled() -> bool:
    """Return False: unisono carries everything."""
    return False


def gloo_built() -> bool:
    """Return False: unisono carries everything."""
    return False


def nccl_built() -> int:
    """Return 0: unisono carries everything."""
    return 0


def ccl_built() -> bool:
    """Return False: unisono carries everything."""
    return False


def ddl_built() -> bool:
    """Return False: unisono carries everything."""
    return False


def cuda_built() -> bool:
    """Return whether tensors on CUDA devices can be passed."""
    import torch

    return bool(torch.cuda.is_available())


def rocm_built() -> bool:
    """Return False: unisono does not serve ROCm."""
    return False
