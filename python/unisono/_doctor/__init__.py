"""``unisono doctor``: this host, and under a launcher every pair of ranks.

Alone it examines this host: two processes meet as ranks, and limits, names, addresses and
installations are looked at. Under a launcher every rank examines its host, the ranks meet, and
rank 0 prints the findings of all and a table of pairs. Each finding that is not right comes with
the command or setting that mends it, and the exit status says whether a job runs.

``host`` reads files of the system, ``memory`` and ``machine`` try things out in other processes,
``job`` is the work of a rank, ``pairs`` measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import unisono
from unisono._doctor import host, job, machine, memory
from unisono._doctor.finding import ADVICE, BROKEN, OK, Finding, in_words
from unisono._doctor.job import Job

_EXAMPLES = """\
examples:
  unisono doctor                                  this host
  unisono launch -n 4 -m unisono doctor           and each pair of four ranks
  unisono launch --hosts node0,node1 -n 1 -m unisono doctor
  torchrun --nproc-per-node 4 -m unisono doctor   or mpirun, srun, a pod
"""


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=f"{name} doctor",
        description="This host, and under a launcher each pair of ranks: is all as it should be?",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--json", action="store_true", help="print the findings as JSON")
    found.add_argument(
        "--here", action="store_true", help="this host alone, also where a launcher has started it"
    )
    return found


def doctor(arguments: Sequence[str], name: str) -> int:
    """Examine, print the findings, and return the exit status: 0 where a job runs here."""
    chosen = command_line(name).parse_args(arguments)
    if chosen.here or not job.is_rank():
        return _alone(as_json=chosen.json)
    return _as_rank(as_json=chosen.json)


def _alone(*, as_json: bool) -> int:
    found = [*host.examine(), *memory.try_out(), *machine.try_out(), *host.protection(1)]
    status = int(any(finding.state == BROKEN for finding in found))
    if as_json:
        records = [_record(finding) for finding in found]
        print(json.dumps({"runs": not status, "findings": records}, indent=1))
        return status
    print(f"this host, {job.place()['name']}")
    print(_text(found))
    print(verdict(found))
    return status


def _as_rank(*, as_json: bool) -> int:
    try:
        found = job.run()
    except unisono.Error as error:
        words = f"no job runs: {error}"
        worse = [finding for finding in host.examine() if finding.state != OK]
        print("\n".join([f"unisono doctor: {words}", _text(worse)]).strip(), file=sys.stderr)
        if as_json:
            print(json.dumps({"runs": False, "error": str(error)}))
        return 1
    if found is None:
        return 0
    findings = [finding for finding, _ in found.findings]
    status = int(any(finding.state == BROKEN for finding in findings))
    if as_json:
        print(json.dumps({"runs": not status, **_all(found)}, indent=1))
        return status
    print("\n".join([*sections(found), *table(found), verdict(findings)]), flush=True)
    return status


def _record(finding: Finding) -> dict[str, str]:
    return {name: text for name, text in asdict(finding).items() if name != "of_host"}


def _all(found: Job) -> dict[str, object]:
    """The findings of a job as JSON has them."""
    return {
        "ranks": [found.names[number] for number in found.hosts],
        "findings": [{**_record(one), "ranks": ranks} for one, ranks in found.findings],
        "pairs": [pair.record() for pair in found.pairs],
        "clocks": [
            {"rank": rank, "ahead": ahead, "within": half}
            for rank, (ahead, half) in found.clocks.items()
        ],
    }


def _text(findings: Sequence[Finding]) -> str:
    return "\n".join(line for finding in findings for line in finding.text())


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line: whether a job runs, and how much there is to mend."""
    broken = sum(finding.state == BROKEN for finding in findings)
    advice = sum(finding.state == ADVICE for finding in findings)
    if broken:
        return f"no job runs here: {broken} broken, see above"
    pieces = {0: "nothing to mend", 1: "one piece of advice above"}
    return f"a job runs here; {pieces.get(advice, f'{advice} pieces of advice above')}"


def sections(found: Job) -> list[str]:
    """Return the findings in words: those that hold for all first, then those of some hosts."""
    parts: dict[tuple[int, ...], list[Finding]] = {}
    for finding, holds_for in found.findings:
        parts.setdefault(tuple(holds_for), []).append(finding)
    lines = []
    for ranks in sorted(parts, key=lambda ranks: (-len(ranks), ranks)):
        lines += [_title(found, ranks), _text(parts[ranks])]
    return lines


def _title(found: Job, ranks: Sequence[int]) -> str:
    numbers = {found.hosts[rank] for rank in ranks}
    hosts = _few([found.names[number] for number in sorted(numbers)])
    if len(ranks) == len(found.hosts):
        every = f"every host: {hosts}" if len(found.names) > 1 else f"this host, {hosts}"
        return f"{every} ({_ranks(ranks)})"
    return f"{hosts} ({_ranks(ranks)})"


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {_few([str(rank) for rank in ranks])}"


def table(found: Job) -> list[str]:
    """Return the pairs as a table."""
    if not found.pairs:
        return []
    rows = [("ranks", "way", "one way", "rate", "and back")]
    rows += [
        (
            f"{found.named(pair.first)} - {found.named(pair.second)}",
            _way(pair.ways),
            in_words(pair.latency),
            _rate(pair.there),
            _rate(pair.back),
        )
        for pair in found.pairs
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.3g} MB/s"


def _way(ways: tuple[str, str]) -> str:
    """The way of a link; over TCP with the address of each end, as the other one sees it."""
    if not ways[0].startswith("tcp "):
        return ways[0] or "not told"
    there, here = (way.removeprefix("tcp ").rpartition(":")[0] for way in ways)
    return f"TCP, {here} - {there}"
