"""The benchmarks measure what they were asked for, report all of it, and notice wrong results."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import run_python
from namespaces import why_not
from ranks import run_ranks

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
# For these imports alone: with the folder on the path, benchmarks/cuda.py is found where CuPy and
# torch mean NVIDIA's package `cuda`, and the ranks of tests take over the path.
with pytest.MonkeyPatch.context() as path:
    path.syspath_prepend(BENCHMARKS)
    import against
    import algorithms
    import compare
    import instructions
    import sweep
    from harness import build, commits, gpu, marks, report
    from harness.cells import Cell, Effort, measure
    from harness.jobs import FailedError, Job, Jobs, RefusedError
    from harness.peers import Options, Peer, start

NO_HOSTS = why_not()
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
    orders = {"bound/one_pass": [1.5], "bound/two_pass": [2.0], "private bound/pull": [2.5]}
    times = {"unisono": [5.0], "unisono-heap": [3.0], "openmpi": [30.0]}
    rounds = orders | times
    measured = Cell(2, "all_reduce", 4 << 20, rounds, dict.fromkeys(rounds, 1), {})
    through_torch = {(2, "all_reduce", 4 << 20): cell(2, 4 << 20, torch__gloo=45.0)}
    assert measured.bound() == ("one_pass", 1.5)
    table = report.bound_table([measured], {2: {"copy": 5e9}}, through_torch)
    row = next(line for line in table.splitlines() if "one_pass" in line)
    assert row.count("2.00") == 2
    assert "(1.2) MISSED" in row
    assert "pull" in row
    assert "gloo 30.0 and 18.0, Open MPI 20.0 and 12.0" in table


def test_what_torch_takes_bounds_every_ratio() -> None:
    through_torch = cell(2, 8, torch__unisono=2.0, torch__gloo=30.0, torch__fake=1.5)
    last = report.torch_table([through_torch]).splitlines()[-2].split()
    assert last[-2:] == ["15.0", "20.0"]


def test_time_of_children_is_not_that_of_others(monkeypatch) -> None:
    ticks, stolen = os.sysconf("SC_CLK_TCK"), [0]

    def ours_and_stolen() -> list[int]:
        return [int(sum(os.times()[:4]) * ticks), 0, 0, 0, 0, 0, 0, stolen[0]]

    monkeypatch.setattr(report, "cores_times", ours_and_stolen)
    others = report.Others()
    subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)
    assert others.cores() < 0.1
    stolen[0] = 100 * ticks
    assert others.cores() > 1


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


def beside(world: int, size: int, this: list[float], other: list[float]) -> Cell:
    """All_reduce on this checkout and on another commit."""
    rounds = {"this": this, "abc": other}
    return Cell(world, "all_reduce", size, rounds, dict.fromkeys(rounds, 1), {})


def test_a_commit_is_held_against_another(monkeypatch) -> None:
    hot = against.Setting("numpy", "private", 1, 2, "hot")
    cold = against.Setting("numpy", "private", 2, 4, "cold")
    of_hot = [beside(2, 8, [1, 1, 1], [4, 4, 4]), beside(2, 1 << 20, [4, 4, 5], [1, 1, 1])]
    cells = {hot: of_hot, cold: [beside(4, 8, [1, 1, 1], [0.95, 0.95, 0.95])]}
    lines = against.summary(cells, "abc", 0.9).splitlines()
    assert " 1.000     2 cells  numpy, one host, 2 ranks, private memory, hot" in lines
    assert " 0.950     1 cells  numpy, 2 hosts, 4 ranks, private memory, cold" in lines
    assert " 0.983     3 cells in all" in lines
    slow = "  0.25  all_reduce 1 MiB, numpy, one host, 2 ranks, private memory, hot (0.20 - 0.25)"
    assert lines[-3:] == ["Cells below 0.9: 1 of 3", "-" * 23, slow]
    assert against.worst(cells, "abc") == 0.25
    rows = against.records(cells, "abc")
    assert [row["ratio"] for row in rows] == [4, 0.25, pytest.approx(0.95)]
    assert (rows[2]["hosts"], rows[2]["state"], rows[2]["bytes"]) == (2, "cold", 8)


def test_what_is_held_against_a_commit_is_chosen(monkeypatch) -> None:
    options = ["--doors", "numpy,torch", "--hosts", "1,4", "--ranks", "2,4", "--sizes", "8,1M"]
    selection = ["--collectives", "reduce,barrier,all_reduce", "--states", "cold"]
    monkeypatch.setattr(sys, "argv", ["against.py", "HEAD", *options, *selection])
    args = against.parse_arguments()
    both = (commits.checkout(), dataclasses.replace(commits.checkout(), name="abc"))
    run = against.Run(args, both)
    # Two ranks are no four hosts.
    groups = [(group.door, group.hosts, group.world) for group in run.groups()]
    assert groups == [(door, *of) for door in commits.DOORS for of in ((1, 2), (1, 4), (4, 4))]
    sums = [("reduce", 8), ("reduce", 1 << 20), ("barrier", 8)]
    assert run.wanted("numpy") == [*sums, ("all_reduce", 8), ("all_reduce", 1 << 20)]
    assert run.wanted("torch") == run.wanted("numpy")[2:]
    assert run.left == 3 * 5 + 3 * 3
    hosts = [command[1] for command in against.Group("numpy", 2, 3).commands(["rank"])]
    assert hosts == ["UNISONO_HOST=host0", "UNISONO_HOST=host0", "UNISONO_HOST=host1"]
    for wrong in (["--doors", "c"], ["--ranks", "1"], ["--states", "warm"], []):
        monkeypatch.setattr(sys, "argv", ["against.py", *(["HEAD", *wrong] if wrong else [])])
        with pytest.raises(SystemExit):
            against.parse_arguments()


@pytest.mark.skipif(not (BENCHMARKS.parent / ".git").exists(), reason="not a git checkout")
def test_the_sources_of_a_commit_are_unpacked_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(commits, "PLACE", tmp_path)
    with pytest.raises(build.MissingError, match="no-such-branch is no commit"):
        commits.commit("no-such-branch")
    of = commits.commit("HEAD")
    assert of.sources == tmp_path / of.name / "sources"
    assert (of.sources / "rust/python/Cargo.toml").is_file()
    (of.sources / "Cargo.toml").unlink()
    assert commits.commit(of.name) == of
    assert sorted(path.name for path in of.sources.parent.iterdir()) == ["sources"]
    assert not (of.sources / "Cargo.toml").exists()


def test_a_package_has_what_was_built_and_nothing_built_before(tmp_path: Path, monkeypatch) -> None:
    built, sources = tmp_path / "lib_core.so", tmp_path / "sources/python/unisono"
    sources.mkdir(parents=True)
    for file in (built, sources / "__init__.py", sources / "_core.abi3.so", sources / "errors.py"):
        file.write_text(file.parent.name)
    monkeypatch.setattr(commits, "build_door", lambda _, door: (f"{door}.so", built))
    of = commits.Build("abc", tmp_path / "sources", tmp_path / "target", tmp_path / "package")
    for doors in (("numpy", "torch"), ("numpy",)):
        commits.build(of, doors)
        names = sorted(path.name for path in (of.package / "unisono").iterdir())
        assert names == ["__init__.py", "errors.py", *(f"{door}.so" for door in doors)]


@pytest.mark.parametrize(
    "layout, door, asked, library",
    [
        ("rust/torch", "numpy", "unisono-module", "target/release/lib_core.so"),
        ("rust/torch", "torch", "unisono-torch", "target/release/libcore_torch.so"),
        ("rust/python", "numpy", "unisono-python", "target/release/lib_core.so"),
        (
            "rust/python",
            "torch",
            "unisono-python --features torch",
            "target/torch-2.9/release/lib_core.so",
        ),
    ],
)
def test_doors_are_built_from_old_commits_and_new_ones(
    tmp_path: Path, monkeypatch, layout: str, door: str, asked: str, library: str
) -> None:
    cargo = tmp_path / "cargo"
    cargo.write_text('#!/bin/sh\necho "$* $UNISONO_TORCH_DIR" >asked\n')
    cargo.chmod(0o755)
    monkeypatch.setenv("CARGO", str(cargo))
    monkeypatch.setenv("UNISONO_TORCH_DIR", "")
    monkeypatch.setattr(commits, "torch_door", lambda: ("core-torch-2.9.so", Path("/torch")))
    (tmp_path / "sources" / layout).mkdir(parents=True)
    of = commits.Build("abc", tmp_path / "sources", tmp_path / "target", tmp_path / "package")
    name, built = commits.build_door(of, door)
    assert name == {"numpy": "_core.abi3.so", "torch": "core-torch-2.9.so"}[door]
    assert built == tmp_path / library
    torch = "/torch" if door == "torch" else ""
    said = (of.sources / "asked").read_text()
    assert said == f"build --release -p {asked} {torch}\n"


@pytest.mark.parametrize("memory", ["private", "heap"])
def test_numpy_ranks_are_right_and_measured_hot_and_cold(memory: str) -> None:
    """Three ranks: `ping_pong` leaves one over. Both commits are this one, as it is built."""
    package = BENCHMARKS.parent / "python"
    group = against.Group("numpy", 1, 3)
    with Jobs() as jobs:
        builds = [commits.Build(name, package, package, package) for name in ("this", "abc")]
        both = [group.start(of, jobs, (memory,)) for of in builds]
        peers = [Peer(job.name, job.name, job.wait_until_ready(), f"{memory}/") for job in both]
        for cold_bytes in (0, 1 << 20):
            for job in both:
                job.command(f"cold {cold_bytes}")
            for collective in compare.NATIVE:
                for size in (1, 24, 12_000) if cold_bytes == 0 else (24,):
                    measured = measure(collective, size, peers, Effort(0.01, 3, 5))
                    assert measured.refused == {}
                    assert measured.rounds.keys() == {"this", "abc"}
                    assert all(calls <= 5 for calls in measured.calls.values())


def test_changes_of_instruction_counts_are_shown() -> None:
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
def test_ranks_do_not_wait_for_time_slices_beside_programs_that_compute() -> None:
    """A rank that yields to such a program waits some milliseconds to run again."""
    cores = len(os.sched_getaffinity(0))
    medians = []
    with compare.busy(cores) as neighbours, Jobs() as jobs:
        before = [cpu_seconds(neighbour.pid) for neighbour in neighbours]
        peers, _ = start(["unisono"], 2 * cores, jobs, Options())
        for _ in range(5):
            rounds = measure("all_reduce", 8, peers, Effort(0.1, 9)).rounds["unisono"]
            medians.append(statistics.median(rounds))
        computed = [cpu_seconds(neighbour.pid) for neighbour in neighbours]
    assert all(now - then > 0.1 for then, now in zip(before, computed, strict=True))
    assert all(neighbour.poll() is not None for neighbour in neighbours)
    # With yields alone it is four milliseconds on two cores.
    assert min(medians) < 1.5e-3, medians


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    assert {"choice", "direct", "ring", "bruck", "windows"} == of_three
    assert of_two == of_three | {"recursive_doubling"}
    assert set(cells[2]["rounds"]) == {"choice", "direct", "bruck"}
    with outputs[1].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(of["rounds"]) for of in cells)
    assert all(float(row["choice_to_best"]) > 0 for row in rows)


@needs_cargo
def test_large_groups_are_predicted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "scale.png"
    printed = run_python(BENCHMARKS / "scale.py", "--plot", str(plot), timeout=280)
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] == ["65536"]]
    # Of each network and size a row, and one of what it needs.
    assert [len(row) for row in rows] == [6] * 4 + [9]
    for row, latency in zip(rows, [20e-6, 20e-6, 20e-3, 20e-3], strict=False):
        ring, tree, hierarchy, chosen = map(float, row[1:5])
        assert chosen <= min(ring, tree, hierarchy)
        # 8,192 hosts: between them all go around, or double what they know.
        assert ring > 2 * 8191 * latency
        assert min(tree, hierarchy, chosen) > 13 * latency
    assert plot.stat().st_size > 10_000


@needs_cargo
@pytest.mark.skipif(NO_HOSTS is not None, reason=f"{NO_HOSTS}")
def test_hosts_are_measured_on_limited_links() -> None:
    pytest.importorskip("torch")
    selection = ["--hosts", "2,1", "--sizes", "64K", "--rate", "1000", "--numbering", "round-robin"]
    effort = ["--algorithms", "hierarchical", "--minutes", "0.05", "--rounds", "3"]
    printed = run_python(BENCHMARKS / "network.py", *selection, *effort, timeout=280)
    assert "ranks on hosts [0, 1, 0]" in printed
    rows = [line for line in printed.splitlines() if line.startswith("all_reduce")]
    # A time and a share of the line for the choice, hierarchical, gloo and unisono through torch.
    assert len(rows) == 1
    assert rows[0].count("(") == 4, printed


def test_ranks_are_killed_in_turn(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "rounds.json"
    options = ["--ranks", "2", "--rounds", "1", "--rows", "call", "--json", str(output)]
    printed = run_python(BENCHMARKS / "failure.py", *options, timeout=150)
    assert "unisono, blocking call" in printed
    seconds = json.loads(output.read_text())["seconds"]
    assert set(seconds) == {"unisono, blocking call", "gloo, blocking call"}
    assert all(len(rounds) == 1 and rounds[0] > 0 for rounds in seconds.values())


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


def of_device(size: int, collective: str = "all_reduce", **microseconds: list[float]) -> dict:
    """A cell of benchmarks/cuda.py: a round of the rate, the host's share, and a call alone."""
    seconds = {name: [[time * 1e-6 for time in times]] for name, times in microseconds.items()}
    return {"collective": collective, "bytes": size, "seconds": seconds, "failed": {}}


