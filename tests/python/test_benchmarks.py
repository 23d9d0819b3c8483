"""The benchmarks measure what they were asked for, report all of it, and notice wrong results."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import algorithms
import compare
import instructions
import pytest
import sweep
from harness import build, marks, report
from harness.cells import Cell, Effort, measure
from harness.jobs import FailedError, Job, Jobs, RefusedError
from harness.peers import Options, Peer, start
from test_examples import run_python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
needs_cargo = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")

# One rank under commands, as simple as it can be: answers what the test wants.
RANK = """
import pathlib, sys
folder, rank = pathlib.Path(sys.argv[1]), sys.argv[2]
replies = (folder / f"replies-{rank}").open("w", buffering=1)
commands = (folder / f"commands-{rank}").open()
replies.write("ok\\n")
for line in commands:
    verb, name, *rest = [*line.split(), ""]
    calls = rest[1:2]
    if name == "dies":
        sys.exit("no more of this")
    if name == "late" and rank == "1":
        continue
    answers = {"refused": "no such thing", "wrong": "wrong 3 elements"}
    seconds = int(calls[0]) * (1 + int(rank)) * 1e-6 if verb == "time" else 0
    replies.write(answers.get(name, f"ok {seconds}") + "\\n")
"""


@pytest.fixture
def job() -> Iterator[Job]:
    with Jobs() as jobs:
        folder = jobs.folder("fake")
        commands = [[sys.executable, "-c", RANK, str(folder), str(rank)] for rank in range(2)]
        yield jobs.add(Job("fake", 2, commands, folder)).wait_until_ready()


def cell(world: int, size: int, **seconds: float) -> Cell:
    """All_reduce with one round on each peer; `__` in a name stands for a slash."""
    rounds = {peer.replace("__", "/").replace("_heap", "-heap"): [t] for peer, t in seconds.items()}
    return Cell(world, "all_reduce", size, rounds, dict.fromkeys(rounds, 1), {})


def test_the_slowest_rank_counts(job: Job) -> None:
    assert job.command("time all_reduce 8 100") == pytest.approx([100e-6, 200e-6])
    measured = measure("all_reduce", 8, [Peer("fake", "fake", job)], Effort(0.05, 5))
    assert measured.rounds["fake"] == pytest.approx([2e-6] * 5)


def test_wrong_results_refusals_and_deaths_are_told_apart(job: Job) -> None:
    with pytest.raises(FailedError, match="wrong 3 elements"):
        job.command("check wrong 8")
    with pytest.raises(RefusedError, match="such thing"):
        job.command("check refused 8")
    refused = measure("refused", 8, [Peer("fake", "fake", job)], Effort(0.05, 5))
    assert refused.refused == {"fake": "such thing"}
    assert refused.median("fake") is None
    with pytest.raises(FailedError, match=r"(?s)ended.*no more of this"):
        job.command("check dies 8")


def test_a_rank_that_does_not_answer_is_given_up(job: Job, monkeypatch) -> None:
    monkeypatch.setattr("harness.jobs.REPLY_SECONDS", 0.5)
    with pytest.raises(FailedError, match=r"no reply within 0 s from \{1\}"):
        job.command("check late 8")


def test_marks_are_held_against_the_right_columns() -> None:
    row = next(row for row in marks.ROWS if row.peer == "openmpi" and row.world == 2)
    cells = {(2, "all_reduce", size): cell(2, size, unisono=1.0, openmpi=2.0) for size in (8, 64)}
    cells[2, "all_reduce", 512] = cell(2, 512, unisono=2.0, openmpi=1.0)
    cells[2, "all_reduce", 1 << 20] = cell(2, 1 << 20, unisono=1.0, openmpi=1.0)
    cells[2, "all_reduce", 64 << 20] = cell(2, 64 << 20, unisono=1, unisono_heap=0.5, openmpi=2)
    small, mebibyte, large, heap = row.ratios(cells)
    assert small.ratio == pytest.approx(2 ** (1 / 3))
    assert small.note == "0.50 at 512 B"
    assert [column.met for column in (small, mebibyte, large, heap)] == [True, False, True, True]
    assert (large.ratio, heap.ratio) == (2.0, 4.0)

    printed = report.marks_table(cells, {})
    assert "1.26 (1.1) met" in printed
    assert "1.00 (1.1) MISSED" in printed
    assert "4.00 (3.7) met" in printed
    through_torch = {(2, "all_reduce", 8): cell(2, 8, torch__unisono=1.0, torch__gloo=15.5)}
    assert "15.50 (15) met" in report.marks_table({}, through_torch)


def test_the_bound_is_the_fastest_of_its_orders() -> None:
    measured = cell(2, 4 << 20, unisono=3.0, bound__one_pass=1.5, bound__two_pass=2.0)
    assert measured.bound() == 1.5
    assert "2.00" in report.bound_table([measured], {2: {"copy": 5e9}}).splitlines()[-1]


def test_what_torch_takes_bounds_every_ratio() -> None:
    through_torch = cell(2, 8, torch__unisono=2.0, torch__gloo=30.0, torch__fake=1.5)
    last = report.torch_table([through_torch]).splitlines()[-2].split()
    assert last[-2:] == ["15.0", "20.0"]


def test_bandwidths_are_those_of_nccl_tests() -> None:
    measured = cell(4, 1000, unisono=1e-6)
    assert report.bandwidths(measured, "unisono") == pytest.approx((1e9, 1.5e9))
    assert report.FACTORS["all_gather"](4) == 0.75
    assert report.FACTORS["broadcast"](4) == 1


def test_a_sweep_skips_what_takes_too_much_and_says_why(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--smallest", "1", "--step", "4"])
    args = sweep.parse_arguments()
    assert (args.sizes[0], args.sizes[1], args.sizes[-1]) == (1, 4, 1 << 30)
    run = sweep.Sweep(args)
    monkeypatch.setattr(sweep, "available_memory", lambda: 4 << 30)
    assert run.too_much(64 << 20, 8, 1, None) is None
    assert "8,192 MiB of buffers" in run.too_much(512 << 20, 8, 1, None)
    slow = cell(2, 1 << 20, unisono=4.0)
    assert "expected to take 80 s" in run.too_much(4 << 20, 2, 1, slow)


def test_changes_of_instruction_counts_are_told() -> None:
    lines = instructions.table({"barrier": 110.0, "all_reduce": 50.0}, {"barrier": 100.0})
    assert lines.splitlines()[1].split() == ["barrier", "110", "100", "+10.0%"]
    assert lines.splitlines()[2].split()[-1] == "50"


@needs_cargo
def test_compare_reports_every_cell(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    outputs = ["--json", str(tmp_path / "cells.json"), "--csv", str(tmp_path / "cells.csv")]
    selection = ["--ranks", "2", "--sizes", "8,4M", "--collectives", "all_reduce,ping_pong,barrier"]
    printed = run_python(
        BENCHMARKS / "compare.py", "--quick", "--minutes", "0.1", *selection, *outputs, timeout=280
    )
    assert "gloo through torch, 2 ranks" in printed
    assert "unisono is at least as fast as gloo in" in printed
    assert "A wait of 2 s" in printed

    cells = json.loads((tmp_path / "cells.json").read_text())["cells"]
    native = [("all_reduce", 8), ("all_reduce", 4 << 20), ("ping_pong", 8), ("ping_pong", 4 << 20)]
    through_torch = native[:2]
    expected = [*native, ("barrier", 8), *through_torch]
    measured = [(of["collective"], of["size"]) for of in cells]
    # On a busy machine cells without a mark are left out, and counted.
    assert set(measured) <= set(expected)
    assert ("all_reduce", 8) in measured
    assert measured == expected or "not measured for want of time" in printed
    assert {"torch/unisono", "torch/gloo"} <= cells[-1]["rounds"].keys()
    for of in cells:
        assert all(len(rounds) >= 3 for rounds in of["rounds"].values())
        assert all(seconds > 0 for rounds in of["rounds"].values() for seconds in rounds)
    assert any(peer.startswith("bound/") for peer in cells[1]["rounds"])
    if "not measured: openmpi" in printed:
        pytest.skip("Open MPI is not installed: compared without it")
    with (tmp_path / "cells.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["peer"] == "openmpi"]
    compared = [row["collective"] for row in rows]
    assert compared == [name for name, _ in expected[:5]] or measured != expected
    assert all(float(row["ratio"]) > 0 for row in rows)


@needs_cargo
def test_every_collective_is_right_on_every_peer(tmp_path: Path) -> None:
    """Three ranks: block sizes differ from powers of two, and `ping_pong` leaves one rank over."""
    with Jobs() as jobs:
        peers, missing = start(["unisono", "openmpi"], 3, jobs, Options())
        assert "unisono" not in missing
        for collective in compare.NATIVE:
            for size in (1, 24, 12_000):
                measured = measure(collective, size, peers, Effort(0.01, 3))
                assert measured.refused == {}
                assert measured.rounds.keys() == {peer.name for peer in peers}
        idle = next(peer.job for peer in peers if peer.name == "unisono").command("idle 2")
        # Two ranks wait for the third for two seconds; spinning would use two seconds of a core.
        assert max(idle) < 0.5, idle
        if missing:
            pytest.skip(f"right on unisono; not tried: {missing}")


@needs_cargo
def test_sweep_writes_csv_json_and_a_plot(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("cells.csv", "cells.json", "plot.png")]
    outputs = ["--csv", str(files[0]), "--json", str(files[1]), "--plot", str(files[2])]
    selection = ["--ranks", "2", "--collectives", "all_reduce,send_recv"]
    sizes = ["--smallest", "1", "--largest", "256", "--step", "16"]
    printed = run_python(
        BENCHMARKS / "sweep.py", "--minutes", "0.05", *selection, *sizes, *outputs, timeout=280
    )
    with files[0].open() as file:
        rows = list(csv.DictReader(file))
    expected = [(name, size) for name in ("all_reduce", "send_recv") for size in ("1", "16", "256")]
    assert [(row["collective"], row["bytes"]) for row in rows] == expected
    assert [row["dtype"] for row in rows[:2]] == ["uint8", "float32"]
    assert len(json.loads(files[1].read_text())["cells"]) == len(rows)
    if "matplotlib is not installed" in printed:
        pytest.skip("written, but not plotted: matplotlib is not installed")
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_choices_are_held_against_the_best_algorithm() -> None:
    first = cell(2, 8, choice=2.0, direct=2.0, ring=1.0)
    second = cell(2, 64, choice=2.0, direct=2.5, ring=4.0)
    assert (algorithms.best(first), algorithms.excess(first)) == (("ring", 1.0), 2.0)
    assert algorithms.excess(second) == 0.8
    assert "direct 2.00" in algorithms.table([first])
    assert "geometric mean 1.265 over 2 cells; worst 2.00" in algorithms.summary([first, second])
    rows = algorithms.records([first])
    assert [row["best"] for row in rows] == ["ring"] * 3
    assert [row["ratio"] for row in rows] == [None, 1.0, 0.5]


@needs_cargo
def test_every_algorithm_is_compared(tmp_path: Path) -> None:
    outputs = [tmp_path / "cells.json", tmp_path / "cells.csv"]
    selection = ["--ranks", "2,3", "--sizes", "8,64K", "--collectives", "all_gather,barrier"]
    effort = ["--minutes", "0.05", "--rounds", "3"]
    files = ["--json", str(outputs[0]), "--csv", str(outputs[1])]
    printed = run_python(BENCHMARKS / "algorithms.py", *selection, *effort, *files, timeout=280)
    assert "3 ranks: geometric mean" in printed
    cells = json.loads(outputs[0].read_text())["cells"]
    assert [of["size"] for of in cells] == [8, 64 << 10, 8] * 2
    of_two, of_three = set(cells[0]["rounds"]), set(cells[3]["rounds"])
    assert {"choice", "direct", "ring", "bruck"} == of_three
    assert of_two == of_three | {"recursive_doubling"}
    assert set(cells[2]["rounds"]) == {"choice", "direct", "bruck"}
    with outputs[1].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(of["rounds"]) for of in cells)
    assert all(float(row["choice_to_best"]) > 0 for row in rows)


def test_ddp_steps_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "steps.json"
    printed = run_python(BENCHMARKS / "ddp.py", "--quick", "--json", str(output), timeout=150)
    assert "ratio" in printed
    seconds = json.loads(output.read_text())["seconds"]
    assert {name: len(steps) for name, steps in seconds.items()} == {
        "unisono": 5,
        "gloo": 5,
        "DDP alone": 5,
        "no DDP": 5,
    }


@needs_cargo
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_instructions_are_counted() -> None:
    counts = instructions.count_all(["barrier"], (500, 4000))
    assert 50 < counts["barrier"] < 50_000


def test_what_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    build.rust_bench.cache_clear()
    with pytest.raises(build.MissingError, match="cargo is not installed"):
        build.rust_bench("collectives")
    with pytest.raises(build.MissingError, match="valgrind is not installed"):
        instructions.count_all(["barrier"], (1, 2))
