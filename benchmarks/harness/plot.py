"""Plots of a sweep.

One peer: latency and bus bandwidth over the size, a column for each world size. Several peers: the
time of one call, a row for each collective, so that lines that are compared lie in one frame.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from harness import report
from harness.arguments import size_name
from harness.cells import Cell


def sweep(cells: list[Cell], path: Path) -> None:
    """Draw all cells to a PNG."""
    peers = list(dict.fromkeys(peer for cell in cells for peer in cell.rounds))
    figure = one_peer(cells, peers[0]) if len(peers) == 1 else several_peers(cells, peers)
    machine = report.machine()
    figure.suptitle(f"{machine['processor']}, {machine['cores']} cores", fontsize=10)
    figure.set_layout_engine("constrained")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def one_peer(cells: list[Cell], peer: str) -> Figure:
    """Latency above, bus bandwidth below; colours are collectives."""
    worlds = sorted({cell.world for cell in cells})
    figure, axes = plt.subplots(
        2, len(worlds), figsize=(4.6 * len(worlds), 7.6), sharex=True, sharey="row", squeeze=False
    )
    for column, world in enumerate(worlds):
        latency, bandwidth = axes[0][column], axes[1][column]
        for which, collective in enumerate(collectives_of(cells)):
            sizes, seconds, bus = points(cells, world, collective, peer)
            look = {"color": f"C{which}", "linestyle": "-" if which < 10 else "--"}
            latency.plot(sizes, [1e6 * value for value in seconds], label=collective, **look)
            bandwidth.plot(sizes, [value / 1e9 for value in bus], **look)
        latency.set_title(f"{report.LABELS.get(peer, peer)}, {world} ranks", fontsize=10)
        latency.set_yscale("log")
        dress(latency)
        dress(bandwidth)
    axes[0][0].set_ylabel("time of one call, µs")
    axes[1][0].set_ylabel("bus bandwidth, GB/s")
    axes[0][0].legend(fontsize=8)
    return figure


def several_peers(cells: list[Cell], peers: list[str]) -> Figure:
    """One frame for each collective and world size; colours are peers."""
    worlds, collectives = sorted({cell.world for cell in cells}), collectives_of(cells)
    size = (4.6 * len(worlds), 2.6 * len(collectives) + 0.8)
    figure, axes = plt.subplots(
        len(collectives), len(worlds), figsize=size, sharex=True, sharey="row", squeeze=False
    )
    for row, collective in enumerate(collectives):
        for column, world in enumerate(worlds):
            frame = axes[row][column]
            for peer in peers:
                sizes, seconds, _ = points(cells, world, collective, peer)
                label = report.LABELS.get(peer, peer)
                if peer.startswith("torch/"):
                    label += " through torch"
                frame.plot(sizes, [1e6 * value for value in seconds], label=label)
            frame.set_title(f"{collective}, {world} ranks", fontsize=9)
            frame.set_yscale("log")
            dress(frame)
        axes[row][0].set_ylabel("µs")
    axes[0][0].legend(fontsize=8)
    return figure


def collectives_of(cells: list[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.collective for cell in cells))


def points(
    cells: list[Cell], world: int, collective: str, peer: str
) -> tuple[list[int], list[float], list[float]]:
    """Return the sizes of one line, with the seconds and the bus bandwidth at each."""
    found = [
        (cell.size, cell.median(peer) or 0.0, report.bandwidths(cell, peer)[1] or 0.0)
        for cell in cells
        if (cell.world, cell.collective) == (world, collective) and peer in cell.rounds
    ]
    found.sort()
    return (
        [size for size, _, _ in found],
        [time for _, time, _ in found],
        [bus for *_, bus in found],
    )


def dress(frame: Axes) -> None:
    frame.set_xscale("log", base=2)
    frame.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    frame.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_name(int(size))))
    frame.tick_params(axis="x", labelrotation=60, labelsize=8)
    frame.grid(visible=True, alpha=0.3)


def scale(lines: list[tuple[str, str, list[tuple[int, float]]]], path: Path) -> None:
    """Draw predicted times over the number of ranks: by title, name, and ranks with seconds."""
    titles = list(dict.fromkeys(title for title, _, _ in lines))
    figure, frames = plt.subplots(2, 2, figsize=(10, 7.2), sharex=True)
    for title, frame in zip(titles, frames.flat, strict=True):
        for _, name, points in (line for line in lines if line[0] == title):
            is_chosen = name == "auto"
            look = {"color": "k", "linestyle": ":"} if is_chosen else {}
            ranks, times = [point[0] for point in points], [point[1] for point in points]
            frame.plot(ranks, times, label="chosen" if is_chosen else name, **look)
        frame.set_title(title, fontsize=10)
        frame.set_xscale("log", base=2)
        frame.set_yscale("log")
        frame.grid(visible=True, alpha=0.3)
    for frame in frames[1]:
        frame.set_xlabel("ranks, 8 on each host")
    for frame in frames[:, 0]:
        frame.set_ylabel("predicted seconds of an all_reduce")
    frames[0][0].legend(fontsize=8)
    figure.set_layout_engine("constrained")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
