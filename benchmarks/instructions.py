"""Count the instructions of small operations with callgrind, and compare with the recorded counts.

    python benchmarks/instructions.py            count, and say by how much each has changed
    python benchmarks/instructions.py --record   count, and keep the counts in instructions.json

Times vary with the machine, counts hardly do. Two ranks, which are threads of one process, are
linked as two processes would be; valgrind runs one thread at a time and hands over where a thread
yields. The count covers the whole operation on both ranks, from the call to the return, halved; it
leaves out how the ranks join. Waiting for the later rank to begin drops out, since two runs with
different numbers of calls are subtracted. Where other programs keep the cores busy a thread that
has yielded may be late for its turn, and the other one looks around once more; so each run is made
several times, and the least count is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from harness import build
from harness.build import MissingError

OPERATIONS = {
    "all_reduce": "all_reduce of 8 bytes",
    "broadcast": "broadcast of 8 bytes",
    "barrier": "barrier",
    "ping_pong": "8 bytes there and back",
}
# The function of benches/instructions.rs in which instructions are counted.
COUNTED = "*instructions*counted*"
RECORD = Path(__file__).with_name("instructions.json")
CALLS = 9000
RUNS = 12


def count(program: Path, operation: str, calls: int) -> int:
    """Return the instructions of both ranks while they carry out the operation `calls` times."""
    profile = build.RESULTS / f"callgrind.{operation}.{calls}"
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={profile}"]
    command += ["--fair-sched=yes", "--collect-atstart=no", f"--toggle-collect={COUNTED}"]
    command += [str(program), operation, str(calls)]
    # Valgrind runs one thread at a time, so to spin would be to count the spinning.
    environment = os.environ | {"UNISONO_SPIN_US": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found:
        raise MissingError(f"valgrind could not run {operation}:\n{done.stderr.strip()}")
    if found[1] == "0":
        raise MissingError(f"nothing was counted: no function is named {COUNTED}")
    return int(found[1])


def count_all(operations: list[str], calls: tuple[int, int]) -> dict[str, float]:
    """Return the instructions of one call on one rank, for every operation."""
    if shutil.which("valgrind") is None:
        raise MissingError("valgrind is not installed (on Debian: apt-get install valgrind)")
    program = build.rust_bench("instructions")
    build.RESULTS.mkdir(parents=True, exist_ok=True)
    few, many = calls
    counts = {}
    for operation in operations:
        less, more = (min(count(program, operation, n) for _ in range(RUNS)) for n in calls)
        counts[operation] = round((more - less) / (many - few) / 2, 1)
    return counts


def recorded() -> dict[str, float]:
    return json.loads(RECORD.read_text())["instructions"] if RECORD.exists() else {}


def table(counts: dict[str, float], before: dict[str, float]) -> str:
    lines = [f"{'instructions of one call on one rank':38}{'now':>10}{'recorded':>10}{'change':>9}"]
    for operation, now in counts.items():
        line = f"{OPERATIONS[operation]:38}{now:>10,.0f}"
        if operation in before:
            line += f"{before[operation]:>10,.0f}{100 * (now / before[operation] - 1):>+8.1f}%"
        lines.append(line)
    return "\n".join(lines)


def compiler() -> str:
    done = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("operations", nargs="*", metavar="OPERATION", help=", ".join(OPERATIONS))
    add("--record", action="store_true", help=f"write the counts to {RECORD.name}")
    add("--calls", type=int, default=CALLS, help="of the longer run")
    add("--fail-above", type=float, metavar="PERCENT", help="exit with 1 if one has grown by more")
    args = parser.parse_args()
    unknown = set(args.operations) - set(OPERATIONS)
    if unknown:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(OPERATIONS)}")
    try:
        counts = count_all(args.operations or list(OPERATIONS), (args.calls // 3, args.calls))
    except MissingError as reason:
        print(f"instructions were not counted: {reason}")
        sys.exit(1 if args.fail_above is not None or args.record else 0)
    before = recorded()
    print(table(counts, before))
    print(f"profiles: callgrind_annotate {build.RESULTS}/callgrind.all_reduce.{args.calls}")
    if args.record:
        content = {"compiler": compiler(), "instructions": before | counts}
        RECORD.write_text(json.dumps(content, indent=1) + "\n")
    growth = [100 * (now / before[of] - 1) for of, now in counts.items() if of in before]
    if args.fail_above is not None and max(growth, default=0.0) > args.fail_above:
        sys.exit(1)


if __name__ == "__main__":
    main()
