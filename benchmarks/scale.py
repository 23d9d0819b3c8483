"""Predict what groups of up to 65,536 ranks take, and check predictions where there are hosts.

         .venv/bin/python benchmarks/scale.py                  predictions, a table and a plot
         .venv/bin/python benchmarks/scale.py --form           form groups of hundreds of ranks here
    sudo .venv/bin/python benchmarks/scale.py --check          measure on hosts made of namespaces

A prediction is what the choice of algorithms goes by (rust/plan/src/cost): of a network it
knows what a message costs at either end, the latency, and the rate of a host's link. --check
measures the latency and the rate with a ping-pong between two hosts, and then compares predictions
of whole collectives, by algorithms asked for by name, with their times. Peers are counted in plans.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import report
from harness.build import CHECKOUT, RESULTS, MissingError, rust_bench
from harness.jobs import FailedError, Job, Jobs

sys.path.append(str(CHECKOUT / "tests" / "support"))
from namespaces import hosts, limit, why_not

RANKS_PER_HOST = 8
HOSTS = tuple(2**power for power in range(1, 14))
SIZES = (8 << 10, 64 << 20)
ALGORITHMS = ("ring", "tree", "hierarchical")
SHOWN = (2, 16, 128, 1024, 8192)  # hosts
MESSAGE = 3e-6  # seconds of either side's time: assumed, as by the choice of algorithms
# The bed: ranks of each host.
BEDS = ((1, 1), (1, 1, 1, 1), (2, 2), (4, 4))
BED_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
# The links of the bed let the first 256 KiB pass at once, which short calls consist of.
BED_SIZES = (4 << 20, 16 << 20, 32 << 20)
BED_CORES = 2


@dataclasses.dataclass(frozen=True)
class Network:
    """The network that joins hosts; its costs are in seconds."""

    name: str
    message: float  # of either side's time
    latency: float  # from host to host
    byte: float  # on a host's link


NETWORKS = (
    Network("data centre, 25 Gbit/s, 20 us", MESSAGE, 20e-6, 8 / 25e9),
    Network("wide area, 1 Gbit/s, 20 ms", MESSAGE, 20e-3, 8 / 1e9),
)


@dataclasses.dataclass(frozen=True)
class Question:
    """A case to predict."""

    hosts: int
    ranks: int  # on each host
    cores: int
    collective: str
    algorithm: str
    size: int
    network: Network

    def line(self) -> str:
        net = self.network
        words = (self.hosts, self.ranks, self.cores, self.collective, self.algorithm, self.size)
        return " ".join(map(str, (*words, net.message, net.latency, net.byte)))


def predict(questions: Sequence[Question]) -> list[dict]:
    """Answer each question: `seconds` (none where the algorithm does not serve it) and more."""
    lines = "".join(question.line() + "\n" for question in questions)
    command = [str(rust_bench("scale")), "predict"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(f"no prediction: {done.stderr.strip()[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def run(*words: str) -> list[dict]:
    """Form a group in one process; what that took."""
    command = [str(rust_bench("scale")), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(f"{' '.join(words)}: {done.stderr.strip()[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def predictions(args: argparse.Namespace) -> None:
    """Print what all_reduce takes by host count and algorithm, and plot it."""
    names = (*ALGORITHMS, "auto")
    cells = [
        Question(count, RANKS_PER_HOST, RANKS_PER_HOST, "all_reduce", name, size, network)
        for network in NETWORKS
        for size in SIZES
        for name in names
        for count in HOSTS
    ]
    answers = dict(zip(cells, predict(cells), strict=True))
    print(f"all_reduce of float32, {RANKS_PER_HOST} ranks on each host, in seconds as predicted")
    for network in NETWORKS:
        for size in SIZES:
            print(f"\n{report.size_name(size)}, {network.name}")
            print(f"{'ranks':>8}" + "".join(f"{name:>16}" for name in names) + "  chosen")
            for count in SHOWN:
                row = [
                    answers[cell]
                    for cell in cells
                    if (cell.network, cell.size, cell.hosts) == (network, size, count)
                ]
                text = "".join(seconds(answer["seconds"]) for answer in row)
                print(f"{count * RANKS_PER_HOST:>8}{text}  {row[-1]['algorithm']}")
    needs(answers)
    try:
        from harness import plot
    except ImportError:
        print("\nno plot: matplotlib is not installed (the extra `bench`)")
        return
    plot.scale(
        [
            (
                f"{report.size_name(size)}, {network.name}",
                name,
                series(answers, network, size, name),
            )
            for network in NETWORKS
            for size in SIZES
            for name in names
        ],
        args.plot,
    )
    print(f"\nplotted: {args.plot}")


def series(
    answers: dict[Question, dict], network: Network, size: int, name: str
) -> list[tuple[int, float]]:
    """Return ranks and seconds of one line."""
    return [
        (cell.hosts * cell.ranks, answer["seconds"])
        for cell, answer in answers.items()
        if (cell.network, cell.size, cell.algorithm) == (network, size, name)
        and answer["seconds"] is not None
    ]


def seconds(value: float | None) -> str:
    return f"{'-':>16}" if value is None else f"{value:>16.6f}"


def needs(answers: dict[Question, dict]) -> None:
    """Print what a rank and the store need, from what small groups need here."""
    small, large = (run("store", str(world))[0] for world in (256, 512))
    written = large["written"] / large["ranks"]
    # Every rank reads the table of all ranks; rank 0 also reads what they have written.
    read = (large["read"] - small["read"]) / (large["ranks"] ** 2 - small["ranks"] ** 2)
    one, two, three = (run("join", str(world)) for world in (64, 128, 256))
    # The memory of a group of n ranks in one process is a * n + b * n * n.
    each = [group[0]["kilobytes"] / group[0]["ranks"] for group in (one, two, three)]
    row = (each[2] - each[0]) / (256 - 64)
    fixed = each[2] - row * 256
    # In a barrier of 2 ** k ranks a rank has links with k others before it and k after it. The
    # farthest on both sides are the same rank.
    links = 256 * (8 - 0.5)
    link = (three[1]["kilobytes"] - three[0]["kilobytes"]) / links
    print(
        f"\nmeasured in one process: a rank writes {written:.0f} bytes to the store and reads "
        f"{read:.0f} for each rank;\n"
        f"it keeps {fixed:.0f} KiB, {row * 1024:.0f} bytes for each rank of the group, and "
        f"{link / 2:.0f} KiB for its end of each link"
    )
    names = (*ALGORITHMS, "auto")
    print(f"\n{'':>8}   peers in an all_reduce of {report.size_name(SIZES[1])}")
    heads = "".join(f"{name:>14}" for name in names)
    print(f"{'ranks':>8}{heads}{'a rank keeps':>14}{'the store sends':>18}")
    for count in SHOWN:
        peers = {
            cell.algorithm: answer["far_peers"] + answer["near_peers"]
            for cell, answer in answers.items()
            if (cell.hosts, cell.size, cell.network) == (count, SIZES[1], NETWORKS[0])
            and answer["seconds"] is not None
        }
        world = count * RANKS_PER_HOST
        kept = (fixed + world * row + peers["auto"] * link / 2) / 1024
        sent = read * world**2 / 2**20
        text = "".join(f"{peers[name]:>14}" for name in names)
        print(f"{world:>8}{text}{kept:>10.1f} MiB{sent:>14.1f} MiB")
    print("A peer on another host has two sockets: a stream and what is said beside it.")


def form() -> None:
    """Print how long groups take to form."""
    for words in (("join", "128"), ("join", "512"), ("groups", "64", "8"), ("store", "2048")):
        for line in run(*words):
            print("  ".join(f"{name} {value}" for name, value in line.items()))


def check(args: argparse.Namespace) -> None:
    """Compare predictions with what collectives take between hosts made of namespaces."""
    trouble = why_not()
    if trouble:
        sys.exit(f"no hosts can be made here: {trouble}")
    network = measured(args)
    print(
        f"{args.rate} Mbit/s links: latency {network.latency * 1e6:.1f} us, "
        f"{8e-6 / network.byte:.0f} Mbit/s"
    )
    errors = []
    for bed in BEDS:
        wanted = [
            Question(len(bed), bed[0], BED_CORES, collective, algorithm, size, network)
            for algorithm in ALGORITHMS
            for collective in BED_COLLECTIVES
            for size in BED_SIZES
        ]
        answers = predict(wanted)
        served = [
            (question, answer["seconds"])
            for question, answer in zip(wanted, answers, strict=True)
            if answer["seconds"] is not None
        ]
        if len(set(bed)) == 1 and bed[0] == 1:
            served = [pair for pair in served if pair[0].algorithm != "hierarchical"]
        times = times_on(bed, [question for question, _ in served], args)
        for question, predicted in served:
            ratio = predicted / times[question]
            errors.append(max(ratio, 1 / ratio) - 1)
            name = f"{'+'.join(map(str, bed))} {question.collective} {question.algorithm}"
            print(
                f"{name:40}{report.size_name(question.size):>6}{times[question] * 1e3:>10.2f} ms"
                f"{predicted * 1e3:>10.2f} predicted  {ratio:.2f}"
            )
    print(
        f"{len(errors)} predictions: off by {statistics.median(errors):.0%} (median), "
        f"{max(errors):.0%} (worst)"
    )


def measured(args: argparse.Namespace) -> Network:
    """Measure what two hosts are joined by."""
    short, long = 8, 16 << 20
    none = Network("the bed", 0, 0, 0)
    questions = [
        Question(2, 1, BED_CORES, "ping_pong", "auto", size, none) for size in (short, long)
    ]
    times = times_on((1, 1), questions, args)
    byte = (times[questions[1]] - times[questions[0]]) / (long - short)
    return Network("the bed", MESSAGE, max(times[questions[0]] - 2 * MESSAGE, 0), byte)


def times_on(
    bed: Sequence[int], questions: Sequence[Question], args: argparse.Namespace
) -> dict[Question, float]:
    """Measure all questions on hosts with the ranks of `bed`; return the medians."""
    host_of = [host for host, ranks in enumerate(bed) for _ in range(ranks)]
    program, times = str(rust_bench("collectives")), {}
    with hosts(len(bed)) as net, Jobs() as jobs:
        limit(net, args.rate)
        for algorithm in dict.fromkeys(question.algorithm for question in questions):
            folder = jobs.folder(algorithm)
            command = [program, "--world", str(len(host_of)), "--channel", str(folder)]
            command += ["--store", f"file://{folder}/store", "--rank"]
            commands = [
                [*net.enter(host), *command, str(rank)] for rank, host in enumerate(host_of)
            ]
            environment = {"UNISONO_INTERFACE": "eth0", "UNISONO_ALGORITHM": algorithm}
            job = jobs.add(Job(algorithm, len(host_of), commands, folder, environment))
            job.wait_until_ready()
            for question in questions:
                if question.algorithm != algorithm:
                    continue
                report.show(f"{algorithm} {question.collective} {report.size_name(question.size)}")
                # One call at a time: of two in a row the second begins while bytes of the first
                # are still on their way.
                line = f"time {question.collective} {question.size} 1"
                calls = [max(job.command(line)) for _ in range(args.rounds + 1)]
                times[question] = statistics.median(calls[1:])
    report.show("")
    return times


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--form", action="store_true", help="form groups of hundreds of ranks in one process")
    add("--check", action="store_true", help="compare predictions with measurements")
    add("--rate", type=int, default=1000, help="Mbit/s of each host's link, for --check")
    add("--rounds", type=int, default=9, help="calls of each measurement of --check")
    add("--plot", type=Path, default=RESULTS / "scale.png", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    machine = report.machine()
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['system']}")
    try:
        if args.form:
            form()
        if args.check:
            check(args)
        if not (args.form or args.check):
            predictions(args)
    except (FailedError, MissingError) as error:
        sys.exit(f"\n{error}")


if __name__ == "__main__":
    main()
