"""The findings of a trace as one page of HTML with pictures, which needs nothing beside it."""

from __future__ import annotations

import statistics
from html import escape

from unisono._trace.report import Rank, Report, remarks, seconds, straggler, tables

_STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 1000px; padding: 0 1em;
       background: #ffffff; color: #1c1e21 }
table { border-collapse: collapse; font-size: 14px }
td, th { padding: 2px 12px 2px 0; text-align: left; border-bottom: 1px solid #8884 }
svg { width: 100%; font: 12px sans-serif }
svg text { fill: currentColor }
.other { fill: #c9ced6 } .transfer { fill: #3a7bd5 } .waiting { fill: #e0862b }
.late { fill: #c0392b }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #e6e8eb }
  .other { fill: #3c4048 }
}
"""
_LEGEND = """<p><svg viewBox="0 0 980 14" role="img">
<rect class="waiting" width="12" height="12"/><text x="18" y="11">waits for others</text>
<rect class="transfer" x="150" width="12" height="12"/>
<text x="168" y="11">in operations else</text>
<rect class="other" x="320" width="12" height="12"/>
<text x="338" y="11">outside of operations</text></svg></p>"""
# The most ranks of a picture: those that wait or hold others most.
MOST_RANKS = 64
_LEFT, _WIDTH, _ROW = 80, 900, 18


def page(told: Report, name: str) -> str:
    """Return the page of a report on the folder of that name."""
    title = f"unisono trace of {escape(name)}"
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f"<p>{told.title}.</p>",
        *(f"<p>{escape(line)}</p>" for line in remarks(told)),
        "<h2>Stragglers</h2>",
    ]
    late = told.stragglers
    parts += [f"<p>{escape(straggler(rank, told))}</p>" for rank in late[:8]]
    if late:
        parts += ["<p>For how long others waited for each rank:</p>", _held(late)]
    else:
        parts.append("<p>None.</p>")
    chosen = sorted(told.ranks, key=lambda rank: -(rank.waiting + rank.held))[:MOST_RANKS]
    chosen.sort(key=lambda rank: rank.rank)
    parts += [
        "<h2>The time of each rank</h2>",
        _LEGEND,
        _bars(chosen),
        "<h2>Waiting through time</h2>",
        "<p>From the first operation to the last; where a column is full the rank only waits.</p>",
        _heat(chosen, told.seconds),
    ]
    for title, (columns, rows) in tables(told).items():
        if rows:
            parts += [f"<h2>{escape(title)}</h2>", _table(columns, rows)]
    return "\n".join([*parts, "</body></html>", ""])


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _picture(rows: int, inside: list[str], below: int = 0) -> str:
    height = rows * _ROW + below
    return f'<svg viewBox="0 0 980 {height}" role="img">{"".join(inside)}</svg>'


def _label(row: int, rank: Rank) -> str:
    return f'<text x="0" y="{row * _ROW + 13}">rank {rank.rank}</text>'


def _rect(kind: str, left: float, row: int, width: float, told: str) -> str:
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{row * _ROW + 2}" width="{max(width, 0):.1f}" '
        f'height="{_ROW - 4}"><title>{escape(told)}</title></rect>'
    )


def _held(late: list[Rank]) -> str:
    shown, inside = late[:MOST_RANKS], []
    most = max(rank.held for rank in shown) or 1
    for row, rank in enumerate(shown):
        told = (
            f"{seconds(rank.held)}, late {len(rank.late)} times by "
            f"{seconds(statistics.median(rank.late))}"
        )
        width = 560 * rank.held / most
        inside += [_label(row, rank), _rect("late", _LEFT, row, width, told)]
        inside.append(f'<text x="{_LEFT + width + 8:.0f}" y="{row * _ROW + 13}">{told}</text>')
    return _picture(len(shown), inside)


def _bars(ranks: list[Rank]) -> str:
    inside = []
    for row, rank in enumerate(ranks):
        whole = rank.span or 1
        shares = {
            "waiting": rank.waiting,
            "transfer": max(rank.inside - rank.waiting, 0),
            "other": max(whole - rank.inside, 0),
        }
        left = float(_LEFT)
        inside.append(_label(row, rank))
        for kind, time in shares.items():
            width = _WIDTH * time / whole
            inside.append(_rect(kind, left, row, width, f"{seconds(time)}, {time / whole:.1%}"))
            left += width
    return _picture(len(ranks), inside)


def _heat(ranks: list[Rank], span: float) -> str:
    inside = []
    for row, rank in enumerate(ranks):
        inside.append(_label(row, rank))
        width = _WIDTH / max(len(rank.bins), 1)
        for at, share in enumerate(rank.bins):
            height = (_ROW - 3) * share
            if height >= 0.3:
                bottom = row * _ROW + _ROW - 2
                inside.append(
                    f'<rect class="waiting" x="{_LEFT + at * width:.1f}" '
                    f'y="{bottom - height:.1f}" width="{width:.1f}" height="{height:.1f}">'
                    f"<title>{share:.0%}</title></rect>"
                )
    bottom = len(ranks) * _ROW + 14
    inside.append(f'<text x="{_LEFT}" y="{bottom}">0</text>')
    inside.append(
        f'<text x="{_LEFT + _WIDTH}" y="{bottom}" text-anchor="end">{seconds(span)}</text>'
    )
    return _picture(len(ranks), inside, 20)
