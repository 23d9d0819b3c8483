"""``unisono explain``: the algorithm that a group would take for a call, and its plan.

There need be no group: the prices are those of this machine or a typical one, and plans are data
(``rust/plan``). ``picture`` draws a plan.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono import _bench
from unisono._explain import picture

_EXAMPLES = """\
examples:
  unisono explain all_reduce --bytes 64M --ranks 8 --hosts 2
  unisono explain all_gather --bytes 1M --ranks 16 --typical
  unisono explain all_reduce --bytes 8 --ranks 64 --hosts 16 --rate 1.2
  unisono explain all_reduce --bytes 1K --ranks 8 --algorithm ring --svg a.svg
"""


def size(text: str) -> int:
    """Return the bytes that a text such as ``64M`` stands for, for argparse.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is no size.
    """
    try:
        return _bench.size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def in_bytes(count: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError("a unit for any number")


def in_seconds(seconds: float) -> str:
    """Return a time in words."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def hosts_of(ranks: int, hosts: int) -> list[int]:
    """Return the host of each rank: as many on each as on the others, or one more."""
    return [rank * hosts // ranks for rank in range(ranks)]


def explain(arguments: Sequence[str], name: str) -> int:
    """Print the answer, and return the exit status."""
    parser = command_line(name)
    chosen = parser.parse_args(arguments)
    if not 1 <= chosen.hosts <= chosen.ranks:
        parser.error(f"{chosen.ranks} ranks on {chosen.hosts} hosts: each host has one at least")
    if min(chosen.latency or 1, chosen.rate or 1) <= 0 or (chosen.cores or 1) < 1:
        parser.error("--latency, --rate and --cores are above 0")
    from unisono import _native

    hosts = hosts_of(chosen.ranks, chosen.hosts)
    try:
        answer = _native.load()._explain(
            chosen.collective,
            chosen.bytes,
            hosts,
            dtype=chosen.dtype,
            root=chosen.root,
            cores=chosen.cores,
            heap=chosen.heap,
            algorithm=chosen.algorithm,
            typical=chosen.typical,
            latency=chosen.latency and chosen.latency * 1e-6,
            rate=chosen.rate and chosen.rate * 1e9,
        )
    except ValueError as error:
        parser.error(str(error))
    answer["hosts"] = hosts
    if chosen.json:
        print(json.dumps(answer))
    else:
        print("\n".join(text(chosen, answer)))
    if chosen.svg:
        trouble = picture.why_not(answer)
        if trouble:
            print(f"{chosen.svg}: no picture, {trouble}", file=sys.stderr)
            return 1
        title = _title(chosen, answer)[0] + ", by " + answer["algorithm"]
        Path(chosen.svg).write_text(picture.svg(answer, title))
    return 0


def text(chosen: argparse.Namespace, answer: dict[str, Any]) -> list[str]:
    """Return the lines of an answer: the call, the prices and the plan."""
    lines = [*_title(chosen, answer), *_prices(answer)]
    if "plans" not in answer:
        return [*lines, "", "(plans are shown for up to 64 ranks)"]
    lines += ["", *_traffic(answer)]
    trouble = picture.why_not(answer)
    lines += ["", *picture.table(answer)] if not trouble else ["", f"(no plan is shown: {trouble})"]
    return lines


def _title(chosen: argparse.Namespace, answer: dict[str, Any]) -> list[str]:
    counts = [answer["hosts"].count(host) for host in range(chosen.hosts)]
    each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} or {max(counts)}"
    where = "one host" if chosen.hosts == 1 else f"{chosen.hosts} hosts, {each} on each"
    blocks = "" if answer["count"] * answer["element_size"] == chosen.bytes else " in each block"
    call = (
        f"{chosen.collective} of {in_bytes(chosen.bytes)}, {answer['count']:,} {chosen.dtype}"
        f"{blocks}, {chosen.ranks} ranks on {where}"
    )
    if chosen.collective == "barrier":
        call = f"barrier of {chosen.ranks} ranks on {where}"
    price = dict(answer["prices"]).get(answer["algorithm"])
    goes = f"goes by {answer['algorithm']}"
    if chosen.algorithm not in (None, answer["algorithm"]):
        goes += f", since {chosen.algorithm} does not serve it"
    if price is not None:
        goes += f": {in_seconds(price)} by its price"
    if answer.get("simulated", float("inf")) != float("inf"):
        goes += f", {in_seconds(answer['simulated'])} in a simulation of its plan"
    return [call, goes]


def _prices(answer: dict[str, Any]) -> list[str]:
    lines = ["", f"{'algorithm':<20}{'price':>12}{'to the least':>15}"]
    least = answer["prices"][0][1]
    for name, price in answer["prices"]:
        ratio = f"{price / least:.2f}" if least > 0 else ""
        mark = "  <- taken" if name == answer["algorithm"] else ""
        lines.append(f"{name:<20}{in_seconds(price):>12}{ratio:>15}{mark}")
    costs = answer["costs"]
    far = f"{in_seconds(costs['remote_latency'])} apart with {1e-9 / costs['remote_byte']:.2f} GB/s"
    near = f"copy {1e-9 / costs['copy']:.1f} and add {1e-9 / costs['fold']:.1f} GB/s each"
    cores = f"{answer['cores']} cores on each host that {near}"
    return [*lines, "", f"prices of {cores}, and of hosts {far}"]


def _traffic(answer: dict[str, Any]) -> list[str]:
    busiest = max(answer["plans"], key=lambda plan: (plan["sent"], plan["messages"]))
    far = max(plan["sent_to_other_hosts"] for plan in answer["plans"])
    if not busiest["messages"]:
        return ["no message: the ranks read each other's memory"]
    words = f"the busiest rank sends {in_bytes(busiest['sent'])} in {busiest['messages']} messages"
    if far:
        words += f", and at most {in_bytes(far)} go from a rank to other hosts"
    if answer.get("rounds"):
        rounds = answer["rounds"]
        words += "; all go at once" if rounds == 1 else f"; {rounds} messages follow each other"
    return [words]


def command_line(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=f"{name} explain",
        description="The algorithm that a group would take for a call, its price and its plan.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("collective", help="all_reduce, broadcast, all_gather, ...")
    add("--bytes", type=size, default=1 << 20, help="of the longer buffer of a rank (1M)")
    add("--ranks", "-n", type=int, default=4, help="how many ranks (4)")
    add("--hosts", type=int, default=1, help="hosts that they are spread over (1)")
    add("--dtype", default="float32", help="the type of the elements (float32)")
    add("--root", type=int, default=0, help="the root, where there is one (0)")
    add("--heap", action="store_true", help="the buffers lie in the shared heap")
    add("--algorithm", help="the algorithm that UNISONO_ALGORITHM asks for")
    add("--cores", type=int, help="cores of a host (as many as here)")
    add("--latency", type=float, metavar="US", help="microseconds from host to host")
    add("--rate", type=float, metavar="GB/S", help="gigabytes a second between hosts")
    add("--typical", action="store_true", help="prices of a typical machine, not of this one")
    add("--svg", metavar="FILE", help="write a picture of the plan")
    add("--json", action="store_true", help="print the answer with all steps as JSON")
    return parser
