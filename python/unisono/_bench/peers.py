"""Other runtimes on the same ranks and the same buffers: gloo by torch.distributed, MPI by mpi4py.

Both live in the processes of unisono's ranks, so their batches alternate with unisono's. MPI takes
part where ``mpirun`` has started the ranks, since it cannot join processes that others started.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

import unisono
from unisono._bench.operations import IN_PLACE, OUT_OF_PLACE, Call, Cell, Operation

NAMES = ("gloo", "mpi")
_WAIT = datetime.timedelta(seconds=300)


class Peer(Protocol):
    """A runtime beside unisono."""

    name: str

    def form(self, operation: Operation) -> str:
        """Return the form of the operation that it has, and unisono too."""

    def call(self, cell: Cell) -> Call | None:
        """Return its call for a cell; None where it has no such operation."""

    def close(self) -> None:
        """End its group."""


def open_all(
    comm: unisono.Communicator, names: Sequence[str], is_one_host: bool
) -> tuple[list[Peer], list[str]]:
    """Return the peers that all ranks have, and a sentence for each that one lacks."""
    found: list[Peer] = []
    missing: list[str] = []
    for name in names:
        trouble, peer = {"gloo": _no_gloo, "mpi": _no_mpi}[name](comm), None
        if _is_everywhere(comm, trouble is None):
            try:
                peer = Gloo(comm, is_one_host) if name == "gloo" else Mpi(comm)
            except (OSError, RuntimeError, ValueError) as error:
                trouble = str(error).partition("\n")[0]
            if _is_everywhere(comm, peer is not None) and peer:
                found.append(peer)
                continue
        missing.append(f"no {name}: {trouble or 'a rank lacks it'}")
    return found, missing


def close_all(found: Sequence[Peer]) -> None:
    """End the groups of all peers."""
    for peer in found:
        peer.close()


def tried(comm: unisono.Communicator, peer: Peer, cell: Cell) -> Call | None:
    """Return a peer's call for a cell after one call of it; None where a rank's is refused."""
    call = peer.call(cell)
    is_right = call is not None
    if call is not None:
        try:
            call(0)
        except (LookupError, RuntimeError, TypeError, ValueError):
            is_right = False
    return call if _is_everywhere(comm, is_right) else None


def _is_everywhere(comm: unisono.Communicator, here: bool) -> bool:
    return bool(comm.all_reduce(np.array([here], np.uint8), "min")[0])


def _no_gloo(_comm: unisono.Communicator) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "it comes with torch, which is not installed"
    if os.environ.get("UNISONO_AS_GLOO", "0") not in ("", "0"):
        return "UNISONO_AS_GLOO puts unisono in its place"
    import torch.distributed as dist

    return None if dist.is_available() and dist.is_gloo_available() else "this torch lacks it"


class Gloo:
    """gloo, as programs call it: by ``torch.distributed``."""

    name = "gloo"

    def __init__(self, comm: unisono.Communicator, is_one_host: bool) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        self.rank, self.world = comm.rank, comm.world_size
        place = np.zeros(128, np.uint8)
        store = None
        if comm.rank == 0:
            named = os.environ.get("MASTER_ADDR") or socket.gethostname()
            host = "127.0.0.1" if is_one_host else named
            store = dist.TCPStore(host, 0, self.world, is_master=True, wait_for_workers=False)
            words = f"{host} {store.port}".encode()
            place[: len(words)] = np.frombuffer(words, np.uint8)
        comm.broadcast(place)
        if store is None:
            host, _, port = place.tobytes().rstrip(b"\0").decode().partition(" ")
            store = dist.TCPStore(host, int(port), self.world, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world, timeout=_WAIT
        )

    def form(self, operation: Operation) -> str:
        """Return in place for reductions of the whole and broadcasts, as torch has them."""
        is_in_place = operation.name in ("all_reduce", "reduce", "broadcast")
        return IN_PLACE if is_in_place else OUT_OF_PLACE

    def call(self, cell: Cell) -> Call | None:
        """Return torch's call for a cell."""
        dist, rank, world = self.dist, self.rank, self.world
        try:
            given, taken = (self.torch.from_numpy(one) for one in (cell.given, cell.taken))
        except TypeError:
            return None
        op = getattr(dist.ReduceOp, cell.known.reduction.upper())
        blocks = list(taken.view(world, -1)) if cell.operation.takes_blocks else []
        parts = list(given.view(world, -1)) if cell.operation.gives_blocks else []
        following, previous = (rank + 1) % world, (rank - 1) % world

        def send_recv(_: int) -> None:
            work = dist.irecv(taken, previous)
            dist.send(given, following)
            work.wait()

        calls: dict[str, Callable[[int], Any]] = {
            "all_reduce": lambda _: dist.all_reduce(given, op),
            "broadcast": lambda root: dist.broadcast(taken, root),
            "all_gather": lambda _: dist.all_gather_into_tensor(taken, given),
            "reduce_scatter": lambda _: dist.reduce_scatter_tensor(taken, given, op),
            "all_to_all": lambda _: dist.all_to_all_single(taken, given),
            "reduce": lambda root: dist.reduce(given, root, op),
            "gather": lambda root: dist.gather(given, blocks if rank == root else None, root),
            "scatter": lambda root: dist.scatter(taken, parts if rank == root else None, root),
            "send_recv": send_recv,
            "barrier": lambda _: dist.barrier(),
        }
        # torch has no scan.
        return calls.get(cell.operation.name)

    def close(self) -> None:
        """Destroy torch's group."""
        self.dist.destroy_process_group()