def test_marks_of_a_gpu_are_those_of_their_cells() -> None:
    """Each mark belongs to one size and some worlds, and to all_reduce alone."""
    sizes = (8, 16, 1 << 20, 64 << 20, 256 << 20)
    held = {
        (world, size): [name for name, _ in gpu.marks(gpu.Setting(world, 1e12, True), cell)]
        for world in (1, 2, 4, 8)
        for size in sizes
        for cell in (of_device(size, unisono=[1, 1, 1], gloo=[30, 30, 30]),)
    }
    assert {where: names for where, names in held.items() if names} == {
        (2, 8): ["alone below 60 us", "host below 15 us"],
        (2, 64 << 20): ["30 times as fast as gloo (20)"],
        (4, 64 << 20): ["30 times as fast as gloo (20)"],
        (2, 256 << 20): ["0.6 of the bound"],
        (4, 256 << 20): ["0.6 of the bound"],
    }
    assert not list(gpu.marks(gpu.Setting(2, 1e12, True), of_device(8, "broadcast")))


@pytest.mark.parametrize(
    "size, times, verdicts",
    [
        # The mark of 8 B is held against a call that is waited for, not against the rate.
        (8, {"unisono": [70.0, 14.9, 59.9]}, [True, True]),
        (8, {"unisono": [20.0, 15.1, 60.1]}, [False, False]),
        (8, {"gloo": [1.0, 1.0, 1.0]}, [None, None]),
        (64 << 20, {"unisono": [10.0, 1, 11], "gloo": [201.0, 1, 1]}, [True]),
        (64 << 20, {"unisono": [10.0, 1, 11], "gloo": [199.0, 1, 1]}, [False]),
        (64 << 20, {"unisono": [10.0, 1, 11]}, [None]),
        (64 << 20, {"gloo": [10.0, 1, 11]}, [None]),
        (256 << 20, {"unisono": [1000.0, 1, 1]}, [True]),
        (256 << 20, {"unisono": [1001.0, 1, 1]}, [False]),
        (256 << 20, {}, [None]),
    ],
)
def test_marks_of_a_gpu_are_met_missed_or_not_measured(size, times, verdicts) -> None:
    # The rate at which a millisecond is the bound's 0.6, and a little less.
    setting = gpu.Setting(2, 4 * 2 * (256 << 20) / 0.6e-3 * (1 - 1e-9), True)
    measured = of_device(size, **times)
    assert [met for _, met in gpu.marks(setting, measured)] == verdicts
    words = {True: ": met", False: ": MISSED", None: ": not measured"}
    printed = gpu.summary([(setting, measured)])
    assert printed.count(": ") == 2 * len(verdicts)
    for text in (printed, gpu.row(setting, measured)):
        assert all(text.count(words[met]) == verdicts.count(met) for met in words)


