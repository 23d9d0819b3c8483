"""Run a job on several "hosts" of one machine: network namespaces with links of any rate and delay.

    sudo .venv/bin/python -m tests.hosts --hosts 2,2 -- .venv/bin/python train.py
    sudo .venv/bin/python -m tests.hosts --hosts 4,4 --rate 1000 -- .venv/bin/python train.py
    sudo .venv/bin/python -m tests.hosts --hosts 1,1 --rate 200 --delay 20 --loss 0.1 -- ./program
    sudo .venv/bin/python -m tests.hosts --hosts 1,1 --cut 5 --heal 8 -- ./program

Every rank is one process of the command, with the variables that torchrun sets. ``--nodes`` starts
one process for each host instead, with NODE_RANK and NNODES, for commands that start ranks
themselves:

    ... --hosts 2,2 --nodes -- sh -c 'torchrun --nnodes $NNODES --node-rank $NODE_RANK
        --master-addr $MASTER_ADDR --master-port $MASTER_PORT --nproc-per-node 2 train.py'

A rate is set by `tc tbf` or, with a delay or losses, in user space (tests/support/carrier.py).
Namespaces take root.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "support"))
from carrier import TUN, Link
from namespaces import Hosts, hosts, limit, numbered, place_of, why_not

PORT = "29500"
# How long the others have to end by themselves once one has failed.
GRACE = 10.0


class Job:
    """The processes of the command, on their hosts."""

    def __init__(self, net: Hosts, host_of: Sequence[int], command: list[str], nodes: bool) -> None:
        self.started: list[tuple[str, subprocess.Popen[str]]] = []
        self.shown: list[threading.Thread] = []
        counts = [host_of.count(host) for host in range(len(net.names))]
        places = range(len(counts)) if nodes else host_of
        for rank, host in enumerate(places):
            variables = {"MASTER_ADDR": net.address(host_of[0]), "MASTER_PORT": PORT}
            if nodes:
                variables |= {"NODE_RANK": str(host), "NNODES": str(len(counts))}
            else:
                variables |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(host_of)),
                    **place_of(rank, host_of),
                }
            process = subprocess.Popen(
                [*net.enter(host), *command],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            name = f"host {host}" if nodes else f"host {host}, rank {rank}"
            self.started.append((name, process))
            thread = threading.Thread(target=self.show, args=(name, process), daemon=True)
            thread.start()
            self.shown.append(thread)

    @staticmethod
    def show(name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"[{name}] {line}", end="", flush=True)

    def wait(self) -> int:
        """Wait until all have ended, or some time after one has failed; the status of that one."""
        status, until = 0, float("inf")
        while True:
            ended = [process.poll() is not None for _, process in self.started]
            failed = [(name, process) for name, process in self.started if process.poll()]
            if failed and not status:
                name, process = failed[0]
                # As a shell has it: a signal adds 128.
                status = process.returncode if process.returncode > 0 else 128 - process.returncode
                print(f"failed: {name}; the others have {GRACE:.0f} s to end", flush=True)
                until = time.monotonic() + GRACE
            if all(ended) or time.monotonic() > until:
                break
            time.sleep(0.05)
        self.end()
        return status

    def end(self) -> None:
        for _, process in self.started:
            with suppress(ProcessLookupError):
                process.kill()
        for thread in self.shown:
            thread.join(5)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", default="2,2", help="ranks of each host, as 4,4 or 3,1")
    add("--numbering", choices=("blocks", "round-robin"), default="blocks")
    add("--rate", type=float, default=0, help="Mbit/s of each host's link; 0: no limit")
    add("--delay", type=float, default=0, help="milliseconds from one host to another")
    add("--loss", type=float, default=0, help="percent of packets that are lost")
    add("--cut", type=float, help="after so many seconds the network carries nothing")
    add("--heal", type=float, help="after so many seconds it carries again")
    add("--nodes", action="store_true", help="one process for each host, not for each rank")
    add("command", nargs="+", help="after --: what to run")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if trouble := why_not():
        sys.exit(f"no hosts can be made here: {trouble}")
    counts = [int(count) for count in args.hosts.split(",")]
    host_of = numbered(counts, args.numbering)
    link = None
    # A SIGTERM to this process ends the ranks and the namespaces too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if (args.delay or args.loss) and not Path(TUN).exists():
        sys.exit(f"no delay or loss can be made here: there is no {TUN}")
    if args.delay or args.loss:
        link = Link(args.rate * 1e6, args.delay / 1e3, args.loss / 100)
    with hosts(len(counts), link=link) as net:
        if args.rate and not link:
            limit(net, args.rate)
        job = Job(net, host_of, args.command, args.nodes)
        timers = [
            threading.Timer(seconds, act, (0,))
            for seconds, act in ((args.cut, net.cut), (args.heal, net.heal))
            if seconds is not None
        ]
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            return job.wait()
        finally:
            for timer in timers:
                timer.cancel()
            job.end()


if __name__ == "__main__":
    sys.exit(main())
