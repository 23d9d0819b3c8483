"""The ranks of a job, as a launcher has started them: they meet, compare and measure.

Rank 0 gets all that was found, and prints it. A rank that cannot join says so itself.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import unisono
from unisono._doctor import host, interfaces, machine, memory, pairs
from unisono._doctor.finding import ADVICE, OK, Finding, in_words
from unisono._doctor.pairs import Measured
from unisono._launch import RANK_VARIABLES

# The variables in which launchers give its number on its host.
_LOCAL_RANK = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    "SLURM_LOCALID",
)
# The least time of an operation: one rank of each host tries things out meanwhile.
_PATIENCE = 600.0
# Seconds between two clocks that are worth advice.
_CLOCKS = 1.0
# A pair is slow that has less than the median of the others, of at least that many, by this.
_COMPARED, _SLOWER = 3, 4


@dataclass
class Job:
    """Everything that the ranks have found, on rank 0."""

    # The host of each rank, by a number, and the names of the hosts.
    hosts: list[int]
    names: list[str]
    # Each with the ranks that it holds for.
    findings: list[tuple[Finding, list[int]]] = field(default_factory=list)
    pairs: list[Measured] = field(default_factory=list)
    # By rank, of one rank of each other host: seconds ahead of rank 0's, and how sure that is.
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)

    def named(self, rank: int) -> str:
        """Return the rank, with its host where there are several."""
        return f"{rank} ({self.names[self.hosts[rank]]})" if len(self.names) > 1 else str(rank)


def is_rank() -> bool:
    """Whether a launcher has started this process as a rank."""
    return any(os.environ.get(name) for name in RANK_VARIABLES)


def run() -> Job | None:
    """Join the job and take part; returns all that was found on rank 0, and None elsewhere.

    Raises
    ------
    unisono.Error
        The ranks cannot meet, or one of them is lost on the way.
    """
    with unisono.init() as comm:
        if comm.timeout is not None:
            comm.timeout = max(comm.timeout, _PATIENCE)
        reports = comm.all_gather_object(_report(comm.stats()["network"]))
        hosts, names = placed(reports)
        found = pairs.measure(comm, pairs.chosen(hosts))
        others = sorted({hosts.index(number) for number in hosts} - {0})
        clocks = pairs.offsets(comm, others)
        measured = [one.record() for one in found]
        stats = comm.stats()
        links = {one["rank"]: one["by"] for one in stats["links"] if one["for"] == "messages"}
        why = "; ".join(stats["network"]["set_back"])
        told = {"pairs": measured, "links": links, "why": why}
        ends = comm.all_gather_object(told)
        rank = comm.rank
    if rank != 0:
        return None
    job = Job(hosts, names, clocks=clocks)
    job.pairs = sorted(_joined(ends), key=lambda pair: (pair.first, pair.second))
    job.findings = _by_ranks(hosts, reports)
    everyone = list(range(len(hosts)))
    job.findings += [(finding, everyone) for finding in host.protection(len(names))]
    job.findings += [*_crowds(job, reports), *_clocks(job), *_slow(job)]
    job.findings += _ways(job, reports, [end["why"] for end in ends])
    return job


def _report(network: dict[str, Any]) -> dict[str, Any]:
    """Look at the host, and tell where this rank is."""
    findings = host.examine()
    findings += interfaces.examine(network["listening"])
    local = next((os.environ[name] for name in _LOCAL_RANK if os.environ.get(name)), "0")
    if local == "0":
        tried = [*memory.try_out(), *machine.try_out()]
        # Two ranks by themselves choose other addresses than those of a job.
        findings += [
            Finding(one.topic, one.state, one.line, one.mend, of_host=True)
            for one in tried
            if one.topic not in ("interfaces", "address")
        ]
    return {"findings": [asdict(finding) for finding in findings], "place": place()}


def place() -> dict[str, Any]:
    """Return where this process runs, as far as ranks compare it."""
    label = os.environ.get("UNISONO_HOST", "auto")
    return {
        "label": "" if label == "auto" else label,
        "name": platform.node(),
        "boot": host.read("/proc/sys/kernel/random/boot_id"),
        "network": _namespace("net"),
        "pids": _namespace("pid"),
        "user": os.geteuid(),
        "transport": os.environ.get("UNISONO_TRANSPORT", "auto"),
        "cores": sorted(os.sched_getaffinity(0)),
        "quota": host.quota(),
        "nodes": host.unbound_nodes(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")  # noqa: PTH115 -- it leads to no file
    except OSError:
        return ""


def placed(reports: Sequence[dict[str, Any]]) -> tuple[list[int], list[str]]:
    """Return the host of each rank, by a number, and the names of the hosts."""
    numbers: dict[tuple[str, ...], int] = {}
    hosts: list[int] = []
    names: list[str] = []
    for report in reports:
        where = report["place"]
        key = (where["label"], where["name"], where["boot"], where["network"])
        if key not in numbers:
            numbers[key] = len(names)
            names.append(where["label"] or where["name"])
        hosts.append(numbers[key])
    # Containers of one machine may have one name.
    unique = [
        f"{name}#{names[:at].count(name)}" if names.count(name) > 1 else name
        for at, name in enumerate(names)
    ]
    return hosts, unique


def _joined(ends: Sequence[dict[str, Any]]) -> list[Measured]:
    """The pairs, with the way of each link as both of its ends have told it."""
    links = [{int(peer): way for peer, way in end["links"].items()} for end in ends]
    found = []
    for end in ends:
        for record in end["pairs"]:
            pair = Measured(**record)
            ways = links[pair.first].get(pair.second, ""), links[pair.second].get(pair.first, "")
            pair.ways = ways
            found.append(pair)
    return found


def _by_ranks(
    hosts: Sequence[int], reports: Sequence[dict[str, Any]]
) -> list[tuple[Finding, list[int]]]:
    """The findings of all ranks, each once, with the ranks that it holds for."""
    known: dict[Finding, set[int]] = {}
    for rank, report in enumerate(reports):
        for record in report["findings"]:
            finding = Finding(**record)
            here = {other for other, number in enumerate(hosts) if number == hosts[rank]}
            known.setdefault(finding, set()).update(here if finding.of_host else {rank})
    return [(finding, sorted(ranks)) for finding, ranks in known.items()]


def _crowds(job: Job, reports: Sequence[dict[str, Any]]) -> list[tuple[Finding, list[int]]]:
    """The cores that the ranks of a host share, and the memory nodes that they are not bound to."""
    found = []
    for number in range(len(job.names)):
        ranks = [rank for rank, other in enumerate(job.hosts) if other == number]
        places = [reports[rank]["place"] for rank in ranks]
        cores = len(set().union(*(here["cores"] for here in places)))
        quotas = [here["quota"] for here in places if here["quota"] is not None]
        cores = max(1, int(min([cores, *quotas])))
        threads = sum(int(here["threads"]) for here in places if here["threads"].isdecimal())
        if len(ranks) > cores:
            line = f"{len(ranks)} ranks share {cores} cores, and wait for each other's time slices"
            found.append((Finding("ranks", ADVICE, line, f"{cores} ranks on this host"), ranks))
        elif threads > cores:
            line = f"{threads} threads of the ranks share {cores} cores (OMP_NUM_THREADS)"
            mend = f"export OMP_NUM_THREADS={max(1, cores // len(ranks))}"
            found.append((Finding("ranks", ADVICE, line, mend), ranks))
        if len(ranks) > 1 and (nodes := max(here["nodes"] for here in places)):
            line = f"ranks run in {nodes} memory nodes, and are bound to none"
            mend = "numactl --cpunodebind=N --membind=N before the program; mpirun --bind-to numa"
            found.append((Finding("nodes", ADVICE, line, mend), ranks))
    return found


def _clocks(job: Job) -> list[tuple[Finding, list[int]]]:
    found = []
    for rank, (ahead, half) in job.clocks.items():
        ranks = [other for other, number in enumerate(job.hosts) if number == job.hosts[rank]]
        way = "ahead of" if ahead > 0 else "behind"
        line = f"the clock is {in_words(abs(ahead))} {way} rank 0's, to within {in_words(half)}"
        if abs(ahead) - half < _CLOCKS:
            found.append((Finding("time", OK, line), ranks))
        else:
            mend = "chronyc makestep, or timedatectl set-ntp true"
            found.append((Finding("time", ADVICE, f"{line}: logs do not line up", mend), ranks))
    return found


def _slow(job: Job) -> list[tuple[Finding, list[int]]]:
    """The pairs between hosts that are much slower than most."""
    between = [pair for pair in job.pairs if job.hosts[pair.first] != job.hosts[pair.second]]
    if len(between) < _COMPARED:
        return []
    usual = statistics.median(min(pair.there, pair.back) for pair in between)
    found = []
    for pair in between:
        rate = min(pair.there, pair.back)
        if rate < usual / _SLOWER:
            line = (
                f"{job.named(pair.first)} - {job.named(pair.second)} has {rate / 1e6:,.3g} MB/s, "
                f"where the median of the pairs between hosts is {usual / 1e6:,.3g} MB/s"
            )
            mend = "ethtool INTERFACE and iperf3 -c HOST, on both of them"
            found.append((Finding("slow", ADVICE, line, mend), [pair.first, pair.second]))
    return found


def _ways(
    job: Job, reports: Sequence[dict[str, Any]], told: Sequence[str]
) -> list[tuple[Finding, list[int]]]:
    """The pairs of one machine that do not share memory, or share it slowly; with the reason."""
    found: dict[Finding, set[int]] = {}
    for pair in job.pairs:
        one, other = (reports[rank]["place"] for rank in (pair.first, pair.second))
        if not one["boot"] or one["boot"] != other["boot"]:
            continue
        why = told[pair.first] or told[pair.second]
        if finding := why_slow(pair.ways[0], one, other, why):
            found.setdefault(finding, set()).update((pair.first, pair.second))
    return [(finding, sorted(ranks)) for finding, ranks in found.items()]


def why_slow(way: str, one: dict[str, Any], other: dict[str, Any], told: str) -> Finding | None:
    """Return why two ranks of one machine do not share memory, or not as fast as they could."""
    if way == "shared memory":
        if one["pids"] == other["pids"]:
            return None
        line = (
            "ranks in several PID namespaces do not read each other's memory: messages are copied"
        )
        return Finding("ways", ADVICE, line, "docker run --pid host, or --pid container:NAME")
    begin = "ranks of one machine use TCP:"
    if "tcp" in (one["transport"], other["transport"]):
        return Finding("ways", ADVICE, f"{begin} UNISONO_TRANSPORT=tcp", "unset UNISONO_TRANSPORT")
    if one["label"] != other["label"]:
        names = f"UNISONO_HOST={one['label'] or 'auto'} and {other['label'] or 'auto'}"
        return Finding("ways", ADVICE, f"{begin} {names}", "unset UNISONO_HOST")
    if one["user"] != other["user"]:
        line = f"{begin} they belong to users {one['user']} and {other['user']}"
        return Finding("ways", ADVICE, line, "one user for all ranks")
    if one["network"] != other["network"]:
        line = f"{begin} they are in several network namespaces (containers)"
        mend = "docker run --network host, or --network container:NAME"
        return Finding("ways", ADVICE, line, mend)
    line = f"{begin} {told or 'it does not say why'}"
    return Finding("ways", ADVICE, line, "unisono doctor, on that host alone")
