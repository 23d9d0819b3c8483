"""The cost of UNISONO_TRACE: calls of a group that writes a trace, beside one that does not.

    python benchmarks/tracing.py                    2 ranks, all_reduce of 64 KiB and of 8 bytes
    python benchmarks/tracing.py --ranks 4 --rounds 9

Both groups have the same processes and take turns, block by block, so that a slow second of the
machine meets both. A block is longer than the interval at which events are written, so that the
writing falls into the blocks that cause it. A row tells the time of a call in the median of the
blocks, and the median of the ratios of neighbours with their range.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import unisono

BLOCK = 3.0
# Calls between two looks at the clock, and those that warm up.
CALLS, WARM = 200, 500


def block(comm: unisono.Communicator, data: np.ndarray, seconds: float) -> float:
    """Return the time of a call: rank 0 says when there have been enough."""
    goes_on = np.ones(1, np.int64)
    for _ in range(WARM):
        comm.all_reduce(data)
    spent, count = 0.0, 0
    while goes_on[0]:
        begin = time.perf_counter()
        for _ in range(CALLS):
            comm.all_reduce(data)
        spent += time.perf_counter() - begin
        count += CALLS
        goes_on[0] = spent < seconds
        comm.broadcast(goes_on, 0)
    return spent / count


def rank(chosen: argparse.Namespace, folder: str) -> None:
    """Time both groups in turns; rank 0 prints a row for each size."""
    plain = unisono.init()
    place = plain.broadcast_object(_free_place() if plain.rank == 0 else None)
    options = unisono.Options(trace=folder)
    traced = unisono.init(place, rank=plain.rank, world_size=plain.world_size, options=options)
    for size in chosen.sizes:
        data = np.zeros(max(size // 4, 1), np.float32)
        off, on = [], []
        for _ in range(chosen.rounds):
            off.append(block(plain, data, chosen.seconds))
            on.append(block(traced, data, chosen.seconds))
        ratios = [after / before for before, after in zip(off, on, strict=True)]
        if plain.rank == 0:
            print(
                f"{size:>8} B   off {statistics.median(off) * 1e6:8.2f} us   "
                f"on {statistics.median(on) * 1e6:8.2f} us   on / off "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})",
                flush=True,
            )


def _free_place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=BLOCK, help="of a block")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 << 10, 8], metavar="BYTES")
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        rank(chosen, os.environ["UNISONO_TEST_TRACE"])
        return 0
    with tempfile.TemporaryDirectory(prefix="unisono-trace-") as folder:
        command = [sys.executable, "-m", "unisono", "launch", "-n", str(chosen.ranks)]
        command += [sys.executable, *sys.argv]
        return subprocess.run(
            command, env={**os.environ, "UNISONO_TEST_TRACE": folder}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
