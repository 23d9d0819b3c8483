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

# How each peer is drawn: those from C and Rust, and dashed those through torch.
LOOKS = {
    "unisono": {"color": "C0"},
    "unisono-heap": {"color": "C2"},
    "openmpi": {"color": "C3"},
    "torch/unisono": {"color": "C0", "linestyle": "--"},
    "torch/gloo": {"color": "C1", "linestyle": "--"},
}
BY_RANKS = (8, 1 << 20, 64 << 20)


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


def by_size(cells: list[Cell], path: Path, digest: str) -> None:
    """Draw the time of an all_reduce by its size, a frame for each world size."""
    worlds = sorted({cell.world for cell in cells})
    figure, axes = plt.subplots(
        1, len(worlds), figsize=(3.6 * len(worlds), 3.8), sharey=True, squeeze=False
    )
    for world, frame in zip(worlds, axes[0], strict=True):
        for peer, look in LOOKS.items():
            sizes, seconds, _ = points(cells, world, "all_reduce", peer)
            if sizes:
                frame.plot(sizes, [1e6 * value for value in seconds], label=named(peer), **look)
        frame.set_title(f"{world} ranks", fontsize=10)
        frame.set_yscale("log")
        dress(frame)
    axes[0][0].set_ylabel("µs of an all_reduce")
    axes[0][0].legend(fontsize=8)
    save(figure, path, digest)


def by_ranks(cells: list[Cell], path: Path, digest: str) -> None:
    """Draw the time of an all_reduce by the number of ranks, a frame for each of some sizes."""
    sizes = [size for size in BY_RANKS if any(cell.size == size for cell in cells)]
    figure, axes = plt.subplots(1, len(sizes), figsize=(3.6 * len(sizes), 3.4), squeeze=False)
    for size, frame in zip(sizes, axes[0], strict=True):
        for peer, look in LOOKS.items():
            line = sorted(
                (cell.world, 1e6 * (cell.median(peer) or 0))
                for cell in cells
                if cell.size == size and peer in cell.rounds
            )
            if line:
                frame.plot(*zip(*line, strict=True), marker="o", label=named(peer), **look)
        frame.set_title(size_name(size), fontsize=10)
        frame.set_yscale("log")
        frame.set_xticks(sorted({cell.world for cell in cells}))
        frame.set_xlabel("ranks")
        frame.grid(visible=True, alpha=0.3)
    axes[0][0].set_ylabel("µs of an all_reduce")
    axes[0][-1].legend(fontsize=8)
    save(figure, path, digest)


def by_hosts(beds: dict[str, dict[tuple[int, str], float | None]], path: Path, digest: str) -> None:
    """Draw the share of the link's rate that an all_reduce reaches, by the ranks of each host."""
    sizes = sorted({size for shares in beds.values() for size, _ in shares})
    peers = list(dict.fromkeys(peer for shares in beds.values() for _, peer in shares))
    figure, axes = plt.subplots(
        1, len(sizes), figsize=(3.6 * len(sizes), 3.2), sharey=True, squeeze=False
    )
    width = 0.8 / len(peers)
    for size, frame in zip(sizes, axes[0], strict=True):
        for which, peer in enumerate(peers):
            shares = [of_bed.get((size, peer)) or 0 for of_bed in beds.values()]
            places = [place + which * width for place in range(len(beds))]
            label = "unisono" if peer == "choice" else named(peer)
            frame.bar(places, shares, width, label=label, color=f"C{which}")
        middle = (len(peers) - 1) * width / 2
        frame.set_xticks([place + middle for place in range(len(beds))], list(beds), fontsize=8)
        frame.set_title(size_name(size), fontsize=10)
        frame.set_xlabel("ranks of each host")
        frame.grid(visible=True, axis="y", alpha=0.3)
    axes[0][0].set_ylabel("share of the link's rate")
    axes[0][0].legend(fontsize=8)
    save(figure, path, digest)


def named(peer: str) -> str:
    return report.LABELS.get(peer, peer) + (" through torch" if peer.startswith("torch/") else "")


def save(figure: Figure, path: Path, digest: str) -> None:
    """Write an SVG that is the same whenever its data are, with their digest in it."""
    figure.set_layout_engine("constrained")
    for frame in figure.axes:
        frame.minorticks_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": digest}):
        figure.savefig(path, metadata={"Date": None, "Description": digest})
    plt.close(figure)
    # Trailing blanks, which editors take away.
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", "utf-8")


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
