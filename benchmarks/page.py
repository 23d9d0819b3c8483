"""Write the tables and plots of docs/benchmarks.md, other pages and the README from results.

    python benchmarks/page.py                            from the files of benchmarks/results
    python benchmarks/page.py --measure                  measure all of them before, in 12 minutes
    python benchmarks/page.py --measure ddp inference    measure these two before

A result is what a benchmark writes by --json, with the commit, the date, the machine and the
command. Between the marks in a document, ``<!-- results:NAME:begin -->`` and ``:end``, everything
is written anew. Results of hosts need root, and are left out without it. The README takes numbers
of a machine that was otherwise idle, and keeps those that it has where it was not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness import marks
from harness.arguments import size_name
from harness.beds import CHOICE, Bed
from harness.build import CHECKOUT
from harness.cells import Cell

RESULTS = CHECKOUT / "benchmarks" / "results"
DOCS, README = CHECKOUT / "docs", CHECKOUT / "README.md"
IMAGES = DOCS / "images"
QUIET = 0.2  # cores that other programs may use where numbers are to stand in the README
BETWEEN = "--collectives all_reduce,all_gather,broadcast --sizes 64K,1M,16M --algorithms none"
BETWEEN += " --rounds 5 --minutes 0.5"
BEDS = ("1,1", "2,2", "4,4", "1,1,1,1")
# How each result is measured; `--json` with its file comes besides.
COMMANDS = {
    "one-host": "compare.py --parts marks --peers openmpi,heap,gloo --minutes 3",
    "collectives": "compare.py --parts collectives --peers openmpi --ranks 2,4"
    " --sizes 8,1K,16K,128K,1M,16M --minutes 2",
    **{f"hosts-{bed.replace(',', '-')}": f"network.py --hosts {bed} {BETWEEN}" for bed in BEDS},
    "ddp": "ddp.py",
    "failure": "failure.py --rounds 5",
    "inference": "inference.py --ranks 2 --dtypes float32 --sizes 4K 16K 64K 1M 32M --seconds 1"
    " --operators unisono gloo deepspeed",
    "one-sided": "one_sided.py --seconds 1",
    "one-sided-hosts": "one_sided.py --rates 1000 0 --sizes 4K 64K 1M 16M 256M --seconds 0.5"
    " --rounds 3",
}
# The result that a plot shows; that of hosts is of all of them.
PLOTS = {"by-size": ("one-host",), "by-ranks": ("one-host",)}
PLOTS["by-hosts"] = tuple(name for name in COMMANDS if name.startswith("hosts-"))

Result = dict[str, Any]


def read() -> dict[str, Result]:
    """Return the results that are there, by name."""
    paths = {name: RESULTS / f"{name}.json" for name in COMMANDS}
    return {
        name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.exists()
    }


def cells(result: Result) -> list[Cell]:
    return [Cell(**cell) for cell in result["cells"]]


def caption(result: Result) -> str:
    """Say where, when, by which commit and by which command a result was measured."""
    machine = result["machine"]
    command = re.sub(r" --json \S+", "", result["command"])
    text = f"From `{command}`, commit {result['commit']}, {result['date']}, "
    text += f"{machine['processor']}, {machine['cores']} cores."
    if not is_quiet(result):
        others = f"{result['others']:.1f}"
        text += f" Other programs used {others} cores meanwhile: no numbers to go by."
    return text


def is_quiet(result: Result) -> bool:
    return result["others"] <= QUIET


def number(value: float | None) -> str:
    """Write three digits or less, as a reader compares them."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 3 else f"{value:.2f}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose first column is text and whose others are numbers."""
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---", *["---:"] * (len(lines[0]) - 1)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def one_host(results: dict[str, Result], worlds: Iterable[int] = (2, 4, 8)) -> str:
    """Return the ratios of an all_reduce to its peers'."""
    by_key = {}
    for cell in cells(results["one-host"]):
        through = any(peer.startswith("torch/") for peer in cell.rounds)
        by_key[through, cell.world, cell.collective, cell.size] = cell
    rows = []
    for row in marks.ROWS:
        if row.reference == "unisono-c" or row.world not in worlds:
            continue
        mine = {key[1:]: cell for key, cell in by_key.items() if key[0] == ("torch" in row.peer)}
        ratios = [one and one.ratio for one in row.ratios(mine)]
        name = row.name if "torch" in row.peer else f"{row.name} from C, unisono from Rust"
        if any(ratios):
            rows.append([f"{name}, {row.world} ranks", *map(number, ratios)])
    return table(["", *marks.COLUMNS], rows)


