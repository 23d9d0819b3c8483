"""The examples for NumPy run and print what they promise; each asserts its own result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "numpy"
LINES = {
    "average.py": r"rank \d: the average is \[.*\]",
    "pi.py": r"rank 0: pi is about 3\.1\d+, from \[.*\]",
    "heat.py": r"rank 0: \d ranks computed what one would, to the last bit",
}


def test_every_example_is_tested():
    # The launcher's tests have elastic.py, which is for `unisono launch --min`.
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*LINES, "elastic.py"}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", LINES)
def test_example(name, world):
    results = run_ranks(world, EXAMPLES / name)
    talkers = world if name == "average.py" else 1
    for result in results[:talkers]:
        assert re.fullmatch(LINES[name], result.output.strip()), result.output
    assert all(result.output == "" for result in results[talkers:])
