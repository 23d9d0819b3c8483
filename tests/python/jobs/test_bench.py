"""``unisono bench``: its table, its file, and that it counts wrong values."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import ROOT, Done, run, script

from unisono import _bench
from unisono._bench import plot
from unisono._bench.operations import OPERATIONS, OUT_OF_PLACE, REDUCTIONS, Cell, Known, dtype_of
from unisono._bench.results import Figures, Peer, Row, Run, average, wrong_in
from unisono._bench.table import Table

UNISONO = [sys.executable, "-m", "unisono"]
QUICK = ("--seconds", "0.01")
ENVIRONMENT = {"NO_COLOR": "", "COLUMNS": "80"}


def bench(*arguments: str, code: int = 0) -> Done:
    done = run([*UNISONO, "bench", *arguments], env=ENVIRONMENT)
    assert done.code == code, done
    return done


def data(done: Done) -> list[list[str]]:
    """The words of the rows of a table."""
    return [line.split() for line in done.out if line and not line.startswith("#")]


# Without ranks.


def test_sizes() -> None:
    assert _bench.sizes("8") == [8]
    assert _bench.sizes("8-1K", 8) == [8, 64, 512, 1024]
    assert _bench.sizes("1M,8-32,16KiB") == [8, 32, 16 << 10, 1 << 20]
    for wrong in ("", "0", "8-", "-8", "64-8", "8X", "1.5M", "K"):
        with pytest.raises(ValueError):
            _bench.sizes(wrong)


def test_bus_bandwidths_are_those_of_nccl_tests() -> None:
    factors = {name: operation.factor(4) for name, operation in OPERATIONS.items()}
    assert factors == {
        "all_reduce": 1.5,
        "broadcast": 1,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "all_to_all": 0.75,
        "reduce": 1,
        "gather": 0.75,
        "scatter": 0.75,
        "scan": 1,
        "exscan": 1,
        "send_recv": 1,
        "barrier": 0,
    }
    figures = Figures.of(seconds=1e-3, size=1 << 20, factor=1.5, wrong=0)
    assert (figures.time_us, figures.algbw, figures.busbw) == (1000, 1.048576, 1.572864)


def test_counts_are_of_a_block() -> None:
    counts = {name: one.count(1024, 4, np.dtype("f4")) for name, one in OPERATIONS.items()}
    assert {counts[name] for name in ("all_reduce", "broadcast", "reduce", "send_recv")} == {256}
    assert {counts[name] for name in ("all_gather", "reduce_scatter", "scatter")} == {64}
    assert counts["barrier"] == 0


def test_rank_variables_are_those_of_the_launchers() -> None:
    source = (ROOT / "rust/core/src/rendezvous/launcher/launchers.rs").read_text()
    assert re.findall(r'(?m)^ +rank: "(\w+)",', source) == list(_bench.RANK_VARIABLES)


def carried_out(cells: list[Cell], root: int) -> None:
    """Do by NumPy what an operation is, from what the cells of all ranks give."""
    operation = cells[0].operation
    given = [cell.given.astype(np.float64) for cell in cells]
    for rank, cell in enumerate(cells):
        contributors = operation.contributors(rank, len(cells))
        if contributors == 0 or (operation.is_to_root and rank != root):
            continue
        own = slice(rank * cell.count, (rank + 1) * cell.count)
        if operation.reduces:
            how = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "avg": np.mean}
            whole = how[cell.known.reduction](given[:contributors], axis=0)
            cell.taken[:] = whole[own] if operation.gives_blocks else whole
        elif operation.gives_blocks and operation.takes_blocks:
            cell.taken[:] = np.concatenate([one[own] for one in given])
        elif operation.takes_blocks:
            cell.taken[:] = np.concatenate(given)
        elif operation.name == "send_recv":
            cell.taken[:] = given[rank - 1]
        else:
            cell.taken[:] = given[root][own] if operation.gives_blocks else given[root]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int64"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "barrier"])
def test_wrong_values_are_counted(name: str, dtype: str, reduction: str) -> None:
    operation, world, root, count = OPERATIONS[name], 3, 1, 700
    for form in operation.forms:
        known = Known(world, dtype_of(dtype), reduction)
        cells = [Cell(operation, form, rank, world, count, known) for rank in range(world)]
        for cell in cells:
            cell.prepare()
        if form == OUT_OF_PLACE:
            assert any(cell.wrong(root) > count // 2 for cell in cells), "nothing has been done"
        carried_out(cells, root)
        assert [cell.wrong(root) for cell in cells] == [0] * world
        for place in (0, 300, -1):
            cells[root].taken[place] += 1
        assert cells[root].wrong(root) == 3


def test_an_element_in_another_place_is_wrong() -> None:
    cell = Cell(OPERATIONS["all_gather"], OUT_OF_PLACE, 0, 2, 1000, Known(2, np.dtype("f4"), "sum"))
    for rank in (1, 0):
        giver = Cell(cell.operation, OUT_OF_PLACE, rank, 2, 1000, cell.known)
        giver.prepare()
        cell.taken[1000 * (1 - rank) :][:1000] = giver.given
    assert cell.wrong(0) == 2000
    cell.taken[:] = np.nan
    assert cell.wrong(0) == 2000


def row(busbw: float, wrong: int = 0, ratio: float | None = None) -> Row:
    figures = Figures(10.0, busbw, busbw, wrong)
    return Row("all_reduce", 8, 2, "float32", "sum", -1, 2, figures, figures, {}, ratio)


def test_sums_of_a_run() -> None:
    rows = [row(1.0, wrong=2), row(3.0)]
    assert (wrong_in(rows), average(rows)) == (4, 2.0)
    assert row(3.0).faster_than(row(2.0)) == 1.5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "ratio, colour", [(1.06, "\033[32m"), (0.94, "\033[31m"), (1.04, ""), (0.96, "")]
)
def test_colours_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, ratio: float, colour: str
) -> None:
    def printed(out: io.StringIO) -> str:
        Table(out, None, against=True).row(row(1.0, ratio=ratio))
        return out.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = printed(io.StringIO())
    assert plain.endswith(f"{ratio:>9.2f}\n")
    assert "\033" not in plain
    assert printed(Terminal()).count("\033") == (2 if colour else 0)
    assert colour in printed(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(Terminal()) == plain


def test_the_line_of_progress_is_erased() -> None:
    out, shown = io.StringIO(), Terminal()
    table = Table(out, shown)
    table.progress("row 1 of 2")
    table.row(row(1.0))
    assert shown.getvalue() == "\r\033[Krow 1 of 2\r\033[K"
    assert "row 1 of 2" not in out.getvalue()


def test_a_page_has_a_point_for_each_row() -> None:
    figures = Figures(10.0, 1.0, 1.0, 0)
    rows = [
        Row("all_<&>", 8 << n, 2, "float32", "sum", -1, 2, figures, None, {"gloo": Peer(30.0, 3.0)})
        for n in range(4)
    ]
    here = {"host": "a", "hosts": 1, "processor": "<b>", "cores": 2, "unisono": "1"}
    page = plot.page(Run(here, ["unisono", "bench"], rows))
    drawings = re.findall(r"(?s)<svg.*?</svg>", page)
    assert len(drawings) == 2
    for drawing in drawings:
        assert len(ET.fromstring(drawing).findall("circle")) == 2 * len(rows)
    assert "<b>" not in page
    assert "all_&lt;&amp;&gt;, gloo, 8 B: 0.3333 GB/s" in page


# With ranks.


def test_help_fits_a_screen() -> None:
    lines = bench("--help").out
    assert len(lines) <= 36
    assert max(map(len, lines)) <= 80
    assert any("bench " in line for line in run([*UNISONO, "--help"]).out)


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["allreduce"], "there are all_reduce, broadcast"),
        (["--sizes", "8-4"], "a span goes up"),
        (["--dtype", "float31"], "there is no type 'float31'"),
        (["--dtype", "complex64"], "the types are"),
        (["--plot", "x.pdf"], "ends in .html or .png"),
        (["--json", "no/such/folder.json"], "there is no folder"),
        (["--against", "no-such.json"], "No such file"),
        (["--against", str(ROOT / "pyproject.toml")], "is no file that `unisono bench --json`"),
        (["--compare", "nccl"], "there are gloo, mpi"),
        (["-n", "2", "--root", "2"], "there are 2 ranks"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    with pytest.raises(SystemExit) as ended:
        _bench.bench(arguments, "unisono")
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_every_operation_is_measured_and_right() -> None:
    done = bench("all", "-n", "2", "--sizes", "8,100K", *QUICK)
    assert f"# unisono {_version()}: 2 ranks on 1 host" in done.out
    [names, units, *_] = [line for line in done.out if "size" in line or "(B)" in line]
    columns = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
    assert names.split() == ["#", *columns.split()]
    assert units.split() == ["#", "(B)", "(elements)", *(["(us)", "(GB/s)", "(GB/s)"] * 2)]
    titles = [line.split()[1] for line in done.out if line.endswith("in-place")]
    assert titles == list(OPERATIONS)
    rows = data(done)
    assert len(rows) == 2 * (len(OPERATIONS) - 1) + 1
    for words in rows:
        assert len(words) == 13
        assert {words[8], words[12]} <= {"0", "-"}
        assert "0" in (words[8], words[12])
    assert rows[1][:5] == ["102400", "25600", "float32", "sum", "-1"]
    assert rows[5][:5] == ["102400", "12800", "float32", "none", "-1"]
    assert done.out[-2] == "# Out of bounds values : 0 OK"
    assert float(done.out[-1].removeprefix("# Avg bus bandwidth    : ")) > 0


def _version() -> str:
    import unisono

    return unisono.__version__


def test_other_types_and_buffers_are_right_too() -> None:
    options = ("--dtype", "int8", "--op", "avg", "--root", "1", "--iterations", "3", "--heap")
    done = bench("all_reduce", "reduce", "reduce_scatter", "-n", "3", "--sizes", "9K", *options)
    assert [words[:5] for words in data(done)] == [
        ["9216", "9216", "int8", "avg", "-1"],
        ["9216", "9216", "int8", "avg", "1"],
        ["9216", "3072", "int8", "avg", "-1"],
    ]


def test_prefixes_are_right_too() -> None:
    for op in ("prod", "avg"):
        done = bench("scan", "exscan", "-n", "3", "--sizes", "9K", "--op", op, "--iterations", "3")
        assert [words[:4] for words in data(done)] == [["9216", "2304", "float32", op]] * 2


def test_a_rank_of_a_job_prints_once() -> None:
    command = [*UNISONO, "launch", "-n", "3", "-m", "unisono", "bench", "--sizes", "4K", *QUICK]
    done = run(command, env=ENVIRONMENT)
    assert done.code == 0, done
    assert sum("3 ranks on 1 host" in line for line in done.out) == 1
    assert sum(line.split()[1:2] == ["4096"] for line in done.out) == 1
    assert all(line.startswith("[0]") for line in done.out)


BROKEN = """
from unisono import _bench
from unisono._bench import rank

