"""``unisono trace``: the operations of a job in time, which its ranks have written.

With UNISONO_TRACE=FOLDER each process writes its operations into a file there (``rust/core``,
``trace``). ``proto`` reads and writes such files; ``job`` puts those of all ranks on one clock and
joins what belongs together; ``merge`` makes one file of them, with arrows; ``report`` and ``page``
tell who was late, and who waited.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from unisono._trace import merge, page, report
from unisono._trace.job import Job, NoTraceError

_EXAMPLES = """\
examples:
  UNISONO_TRACE=trace torchrun --nproc-per-node 4 train.py
  unisono trace report trace                 who was late, and who waited
  unisono trace report trace --html a.html   the same as a page with pictures
  unisono trace merge trace -o a.zip         for https://ui.perfetto.dev, with
                                             torch's traces (trace/*.json)
"""


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=f"{name} trace",
        description="The operations of a job in time, which its ranks wrote into a folder.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("action", choices=("merge", "report"), help="one file of all, or findings")
    found.add_argument("folder", type=Path, help="the folder that UNISONO_TRACE named")
    found.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="merge: write this file, .zip or .tar or, without torch's traces, .pftrace "
        "(FOLDER.zip)",
    )
    found.add_argument("--html", type=Path, metavar="FILE", help="report: write a page, too")
    found.add_argument("--json", action="store_true", help="report: print all numbers")
    return found


def trace(arguments: list[str], name: str) -> int:
    """Do what the command line asks for, and return the exit status: 1 if there is no trace."""
    parser = command_line(name)
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder
    if chosen.action == "merge" and (chosen.html or chosen.json):
        parser.error("--html and --json are for report")
    if chosen.action == "report" and chosen.output:
        parser.error("-o is for merge")
    target = chosen.output or folder.with_name(f"{folder.resolve().name}.zip")
    if target.suffix not in merge.SUFFIXES:
        parser.error(f"{target}: it can be a {', '.join(merge.SUFFIXES)}")
    try:
        job = Job.read(folder)
        if chosen.action == "merge":
            _merge(job, folder, target)
            return 0
        told = report.report(job)
        print(json.dumps(told.record()) if chosen.json else report.text(told))
        if chosen.html:
            chosen.html.write_text(page.page(told, folder.resolve().name), encoding="utf-8")
    except (NoTraceError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _merge(job: Job, folder: Path, target: Path) -> None:
    merged = merge.write(job, folder, target)
    print(
        f"{target}: {len(job.processes)} ranks, {merged.operations} operations, "
        f"{merged.messages} arrows of messages and {merged.waits} to those that waited"
    )
    if merged.beside:
        print(f"beside: {', '.join(merged.beside)}")
    for line in merged.left_out:
        print(f"left out: {line}")
    for line in report.remarks(report.report(job)):
        print(line)
    print("open it in https://ui.perfetto.dev")
