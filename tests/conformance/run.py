#!/usr/bin/env python3
"""Run PyTorch's own tests of a c10d backend on unisono.

    python tests/conformance/run.py                 every test that must pass
    python tests/conformance/run.py -k all_reduce   some of them
    python tests/conformance/run.py --shard 1/4     a fixed quarter of them
    python tests/conformance/run.py --all           also those that gloo skips, which must not fail
    python tests/conformance/run.py --backend gloo --all   gloo itself

``expected.json`` lists the tests that must pass: those that gloo passes on CPUs, and the all_to_all
tests of mpi, three of them for eight ranks. The exit status is 1 when one of them does not pass
or any test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
CLASS = "suite.py::TestConformance"


def collect(env: dict[str, str]) -> list[str]:
    """Return the names of all tests of the suite."""
    command = [sys.executable, "-m", "pytest", CLASS, "--collect-only", "-q", *QUIET]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        env = {**env, "TEMP_DIR": folder}
        result = subprocess.run(
            command, cwd=HERE, env=env, capture_output=True, text=True, check=False
        )
    names = [line.rpartition("::")[2] for line in result.stdout.splitlines() if "::" in line]
    if not names:
        sys.exit(f"no test was found\n{result.stdout}\n{result.stderr}")
    return names


# The settings in pyproject.toml are for our own tests.
QUIET = ["-c", os.devnull, "--rootdir", str(HERE), "-p", "no:cacheprovider"]


def run(names: list[str], env: dict[str, str], timeout: int) -> dict[str, str]:
    """Run the tests and return how each ended: passed, failed, skipped or missing."""
    if not names:
        return {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", *QUIET, f"--timeout={timeout}"]
        command += [f"--junitxml={report}", *(f"{CLASS}::{name}" for name in names)]
        subprocess.run(command, cwd=HERE, env={**env, "TEMP_DIR": folder}, check=False)
        outcome = dict.fromkeys(names, "missing")
        if report.exists():
            for case in ElementTree.parse(report).getroot().iter("testcase"):
                kinds = {child.tag for child in case}
                failed, skipped = kinds & {"failure", "error"}, "skipped" in kinds
                state = "failed" if failed else "skipped" if skipped else "passed"
                outcome[case.get("name", "")] = state
    return outcome


def main() -> int:
    """Run what the command line asks for and compare it with what is expected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="unisono", choices=["unisono", "gloo"])
    parser.add_argument("-k", dest="part", default="", help="tests whose name has this part")
    parser.add_argument("--shard", default="1/1", help="every n-th test, from the first: 1/4")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    parser.add_argument("--all", action="store_true", help="also tests that need not pass")
    args = parser.parse_args()

    contents = json.loads((HERE / "expected.json").read_text())
    expected, large = set(contents["pass"]), set(contents["of_8_ranks"])
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "CONFORMANCE_BACKEND": args.backend, "PYTHONPATH": path}
    known = collect(env)
    gone = sorted(expected - set(known))
    chosen = [n for n in known if args.part in n and (args.all or n in expected)]
    part, parts = map(int, args.shard.split("/"))
    chosen = chosen[part - 1 :: parts]
    # Three ranks, as torch's own runs have; a few tests of groups want eight.
    outcome = run([n for n in chosen if n not in large], env, args.timeout)
    if eight := [n for n in chosen if n in large]:
        outcome |= run(eight, {**env, "WORLD_SIZE": "8"}, args.timeout)

    count = Counter(outcome.values())
    print(f"{args.backend}: " + ", ".join(f"{n} {state}" for state, n in sorted(count.items())))
    wrong = {
        n: s
        for n, s in outcome.items()
        if s in ("failed", "missing") or (s == "skipped" and n in expected)
    }
    for name, state in sorted(wrong.items()):
        print(f"  {name}: {state}")
    for name in gone:
        print(f"  {name}: torch's suite has it no more")
    return 1 if wrong or gone else 0


if __name__ == "__main__":
    sys.exit(main())