def collectives(results: dict[str, Result]) -> str:
    """Return the ratio of each collective to Open MPI's, by size and ranks."""
    measured = [cell for cell in cells(results["collectives"]) if cell.collective != "barrier"]
    sizes = sorted({cell.size for cell in measured})
    worlds = sorted({cell.world for cell in measured})
    found = {
        (cell.collective, cell.world, cell.size): cell.ratio("openmpi", "unisono")
        for cell in measured
    }
    rows = []
    for name in dict.fromkeys(cell.collective for cell in measured):
        by_size = ([found.get((name, world, size)) for world in worlds] for size in sizes)
        rows.append([name, *(" / ".join(number(ratio) or "-" for ratio in of) for of in by_size)])
    ratios = [ratio for ratio in found.values() if ratio]
    ahead = sum(ratio >= 1 for ratio in ratios)
    text = f"unisono is at least as fast as Open MPI in {ahead} of {len(ratios)} cells.\n\n"
    return text + table(["", *map(size_name, sizes)], rows)


def bed_of(result: Result) -> Bed:
    return Bed(**{**result["bed"], "ranks": tuple(result["bed"]["ranks"])})


def hosts(results: dict[str, Result]) -> str:
    """Return the share of the link's rate that calls reach, by the ranks of each host."""
    measured = [results[name] for name in PLOTS["by-hosts"] if name in results]
    shares: dict[tuple[str, int], list[str]] = {}
    for column, result in enumerate(measured):
        bed = bed_of(result)
        for cell in cells(result):
            row = shares.setdefault((cell.collective, cell.size), [""] * len(measured))
            both = [cell.median(peer) for peer in (CHOICE, "torch/gloo")]
            of_line = [time and bed.share(cell.collective, cell.size, time) for time in both]
            row[column] = " / ".join(f"{share:.2f}" for share in of_line if share)
    heads = [" + ".join(map(str, bed_of(result).ranks)) for result in measured]
    rows = ([f"{name}, {size_name(size)}", *row] for (name, size), row in shares.items())
    return table(["", *heads], rows)


def ddp(results: dict[str, Result]) -> str:
    """Return the time of a training step."""
    result = results["ddp"]
    medians = {name: statistics.median(times) for name, times in result["seconds"].items()}
    times = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in medians.items())
    text = f"A step of {result['parameters'] / 1e6:.0f} million parameters with {result['ranks']} "
    text += (
        f"ranks is {result['ratio']:.2f} times as fast on unisono as on gloo. Milliseconds, and "
    )
    text += f"without a backend (DDP alone) or DDP: {times}."
    return folded(text)


def failure(results: dict[str, Result]) -> str:
    """Return the time from a kill to the errors of the others."""
    seconds = results["failure"]["seconds"]
    rows: dict[str, list[str]] = {}
    for name, times in seconds.items():
        backend, _, what = name.partition(", ")
        if what.endswith("closed"):
            continue
        row = rows.setdefault(what, ["-"] * 4)
        first = 2 * (backend == "gloo")
        numbers = (statistics.median(times), max(times))
        row[first : first + 2] = [f"{number * 1e3:.1f}" for number in numbers]
    head = ("", "unisono: median", "worst", "gloo: median", "worst")
    return table(head, ([name, *row] for name, row in rows.items()))


