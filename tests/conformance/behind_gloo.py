#!/usr/bin/env python3
"""Run programs on gloo and again with unisono in gloo's place, and print what differs.

    python tests/conformance/behind_gloo.py                          the programs of programs.py
    python tests/conformance/behind_gloo.py --only accelerate        those with that in their name
    python tests/conformance/behind_gloo.py -- torchrun --nproc-per-node 2 train.py
    python tests/conformance/behind_gloo.py --tests test_c10d_object_collectives.py

A command is compared by its exit status, a file of tests by how each of them ended (pytest runs
it). The last lines are a table of all programs. The exit status is 1 when something passed on gloo
and not on unisono without an explanation in programs.py, or when unisono did not act: gloo would
have been compared with itself then. A program outside this repository is named by where its package
installs it; nothing of it is copied here.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

LIMIT = 300.0  # seconds for one command, or for one test of a file
GRACE = 10.0  # seconds that a launcher gets to end its ranks
ACTS = "unisono: in gloo's place"
# In the environment of a run and of all that it starts, so that nothing of it stays behind.
MARK = "BEHIND_GLOO_RUN"


@dataclass(frozen=True)
class Reason:
    """Why something may fail on unisono alone, where what it prints then `says` certain words."""

    why: str
    says: str = ""


@dataclass(frozen=True)
class Program:
    """A command, or arguments of pytest, to run twice.

    `environment` may say ``{scratch}`` for a folder that each run gets for itself; a program that
    is `at_home` runs in the folder where this one does, any other in its scratch folder. Of
    `explained` the keys are patterns of parts that may differ. `limit` is for the whole; None means
    LIMIT for a command, and an hour for tests with LIMIT for each.
    """

    name: str
    command: Sequence[str]
    tests: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    explained: Mapping[str, Reason] = field(default_factory=dict)
    at_home: bool = False
    limit: float | None = None


@dataclass
class Outcome:
    """How a program ended: a state for each of its parts, and the seconds it took.

    `failures` has what was printed of those tests that failed.
    """

    parts: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    output: str = ""


@dataclass
class Difference:
    """A part that ended otherwise on unisono than on gloo, and why, where that is known."""

    part: str
    on_gloo: str
    on_unisono: str
    why: str = ""

    @property
    def is_loss(self) -> bool:
        """Whether the part passed on gloo alone."""
        return self.on_gloo == "passed" != self.on_unisono


@dataclass
class Row:
    """The result of comparing a program."""

    name: str
    there: Outcome
    here: Outcome
    both: int
    differences: list[Difference]

    @property
    def lost(self) -> list[Difference]:
        """The parts that passed on gloo alone."""
        return [each for each in self.differences if each.is_loss]

    @property
    def gained(self) -> list[Difference]:
        """The parts that passed on unisono alone."""
        return [each for each in self.differences if each.on_unisono == "passed" != each.on_gloo]

    @property
    def trouble(self) -> str:
        """Why the row counts as failed, or an empty string."""
        if ACTS not in self.here.output:
            return "unisono did not act, so gloo was compared with itself"
        if ACTS in self.there.output:
            return "unisono acted in the run on gloo too"
        unexplained = [each.part or "the command" for each in self.lost if not each.why]
        return f"passed on gloo alone: {', '.join(unexplained)}" if unexplained else ""


def run(program: Program, as_gloo: bool, limit: float = LIMIT) -> Outcome:
    """Run a program once, and end what it leaves behind."""
    with tempfile.TemporaryDirectory(prefix="behind-", ignore_cleanup_errors=True) as scratch:
        report = Path(scratch, "report.xml")
        command = [*program.command]
        whole = program.limit or limit
        if program.tests:
            command = [*pytest_command(report, limit), *command]
            whole = program.limit or 12 * limit
        mark = f"{MARK}={uuid.uuid4()}"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONUNBUFFERED": "1",
            # Some name their tests in the order of a set.
            "PYTHONHASHSEED": "0",
            **{key: value.format(scratch=scratch) for key, value in program.environment.items()},
            "UNISONO_AS_GLOO": str(int(as_gloo)),
            MARK: mark.partition("=")[2],
        }
        folder = None if program.at_home else scratch
        outcome = watched(command, environment, mark, folder, whole)
        if program.tests and (read := read_report(report))[0]:
            # Tests that a limit for the whole cut off are missing in the report.
            outcome.parts, outcome.failures = read
    return outcome


def pytest_command(report: Path, limit: float) -> list[str]:
    """Return what runs tests; uncaptured, for what unisono says is looked for in the output."""
    # The settings in pyproject.toml are for our own tests.
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-c", os.devnull]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
    return [*command, f"--timeout={limit:g}"]


def watched(
    command: Sequence[str],
    environment: Mapping[str, str],
    mark: str,
    folder: str | None,
    limit: float,
) -> Outcome:
    """Run a command that may take so long; its only part has no name."""
    began = time.monotonic()
    # A file, and no pipe: a pipe stays open as long as anything holds it.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            state = "passed" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            state = f"not ended after {limit:g} s"
            # torchrun ends its workers when it is asked to, and they lead sessions of their own.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        seconds = time.monotonic() - began
        kill_marked(mark)
        process.wait()
        output.seek(0)
        return Outcome({"": state}, seconds=seconds, output=output.read())


def kill_marked(mark: str) -> None:
    """Kill every process that has the mark in its environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        # It may have ended, or be somebody else's.
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def read_report(report: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the state of each test by its name, and what those print that failed."""
    parts: dict[str, str] = {}
    failures: dict[str, str] = {}
    if not report.exists():
        return parts, failures
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        failed = [child for child in case if child.tag in {"failure", "error"}]
        skipped = case.find("skipped") is not None
        name = f"{case.get('classname')}.{case.get('name')}"
        parts[name] = "failed" if failed else "skipped" if skipped else "passed"
        if failed:
            failures[name] = "\n".join(child.text or "" for child in failed)
    return parts, failures


def compare(program: Program, there: Outcome, here: Outcome) -> Row:
    """Return what differs between a run on gloo and one on unisono."""
    differences, both = [], 0
    for part in {**there.parts, **here.parts}:
        on_gloo = there.parts.get(part, "missing")
        on_unisono = here.parts.get(part, "missing")
        both += on_gloo == on_unisono == "passed"
        if on_gloo != on_unisono:
            why = explanation(program.explained, part, here.failures.get(part, here.output))
            differences.append(Difference(part, on_gloo, on_unisono, why))
    differences.sort(key=lambda each: (not each.is_loss, each.part))
    return Row(program.name, there, here, both, differences)


def explanation(explained: Mapping[str, Reason], part: str, printed: str) -> str:
    """Return why the part, which has printed that, may differ, or an empty string."""
    for pattern, reason in explained.items():
        if fnmatch.fnmatchcase(part, pattern) and reason.says in printed:
            return reason.why
    return ""


def describe(row: Row) -> str:
    """Return what a person wants to read of a comparison as soon as it is done."""
    counts = f"{row.both} passed on both, {len(row.gained)} gained, {len(row.lost)} lost"
    times = f"gloo {row.there.seconds:.1f} s, unisono {row.here.seconds:.1f} s"
    lines = [f"{row.name}: {counts}; {times}"]
    for each in row.differences:
        why = f" ({each.why})" if each.why else ""
        part = each.part or "the command"
        lines.append(f"  {part}: {each.on_gloo} on gloo, {each.on_unisono} on unisono{why}")
    if row.trouble:
        lines.append(f"  FAILED: {row.trouble}")
        lines += ["    " + line for line in row.here.output.splitlines()[-30:]]
    elif not row.both:
        lines.append("  nothing of it passes on gloo, which ends with")
        lines += ["    " + line for line in row.there.output.splitlines()[-5:]]
    return "\n".join(lines)


def table(rows: Iterable[Row]) -> str:
    """Return a Markdown table of all programs, and what differs below it."""
    rows = list(rows)
    lines = [
        "| program | passed on both | on neither | gained | lost | gloo | unisono |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        parts = len({**row.there.parts, **row.here.parts})
        neither = parts - row.both - len(row.gained) - len(row.lost)
        lines.append(
            f"| {row.name} | {row.both} | {neither} | {len(row.gained)} | {len(row.lost)} "
            f"| {row.there.seconds:.0f} s | {row.here.seconds:.0f} s |"
        )
    differences = [(row.name, each) for row in rows for each in row.differences]
    if differences:
        lines += ["", "| differs | on gloo | on unisono | why |", "|---|---|---|---|"]
    for name, each in differences:
        what = f"{name}: {each.part}" if each.part else name
        lines.append(f"| {what} | {each.on_gloo} | {each.on_unisono} | {each.why or '?'} |")
    return "\n".join(lines)


def main() -> int:
    """Compare what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", action="store_true", help="the rest are arguments of pytest")
    parser.add_argument("--only", default="", help="programs with that in their name")
    parser.add_argument("--list", action="store_true", help="name the programs and end")
    parser.add_argument(
        "--timeout", type=float, default=LIMIT, help="seconds for a command, or for one test"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what to run")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if command:
        chosen = [Program(" ".join(command), command, tests=args.tests, at_home=True)]
    else:
        from programs import programs

        found, absent = programs()
        chosen = [program for program in found if args.only in program.name]
        print("\n".join(line for line in absent if args.only in line))
    if args.list:
        print("\n".join(program.name for program in chosen))
        return 0
    rows = []
    for program in chosen:
        there, here = (run(program, as_gloo, args.timeout) for as_gloo in (False, True))
        rows.append(compare(program, there, here))
        print(describe(rows[-1]), flush=True)
    print(f"\n{table(rows)}")
    return int(any(row.trouble for row in rows) or not rows)


if __name__ == "__main__":
    sys.exit(main())
