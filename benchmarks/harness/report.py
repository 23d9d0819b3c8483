"""The output: tables of ratios, and the same as CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import marks
from harness.arguments import size_name
from harness.build import CHECKOUT
from harness.cells import Cell

LABELS = {
    "unisono": "unisono",
    "unisono-heap": "unisono, heap",
    "unisono-c": "unisono, C",
    "unisono-c-heap": "unisono, C, heap",
    "openmpi": "Open MPI",
    "torch/unisono": "unisono",
    "torch/unisono-heap": "unisono, heap",
    "torch/gloo": "gloo",
    "torch/fake": "torch alone",
}

# Bus bandwidth is algorithm bandwidth times this, as nccl-tests define it: what a link must carry,
# so that the number is comparable between collectives and world sizes.
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce": lambda _: 1,
    "broadcast": lambda _: 1,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ping_pong": lambda _: 1,
    "send_recv": lambda _: 1,
}


def show(progress: str) -> None:
    """Overwrite the line of progress, where there is a terminal to see it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{progress}")
        sys.stderr.flush()


def title(text: str) -> str:
    return f"\n{text}\n{'-' * len(text)}"


def microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:,.1f}"


def ratios_table(cells: list[Cell], reference: str, peer: str) -> str:
    """Return one world's cells, a line each, with a gap between collectives."""
    ours, theirs = LABELS.get(reference, reference), LABELS.get(peer, peer)
    lines = [f"{'':16}{'size':>9}{ours:>14}{theirs:>14}{'ratio':>9}   lowest - highest"]
    previous = None
    for cell in cells:
        if previous not in (None, cell.collective):
            lines.append("")
        name = cell.collective if cell.collective != previous else ""
        previous = cell.collective
        line = f"{name:16}{'' if cell.collective == 'barrier' else size_name(cell.size):>9}"
        line += "".join(f"{microseconds(cell.median(which)):>14}" for which in (reference, peer))
        ratio = cell.ratio(peer, reference)
        if ratio is None:
            reasons = [f"{LABELS.get(name, name)}: {why}" for name, why in cell.refused.items()]
            lines.append(f"{line}   not compared{'; '.join(['', *reasons])}")
            continue
        low, high = cell.ratio_range(peer, reference)
        lines.append(f"{line}{ratio:>9.2f}   {low:6.2f} - {high:.2f}{'' if ratio >= 1 else '  <'}")
    return "\n".join(lines)


def behind(cells: list[Cell], reference: str, peer: str) -> str:
    """Count the cells where the reference is at least as fast, and name every other one."""
    ratios = [(cell, cell.ratio(peer, reference)) for cell in cells]
    compared = [(cell, ratio) for cell, ratio in ratios if ratio]
    slower = [(cell, ratio) for cell, ratio in compared if ratio < 1]
    ours, theirs = LABELS.get(reference, reference), LABELS.get(peer, peer)
    text = f"{ours} is at least as fast as {theirs} in {len(compared) - len(slower)} of "
    text += f"{len(compared)} cells"
    if not slower:
        return text
    names = [
        f"  {cell.world} ranks {cell.collective} {size_name(cell.size)}: {ratio:.2f}"
        for cell, ratio in slower
    ]
    return "\n".join([f"{text}; not in:", *names])


def marks_table(
    cells: dict[tuple[int, str, int], Cell], torch_cells: dict[tuple[int, str, int], Cell]
) -> str:
    """Every mark: the ratio that was measured, the mark in brackets, and whether it was met."""
    wide = (34, 20, 18, 18, 18)
    lines = [title("The marks: float32 all_reduce in place, peer's median / unisono's median")]
    lines.append(spread(["", *marks.COLUMNS], wide))
    for row in marks.ROWS:
        columns = row.ratios(torch_cells if row.peer.startswith("torch/") else cells)
        texts = [column.text() if column else "-" for column in columns]
        name = f"{row.name}, {row.world} ranks"
        lines.append(spread([name, *texts], wide))
        if columns[0]:
            lines.append(f"{'':34}worst {columns[0].note}")
    lines.append("8 B - 16 KiB: the geometric mean over 8, 64, 512, 4096 and 16384 B")
    return "\n".join(lines)


def spread(texts: list[str], widths: tuple[int, ...]) -> str:
    columns = zip(texts, widths, strict=True)
    return "".join(f"{text:<{width}}" for text, width in columns).rstrip()


