"""The command line: each help fits a screen, and shells complete it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.__main__ import COMMANDS


def unisono(*arguments: str) -> str:
    modules = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "unisono", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": modules, "COLUMNS": "80"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["", *sorted(COMMANDS)])
def test_help_fits_a_screen(command: str) -> None:
    lines = unisono(*command.split(), "--help").splitlines()
    assert any("unisono" in line for line in lines[:3])
    assert len(lines) <= 40
    assert [line for line in lines if len(line) > 80] == []


@pytest.fixture(scope="module")
def completions() -> dict[str, str]:
    pytest.importorskip("shtab")
    return {shell: unisono("completion", shell) for shell in ("bash", "zsh", "fish")}


@pytest.mark.parametrize(
    "line, expected",
    [
        ("unisono ", {"launch", "run", "doctor", "status", "top", "metrics", "bench"}),
        ("unisono la", {"launch"}),
        ("unisono status --", {"--json", "--stacks", "--hosts"}),
        # Of the launcher, by its own help.
        ("unisono launch --m", {"--master-addr", "--min", "--module"}),
        ("unisono completion ", {"bash", "zsh", "fish"}),
        ("unisono bench --json run", {"run.json"}),
    ],
)
def test_bash_completes(
    completions: dict[str, str], line: str, expected: set[str], tmp_path: Path
) -> None:
    (tmp_path / "run.json").touch()
    (tmp_path / "script").write_text(completions["bash"])
    # As bash calls the function that `complete` has registered for the command.
    program = (
        'source ./script; read -ra COMP_WORDS <<< "$1"; [[ $1 == *" " ]] && COMP_WORDS+=("");'
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$1; COMP_POINT=${#1};"
        "function=$(complete -p unisono | sed 's/.*-F \\([^ ]*\\) .*/\\1/');"
        '$function unisono "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}";'
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", program, "bash", line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    found = {word.strip() for word in done.stdout.splitlines()}
    assert expected <= found, (found, done.stderr)
    if line == "unisono la":
        assert found == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_theirs(completions: dict[str, str], shell: str, tmp_path: Path) -> None:
    text = completions[shell]
    assert "master-addr" in text
    assert "metrics" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(text)
    subprocess.run([shell, "-n", str(script)], timeout=20, check=True)
