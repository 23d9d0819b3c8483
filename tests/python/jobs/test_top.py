"""``unisono top``: frames of a job, printed once and on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from ranks import run_ranks
from test_status import answer, process

from unisono._status import top


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_job_is_shown_once_and_on_a_terminal(has_rich: bool, tmp_path: Path) -> None:
    if has_rich:
        pytest.importorskip("rich")
    else:
        (tmp_path / "rich.py").write_text("raise ImportError('for a test')")
    results = run_ranks(3, "status_ranks:is_shown_by_top", str(tmp_path), timeout=60)
    once, screen, code, pids = results[0].value
    title, culprit, head, first, *others = once.splitlines()
    assert title.endswith("of 3 ranks, 3 of them here")
    assert culprit.startswith("  rank 0 (host "), once
    assert "2 ranks wait for it in all_reduce #2" in culprit, once
    assert head.split() == " ".join(top.COLUMNS).split()
    # The culprit comes first. No operation has begun between the two looks.
    assert first.split()[:4] == ["0", str(pids[0]), "-", "0"], once
    for rank, line in enumerate(others, 1):
        cells = line.split()
        assert cells[:4] == [str(rank), str(pids[rank]), "all_reduce", "#2"], once
        assert cells[5:7] == ["0", "0"], once
    assert code == 0, screen
    assert str(pids[1]) in screen
    # Without what moves the cursor, and as if no line were broken.
    words = " ".join(re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen).split())
    assert "2 ranks wait for it in all_reduce #2" in words
    # rich has a screen of its own, and leaves it at the end.
    assert ("\x1b[?1049l" in screen) == has_rich, screen


def test_rates_are_those_between_two_looks() -> None:
    def look(time: float, calls: int, seconds: float) -> top.Look:
        peers = [{"rank": 1, "last": 7, "seconds": seconds, "median_seconds": 0.1}]
        peers.append({"rank": 2, "last": 3, "seconds": 0.0, "median_seconds": 0.1})
        state = answer(0, number=calls + 1)
        state["waited"] |= {"seconds": seconds, "by_rank": peers}
        return top.Look(time, [process(0, state)])

    shown = top.frame(look(10.0, 100, 1.0), look(12.0, 300, 2.5))
    ((row,),) = (section.rows for section in shown.sections)
    cells = dict(zip(top.COLUMNS, row.cells, strict=True))
    assert (cells["ops/s"], cells["waited"]) == ("100", "2.5 s  75%")
    assert cells["last"] == "rank 1 (7)"
    assert top.plain(top.frame(look(0, 1, 0), look(1, 1, 0), "other")).startswith("no process")


def test_a_frame_has_no_more_lines_than_the_terminal() -> None:
    found = [process(rank, answer(rank)) for rank in range(3)]
    look = top.Look(0.0, found)
    lines = top.plain(top.frame(look, look), 4).splitlines()
    assert len(lines) == 4
    assert lines[-1] == "... and 2 more lines"


def test_ranks_are_left_out_where_rich_has_no_room() -> None:
    console = pytest.importorskip("rich.console")
    found = [process(rank, answer(rank), {**answer(rank), "id": "cd"}) for rank in range(3)]
    look = top.Look(0.0, found)
    for lines, first, second in ((20, 3, 3), (10, 3, 1), (9, 2, 1), (6, 1, 1)):
        out = console.Console(file=io.StringIO(), width=150)
        out.print(top.drawn(top.frame(look, look), lines))
        text = out.file.getvalue()
        assert len(re.findall(r"(?m)^ \d", text)) == first + second, text
        cut = [str(3 - shown) for shown in (first, second) if shown < 3]
        assert re.findall(r"and (\d) more ranks", text) == cut, text
        assert len(text.splitlines()) <= max(lines, 8)