right = rank.call

def broken(comm, cell):
    one = right(comm, cell)
    def call(root):
        one(root)
        if cell.rank == 1:
            cell.taken[[3, 5]] += 1
    return call

rank.call = broken
sys.exit(_bench.bench(sys.argv[1:], "unisono"))
"""


def test_a_wrong_result_ends_the_run_with_1(tmp_path: Path) -> None:
    path = script(tmp_path, BROKEN)
    launch = [*UNISONO, "launch", "-n", "2", "--output", "plain", str(path)]
    done = run([*launch, "all_gather", "--sizes", "1K", *QUICK], env=ENVIRONMENT)
    assert done.code == 1, done
    [words] = data(done)
    assert (words[8], words[12]) == ("2", "2")
    assert "# Out of bounds values : 4 FAILED" in done.out
    unchecked = run([*launch, "--no-check", "--sizes", "1K", *QUICK], env=ENVIRONMENT)
    assert unchecked.code == 0, unchecked
    [words] = data(unchecked)
    assert (words[8], words[12]) == ("-", "-")
    assert not any("Out of bounds" in line for line in unchecked.out)


def test_a_run_is_kept_and_compared_with(tmp_path: Path) -> None:
    first, second, page = (tmp_path / name for name in ("1.json", "2.json", "x.html"))
    asked = ["all_reduce", "broadcast", "barrier", "-n", "2", *QUICK]
    bench(*asked, "--sizes", "8,1K", "--json", str(first))
    also = ("--against", str(first), "--json", str(second), "--plot", str(page))
    done = bench(*asked, "--sizes", "8,1K,4K", *also)
    before, after = Run.read(first), Run.read(second)
    assert before.command[1:] == ["bench", *asked, "--sizes", "8,1K", "--json", str(first)]
    assert {"host", "hosts", "processor", "cores", "unisono"} == before.machine.keys()
    assert [row.size for row in after.rows] == [8, 1024, 4096, 8, 1024, 4096, 0]
    earlier = {row.key: row for row in before.rows}
    assert earlier.keys() < {row.key for row in after.rows}
    for row, words in zip(after.rows, data(done), strict=True):
        found = earlier.get(row.key)
        if found is None:
            assert (row.size, row.against, words[-1]) == (4096, None, "-")
        else:
            # Two ranks, so as many bytes move.
            assert row.against == pytest.approx(found.main.time_us / row.main.time_us)
            assert words[-1] == f"{row.against:.2f}"
    assert page.read_text("utf-8").count("<circle") == 2 * len([r for r in after.rows if r.size])


def test_json_is_all_that_is_printed() -> None:
    done = bench("-n", "2", "--sizes", "8", "--json", "-", *QUICK)
    record: dict[str, Any] = json.loads("\n".join(done.out))
    assert [(row["operation"], row["ranks"]) for row in record["rows"]] == [("all_reduce", 2)]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_gloo_is_measured_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = ("--compare", "gloo,mpi", "--json", str(path), "--sizes", "1K", "--iterations", "2")
    done = bench("all", "-n", "2", *options)
    assert any(line.startswith("# no mpi: start the ranks by it: mpirun") for line in done.out)
    assert any(line.endswith("gloo") for line in done.out)
    for row, words in zip(Run.read(path).rows, data(done), strict=True):
        if row.operation in ("scan", "exscan"):
            # torch has none.
            assert (row.peers, words[-1]) == ({}, "-")
            continue
        gloo, form = row.peers["gloo"], row.out_of_place
        if row.operation in ("all_reduce", "reduce", "broadcast"):
            form = row.in_place
        assert gloo.ratio == pytest.approx(gloo.time_us / form.time_us)
        assert words[-2:] == [f"{gloo.time_us:.2f}", f"{gloo.ratio:.2f}"]
