"""Hangs of public reports, through torch: ``unisono status`` names the culprit while they last."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hangs_ranks import END
from ranks import PATIENCE, run_ranks

pytest.importorskip("torch")

# Seconds until status must have named the culprit, once all ranks are about to hang.
SOON = 30.0


class Watcher(threading.Thread):
    """Runs ``unisono status`` until its lines about a job are as they should be; then ends it."""

    def __init__(self, folder: Path, world: int, seen: Callable[[str, list[int]], bool]) -> None:
        super().__init__()
        self.folder, self.world, self.seen = folder, world, seen
        self.pids: list[int] = []
        self.text = ""
        # The job is over, whether or not it was seen.
        self.over = threading.Event()

    def run(self) -> None:
        deadline = math.inf
        try:
            while time.monotonic() < deadline and not self.over.wait(0.2):
                files = sorted(self.folder.glob("*.pid"))
                words = [file.read_text() for file in files]
                if len(files) == self.world and all(word.endswith("\n") for word in words):
                    if not self.pids:
                        deadline = time.monotonic() + SOON * PATIENCE
                    self.pids = [int(word) for word in words]
                    self.text = about(self.pids, status())
                    if self.seen(self.text, self.pids):
                        return
        finally:
            (self.folder / END).touch()
            for pid in self.pids:
                # One that is stopped can only end when it goes on.
                os.kill(pid, signal.SIGCONT)


def status() -> str:
    command = [sys.executable, "-m", "unisono", "status"]
    modules = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": modules}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=20, check=False
    )
    return done.stdout


def about(pids: list[int], text: str) -> str:
    """The parts of the text that name one of these processes: others run beside this test."""
    parts = re.split(r"(?m)^(?=\S)", text)
    return "".join(part for part in parts if any(f"pid {pid}" in part for pid in pids))


def hang(
    folder: Path,
    name: str,
    world: int,
    expected: str,
    *args: object,
    env: Callable[[int], dict[str, str]] | None = None,
) -> None:
    """Start a job that hangs; status says at last, of a line, all of `expected`.

    ``<2>`` stands for the words for rank 2.
    """

    def pattern(pids: list[int]) -> str:
        return re.sub(
            r"<(\d)>", lambda at: rf"rank {at[1]} \(host \S+, pid {pids[int(at[1])]}\)", expected
        )

    def seen(text: str, pids: list[int]) -> bool:
        return re.search(pattern(pids), text) is not None

    watcher = Watcher(folder, world, seen)
    watcher.start()
    target = f"hangs_ranks:{name}"
    results = run_ranks(world, target, folder, *args, timeout=60, env=env, torch=True, check=False)
    watcher.over.set()
    watcher.join()
    reports = "\n".join(result.report() for result in results)
    assert watcher.pids, reports
    assert seen(watcher.text, watcher.pids), f"{watcher.text}\n{reports}"


def test_another_call(tmp_path: Path) -> None:
    hang(
        tmp_path,
        "other_call",
        3,
        # Where rank 2 finds the difference before one of the others, it names that one.
        r"  (<2> is named by 2|<0> is named by 1|<1> is named by 1) of 3 ranks that have failed: "
        r"all_\w+ #2: the operation differs: .*called all_gather #2",
    )


def test_a_data_loader(tmp_path: Path) -> None:
    hang(
        tmp_path,
        "data_loader",
        3,
        r"  <2> is in no operation of this group \(its last: all_reduce #3 .*\); it sleeps; 2 "
        r"ranks wait for it in all_reduce #4, for",
    )


def test_a_rank_that_left(tmp_path: Path) -> None:
    hang(
        tmp_path,
        "one_left",
        3,
        r"  <2> is named by 2 of 2 ranks that have failed: all_reduce #5.*has left the "
        r"group in good order while this operation still needs it",
    )


def test_two_groups_in_opposite_orders(tmp_path: Path) -> None:
    hang(
        tmp_path,
        "two_groups",
        3,
        r"(?m)^groups \w{8} and \w{8} wait for each other: .*rank 1 of \w{8} \(.*\) waits for rank "
        r"0 in all_reduce #1, for .* s.*; all ranks must call the operations of their groups in",
    )


def test_a_host_that_is_stopped(tmp_path: Path) -> None:
    hang(
        tmp_path,
        "stopped_host",
        4,
        r"(?m)^pid \d+, stopped .*, rank 2 of group \w{8}\n"
        r"pid \d+, stopped .*, rank 3 of group \w{8}\n"
        r"group .* of 4 ranks, 2 of them here\n"
        r"  <2> is stopped \(SIGCONT lets it go on\).*(?:rank \d waits|ranks wait) for it in "
        r"all_reduce #2",
        env=lambda rank: {"UNISONO_HOST": "ab"[rank // 2]},
    )


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    hang(
        tmp_path,
        "full_disk",
        2,
        r"  <0> is in no operation of this group \(its last: all_reduce #1 .*\); it sleeps; rank 1 "
        r"waits for it in barrier #2, for",
        "/dev/full",
    )


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint.pt"
    os.mkfifo(place)
    # Nothing is read from it.
    reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    try:
        hang(
            tmp_path,
            "full_disk",
            2,
            rf"  <0> is in no operation of this group .*; it writes {re.escape(str(place))}; rank "
            r"1 waits for it in barrier #2, for",
            str(place),
        )
    finally:
        os.close(reader)
