"""The comparison with gloo measures what it was asked for, and says so in every form."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from test_examples import run_python

pytest.importorskip("torch")

COMPARE = Path(__file__).resolve().parents[2] / "benchmarks" / "compare.py"
OPS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter"]


def test_compare_reports_every_cell(tmp_path: Path) -> None:
    outputs = ["--json", str(tmp_path / "cells.json"), "--csv", str(tmp_path / "cells.csv")]
    printed = run_python(
        COMPARE, "--quick", "--worlds", "2", "--sizes", "8,4K", *outputs, timeout=150
    )
    assert "ratio = gloo / unisono" in printed
    assert "unisono is faster in" in printed.splitlines()[-1] or "; not in:" in printed

    measured = json.loads((tmp_path / "cells.json").read_text())["cells"]
    cells = [(cell["world"], cell["op"], cell["size"]) for cell in measured]
    assert cells == [(2, op, size) for op in OPS for size in (8, 4096)]
    for cell in measured:
        assert cell["unsupported"] is None
        assert cell["ratio"] == pytest.approx(cell["seconds_1"] / cell["seconds_0"])
        assert all(len(rounds) == cell["rounds"] >= 3 for rounds in cell["round_seconds"])
        assert all(seconds > 0 for rounds in cell["round_seconds"] for seconds in rounds)
    with (tmp_path / "cells.csv").open() as file:
        assert [row["op"] for row in csv.DictReader(file)] == [op for _, op, _ in cells]