def _no_mpi(comm: unisono.Communicator) -> str | None:
    if not {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"} & os.environ.keys():
        return f"start the ranks by it: mpirun -n {comm.world_size} unisono bench ... --compare mpi"
    if importlib.util.find_spec("mpi4py") is None:
        return "pip install mpi4py"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"mpi4py does not start: {error}"
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (comm.rank, comm.world_size):
        return f"its rank {world.rank} of {world.size} is not unisono's"
    return None


class Mpi:
    """The MPI that mpi4py was built for, by its calls on buffers."""

    name = "mpi"

    def __init__(self, comm: unisono.Communicator) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.world = comm.rank, comm.world_size

    def form(self, operation: Operation) -> str:
        """Return out of place, where unisono has that."""
        return operation.forms[0]

    def call(self, cell: Cell) -> Call | None:
        """Return MPI's call for a cell; it has no average and no bfloat16."""
        comm, rank = self.comm, self.rank
        if cell.operation.reduces and cell.known.reduction == "avg":
            return None
        op = {"sum": self.mpi.SUM, "prod": self.mpi.PROD, "min": self.mpi.MIN, "max": self.mpi.MAX}
        how = op.get(cell.known.reduction)
        given, taken = cell.given, cell.taken
        following, previous = (rank + 1) % self.world, (rank - 1) % self.world

        calls: dict[str, Callable[[int], Any]] = {
            "all_reduce": lambda _: comm.Allreduce(given, taken, how),
            "scan": lambda _: comm.Scan(given, taken, how),
            "exscan": lambda _: comm.Exscan(given, taken, how),
            "broadcast": lambda root: comm.Bcast(taken, root),
            "all_gather": lambda _: comm.Allgather(given, taken),
            "reduce_scatter": lambda _: comm.Reduce_scatter_block(given, taken, how),
            "all_to_all": lambda _: comm.Alltoall(given, taken),
            "reduce": lambda root: comm.Reduce(given, taken if rank == root else None, how, root),
            "gather": lambda root: comm.Gather(given, taken if rank == root else None, root),
            "scatter": lambda root: comm.Scatter(given if rank == root else None, taken, root),
            "send_recv": lambda _: comm.Sendrecv(given, following, 0, taken, previous),
            "barrier": lambda _: comm.Barrier(),
        }
        return calls[cell.operation.name]

    def close(self) -> None:
        """Do nothing: mpi4py ends MPI with the process."""
