"""The peers: what can be measured beside unisono, and how the ranks of each are started."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

from harness import build
from harness.build import MissingError
from harness.jobs import FailedError, Job, Jobs

# The orders in which an all_reduce can go over memory (ranks/bound.c): over shared buffers, and
# over private ones.
BOUND_VARIANTS = ("two_pass", "two_pass_streaming", "one_pass", "one_pass_streaming")
PRIVATE_BOUND_VARIANTS = ("window", "pull")

OPEN_MPI_FLAGS = ["--oversubscribe", "--bind-to", "none"]
OPEN_MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that all cells of a run share."""

    out_of_place: bool = False
    most_bytes: int = 64 << 20  # of the largest cell; the bound shares buffers of that size


@dataclasses.dataclass(frozen=True)
class Peer:
    """One column of a comparison: a job, and how its commands name a collective."""

    name: str
    asked_as: str  # what stands for it in a list of peers
    job: Job
    prefix: str = ""
    # For the bound: the only collective it has, and the name of the variant.
    only: tuple[str, str] | None = None

    def word(self, collective: str) -> str | None:
        """Return the collective's name in this peer's commands; `None`: it has none."""
        if self.only is None:
            return self.prefix + collective
        return self.only[1] if collective == self.only[0] else None


def start(
    names: list[str], world: int, jobs: Jobs, options: Options
) -> tuple[list[Peer], dict[str, str]]:
    """Start the jobs of the named peers. Returns them, and why others cannot be had."""
    started: dict[str, Job] = {}
    missing: dict[str, str] = {}

    def attempt(name: str, action: Callable[[], Job]) -> None:
        try:
            started[name] = action()
        except (MissingError, FailedError) as reason:
            started.pop(name, None)
            missing[name] = str(reason)

    through_torch = [name.removeprefix("torch/") for name in names if name.startswith("torch/")]
    for name in dict.fromkeys(name for name in names if not name.startswith("torch/")):
        attempt(name, functools.partial(STARTERS[name], name, world, jobs, options))
    if through_torch:
        attempt("torch", lambda: start_torch(through_torch, world, jobs))
    for name, job in list(started.items()):
        attempt(name, job.wait_until_ready)
    peers: list[Peer] = []
    for name in names:
        family = "torch" if name.startswith("torch/") else name
        if family in started:
            peers += peers_of(name, started[family])
    return peers, missing


def peers_of(name: str, job: Job) -> list[Peer]:
    if name == "bound":
        return [
            Peer(f"{family}/{variant}", name, job, only=("all_reduce", variant))
            for family, variants in (
                ("bound", BOUND_VARIANTS),
                ("private bound", PRIVATE_BOUND_VARIANTS),
            )
            for variant in variants
        ]
    prefix = f"{name.removeprefix('torch/')}/" if name.startswith("torch/") else ""
    return [Peer(name, name, job, prefix)]


def start_unisono(name: str, world: int, jobs: Jobs, options: Options) -> Job:
    """Start the Rust program, one process for each rank."""
    program = build.rust_bench("collectives")
    folder = jobs.folder(name)
    common = [str(program), "--world", str(world), "--channel", str(folder)]
    common += ["--store", f"file://{folder}/store"]
    common += ["--memory", "heap" if name == "unisono-heap" else "private"]
    if options.out_of_place:
        common.append("--out-of-place")
    commands = [[*common, "--rank", str(rank)] for rank in range(world)]
    return jobs.add(Job(name, world, commands, folder))


def start_unisono_c(name: str, world: int, jobs: Jobs, options: Options) -> Job:
    """Start the program in C, one process for each rank."""
    program = build.unisono_program()
    folder = jobs.folder(name)
    memory = "heap" if name == "unisono-c-heap" else "private"
    commands = [
        [str(program), str(folder), str(rank), str(world), memory]
        + (["out"] if options.out_of_place else [])
        for rank in range(world)
    ]
    return jobs.add(Job(name, world, commands, folder))


def start_open_mpi(name: str, world: int, jobs: Jobs, options: Options) -> Job:
    """Start the C program under mpirun."""
    program, launcher = build.open_mpi_program(), build.beside_python("mpirun")
    folder = jobs.folder(name)
    command = [str(launcher), "-n", str(world), *OPEN_MPI_FLAGS, *open_mpi_extra(world)]
    command += [str(program), str(folder), *(["out"] if options.out_of_place else [])]
    return jobs.add(Job(name, world, [command], folder, OPEN_MPI_ENVIRONMENT))


def open_mpi_extra(world: int) -> list[str]:
    """Give Open MPI what makes it fastest with more ranks than cores: to yield when it waits."""
    if world > len(os.sched_getaffinity(0)):
        return ["--mca", "mpi_yield_when_idle", "1"]
    return []


def start_bound(name: str, world: int, jobs: Jobs, options: Options) -> Job:
    folder = jobs.folder(name)
    command = [str(build.bound_program()), str(folder), str(world), str(options.most_bytes)]
    return jobs.add(Job(name, world, [command], folder))


def start_torch(backends: list[str], world: int, jobs: Jobs) -> Job:
    """Start Python ranks in which every backend has its group, so that torch is loaded once."""
    folder = jobs.folder("torch")
    program = str(Path(__file__).resolve().parents[1] / "ranks" / "torch_rank.py")
    common = [sys.executable, program, str(folder), str(world), ",".join(backends)]
    commands = [[*common, str(rank)] for rank in range(world)]
    # One thread for each rank, and no flight recorder, which from torch 2.15 on adds to every call
    # of a plugin but not of gloo.
    environment = {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "0"}
    return jobs.add(Job("torch", world, commands, folder, environment))


STARTERS = {
    "unisono": start_unisono,
    "unisono-heap": start_unisono,
    "unisono-c": start_unisono_c,
    "unisono-c-heap": start_unisono_c,
    "openmpi": start_open_mpi,
    "bound": start_bound,
}
