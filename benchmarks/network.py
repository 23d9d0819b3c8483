"""Measure collectives between hosts, made of network namespaces, on links of a known rate.

    sudo .venv/bin/python benchmarks/network.py                       in about five minutes
    sudo .venv/bin/python benchmarks/network.py --hosts 4,4 --sizes 1M,16M,64M --rate 1000
    sudo .venv/bin/python benchmarks/network.py --hosts 2,2 --numbering round-robin --rate 0
    sudo .venv/bin/python benchmarks/network.py --algorithms none --collectives all_reduce_int8

A job of unisono chooses its algorithms by itself, one job for each of --algorithms uses that alone
(UNISONO_ALGORITHM), and one job holds the groups of torch with gloo and with unisono. They
take turns, round by round. The last columns say what share of the line's rate a call reaches: a
host cannot all_reduce in less time than 2(h-1)/h of the bytes take on its link.

A link's rate is set by `tc tbf` in both directions of each host's interface, that of each
connection by `tc htb`, and a link with a delay or losses is made in user space
(tests/support/carrier.py). Namespaces take root.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import arguments, report
from harness.build import CHECKOUT, MissingError, rust_bench
from harness.cells import Cell, Effort, measure
from harness.jobs import FailedError, Job, Jobs
from harness.peers import Peer

# The test bed of the tests: one definition of what a host is.
sys.path.append(str(CHECKOUT / "tests" / "support"))
from carrier import Link
from namespaces import Hosts, hosts, limit, limit_flows, numbered, why_not

CHOICE = "choice"
TORCH = ("gloo", "unisono")
SIZES = (8, 10 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
SHARES = {
    # Bytes that the busiest host must send or receive, for h hosts and r ranks on the largest, in
    # those of a rank's longer buffer.
    "all_reduce": lambda h, _: 2 * (h - 1) / h,
    # Of float32, although a quarter of the bytes is sent.
    "all_reduce_int8": lambda h, _: 2 * (h - 1) / h,
    "all_gather": lambda h, _: (h - 1) / h,
    "reduce_scatter": lambda h, _: (h - 1) / h,
    "broadcast": lambda _, __: 1.0,
    "all_to_all": lambda h, r: r * (h - 1) / h,
}


def start(net: Hosts, host_of: list[int], algorithms: Sequence[str], jobs: Jobs) -> list[Peer]:
    """Start all jobs, each rank on its host."""
    world, started = len(host_of), []

    def add(name: str, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        commands = [
            [*net.enter(host), *command, *rank_arguments(name, rank)]
            for rank, host in enumerate(host_of)
        ]
        environment = {"UNISONO_INTERFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0", **environment}
        started.append(jobs.add(Job(name, world, commands, folder, environment)))

    def rank_arguments(name: str, rank: int) -> list[str]:
        return [str(rank)] if name == "torch" else ["--rank", str(rank)]

    for name in (CHOICE, *algorithms):
        folder = jobs.folder(name)
        command = [str(rust_bench("collectives")), "--world", str(world)]
        command += ["--channel", str(folder), "--store", f"file://{folder}/store"]
        algorithm = "auto" if name == CHOICE else name
        add(name, command, folder, {"UNISONO_ALGORITHM": algorithm})
    folder = jobs.folder("torch")
    program = str(CHECKOUT / "benchmarks" / "ranks" / "torch_rank.py")
    command = [sys.executable, program, str(folder), str(world), ",".join(TORCH)]
    add("torch", command, folder, {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "0"})
    for job in started:
        job.wait_until_ready()
    peers = [Peer(job.name, job.name, job) for job in started[:-1]]
    return peers + [
        Peer(f"torch/{name}", f"torch/{name}", started[-1], f"{name}/") for name in TORCH
    ]


def table(cells: list[Cell], args: argparse.Namespace) -> str:
    """Return the medians, and the shares of the line's rate."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.rounds))
    lines = [f"{'':16}{'size':>9}" + "".join(f"{name:>20}" for name in names)]
    for cell in cells:
        line = f"{cell.collective:16}{report.size_name(cell.size):>9}"
        for name in names:
            seconds = cell.median(name)
            text = "-" if seconds is None else report.microseconds(seconds)
            if seconds and args.rate and cell.collective in SHARES:
                share = SHARES[cell.collective](len(args.hosts), max(args.hosts))
                sent = share * cell.size
                text += f" ({sent * 8 / (args.rate * 1e6) / seconds:.2f})"
            line += f"{text:>20}"
        lines.append(line)
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, list_of = parser.add_argument, arguments.list_of
    collectives = arguments.one_of(*SHARES)
    add("--hosts", type=list_of(int), default=(4, 4), help="ranks of each host, as 4,4 or 3,1")
    add("--numbering", choices=("blocks", "round-robin"), default="blocks")
    add("--rate", type=int, default=1000, help="Mbit/s of each host's link; 0: no limit")
    add("--flow-rate", type=int, default=0, help="Mbit/s of each connection; 0: no limit")
    add("--delay", type=float, default=0, help="milliseconds from one host to another")
    add("--loss", type=float, default=0, help="percent of packets that are lost")
    add("--collectives", type=list_of(collectives), default=("all_reduce",), help="as all_reduce")
    add("--sizes", type=list_of(arguments.size), default=SIZES, help="as 8,16K,64M")
    add("--algorithms", type=list_of(str), default=("ring",), help="as ring,two_shot; or none")
    add("--minutes", type=float, default=5.0, help="about how long it may take")
    add("--rounds", type=int, default=7, help="measurements of each job in a cell")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    trouble = why_not()
    if trouble:
        sys.exit(f"no hosts can be made here: {trouble}")
    host_of = numbered(args.hosts, args.numbering)
    machine = report.machine()
    rate = f"{args.rate} Mbit/s" if args.rate else "no limit"
    if args.flow_rate:
        args.rate, rate = 0, f"{args.flow_rate} Mbit/s for each connection"
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; float32")
    link = None
    if args.delay or args.loss:
        link = Link(args.rate * 1e6, args.delay / 1e3, args.loss / 100)
        rate += f", {args.delay} ms away, {args.loss} % lost"
    print(f"ranks on hosts {host_of}, links of {rate}; microseconds (share of the line)")
    if os.getloadavg()[0] > 0.5:
        print(f"load average {os.getloadavg()[0]:.1f}: others use this machine, ratios will vary")
    wanted = [(collective, size) for collective in args.collectives for size in args.sizes]
    algorithms = [name for name in args.algorithms if name != "none"]
    cells = []
    try:
        with hosts(len(args.hosts), link=link) as net, Jobs() as jobs:
            if args.flow_rate:
                limit_flows(net, args.flow_rate)
            if args.rate and not link:
                limit(net, args.rate)
            peers = start(net, host_of, algorithms, jobs)
            for collective, size in wanted:
                report.show(f"{collective} {report.size_name(size)}")
                effort = Effort(args.minutes * 60 / len(wanted), args.rounds)
                cells.append(measure(collective, size, peers, effort))
    except (FailedError, MissingError) as error:
        sys.exit(f"\n{error}")
    report.show("")
    print(table(cells, args))


if __name__ == "__main__":
    main()