def bound_table(
    cells: list[Cell],
    loops: dict[int, dict[str, float]],
    torch_cells: dict[tuple[int, str, int], Cell],
) -> str:
    """How far all_reduce is from what memory allows: unisono's time / the bound's."""
    lines = [title("The bound: an all_reduce that never waits, on shared and on private buffers")]
    for world, rates in loops.items():
        text = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())
        lines.append(f"{world} ranks at once, each: {text} (of 64 MiB results on private memory)")
    head = f"{'':9}{'size':>9}"
    for memory in ("heap", "private"):
        head += f"{'bound':>12}  {'fastest':20}{f'{memory} / bound':>18}"
    lines.append(head)
    for cell in cells:
        if not cell.bound():
            continue
        line = f"{cell.world} ranks  {size_name(cell.size):>9}"
        for family, peer in (("bound", "unisono-heap"), ("private bound", "unisono")):
            variant, bound = cell.bound(family) or ("-", None)
            seconds = cell.median(peer)
            line += f"{microseconds(bound):>12}  {variant:20}"
            text = f"{seconds / bound:.2f}" if seconds and bound else "-"
            if seconds and bound and family == "bound" and cell.world == 2:
                met = seconds / bound <= marks.MARK_OF_BOUND
                text += f" ({marks.MARK_OF_BOUND}) {'met' if met else 'MISSED'}"
            line += f"{text:>18}"
        lines.append(line)
    lines.append(
        "ratios that a program at the bound would have to gloo and Open MPI, heap and private:"
    )
    for cell in cells:
        bounds = [cell.bound("bound"), cell.bound("private bound")]
        if not all(bounds):
            continue
        through_torch = torch_cells.get((cell.world, "all_reduce", cell.size))
        theirs = {
            "gloo": through_torch.median("torch/gloo") if through_torch else None,
            "Open MPI": cell.median("openmpi"),
        }
        texts = [
            f"{name} {' and '.join(f'{seconds / best[1]:.1f}' for best in bounds if best)}"
            for name, seconds in theirs.items()
            if seconds
        ]
        if texts:
            lines.append(f"{cell.world} ranks  {size_name(cell.size):>9}  {', '.join(texts)}")
    return "\n".join(lines)


def torch_table(cells: list[Cell]) -> str:
    """Return what torch takes without a backend, and the ratio to gloo that this leaves to any."""
    lines = [title("all_reduce through torch on a backend that does nothing, microseconds")]
    lines.append(
        f"{'':9}{'size':>9}{'torch alone':>14}{'unisono':>12}{'gloo':>12}"
        f"{'gloo / unisono':>17}{'gloo / torch alone':>20}"
    )
    for cell in cells:
        alone = cell.median("torch/fake")
        if not alone:
            continue
        line = f"{cell.world} ranks  {size_name(cell.size):>9}{microseconds(alone):>14}"
        line += "".join(
            f"{microseconds(cell.median(peer)):>12}" for peer in ("torch/unisono", "torch/gloo")
        )
        for reference, width in (("torch/unisono", 17), ("torch/fake", 20)):
            ratio = cell.ratio("torch/gloo", reference)
            line += f"{'-' if ratio is None else f'{ratio:.1f}':>{width}}"
        lines.append(line)
    lines.append(
        "torch alone: the call of torch's `fake` backend and one sched_yield, on every rank at once"
    )
    return "\n".join(lines)


def c_table(cells: list[Cell]) -> str:
    """The cost of the C header: the time from Rust / the time from C."""
    lines = [title("From C beside from Rust: microseconds")]
    lines.append(f"{'':27}{'size':>9}{'from Rust':>12}{'from C':>12}{'ratio':>9}")
    for cell in cells:
        ratio = cell.ratio("unisono", "unisono-c")
        if ratio is None:
            continue
        line = f"{cell.world} ranks  {cell.collective:18}{size_name(cell.size):>9}"
        line += "".join(f"{_fine(cell.median(peer)):>12}" for peer in ("unisono", "unisono-c"))
        line += f"{ratio:>9.2f}"
        if cell.collective == "all_reduce" and cell.size in marks.SIZES_OF_C and cell.world == 2:
            met = ratio >= marks.MARK_OF_C
            line += f"  ({marks.MARK_OF_C}) {'met' if met else 'MISSED'}"
        lines.append(line)
    return "\n".join(lines)


