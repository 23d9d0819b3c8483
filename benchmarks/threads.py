"""Long messages between hosts, moved by one thread of each rank and by several.

    python benchmarks/threads.py
    python benchmarks/threads.py --threads 1,4,auto --sizes 64M --address 10.0.0.5

Two ranks of this machine count as two hosts (UNISONO_HOST) and talk over TCP through an address of
it that is no loopback address: by default that of the default route. No card has a part in it, so
it shows what cores can move, and takes a machine with more than a few. For each of --threads
(UNISONO_THREADS) there is a pair of processes, and they take turns, round by round. The first calls
of each, in which further connections are opened and tried, do not count. A figure is the median
over the rounds in gigabytes a second: the bytes of the message, or of the array that is broadcast
or reduced, by the time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np
from harness import arguments

OPERATIONS = ("send", "broadcast", "all_reduce")
TRIAL = 512 << 20  # bytes after which the number of connections is settled
LIMIT = 120.0  # seconds in which a round ends


def rank(place: int, address: str, port: int, threads: str, pipe: Connection) -> None:
    """Be a rank: do what comes over the pipe, and tell how long it took."""
    os.environ |= {
        "RANK": str(place),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "UNISONO_HOST": f"host{place}",
        "UNISONO_INTERFACE": address,
        "UNISONO_THREADS": threads,
    }
    import unisono

    comm = unisono.init()
    arrays: dict[int, np.ndarray] = {}
    while command := pipe.recv():
        operation, size, calls = command
        if size not in arrays:
            arrays[size] = np.ones(size // 4, np.float32)
        data = arrays[size]
        comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            if operation == "broadcast":
                comm.broadcast(data, 0)
            elif operation == "all_reduce":
                comm.all_reduce(data, op="max")
            elif place == 0:
                comm.send(data, 1)
            else:
                comm.recv(data, 0)
        comm.barrier()
        pipe.send((time.perf_counter() - start) / calls)
    comm.close()


class Pair:
    """Two ranks with `threads` threads each."""

    def __init__(self, address: str, threads: str) -> None:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.pipes, self.ranks = [], []
        for place in (0, 1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank, args=(place, address, port, threads, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.ranks.append(process)

    def time(self, operation: str, size: int, calls: int = 1) -> float:
        try:
            for pipe in self.pipes:
                pipe.send((operation, size, calls))
            return max(self.answer(pipe) for pipe in self.pipes)
        except (BrokenPipeError, EOFError):
            raise SystemExit("a rank has ended; what it said is above") from None

    @staticmethod
    def answer(pipe: Connection) -> float:
        if not pipe.poll(LIMIT):
            raise SystemExit(f"a rank has not answered for {LIMIT:.0f} s")
        return pipe.recv()

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.ranks:
            process.join(LIMIT)


def own_address() -> str:
    """Return the address of the default route; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            raise SystemExit(f"no default route ({error}): give an --address") from error
        return probe.getsockname()[0]


def threads(text: str) -> str:
    return text if text == "auto" else str(int(text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    list_of = arguments.list_of
    parser.add_argument("--threads", type=list_of(threads), default=("1", "2", "4", "auto"))
    parser.add_argument("--sizes", type=list_of(arguments.size), default=(16 << 20, 256 << 20))
    parser.add_argument("--address", help="of this machine, not a loopback one")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    address = args.address or own_address()
    print(f"2 ranks as 2 hosts over {address}, {len(os.sched_getaffinity(0))} cores, GB/s")
    pairs = {name: Pair(address, name) for name in args.threads}
    print(f"{'threads':12}{'':>10}" + "".join(f"{name:>8}" for name in pairs))
    for operation in OPERATIONS:
        for size in args.sizes:
            for pair in pairs.values():
                pair.time(operation, size, max(2, TRIAL // size))
            rounds = {name: [] for name in pairs}
            for _ in range(args.rounds):
                for name, pair in pairs.items():
                    rounds[name].append(pair.time(operation, size))
            rates = [size / statistics.median(times) / 1e9 for times in rounds.values()]
            row = "".join(f"{rate:8.2f}" for rate in rates)
            print(f"{operation:12}{arguments.size_name(size):>10}{row}", flush=True)
    for pair in pairs.values():
        pair.end()


if __name__ == "__main__":
    main()
