"""The time that `unisono status` takes, by the state of the job that it asks.

    sudo .venv/bin/python benchmarks/status.py              8 hosts of 8 ranks
    sudo .venv/bin/python benchmarks/status.py --hosts 2 --ranks 4

The hosts are network namespaces of this machine (tests/support/namespaces.py), which takes root.
The command runs on the host of rank 0. First all ranks sleep; then all but rank 0 wait for it in an
all_reduce. A row tells the seconds of the whole command, with the start of Python, in the median of
the rounds with their range: for all ranks, and for those of the command's own host (`--here`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import unisono

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.append(str(CHECKOUT / "tests" / "support"))
from namespaces import hosts, place_of, why_not  # noqa: E402
from ranks import run_ranks  # noqa: E402

# Waits that have lasted for as long as this are asked about.
SETTLE = 2.0


def ask(state: str, ranks: int, rounds: int) -> list[str]:
    """Time the command; return a row for each of its forms."""
    rows = []
    for flags in ((), ("--here",)):
        spent = []
        for _ in range(rounds):
            begun = time.monotonic()
            command = [sys.executable, "-m", "unisono", "status", *flags]
            asked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
            spent.append(time.monotonic() - begun)
            if asked.returncode or f"of {ranks} ranks" not in asked.stdout:
                raise AssertionError(f"status said: {asked.stdout}{asked.stderr}")
        rows.append(
            f"{ranks} ranks that {state:<22}{' '.join(flags) or 'all':<7}"
            f"{statistics.median(spent):6.2f} s ({min(spent):.2f} - {max(spent):.2f})"
        )
    return rows


def rank(rounds: int) -> list[str]:
    """Be one of the ranks; rank 0 asks, and returns the rows."""
    comm = unisono.init()
    go = Path(os.environ["GO"])
    rows = []
    if comm.rank == 0:
        rows += ask("sleep", comm.world_size, rounds)
        go.touch()
        time.sleep(SETTLE)
        rows += ask("wait in an all_reduce", comm.world_size, rounds)
    while not go.exists():
        time.sleep(SETTLE / 4)
    comm.all_reduce(np.ones(1000))
    return rows


def main() -> int:
    """Make the hosts, and run the ranks on them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=8, help="number of hosts (default: 8)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of each host (default: 8)")
    parser.add_argument("--rounds", type=int, default=9, help="commands of each row (default: 9)")
    chosen = parser.parse_args()
    if reason := why_not():
        parser.error(f"no hosts can be made here: {reason}")
    host_of = [at for at in range(chosen.hosts) for _ in range(chosen.ranks)]
    with hosts(chosen.hosts) as net, tempfile.TemporaryDirectory(prefix="status-") as folder:

        def environment(rank: int) -> dict[str, str]:
            job = {"MASTER_ADDR": net.address(0), "MASTER_PORT": "29535"}
            own = {"GO": f"{folder}/go", "PYTHONPATH": str(Path(__file__).parent)}
            return {**job, **own, **place_of(rank, host_of)}

        ended = run_ranks(
            len(host_of),
            "status:rank",
            chosen.rounds,
            timeout=60 + 20 * chosen.rounds,
            env=environment,
            host=lambda rank: net.names[host_of[rank]],
        )
    print("\n".join(ended[0].value))
    return 0


if __name__ == "__main__":
    sys.exit(main())
