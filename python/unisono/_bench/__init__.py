"""``unisono bench``: how fast the operations are on this machine, with the columns of nccl-tests.

Started alone it starts its ranks itself, by ``unisono launch``. Where the environment names a rank
the process is that rank of the job, and rank 0 prints; so it runs under every launcher and on
several hosts.

``operations`` are those that are measured and their known values, ``measure`` has the clock,
``rank`` is the work of a rank, ``peers`` are other runtimes; ``results``, ``table`` and ``plot``
show the rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from unisono._launch import RANK_VARIABLES

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_EXAMPLES = """\
examples:
  unisono bench                              all_reduce of 8 B to 64 MiB
  unisono bench all_gather broadcast -n 4 --compare gloo --plot bench.html
  unisono bench all --json run.json          and later: --against run.json
  unisono launch --hosts a,b -n 4 -m unisono bench       one job, two hosts
  mpirun --bind-to none -n 4 unisono bench --compare mpi   ranks of MPI
"""


def sizes(text: str, factor: int = 4) -> list[int]:
    """Return the sizes that a list names, as in 8,64K-64M: a span goes on by `factor`.

    Raises
    ------
    ValueError
        A size is not a number with K, M, G or nothing behind it, or a span goes down.
    """
    found = []
    for item in text.split(","):
        low, dash, high = item.partition("-")
        begin, last = size(low), size(high if dash else low)
        if begin > last:
            raise ValueError(f"{item}: a span goes up")
        while begin < last:
            found.append(begin)
            begin *= factor
        found.append(last)
    return sorted(set(found))


def size(text: str) -> int:
    """Return the bytes that a text such as 64K stands for, with units of 1,024.

    Raises
    ------
    ValueError
        It is not a number above 0 with K, M, G or nothing behind it.
    """
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in "KMG" else ""
    if not number.removesuffix(unit).isdecimal() or int(number.removesuffix(unit)) == 0:
        raise ValueError(f"{text!r} is no size: write 512, 16K, 64M or 1G")
    return int(number.removesuffix(unit)) << _UNITS[unit]


def bench(arguments: Sequence[str], name: str) -> int:
    """Do what the command line asks for; returns the exit status: 1 if a value is wrong."""
    parser = command_line(name)
    chosen = parser.parse_args(arguments)
    world = os.environ.get("WORLD_SIZE")
    number = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)
    _refuse(parser, chosen)
    if number in (None, "0"):
        _refuse_files(parser, chosen)
    if number is not None:
        if chosen.ranks and world and chosen.ranks != int(world):
            parser.error(f"-n {chosen.ranks}: this process is one of {world} ranks already")
        return _be_a_rank(chosen, [name, "bench", *arguments])
    from unisono import _native
    from unisono._launch import launch

    ranks = chosen.ranks or max(2, len(os.sched_getaffinity(0)))
    if chosen.root is not None and chosen.root >= ranks:
        parser.error(f"--root {chosen.root}: there are {ranks} ranks")
    again = ["-m", "unisono", "bench", *arguments]
    return launch(["-n", str(ranks), "--output", "plain", *again], _native.load())


def _be_a_rank(chosen: argparse.Namespace, command: Sequence[str]) -> int:
    import unisono
    from unisono._bench import operations, rank
    from unisono._bench.measure import Effort

    asked = list(operations.OPERATIONS) if "all" in chosen.operations else chosen.operations
    wishes = rank.Wishes(
        operations=list(dict.fromkeys(asked)) or ["all_reduce"],
        sizes=sizes(chosen.sizes, chosen.factor),
        dtype=operations.dtype_of(chosen.dtype),
        reduction=chosen.op,
        root=chosen.root,
        effort=Effort(chosen.seconds, chosen.iterations),
        is_checked=chosen.check,
        is_in_heap=chosen.heap,
        compare=chosen.compare,
        json=chosen.json,
        against=chosen.against,
        plot=chosen.plot,
        command=command,
    )
    try:
        return rank.run(wishes)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (unisono.Error, OSError, ValueError) as error:
        print(f"unisono bench: {error}", file=sys.stderr)
        return 2


def _refuse(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """End with the reason where words on the command line mean nothing."""
    from unisono._bench import operations

    try:
        operations.dtype_of(chosen.dtype)
        sizes(chosen.sizes, chosen.factor)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(chosen.operations) - {*operations.OPERATIONS, "all"}:
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(operations.OPERATIONS)}")
    if chosen.plot and chosen.plot.suffix not in (".html", ".png"):
        parser.error(f"--plot {chosen.plot}: write a name that ends in .html or .png")


def _refuse_files(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """End with the reason where rank 0 would only find at the end that files cannot be had."""
    from unisono._bench import results

    try:
        if chosen.against:
            results.Run.read(chosen.against)
    except (OSError, ValueError) as error:
        parser.error(f"--against: {error}")
    for path in (chosen.plot, Path(chosen.json) if chosen.json else None):
        if path and not path.parent.is_dir():
            parser.error(f"there is no folder {path.parent} for {path.name}")
    if chosen.plot and chosen.plot.suffix == ".png" and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot to .png needs matplotlib: pip install matplotlib (.html needs none)")


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from unisono._bench import operations, peers

    parser = argparse.ArgumentParser(
        prog=f"{name} bench",
        description="How fast operations are here, with the columns of nccl-tests.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [OPERATION ...] [-n N] [--sizes 8-64M] [OPTIONS]",
    )
    add = parser.add_argument
    reductions = ", ".join(operations.REDUCTIONS)
    known = ", ".join([*operations.OPERATIONS, "all"])
    add("operations", nargs="*", metavar="OPERATION", help=f"{known} (all_reduce)")
    add("-n", "--ranks", type=_positive, metavar="N", help="ranks to start here (one a core)")
    add("--sizes", default="8-64M", help="of the whole, in bytes: 8,64K or 8-64M (8-64M)")
    add(
        "--factor",
        type=_factor,
        default=4,
        metavar="F",
        help="from one size of a span to the next (4)",
    )
    add("--dtype", default="float32", metavar="TYPE", help="float16, bfloat16, int8, ... (float32)")
    add(
        "--op",
        default="sum",
        choices=operations.REDUCTIONS,
        metavar="OP",
        help=f"{reductions} (sum)",
    )
    add("--root", type=_rank, metavar="RANK", help="a fixed root (each rank in turn)")
    add("--iterations", type=_iterations, metavar="N", help="calls of a time (as fit, at least 5)")
    add("--seconds", type=float, default=0.5, metavar="S", help="to measure a row (0.5)")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="count wrong values")
    add("--heap", action="store_true", help="buffers of unisono.empty, which ranks of a host share")
    add("--compare", type=_peers, default=[], metavar="NAMES", help=", ".join(peers.NAMES))
    add("--json", metavar="FILE", help="write the rows to a file; - prints them and no table")
    add("--against", type=Path, metavar="FILE", help="a column with the ratio to such a file")
    add("--plot", type=Path, metavar="FILE", help="draw bandwidths and times: x.html or x.png")
    return parser


def _peers(text: str) -> list[str]:
    from unisono._bench.peers import NAMES

    found = list(dict.fromkeys(text.split(",")))
    if wrong := [one for one in found if one not in NAMES]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: there are {', '.join(NAMES)}")
    return found


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number from {least} on")
    return int(text)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _factor(text: str) -> int:
    return _whole(text, 2)


def _rank(text: str) -> int:
    return _whole(text, 0)


def _iterations(text: str) -> int | None:
    return None if text == "auto" else _whole(text, 1)