def inference(results: dict[str, Result]) -> str:
    """Return the times of sums in place beside those of other operators."""
    figures = results["inference"]["figures"]
    names = list(figures[0]["seconds"])
    rows = (
        [
            f"{figure['size'][:-1]} {figure['size'][-1]}iB",
            *(number(figure["seconds"][name] * 1e6) for name in names),
        ]
        for figure in figures
    )
    return table(["", *names], rows)


def one_sided(results: dict[str, Result]) -> str:
    """Return the times of transfers beside that of a plain copy."""
    figures = results["one-sided"]["figures"]
    names = list(dict.fromkeys(name for figure in figures for name in figure["seconds"]))
    rows: dict[int, dict[str, float]] = {}
    for figure in figures:
        rows.setdefault(figure["size"], {}).update(figure["seconds"])
    lines = (
        [size_name(size), *(number(1e6 * row[name] if name in row else None) for name in names)]
        for size, row in rows.items()
    )
    return table(["", *names], lines)


def one_sided_hosts(results: dict[str, Result]) -> str:
    """Return the times of transfers between hosts beside NIXL's and those of a socket."""
    rows = []
    for figure in results["one-sided-hosts"]["figures"]:
        rate, seconds = figure["rate"], figure["seconds"]
        link = f"{rate / 1000:g} Gbit/s" if rate else "no limit"
        row = [f"{link}, {size_name(figure['size'])}"]
        for name in ("private", "nixl", "sockets"):
            both = [seconds.get(f"{name} {what}") for what in ("write", "read")]
            row.append(", ".join(number(time and time * 1e6) or "-" for time in both))
            if name == "nixl":
                own = (seconds[f"private {what}"] for what in ("write", "read"))
                ratios = [time and time / mine for time, mine in zip(both, own, strict=True)]
                row.append(", ".join(number(ratio) or "-" for ratio in ratios))
        shares = [
            figure["size"] * 8 / (rate * 1e6) / seconds[f"private {what}"] if rate else None
            for what in ("write", "read")
        ]
        row.append(", ".join(number(share) or "-" for share in shares) if rate else "")
        rows.append(row)
    head = ["", "unisono: write, read", "NIXL", "NIXL / unisono", "a socket", "share of the link"]
    return table(head, rows)


# The parts of pages: where they stand, the results that each needs, and the text made of them.
PARTS: dict[str, tuple[str, tuple[str, ...], Callable[[dict[str, Result]], str]]] = {
    "one-host": ("benchmarks", ("one-host",), one_host),
    "collectives": ("benchmarks", ("collectives",), collectives),
    "hosts": ("benchmarks", PLOTS["by-hosts"], hosts),
    "ddp": ("benchmarks", ("ddp",), ddp),
    "failure": ("faults", ("failure",), failure),
    "inference": ("inference", ("inference",), inference),
    "one-sided": ("transports", ("one-sided",), one_sided),
    "one-sided-hosts": ("transports", ("one-sided-hosts",), one_sided_hosts),
}


def part(name: str, results: dict[str, Result]) -> str:
    """Return what stands between the marks of a part of the page."""
    _, needed, make = PARTS[name]
    there = [results[result] for result in needed if result in results]
    if not there:
        return f"Not measured yet: `python benchmarks/page.py --measure {' '.join(needed)}`."
    pictures = [
        f"![{plot.replace('-', ' ').capitalize()}](images/{plot}.svg)"
        for plot, of in PLOTS.items()
        if of == needed
    ]
    return "\n\n".join([make(results), *["\n".join(pictures)] * bool(pictures), wrapped(there)])


def wrapped(results: list[Result]) -> str:
    """Return the captions of results, and that of runs that differ in their hosts alone once."""
    texts = [caption(result) for result in results]
    if len(texts) > 1:
        rest = ", ".join(f"`{bed_text(result)}`" for result in results[1:])
        texts = [f"{texts[0]} The other columns: {rest} in its place."]
    return folded(" ".join(texts))


def folded(text: str) -> str:
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)


def bed_text(result: Result) -> str:
    return f"--hosts {','.join(map(str, result['bed']['ranks']))}"