def test_the_bound_of_a_gpu_is_what_its_ranks_must_move() -> None:
    assert gpu.Setting(2, 1e6, True).bound(8) == 4 * 2 * 8
    assert gpu.Setting(4, 1e6, True).bound(8) == 5 * 4 * 8
    assert gpu.Setting(4, 1e6, True, True).bound(8) == 2 * 4 * 8
    for unknown in (gpu.Setting(1, 1e6, True), gpu.Setting(2, 1e6, False), gpu.Setting(2, 0, True)):
        assert unknown.bound(8) is None
        assert "of the bound: met" not in gpu.row(unknown, of_device(256 << 20, unisono=[1, 1, 1]))
    line = gpu.row(gpu.Setting(4, 1e12, True), of_device(1 << 20, unisono=[80.0, 2.0, 3.0]))
    assert line.split() == ["all_reduce", "1", "MiB", "80.0", "3.0", "2.0", "-", "-", "0.26"]


def test_a_backend_that_is_left_out_on_a_gpu_is_named() -> None:
    assert "not measured: nccl: why" in gpu.heading(gpu.Setting(2, 1e9, True), {"nccl": "why"})
    measured = of_device(8, "broadcast", gloo=[1.0, 1, 1]) | {"failed": {"unisono": "rank 1: no"}}
    line, left_out = gpu.row(gpu.Setting(2, 1e9, True), measured).splitlines()
    assert line.split() == ["broadcast", "8", "B", "-", "-", "-", "1.0", "-"]
    assert left_out == "left out from here on: unisono: rank 1: no"


