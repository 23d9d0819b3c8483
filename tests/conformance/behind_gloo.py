#!/usr/bin/env python3
"""Run programs on gloo and again with unisono in gloo's place, and print what differs.

    python tests/conformance/behind_gloo.py                          the programs listed below
    python tests/conformance/behind_gloo.py -- torchrun --nproc-per-node 2 train.py
    python tests/conformance/behind_gloo.py --tests test_c10d_object_collectives.py

A command is compared by its exit status, a file of tests by how each of them ended (pytest runs
it). "passed there and not here" is what the exit status of this program tells. A program outside
this repository is named by where its package installs it; nothing of it is copied here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

LIMIT = 300.0  # seconds for one command


@dataclass
class Outcome:
    """How a program ended: a state for each of its parts, and the seconds it took."""

    parts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    output: str = ""


def run(command: list[str], as_gloo: bool, timeout: float) -> Outcome:
    """Run a command; its only part is named after it."""
    environment = {
        **os.environ,
        "UNISONO_AS_GLOO": str(int(as_gloo)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # What it starts ends with it.
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        state = "passed" if process.returncode == 0 else f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        state = f"not ended after {timeout:g} s"
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
    return Outcome({"": state}, time.monotonic() - began, output)


def run_tests(arguments: list[str], as_gloo: bool, timeout: float) -> Outcome:
    """Run files of tests under pytest; every test is a part."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider"]
        outcome = run([*command, f"--junitxml={report}", *arguments], as_gloo, timeout)
        if report.exists():
            outcome.parts = {}
            for case in ElementTree.parse(report).getroot().iter("testcase"):
                kinds = {child.tag for child in case}
                failed, skipped = kinds & {"failure", "error"}, "skipped" in kinds
                name = f"{case.get('classname')}.{case.get('name')}"
                outcome.parts[name] = "failed" if failed else "skipped" if skipped else "passed"
    return outcome


def compare(name: str, there: Outcome, here: Outcome) -> int:
    """Print how the two differ; return how much passed there and not here."""
    states = [(part, there.parts.get(part, "missing"), here.parts.get(part, "missing"))
              for part in {**there.parts, **here.parts}]  # fmt: skip
    lost = [row for row in states if row[1] == "passed" != row[2]]
    gained = [row for row in states if row[2] == "passed" != row[1]]
    other = [row for row in states if row[1] != row[2] and "passed" not in row[1:]]
    same = len(states) - len(lost) - len(gained) - len(other)
    print(
        f"{name}: {same} the same, {len(gained)} gained, {len(lost)} lost; "
        f"gloo {there.seconds:.1f} s, unisono {here.seconds:.1f} s",
        flush=True,
    )
    for part, on_gloo, on_unisono in [*lost, *gained, *other]:
        print(f"  {part or 'the command'}: {on_gloo} on gloo, {on_unisono} on unisono")
    for part, on_gloo, _ in states:
        if on_gloo != "passed" and on_gloo != "skipped" and not part:
            print("  ends so on gloo too")
    if lost and not lost[0][0]:
        print("\n".join("    " + line for line in here.output.splitlines()[-30:]))
    return len(lost)


def programs() -> dict[str, list[str]]:
    """Return the commands to compare when none is given, by name: what is installed of them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    found: dict[str, list[str]] = {}
    accelerate = importlib.util.find_spec("accelerate")
    if accelerate and accelerate.origin:
        # On a machine with a GPU they would take it.
        os.environ["ACCELERATE_USE_CPU"] = "true"
        scripts = Path(accelerate.origin).parent / "test_utils" / "scripts"
        for script in ("test_script", "test_ops", "test_sync"):
            path = str(scripts / f"{script}.py")
            found[f"accelerate {script}"] = [*torchrun, "--nproc-per-node", "2", path]
    else:
        print("accelerate is not installed: its scripts are left out")
    return found


def main() -> int:
    """Compare what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", action="store_true", help="the rest are arguments of pytest")
    parser.add_argument("--timeout", type=float, default=LIMIT, help="seconds for a command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what to run")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    chosen = {" ".join(command): command} if command else programs()
    play = run_tests if args.tests else run
    lost = sum(
        compare(name, play(each, False, args.timeout), play(each, True, args.timeout))
        for name, each in chosen.items()
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
