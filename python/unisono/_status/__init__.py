"""``unisono status``: the ranks of a job, their operations, and the ranks that these wait for.

``ask`` asks every process of this host that has groups, and ``elsewhere`` the ranks of other hosts
through these; ``words`` puts the answers together and says who waits for whom; ``ras`` says it in
the words of NCCL; ``jobs`` tells jobs apart. ``unisono top`` shows the same of this host again and
again (``top``), ``unisono metrics`` exports it (``metrics``), and ``flight`` writes the last
operations into files that torch's analyzer reads.
"""

from __future__ import annotations

import argparse
import json
import sys

from unisono._status import ask, elsewhere, flight, jobs, ras, words


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=f"{name} status",
        description="The ranks of the jobs on this host, their operations, and the ranks that these"
        " wait for. Ranks of other hosts are asked through their groups.",
    )
    form = found.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the answers as they came")
    form.add_argument("--ras", action="store_true", help="print them in the form of ncclras, JSON")
    form.add_argument(
        "--records",
        metavar="PREFIX",
        help="write the last operations of each rank to PREFIX0 and so on, for torchfrtrace",
    )
    form.add_argument(
        "--stacks",
        action="store_true",
        help="show the Python stacks of those that others wait for, by py-spy",
    )
    found.add_argument(
        "--pid", type=int, metavar="PID", help="tell of the job of this process alone"
    )
    found.add_argument("--here", action="store_true", help="ask the ranks of this host alone")
    found.add_argument(
        "--hosts",
        type=lambda text: [host.partition(":")[0] for host in text.split(",")],
        metavar="HOST,...",
        help="ask on these hosts, over ssh, and not here: for a job that has no rank on this one",
    )
    found.add_argument("--ssh", default="ssh", metavar="COMMAND", help="how to reach a host (ssh)")
    return found


def status(arguments: list[str], name: str) -> int:
    """Print the state of the jobs on this host, and return the exit status: 1 if there is none."""
    chosen = command_line(name).parse_args(arguments)
    if chosen.hosts:
        found, missing = ask.processes_of(chosen.hosts, chosen.ssh)
    else:
        found, missing = ask.processes(), []
        if not chosen.here:
            found += elsewhere.processes(found, records=bool(chosen.records))
    for line in missing:
        print(f"unisono status: {line}", file=sys.stderr)
    if chosen.pid is not None:
        found = jobs.with_pid(found, chosen.pid)
        if not found:
            print(f"unisono status: no rank has the pid {chosen.pid} here", file=sys.stderr)
            return 1
    if chosen.records and len(several := jobs.apart(found)) > 1:
        pids = ", ".join(str(job[0].pid) for job in several)
        print(
            f"unisono status: {len(several)} jobs run here, and records are of one: name a process "
            f"of it by --pid ({pids})",
            file=sys.stderr,
        )
        return 2
    if chosen.json:
        print(json.dumps([vars(process) for process in found], indent=1))
    elif chosen.records:
        for path in flight.write(found, chosen.records):
            print(path)
    elif chosen.ras:
        print(json.dumps(ras.report(found), indent=1))
    else:
        told = words.text(found, stacks=chosen.stacks)
        print(told or "no process with a group of unisono runs here")
    return 0 if found and not missing else 1