def barrier_table(cells: list[Cell]) -> str:
    lines = [title("Barrier, microseconds")]
    lines.append(f"{'':9}{'unisono':>12}{'Open MPI':>12}{'difference':>12}")
    for cell in cells:
        ours, theirs = cell.median("unisono"), cell.median("openmpi")
        line = f"{cell.world} ranks  {_fine(ours):>12}{_fine(theirs):>12}"
        if ours and theirs:
            line += f"{(ours - theirs) * 1e6:>+12.2f}"
            if cell.world == 2:
                met = ours - theirs <= marks.MARK_OF_BARRIER
                line += f"  (+1) {'met' if met else 'MISSED'}"
        lines.append(line)
    return "\n".join(lines)


def _fine(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:,.2f}"


def bandwidths(cell: Cell, peer: str) -> tuple[float | None, float | None]:
    """Algorithm and bus bandwidth in bytes per second; none for a barrier."""
    seconds, factor = cell.median(peer), FACTORS.get(cell.collective)
    if not seconds or not factor:
        return None, None
    rate = cell.size / seconds
    return rate, rate * factor(cell.world)


def records(cells: list[Cell], reference_of: dict[str, str]) -> list[dict[str, object]]:
    """Return one flat record for each cell and peer; `reference_of` says what a peer is beside."""
    rows = []
    for cell in cells:
        for peer in (*cell.rounds, *cell.refused):
            rounds = cell.rounds.get(peer, [])
            algorithm, bus = bandwidths(cell, peer)
            reference = reference_of.get(peer)
            rows.append(
                {
                    "ranks": cell.world,
                    "collective": cell.collective,
                    "bytes": cell.size,
                    "dtype": "uint8" if cell.size % 4 else "float32",
                    "peer": peer,
                    "seconds": cell.median(peer),
                    "lowest": min(rounds, default=None),
                    "highest": max(rounds, default=None),
                    "rounds": len(rounds),
                    "calls_per_round": cell.calls.get(peer),
                    "algorithm_bytes_per_second": algorithm,
                    "bus_bytes_per_second": bus,
                    "reference": reference,
                    "ratio": cell.ratio(peer, reference) if reference else None,
                    "refused": cell.refused.get(peer),
                }
            )
    return rows


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, **content: object) -> None:
    """Write what was measured, and beside it where, when, by which commit and which command.

    A list has a line for each entry, and numbers four digits: what is committed is read by people.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, value in (origin() | content).items():
        text = json.dumps(_plain(value))
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(json.dumps(_plain(entry)) for entry in value) + "\n]"
        lines.append(f"{json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Cell):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def origin() -> dict[str, object]:
    """Return the command, commit, date and machine of this run, and the cores that others used."""
    command = [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return {
        "command": f"python {shlex.join(command)}",
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(),
        "others": OTHERS.cores(),
    }


def commit() -> str:
    """Return the commit that is checked out; documents and results may differ from it."""
    git = ["git", "-C", str(CHECKOUT)]
    others = [":!benchmarks/results", ":!docs", ":!*.md"]
    asked = (
        [*git, "rev-parse", "--short=8", "HEAD"],
        [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", *others],
    )
    try:
        name, changed = (subprocess.check_output(words, text=True).strip() for words in asked)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changed else name


def machine() -> dict[str, object]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


class Stolen:
    """The share of these cores' time that the hypervisor gives to others, from now on."""

    def __init__(self) -> None:
        self.before = cores_times()

    def share(self) -> float:
        """Return how much of the time it was until now: 0.1 for a tenth; 0 where unknown."""
        passed = [now - then for now, then in zip(cores_times(), self.before, strict=True)]
        return passed[7] / sum(passed) if sum(passed) > 0 else 0.0


class Others:
    """The cores that programs other than this one and its children use, from now on."""

    def __init__(self) -> None:
        self.before, self.began = self._used(), time.monotonic()

    @staticmethod
    def _used() -> float:
        """Return seconds that are not this program's, with those that the hypervisor took."""
        user, nice, system, *_, stolen = cores_times() or [0] * 8
        ours = sum(os.times()[:4])
        return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK") - ours

    def cores(self) -> float:
        """Return how many it was on average; children count as others until they have ended."""
        passed = time.monotonic() - self.began
        return max(0.0, (self._used() - self.before) / passed) if passed else 0.0


def cores_times() -> list[int]:
    """Return ticks: user, nice, system, idle, iowait, irq, softirq, steal; none where unknown."""
    try:
        text = Path("/proc/stat").read_text()
    except OSError:
        return []
    return [int(number) for number in text.split("\n", 1)[0].split()[1:9]]


OTHERS = Others()


def processor() -> str:
    """Return the processor's name, where the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
