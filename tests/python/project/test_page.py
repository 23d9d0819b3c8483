"""Numbers and pictures in the documents are those that the committed results and plans make."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

# As in test_benchmarks.py: for these imports alone.
with pytest.MonkeyPatch.context() as path:
    path.syspath_prepend(ROOT / "benchmarks")
    import page

IMAGES = ROOT / "docs" / "images"
PLANS = {
    f"plan-{name}.svg": ["--ranks", "4", "--hosts", "1", "--algorithm", name]
    for name in ("direct", "recursive_doubling", "ring", "halving", "windows")
}
PLANS["plan.svg"] = ["--ranks", "8", "--hosts", "2", "--algorithm", "hierarchical"]


def test_the_documents_are_what_the_results_make() -> None:
    for document, text in page.documents(page.read()).items():
        assert document.read_text("utf-8") == text, "run: python benchmarks/page.py"


def test_the_plots_are_of_the_results() -> None:
    results = page.read()
    for name, needed in page.PLOTS.items():
        if any(result in results for result in needed):
            drawn = (IMAGES / f"{name}.svg").read_text("utf-8")
            assert page.digest(needed) in drawn, "run: python benchmarks/page.py"


def test_every_result_says_where_it_is_from() -> None:
    for name, result in page.read().items():
        program = page.COMMANDS[name].split()[0]
        assert result["command"].startswith(f"python benchmarks/{program} ")
        assert re.fullmatch(r"[0-9a-f]{8,}", result["commit"]), "measure what is committed"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
        assert result["machine"].keys() >= {"cores", "processor"}
    named = {path.stem for path in page.RESULTS.glob("*.json")}
    assert named <= set(page.COMMANDS)


def test_a_part_without_a_result_says_how_to_measure_it() -> None:
    assert "page.py --measure ddp`" in page.part("ddp", {})


def test_the_readme_takes_numbers_of_a_quiet_machine_alone(tmp_path: Path) -> None:
    times = {"unisono": [1.0], "openmpi": [2.5]}
    calls = dict.fromkeys(times, 1)
    cell = {"world": 2, "collective": "all_reduce", "size": 8, "rounds": times, "calls": calls}
    result = {
        "command": "python x.py --json y.json",
        "commit": "abc",
        "date": "2026-01-02",
        "machine": {"processor": "P", "cores": 2},
        "others": 0.01,
        "cells": [{**cell, "refused": {}}],
    }
    results = {"one-host": json.loads(json.dumps(result))}
    text = page.readme(results)
    assert "| Open MPI 5 from C, unisono from Rust, 2 ranks | 2.50 |" in text
    assert "From `python x.py`, commit abc, 2026-01-02, P, 2 cores." in text
    results["one-host"]["others"] = 0.8
    assert page.readme(results) is None
    assert "Other programs used 0.8 cores" in page.part("one-host", results)


@pytest.mark.parametrize("name", PLANS)
def test_the_plans_are_those_of_today(name: str, tmp_path: Path) -> None:
    drawn = tmp_path / name
    common = ["all_reduce", "--bytes", "16K", "--typical", "--svg", str(drawn)]
    command = [sys.executable, "-m", "unisono", "explain", *common, *PLANS[name]]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert drawn.read_text("utf-8") == (IMAGES / name).read_text("utf-8")


def test_every_plan_is_shown() -> None:
    shown = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    assert set(re.findall(r"images/(plan[\w-]*\.svg)", shown)) == set(PLANS)
