"""Hosts made of network namespaces, and the jobs whose ranks run on them."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness.build import (
    CHECKOUT,
    MissingError,
    beside_python,
    open_mpi_program,
    rust_bench,
    sockets_program,
)
from harness.jobs import Job, Jobs
from harness.peers import OPEN_MPI_ENVIRONMENT, OPEN_MPI_FLAGS, Peer, open_mpi_extra

# The test bed of the tests: one definition of what a host is.
sys.path.append(str(CHECKOUT / "tests" / "support"))
import mpi_hosts
from carrier import Link
from namespaces import Hosts, hosts, limit, limit_flows, numbered

CHOICE = "choice"
ONE_HOST = "one host"
SOCKETS = ("exchange", "round_trip")
TORCH = ("gloo", "unisono")
OPEN_MPI = "openmpi"

Ranks = tuple[int, ...]


def _even(ranks: Ranks) -> float:
    return 2 * (len(ranks) - 1) / len(ranks)


def _blocks(ranks: Ranks) -> float:
    """A host has the blocks of its ranks, and needs all others; or the other way."""
    return max(max(own, sum(ranks) - own) for own in ranks) / sum(ranks)


def _pairs(ranks: Ranks) -> float:
    return max(own * (sum(ranks) - own) for own in ranks) / sum(ranks)


# Bytes that the busiest host must send or receive, in those of a rank's longer buffer.
SHARES: dict[str, Callable[[Ranks], float]] = {
    "all_reduce": _even,
    # Of float32, although a quarter of the bytes is sent.
    "all_reduce_int8": _even,
    "all_gather": _blocks,
    "reduce_scatter": _blocks,
    "broadcast": lambda _: 1.0,
    "all_to_all": _pairs,
}


@dataclasses.dataclass(frozen=True)
class Bed:
    """Hosts, the number of ranks on each, and the links between the hosts."""

    ranks: tuple[int, ...]
    numbering: str = "blocks"
    rate: int = 0  # Mbit/s of each host's link; 0: no limit
    flow_rate: int = 0  # Mbit/s of each connection; 0: no limit
    delay: float = 0  # milliseconds from one host to another
    loss: float = 0  # percent of packets

    @property
    def host_of(self) -> list[int]:
        """The host of each rank."""
        return numbered(self.ranks, self.numbering)

    def link(self) -> str:
        """The properties of its links, in words."""
        rate = f"{self.rate} Mbit/s" if self.rate else "no limit"
        if self.flow_rate:
            rate = f"{self.flow_rate} Mbit/s for each connection"
        if self.delay or self.loss:
            rate += f", {self.delay} ms away, {self.loss} % lost"
        return rate

    def share(self, collective: str, size: int, seconds: float) -> float | None:
        """The share of the link's rate that a call of this length reaches."""
        if not self.rate or self.flow_rate or collective not in SHARES:
            return None
        sent = SHARES[collective](self.ranks) * size
        return sent * 8 / (self.rate * 1e6) / seconds

    @contextlib.contextmanager
    def made(self) -> Iterator[Hosts]:
        """Make the hosts, and remove them at the end."""
        link = None
        if self.delay or self.loss:
            link = Link(self.rate * 1e6, self.delay / 1e3, self.loss / 100)
        with hosts(len(self.ranks), link=link) as net:
            if self.flow_rate:
                limit_flows(net, self.flow_rate)
            elif self.rate and not link:
                limit(net, self.rate)
            yield net


def start(
    bed: Bed, net: Hosts, names: Sequence[str], jobs: Jobs, environment: dict[str, str]
) -> list[Peer]:
    """Start the jobs of these names, each rank on its host.

    A name is ``choice``, an algorithm, ``one host`` (of all ranks, on the first host), one of
    `SOCKETS`, ``openmpi``, or ``torch``, which has the groups of several peers. Open MPI is left
    out where it is not installed.
    """
    host_of, world = bed.host_of, sum(bed.ranks)
    usual = (
        {"UNISONO_INTERFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0"} if len(bed.ranks) > 1 else {}
    )
    started: dict[str, Job] = {}

    def add(name: str, commands: list[list[str]], folder: Path, more: dict[str, str]) -> None:
        places = [0] * world if name == ONE_HOST else host_of
        inside = [[*net.enter(host), *words] for host, words in zip(places, commands, strict=True)]
        variables = {**usual, **environment, **more}
        started[name] = jobs.add(Job(name, world, inside, folder, variables))

    for name in names:
        folder = jobs.folder(name)
        if name in SOCKETS:
            program = [str(sockets_program()), str(folder)]
            places = ",".join(map(str, host_of))
            addresses = [net.address(host) for host in range(len(bed.ranks))]
            commands = [
                [*program, str(rank), str(world), places, *addresses] for rank in range(world)
            ]
            add(name, commands, folder, {})
        elif name == OPEN_MPI:
            try:
                words = open_mpi(bed, net, folder)
            except MissingError as reason:
                print(f"Open MPI is left out: {reason}")
                continue
            job = Job(name, world, [words], folder, OPEN_MPI_ENVIRONMENT)
            started[name] = jobs.add(job)
        elif name == "torch":
            program = str(CHECKOUT / "benchmarks" / "ranks" / "torch_rank.py")
            common = [sys.executable, program, str(folder), str(world), ",".join(TORCH)]
            quiet = {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "0"}
            add(name, [[*common, str(rank)] for rank in range(world)], folder, quiet)
        else:
            common = [str(rust_bench("collectives")), "--world", str(world)]
            common += ["--channel", str(folder), "--store", f"file://{folder}/store"]
            algorithm = "auto" if name in (CHOICE, ONE_HOST) else name
            commands = [[*common, "--rank", str(rank)] for rank in range(world)]
            add(name, commands, folder, {"UNISONO_ALGORITHM": algorithm})
    for job in started.values():
        job.wait_until_ready()
    peers = []
    for name, job in started.items():
        if name == "torch":
            peers += [Peer(f"torch/{of}", f"torch/{of}", job, f"{of}/") for of in TORCH]
        elif name in SOCKETS:
            peers.append(Peer(name, name, job, only=("all_reduce", name)))
        else:
            peers.append(Peer(name, name, job))
    return peers


def open_mpi(bed: Bed, net: Hosts, folder: Path) -> list[str]:
    """Return the command that starts Open MPI's ranks, each on its host, over TCP between hosts."""
    by = "node" if bed.numbering == "round-robin" else "slot"
    words = ["--mca", "btl_tcp_if_include", "eth0", *OPEN_MPI_FLAGS]
    words += [*open_mpi_extra(sum(bed.ranks)), str(open_mpi_program()), str(folder)]
    return mpi_hosts.open_mpi(net, beside_python("mpirun"), bed.ranks, by, words, folder)
