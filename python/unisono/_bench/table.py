"""The table of nccl-tests, printed row by row, with a line of progress below it on a terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from unisono._bench.results import Figures, Row, Run, average, wrong_in

#: A bandwidth that differs from an earlier run's by less is not coloured.
_CHANGE = 0.05
_GREEN, _RED, _PLAIN = "\033[32m", "\033[31m", "\033[0m"
_ERASE = "\r\033[K"


def size_name(size: int) -> str:
    """Return a size in the largest unit that divides it."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size} B"


class Table:
    """Prints rows as they come; nothing where `out` is None.

    `progress` is where the line of progress goes, if it is a terminal.
    """

    def __init__(
        self,
        out: TextIO | None,
        progress: TextIO | None,
        peers: Sequence[str] = (),
        against: bool = False,
    ) -> None:
        self.out, self.peers, self.against = out, peers, against
        self.is_coloured = bool(out and out.isatty() and not os.environ.get("NO_COLOR"))
        self.shown = progress if progress and progress.isatty() else None

    def line(self, text: str = "") -> None:
        """Print a line of its own."""
        if self.out:
            print(text, file=self.out, flush=True)

    def progress(self, text: str = "") -> None:
        """Show a line in the place of the one before; without text, erase it."""
        if self.shown:
            print(f"{_ERASE}{text}", end="", file=self.shown, flush=True)

    def head(self, operation: str) -> None:
        """Print the names of the columns."""
        more = [f"{name:>18}" for name in self.peers] + ["  against"] * self.against
        units = [f"{'(us)':>11}  ratio"] * len(self.peers) + ["    ratio"] * self.against
        forms = "".join(f"{name:^33}" for name in ("out-of-place", "in-place"))
        names = f"{'time':>11}{'algbw':>8}{'busbw':>8}{'#wrong':>7}"[1:] * 2
        bandwidths = f"{'(us)':>11}{'(GB/s)':>8}{'(GB/s)':>8}{'':>7}"[1:] * 2
        self.line("#")
        self.line(f"# {operation:<48}{forms}".rstrip())
        columns = f"{'size':>11}{'count':>12}{'type':>10}{'redop':>7}{'root':>6}"
        self.line(f"# {columns}  {names}{''.join(more)}")
        self.line(f"# {'(B)':>11}{'(elements)':>12}{'':23}  {bandwidths}{''.join(units)}".rstrip())

    def row(self, row: Row) -> None:
        """Print a row."""
        self.progress()
        cells = [f"  {row.size:>11}{row.count:>12}{row.type:>10}{row.redop:>7}{row.root!s:>6}  "]
        cells += [_figures(form) for form in (row.out_of_place, row.in_place)]
        for name in self.peers:
            peer = row.peers.get(name)
            cells.append(f"{peer.time_us:>11.2f} {peer.ratio:>6.2f}" if peer else f"{'-':>18}")
        if self.against:
            cells.append(self._against(row.against))
        self.line("".join(cells))

    def _against(self, ratio: float | None) -> str:
        if ratio is None:
            return f"{'-':>9}"
        text = f"{ratio:>9.2f}"
        if not self.is_coloured or abs(ratio - 1) <= _CHANGE:
            return text
        return f"{_GREEN if ratio > 1 else _RED}{text}{_PLAIN}"

    def top(self, run: Run, ranks: int) -> None:
        """Print where the rows come from."""
        here = run.machine
        hosts = f"{here['hosts']} hosts" if here["hosts"] > 1 else "1 host"
        self.line(f"# unisono {here['unisono']}: {ranks} ranks on {hosts}")
        self.line(f"# {here['host']}: {here['processor']}, {here['cores']} cores")

    def end(self, rows: Sequence[Row]) -> None:
        """Print the sum of all rows."""
        self.progress()
        self.line("#")
        if any(figures.wrong is not None for row in rows for figures in row.figures):
            wrong = wrong_in(rows)
            self.line(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
        self.line(f"# Avg bus bandwidth    : {average(rows):g}")


def _figures(form: Figures | None) -> str:
    if form is None:
        return f"{'-':>10}{'-':>8}{'-':>8}{'-':>7}"
    bandwidths = [f"{one:>8.2f}" if one else f"{'-':>8}" for one in (form.algbw, form.busbw)]
    wrong = "-" if form.wrong is None else form.wrong
    return f"{form.time_us:>10.2f}{''.join(bandwidths)}{wrong:>7}"