def readme(results: dict[str, Result]) -> str | None:
    """Return what stands in the README, or nothing where there are no numbers for it."""
    result = results.get("one-host")
    if result is None or not is_quiet(result):
        return None
    more = results.get("collectives")
    text = caption(result)
    if more and is_quiet(more):
        text += " Over all collectives " + collectives(results).partition("\n")[0]
    picture = "![Time of an all_reduce by size](docs/images/by-size.svg)"
    said = "The peer's time for an all_reduce of float32, divided by unisono's:"
    return "\n\n".join([picture, said, one_host(results, (2, 4)), folded(text)])


def filled(text: str, name: str, content: str) -> str:
    """Put `content` between the marks of that name."""
    begin, end = f"<!-- results:{name}:begin -->", f"<!-- results:{name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text, found = pattern.subn(lambda _: f"{begin}\n{content}\n{end}", text)
    if found != 1:
        raise ValueError(f"{begin} stands {found} times in the document, and has to once")
    return text


def documents(results: dict[str, Result]) -> dict[Path, str]:
    """Return the documents with the numbers of these results."""
    texts = {README: README.read_text("utf-8")}
    for name, (page, *_) in PARTS.items():
        path = DOCS / f"{page}.md"
        text = texts.get(path) or path.read_text("utf-8")
        texts[path] = filled(text, name, part(name, results))
    if content := readme(results):
        texts[README] = filled(texts[README], "readme", content)
    return texts


def digest(names: Iterable[str]) -> str:
    """Return a digest of results, which stands in the plots that are made of them."""
    data = b"".join(
        path.read_bytes() for name in names if (path := RESULTS / f"{name}.json").exists()
    )
    return hashlib.sha256(data).hexdigest()[:16]


def draw(results: dict[str, Result]) -> None:
    """Draw the plots of the results that are there."""
    try:
        from harness import plot
    except ImportError:
        sys.exit("matplotlib is not installed (the extra `bench`)")
    if "one-host" in results:
        measured = [cell for cell in cells(results["one-host"]) if cell.collective == "all_reduce"]
        plot.by_size(measured, IMAGES / "by-size.svg", digest(PLOTS["by-size"]))
        plot.by_ranks(measured, IMAGES / "by-ranks.svg", digest(PLOTS["by-ranks"]))
    beds = {}
    for name in PLOTS["by-hosts"]:
        if name in results:
            bed = bed_of(results[name])
            beds[" + ".join(map(str, bed.ranks))] = {
                (cell.size, peer): bed.share(cell.collective, cell.size, cell.median(peer) or 0)
                for cell in cells(results[name])
                for peer in (CHOICE, "torch/gloo")
                if cell.collective == "all_reduce" and cell.median(peer)
            }
    if beds:
        plot.by_hosts(beds, IMAGES / "by-hosts.svg", digest(PLOTS["by-hosts"]))


def measure(names: Iterable[str]) -> list[str]:
    """Measure results anew, one after the other; return the names of those that failed."""
    failed = []
    for name in names:
        words = shlex.split(COMMANDS[name])
        path = (RESULTS / f"{name}.json").relative_to(CHECKOUT)
        print(f"\n{name}: {COMMANDS[name]}", flush=True)
        program = [sys.executable, f"benchmarks/{words[0]}", *words[1:], "--json", str(path)]
        if subprocess.run(program, cwd=CHECKOUT, check=False).returncode:
            failed.append(name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(COMMANDS)
    parser.add_argument("--measure", nargs="*", metavar="NAME", help=f"all, or some of {names}")
    args = parser.parse_args()
    failed = []
    if args.measure is not None:
        if unknown := set(args.measure) - set(COMMANDS):
            parser.error(f"--measure: {', '.join(sorted(unknown))} is none of {names}")
        failed = measure(args.measure or COMMANDS)
    results = read()
    draw(results)
    for path, text in documents(results).items():
        path.write_text(text, "utf-8")
        print(f"written: {path.relative_to(CHECKOUT)}")
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
