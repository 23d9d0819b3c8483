"""Bus bandwidth and time over size: a page with drawings of its own, or a PNG by matplotlib.

A row is a point in each frame: its figures out of place, or in place where there are no others.
Other runtimes are dashed lines in the colour of the operation.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unisono._bench.results import Row, Run
from unisono._bench.table import size_name

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ROOM = 760, 300, 64, 34, 14
_COLOURS = 9
_PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>unisono bench</title>
<style>
:root {{ color-scheme: light dark; --paper: #fff; --ink: #222; --grid: #ddd;
  --c0: #1f6fb4; --c1: #c9540a; --c2: #2a8a3c; --c3: #b3262b; --c4: #7a4fb0; --c5: #8a5a3c;
  --c6: #b8479a; --c7: #6b6b6b; --c8: #0b8a8a; }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #16181c; --ink: #ddd; --grid: #3a3d44;
  --c0: #6db3f2; --c1: #ff9d57; --c2: #6fd083; --c3: #ff7b7f; --c4: #bd9bf0; --c5: #d0a184;
  --c6: #f090d0; --c7: #b0b0b0; --c8: #5fd3d3; }} }}
body {{ background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 800px; margin: 2em auto; padding: 0 1em; }}
h1, h2 {{ font-size: 1.1em; }}
svg {{ width: 100%; height: auto; }} svg text {{ fill: var(--ink); font-size: 12px; }}
.grid {{ stroke: var(--grid); }} .line {{ fill: none; stroke-width: 2; }}
.key span {{ margin-right: 1.2em; white-space: nowrap; }}
</style></head><body>
<h1>unisono bench: {ranks} ranks</h1>
<p>{place}<br>{date}<br><code>{command}</code></p>
<p class="key">{key}</p>
<h2>Bus bandwidth, GB/s</h2>
{bandwidth}
<h2>Time of one call, µs</h2>
{time}
</body></html>
"""


@dataclass(frozen=True)
class Line:
    """An operation on one runtime, with (size, time in µs, bus bandwidth) of each row."""

    name: str
    colour: int
    is_dashed: bool
    points: list[tuple[int, float, float]]

    def values(self, which: int) -> list[tuple[int, float]]:
        """Return sizes with times (1) or bandwidths (2), as far as axes of logarithms go."""
        return [(point[0], point[which]) for point in self.points if point[which] > 0]


def draw(run: Run, path: Path) -> None:
    """Draw a run to a file whose name ends in .html or .png."""
    if path.suffix == ".html":
        path.write_text(page(run), "utf-8")
    else:
        _png(run, path)


def lines(rows: Iterable[Row]) -> list[Line]:
    """Return the lines of a drawing; barriers have no size, and no place in it."""
    sized = [row for row in rows if row.size]
    found = []
    for colour, operation in enumerate(dict.fromkeys(row.operation for row in sized)):
        own = [row for row in sized if row.operation == operation]
        points = [(row.size, row.main.time_us, row.main.busbw) for row in own]
        found.append(Line(operation, colour % _COLOURS, False, points))
        for peer in dict.fromkeys(name for row in own for name in row.peers):
            points = [
                (row.size, row.peers[peer].time_us, row.main.busbw * row.main.time_us / took)
                for row in own
                if peer in row.peers and (took := row.peers[peer].time_us)
            ]
            found.append(Line(f"{operation}, {peer}", colour % _COLOURS, True, points))
    return found


def page(run: Run) -> str:
    """Return a page of HTML that needs no other file."""
    here, drawn = run.machine, lines(run.rows)
    place = f"{here['host']}: {here['processor']}, {here['cores']} cores, unisono {here['unisono']}"
    key = "".join(
        f'<span style="color: var(--c{line.colour})">{"┅" if line.is_dashed else "━"} '
        f"{html.escape(line.name)}</span>"
        for line in drawn
    )
    return _PAGE.format(
        ranks=run.rows[0].ranks if run.rows else 0,
        place=html.escape(place),
        date=html.escape(run.date),
        command=html.escape(" ".join(run.command)),
        key=key,
        bandwidth=_frame(drawn, 2, "GB/s"),
        time=_frame(drawn, 1, "µs"),
    )


class _Axis:
    """A logarithmic axis from one pixel to another."""

    def __init__(self, values: list[float], base: float, first: float, last: float) -> None:
        # One decade at least, so that a single value has a place too.
        self.base = base
        self.low = math.floor(math.log(min(values), base) + 1e-9)
        self.high = max(self.low + 1, math.ceil(math.log(max(values), base) - 1e-9))
        self.first, self.last = first, last

    def place(self, value: float) -> float:
        part = (math.log(value, self.base) - self.low) / (self.high - self.low)
        return round(self.first + part * (self.last - self.first), 1)

    def ticks(self, most: int) -> list[float]:
        step = math.ceil((self.high - self.low + 1) / most)
        return [self.base**power for power in range(self.low, self.high + 1, step)]


def _frame(drawn: list[Line], which: int, unit: str) -> str:
    found = [point for line in drawn for point in line.values(which)]
    if not found:
        return "<p>Nothing to draw.</p>"
    across = _Axis([size for size, _ in found], 2, _LEFT, _WIDTH - _ROOM)
    up = _Axis([value for _, value in found], 10, _HEIGHT - _BELOW, _ROOM)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{unit} over size">']
    for tick in across.ticks(10):
        x = across.place(tick)
        parts.append(f'<path class="grid" d="M{x} {_ROOM}V{_HEIGHT - _BELOW}"/>')
        name = size_name(int(tick))
        parts.append(f'<text x="{x}" y="{_HEIGHT - 14}" text-anchor="middle">{name}</text>')
    for tick in up.ticks(8):
        y = up.place(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _ROOM}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for line in drawn:
        colour, dash = f"var(--c{line.colour})", ' stroke-dasharray="6 4"' * line.is_dashed
        places = [(across.place(size), up.place(value)) for size, value in line.values(which)]
        track = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline class="line" stroke="{colour}"{dash} points="{track}"/>')
        for (size, value), (x, y) in zip(line.values(which), places, strict=True):
            title = html.escape(f"{line.name}, {size_name(size)}: {value:.4g} {unit}")
            circle = f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}">'
            parts.append(f"{circle}<title>{title}</title></circle>")
    return "\n".join([*parts, "</svg>"])


def _png(run: Run, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    frames = figure.subplots(2, 1, sharex=True)
    for frame, which, name in zip(frames, (2, 1), ("bus bandwidth, GB/s", "time, µs"), strict=True):
        for line in lines(run.rows):
            points = line.values(which)
            frame.loglog(
                [size for size, _ in points],
                [value for _, value in points],
                marker=".",
                color=f"C{line.colour}",
                linestyle="--" if line.is_dashed else "-",
                label=line.name,
            )
        frame.set_ylabel(name)
        frame.grid(visible=True, alpha=0.3)
    frames[1].set_xscale("log", base=2)
    frames[1].xaxis.set_major_formatter(lambda size, _: size_name(int(size)))
    frames[1].tick_params(axis="x", labelrotation=45)
    figure.legend(*frames[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    here = run.machine
    figure.suptitle(f"{here['processor']}, {here['cores']} cores", fontsize=10)
    figure.savefig(path, dpi=120)
