"""The output of benchmarks/cuda.py: its table and the marks, made from measurements alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from harness.arguments import size_name

LATENCY_MARK = 60.0  # microseconds: 8 B all_reduce at 2 ranks, waited for
HOST_MARK = 15.0  # microseconds: a call of it, until it returns
BOUND_MARK = 0.6  # of what the copy rate allows: 256 MiB all_reduce at 2 and 4 ranks
GLOO_MARK = 20.0  # times as fast as gloo: 64 MiB all_reduce at 2 and 4 ranks


@dataclass(frozen=True)
class Setting:
    """The conditions of a cell, from which the bound of its times follows."""

    world: int
    copy_rate: float  # bytes per second
    shared: bool  # all ranks are on one device
    in_place: bool = False  # tensors are read where they lie

    def bound(self, bytes_: int) -> float | None:
        """Return the microseconds in which a large all_reduce can be done, where that is known."""
        if not self.shared or self.world == 1 or not self.copy_rate:
            return None
        passes = 2.0 if self.in_place else 6 - 4 / self.world
        return passes * self.world * bytes_ / self.copy_rate * 1e6


def medians(cell: dict) -> dict[str, list[float]]:
    """Return by backend a call's microseconds: at the rate of many, until it returns, alone."""
    return {
        name: [statistics.median(times) * 1e6 for times in zip(*rounds, strict=True)]
        for name, rounds in cell["seconds"].items()
    }


def heading(setting: Setting, missing: dict[str, str]) -> str:
    rate = f"{setting.copy_rate / 1e9:,.0f} GB/s read and written"
    columns = f"{'unisono':>12}{'alone':>12}{'host':>9}{'gloo':>12}{'nccl':>12}{'of bound':>10}"
    lines = [
        f"\n{setting.world} ranks; copies within the device's memory: {rate}",
        *(f"not measured: {name}: {reason}" for name, reason in missing.items()),
        f"{'':16}{'size':>10}{columns}  microseconds",
    ]
    return "\n".join(lines)


def row(setting: Setting, cell: dict) -> str:
    """Return a cell's line of the table, and what became of backends that were left out in it."""
    times = medians(cell)
    ours, host, alone = times.get("unisono", (None, None, None))
    columns = [(ours, 12), (alone, 12), (host, 9)]
    columns += [(times.get(name, (None,))[0], 12) for name in ("gloo", "nccl")]
    line = f"{cell['collective']:16}{size_name(cell['bytes']):>10}"
    line += "".join(
        f"{'-' if value is None else f'{value:,.1f}':>{width}}" for value, width in columns
    )
    bound = setting.bound(cell["bytes"])
    if cell["collective"] == "all_reduce" and cell["bytes"] >= 1 << 20 and ours and bound:
        line += f"{bound / ours:10.2f}"
    said = [f"{name}: {verdict(met)}" for name, met in marks(setting, cell)]
    lines = [f"{line}  {', '.join(said)}".rstrip()]
    lines += [f"left out from here on: {name}: {why}" for name, why in cell["failed"].items()]
    return "\n".join(lines)


def marks(setting: Setting, cell: dict) -> Iterator[tuple[str, bool | None]]:
    """Yield the marks that a cell is held to, and whether each is met; None: not measured."""
    if cell["collective"] != "all_reduce":
        return
    times = medians(cell)
    ours, host, alone = times.get("unisono", (None, None, None))
    if cell["bytes"] == 8 and setting.world == 2:
        yield f"alone below {LATENCY_MARK:g} us", alone and alone < LATENCY_MARK
        yield f"host below {HOST_MARK:g} us", host and host < HOST_MARK
    if cell["bytes"] == 64 << 20 and setting.world in (2, 4):
        gloo = times.get("gloo", (None,))[0]
        what, met = "", None
        if ours and gloo:
            what, met = f"{gloo / ours:.0f} ", gloo / ours >= GLOO_MARK
        yield f"{what}times as fast as gloo ({GLOO_MARK:g})", met
    if cell["bytes"] == 256 << 20 and setting.world in (2, 4) and setting.shared:
        bound = setting.bound(cell["bytes"])
        yield f"{BOUND_MARK:g} of the bound", ours and bound and bound / ours >= BOUND_MARK


def verdict(met: bool | None) -> str:
    return {True: "met", False: "MISSED", None: "not measured"}[met]


def summary(asked: list[tuple[Setting, dict]]) -> str:
    """Return the marks of all cells that were asked for, also those without times."""
    lines = [
        f"{setting.world} ranks, all_reduce of {size_name(cell['bytes'])}: {what}: {verdict(met)}"
        for setting, cell in asked
        for what, met in marks(setting, cell)
    ]
    return "\n".join(["\nThe marks", *(lines or ["none is held by the cells that were asked for"])])
