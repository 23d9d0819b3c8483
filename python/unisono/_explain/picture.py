"""Pictures of plans: a table in text, and arrows between the ranks as SVG."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import Any

# As much as a screen shows.
MOST_RANKS = 32
MOST_ROUNDS = 12
WIDTH = 118
MOST_PEERS = 4
# As much as a picture shows.
MOST_ARROWS = 4000
SIGNS = {"send": ">", "recv": "<", "fold": "+", "signal": "!", "wait": "?"}
LEGEND = {
    "send": ">1 sends to rank 1",
    "recv": "<1 receives from it",
    "fold": "+1 adds what comes from it",
    "signal": "!1 signals to it",
    "wait": "?1 waits for its signal",
    "copy": "= copies in memory",
    "reduce": "* adds up in memory",
    "reduce_all": "* adds up in memory",
}


def why_not(answer: dict[str, Any]) -> str | None:
    """Return why there is no picture, if there is none."""
    plans = answer.get("plans", [])
    if not plans or "plan" not in plans[0]:
        steps = sum(plan["steps"] for plan in plans)
        return f"it has {steps:,} steps" if plans else "there are more than 64 ranks"
    if len(plans) > MOST_RANKS:
        return f"there are more than {MOST_RANKS} ranks (--json has their steps)"
    return None


def table(answer: dict[str, Any]) -> list[str]:
    """Return the rounds of all ranks as lines: what each sends and receives in each."""
    plans = [plan["plan"] for plan in answer["plans"]]
    last = answer["rounds"] or 0
    first = 0 if any(step["round"] == 0 for plan in plans for step in plan) else 1
    shown = range(first, min(last, MOST_ROUNDS) + 1)
    rows = [["round", *map(str, shown)]]
    for rank, plan in enumerate(plans):
        by_round: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for step in plan:
            by_round[step["round"]].append(step)
        rows.append([f"rank {rank}", *(_cell(by_round[number]) for number in shown)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while len(widths) > 2 and sum(widths) + 2 * len(widths) > WIDTH:
        widths.pop()
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
    left_out = last - first - len(widths) + 2
    if left_out > 0:
        lines.append(f"... and {left_out} more rounds")
    kinds = {step["kind"] for plan in plans for step in plan}
    words = [words for kind, words in LEGEND.items() if kind in kinds]
    return [*lines, "", ", ".join(dict.fromkeys(words))]


def _cell(steps: list[dict[str, Any]]) -> str:
    peers: dict[str, list[int]] = defaultdict(list)
    for step in steps:
        if step["kind"] in SIGNS:
            peers[step["kind"]] += step["peers"]
    words = [SIGNS[kind] + _numbers(sorted(set(peers[kind]))) for kind in SIGNS if peers.get(kind)]
    if any(step["kind"] in ("reduce", "reduce_all") for step in steps):
        words.append("*")
    elif any(step["kind"] == "copy" for step in steps):
        words.append("=")
    return " ".join(words) or "."


def _numbers(ranks: list[int]) -> str:
    if len(ranks) > MOST_PEERS:
        return f"{len(ranks)} ranks"
    return ",".join(map(str, ranks))


_STYLE = """
svg { background: #ffffff; color: #1c1e21; font: 12px sans-serif }
.far { stroke: #c2410c } .near { stroke: #2563eb } .rank { stroke: #b8bcc4 }
.host { fill: #f2f4f7 }
@media (prefers-color-scheme: dark) {
  svg { background: #16181c; color: #e6e8eb }
  .far { stroke: #fb923c } .near { stroke: #7aa2ff } .rank { stroke: #4b5058 }
  .host { fill: #20242b }
}
"""
LEFT, TOP, ROW, COLUMN = 80, 60, 34, 90


def svg(answer: dict[str, Any], title: str) -> str:
    """Return a picture: a line for each rank, and an arrow for each message from round to round.

    Messages between hosts have another colour than those inside one, and ranks of a host a common
    ground.
    """
    plans = [plan["plan"] for plan in answer["plans"]]
    hosts = answer["hosts"]
    arrows = [
        (rank, peer, step["round"], hosts[rank] != hosts[peer])
        for rank, plan in enumerate(plans)
        for step in plan
        if step["kind"] in ("send", "signal")
        for peer in step["peers"]
    ][:MOST_ARROWS]
    rounds = max((round_ for *_, round_, _ in arrows), default=1)
    width = max(LEFT + COLUMN * rounds + 40, 20 + 8 * len(title))
    height = TOP + ROW * len(plans) + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 6 3 0 6z" fill="context-stroke"/></marker>'
        f'</defs><text x="10" y="20" fill="currentColor" font-size="14">{escape(title)}</text>'
    )
    parts = [head, *_ground(hosts, width)]
    for number in range(1, rounds + 1):
        x = LEFT + COLUMN * (number - 0.5)
        parts.append(
            f'<text x="{x}" y="{TOP - 14}" fill="currentColor" text-anchor="middle">{number}</text>'
        )
    for rank in range(len(plans)):
        y = TOP + ROW * (rank + 0.5)
        parts.append(f'<text x="10" y="{y + 4}" fill="currentColor">rank {rank}</text>')
        parts.append(f'<path class="rank" d="M{LEFT} {y}H{width - 20}"/>')
    for rank, peer, round_, is_far in arrows:
        start, end = LEFT + COLUMN * (round_ - 1) + 10, LEFT + COLUMN * round_ - 10
        at, to = TOP + ROW * (rank + 0.5), TOP + ROW * (peer + 0.5)
        parts.append(
            f'<path class="{"far" if is_far else "near"}" d="M{start} {at}L{end} {to}" '
            'fill="none" marker-end="url(#tip)"/>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _ground(hosts: list[int], width: int) -> list[str]:
    parts = []
    for host in sorted(set(hosts))[::2]:
        ranks = [rank for rank, of in enumerate(hosts) if of == host]
        parts.append(
            f'<rect class="host" x="0" y="{TOP + ROW * ranks[0]}" width="{width}" '
            f'height="{ROW * len(ranks)}"/>'
        )
    return parts
