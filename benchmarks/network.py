"""Measure collectives between hosts, made of network namespaces, on links of a known rate.

    sudo .venv/bin/python benchmarks/network.py                       in about five minutes
    sudo .venv/bin/python benchmarks/network.py --hosts 4,4 --sizes 1M,16M,64M --rate 1000
    sudo .venv/bin/python benchmarks/network.py --hosts 2,2 --numbering round-robin --rate 0
    sudo .venv/bin/python benchmarks/network.py --algorithms none --collectives all_reduce_int8
    sudo .venv/bin/python benchmarks/network.py --marks               in about 25 minutes

A job of unisono chooses its algorithms by itself, one job for each of --algorithms uses that alone
(UNISONO_ALGORITHM), and one job holds the groups of torch with gloo and with unisono. They
take turns, round by round. The last columns say what share of the line's rate a call reaches: a
host cannot all_reduce in less time than 2(h-1)/h of the bytes take on its link.

--marks measures on beds of its own what the project aims at between hosts, and says what is met;
beside gloo there are plain sockets (ranks/sockets.c) and, where it is installed, Open MPI over TCP.

A link's rate is set by `tc tbf` in both directions of each host's interface, that of each
connection by `tc htb`, and a link with a delay or losses is made in user space
(tests/support/carrier.py). Namespaces take root.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from harness import arguments, network_marks, report
from harness.beds import CHOICE, SHARES, Bed, start
from harness.build import MissingError
from harness.cells import Cell, Effort, measure
from harness.jobs import FailedError, Jobs
from namespaces import why_not

SIZES = (8, 10 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)


def table(cells: list[Cell], bed: Bed) -> str:
    """Return the medians, and the shares of the line's rate."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.rounds))
    lines = [f"{'':16}{'size':>9}" + "".join(f"{name:>20}" for name in names)]
    for cell in cells:
        line = f"{cell.collective:16}{report.size_name(cell.size):>9}"
        for name in names:
            seconds = cell.median(name)
            text = "-" if seconds is None else report.microseconds(seconds)
            share = seconds and bed.share(cell.collective, cell.size, seconds)
            if share:
                text += f" ({share:.2f})"
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
    add("--marks", action="store_true", help="measure what is aimed at, and say what is missed")
    parts = arguments.list_of(arguments.one_of(*network_marks.PARTS))
    add("--parts", type=parts, default=tuple(network_marks.PARTS), help="of the marks, as line,far")
    add("--minutes", type=float, default=5.0, help="about how long it may take")
    add("--rounds", type=int, default=7, help="measurements of each job in a cell")
    add(
        "--json", type=Path, metavar="FILE", help="write every round's time to FILE, not of --marks"
    )
    return parser.parse_args()


def measure_cells(bed: Bed, args: argparse.Namespace) -> list[Cell]:
    """Measure what the command line asks for."""
    wanted = [(collective, size) for collective in args.collectives for size in args.sizes]
    algorithms = [name for name in args.algorithms if name != "none"]
    cells = []
    with bed.made() as net, Jobs() as jobs:
        peers = start(bed, net, [CHOICE, *algorithms, "torch"], jobs, {})
        for collective, size in wanted:
            report.show(f"{collective} {report.size_name(size)}")
            effort = Effort(args.minutes * 60 / len(wanted), args.rounds)
            cells.append(measure(collective, size, peers, effort))
    report.show("")
    return cells


def main() -> None:
    args = parse_arguments()
    trouble = why_not()
    if trouble:
        sys.exit(f"no hosts can be made here: {trouble}")
    machine = report.machine()
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; float32")
    if os.getloadavg()[0] > 0.5:
        print(f"load average {os.getloadavg()[0]:.1f}: others use this machine, ratios will vary")
    try:
        if args.marks:
            network_marks.run(args.parts)
            return
        bed = Bed(args.hosts, args.numbering, args.rate, args.flow_rate, args.delay, args.loss)
        print(
            f"ranks on hosts {bed.host_of}, links of {bed.link()}; microseconds (share of the line)"
        )
        cells = measure_cells(bed, args)
        print(table(cells, bed))
        if args.json:
            report.write_json(args.json, bed=dataclasses.asdict(bed), cells=cells)
    except (FailedError, MissingError) as error:
        sys.exit(f"\n{error}")


if __name__ == "__main__":
    main()