def test_a_backend_that_fails_on_a_gpu_does_not_end_the_others() -> None:
    pytest.importorskip("torch")
    for result in run_ranks(2, "cuda_benchmark_ranks:measures_the_others", torch=True):
        missing, first, second = result.value
        assert list(missing) == ["absent"]
        assert "Unknown backend type absent" in missing["absent"]
        assert first["failed"] == {"breaks": "rank 1: RuntimeError: it broke ... as it must"}
        assert {name: len(rounds) for name, rounds in first["seconds"].items()} == {"gloo": 5}
        assert all(times[0] > 0 for times in first["seconds"]["gloo"])
        assert second["failed"] == {}
        assert list(second["seconds"]) == ["gloo"]


def test_the_benchmark_of_a_gpu_ends_with_what_was_not_measured(tmp_path: Path) -> None:
    """Ranks that die leave their cells unmeasured, and the exit status says so."""
    pytest.importorskip("torch")
    output = tmp_path / "cells.json"
    (result,) = run_ranks(
        1, "cuda_benchmark_ranks:finds_no_device", str(output), torch=True, check=False
    )
    assert "2 ranks ended in all_reduce of 8 B: " in result.output
    assert "they go on without nccl" in result.output
    assert "all_reduce of 8 B: alone below 60 us: not measured" in result.output
    assert "unisono was not measured in 2 of 2 cells" in result.output
    assert result.exit_code == 1
    assert json.loads(output.read_text())["2"]["cells"] == []


def test_no_import_finds_a_benchmark_instead_of_a_package() -> None:
    """NVIDIA's package is called cuda: CuPy and torch import it, in every rank of a test, too."""
    program = "import cuda; print(list(cuda.__path__))"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert str(BENCHMARKS) not in ended.stdout + ended.stderr
    assert ended.returncode == 0 or "ModuleNotFoundError: No module named 'cuda'" in ended.stderr


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
