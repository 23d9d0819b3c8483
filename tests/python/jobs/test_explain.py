"""``unisono explain``: the algorithm, the prices and the plan of a call, without a group."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from unisono import _explain
from unisono._explain import picture

pytestmark = pytest.mark.check


def explain(*arguments: str) -> str:
    command = [sys.executable, "-m", "unisono", "explain", "--typical", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(explain("--json", *arguments))
    return found


def test_a_ring_is_drawn_round_by_round() -> None:
    text = explain(
        *("all_reduce", "--bytes", "64K", "--ranks", "4", "--hosts", "4", "--algorithm", "ring")
    )
    lines = text.splitlines()
    assert lines[0] == "all_reduce of 64 KiB, 16,384 float32, 4 ranks on 4 hosts, 1 on each"
    assert lines[1].startswith("goes by ring: ")
    # The input is copied, three rounds add up, three pass the sums on.
    first = next(line for line in lines if line.startswith("rank 0 "))
    assert first.split() == ["rank", "0", "=", *(">1 +3 " * 3 + ">1 <3 " * 3).split()]
    assert "the busiest rank sends 96 KiB in 6 messages" in text
    assert "6 messages follow each other" in text


def test_the_cheapest_is_taken_and_all_have_a_price() -> None:
    for size in ("8", "64K", "64M"):
        found = answer("all_reduce", "--bytes", size, "--ranks", "8", "--hosts", "2")
        prices = [price for _, price in found["prices"]]
        assert prices == sorted(prices)
        assert found["algorithm"] == found["prices"][0][0]
        assert {"ring", "hierarchical", "direct"} <= {name for name, _ in found["prices"]}
        assert found["simulated"] > 0
    # Between hosts a long one is split up before it is sent.
    assert found["algorithm"] == "hierarchical"
    far = max(plan["sent_to_other_hosts"] for plan in found["plans"])
    assert far < found["count"] * found["element_size"]


def test_links_and_machine_change_the_prices() -> None:
    call = ("all_reduce", "--bytes", "16M", "--ranks", "4", "--hosts", "4")
    usual = answer(*call)
    fast = answer(*call, "--rate", "12", "--latency", "5")
    assert fast["prices"][0][1] < usual["prices"][0][1] / 2
    assert fast["costs"]["remote_latency"] == pytest.approx(5e-6)
    assert answer(*call, "--cores", "3")["cores"] == 3


def test_memory_that_ranks_share() -> None:
    heap = answer("all_reduce", "--bytes", "4M", "--ranks", "4", "--cores", "4", "--heap")
    assert heap["algorithm"] == "in_place"
    private = answer("all_reduce", "--bytes", "64K", "--ranks", "4", "--algorithm", "windows")
    assert private["algorithm"] == "windows"
    assert not any(plan["messages"] for plan in private["plans"])
    text = explain("all_reduce", "--bytes", "64K", "--ranks", "4", "--algorithm", "windows")
    assert "no message: the ranks read each other's memory" in text


def test_an_algorithm_that_does_not_serve_a_call() -> None:
    text = explain("gather", "--bytes", "1K", "--ranks", "4", "--algorithm", "ring")
    assert "since ring does not serve it" in text


def test_large_worlds_have_prices() -> None:
    found = answer("all_reduce", "--bytes", "1M", "--ranks", "1000", "--hosts", "125")
    assert "plans" not in found
    assert found["prices"][0][1] > 0


def test_a_picture_has_an_arrow_for_each_message(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    call = ("all_gather", "--bytes", "1M", "--ranks", "6", "--hosts", "2", "--algorithm", "ring")
    found = answer(*call, "--svg", str(path))
    arrows = [
        element
        for element in ElementTree.parse(path).getroot().iter()
        if element.get("class") in ("near", "far")
    ]
    assert len(arrows) == sum(plan["messages"] for plan in found["plans"])
    # Of the six links of this ring two lead to the other host.
    far = [arrow for arrow in arrows if arrow.get("class") == "far"]
    assert 3 * len(far) == len(arrows)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["all_to_some"], "is none of"),
        (["all_reduce", "--dtype", "float33"], "is none of"),
        (["all_reduce", "--algorithm", "luck"], "is none of"),
        (["all_reduce", "--ranks", "2", "--hosts", "3"], "each host has one at least"),
        (["broadcast", "--root", "7"], "no group of 4 ranks"),
        (["send"], "no group of 4 ranks"),
        (["all_reduce", "--bytes", "many"], "is no size"),
        (["all_reduce", "--rate", "-1"], "above 0"),
    ],
)
def test_questions_without_an_answer(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _explain.explain(arguments, "unisono")
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_sizes_are_read_and_written() -> None:
    assert _explain.size("64K") == 65536
    for text in ("", "-1", "K", "1X", "nan", "1.5M"):
        with pytest.raises(argparse.ArgumentTypeError):
            _explain.size(text)
    assert [_explain.in_bytes(n) for n in (8, 65536, 3 << 19)] == ["8 B", "64 KiB", "1.5 MiB"]
    assert [_explain.in_seconds(s) for s in (2, 0.0123, 3e-6)] == ["2 s", "12.3 ms", "3 us"]
    assert _explain.hosts_of(5, 2) == [0, 0, 0, 1, 1]


def test_long_plans_have_no_picture() -> None:
    steps = {"plans": [{"steps": 30_000}]}
    assert picture.why_not(steps) == "it has 30,000 steps"
    many = {"plans": [{"steps": 1, "plan": []}] * 33}
    assert "more than 32 ranks" in (picture.why_not(many) or "")
