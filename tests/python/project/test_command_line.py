"""The command line: each help fits a screen, and shells complete it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from ranks import PATIENCE

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


# A line, and words that a shell offers at its end; the line with the rest of a word, where only one
# fits.
LINES = [
    ("unisono ", {"launch", "run", "doctor", "status", "top", "metrics", "bench"}),
    ("unisono la", "unisono launch "),
    ("unisono status --", {"--json", "--stacks", "--hosts"}),
    # Of the launcher, by its own help.
    ("unisono launch --m", {"--master-addr", "--min", "--module"}),
    ("unisono launch -n 2 --hosts a,b train", "unisono launch -n 2 --hosts a,b train.py "),
    ("unisono run train", "unisono run train.py "),
    ("unisono completion ", {"bash", "zsh", "fish"}),
    ("unisono bench --json run", "unisono bench --json run.json "),
    ("unisono bench all", {"all_reduce", "all_gather", "all_to_all", "all"}),
    ("unisono explain red", {"reduce", "reduce_scatter"}),
    ("unisono simulate --d", {"--dies", "--dark"}),
    ("unisono trace report tra", "unisono trace report traces/"),
    ("unisono trace ", {"merge", "report"}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the lines complete."""
    for name in ("run.json", "train.py"):
        (tmp_path / name).touch()
    (tmp_path / "traces").mkdir()
    return tmp_path


def check_offered(line: str, expected: set[str] | str, offered: set[str]) -> None:
    """Where one word fits, it alone is offered."""
    if isinstance(expected, set):
        assert expected <= offered, offered
    else:
        assert offered == {expected.split()[-1].rstrip("/")}


@pytest.mark.parametrize("line, expected", LINES)
def test_bash_completes(
    completions: dict[str, str], line: str, expected: set[str] | str, folder: Path
) -> None:
    (folder / "script").write_text(completions["bash"])
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
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    check_offered(line, expected, {word.strip() for word in done.stdout.splitlines()})


@pytest.mark.parametrize("line, expected", LINES)
def test_fish_completes(
    completions: dict[str, str], line: str, expected: set[str] | str, folder: Path
) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (folder / "script").write_text(completions["fish"])
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source script; complete -C '{line}'"],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    # A word, a tab, and its description.
    words = {word.partition("\t")[0].rstrip("/") for word in done.stdout.splitlines()}
    check_offered(line, expected, words)


@pytest.mark.parametrize("line, expected", LINES)
def test_zsh_completes(
    completions: dict[str, str], line: str, expected: set[str] | str, folder: Path
) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    home = folder / ".home"
    home.mkdir()
    (home / "_unisono").write_text(completions["zsh"])
    # Completion works in zsh's editor alone, and so on a terminal: a key lists what there is, one
    # completes, and one shows the line and ends.
    (home / ".zshrc").write_text(
        "fpath=($ZDOTDIR $fpath)\n"
        "autoload -Uz compinit && compinit -u -D\n"
        "unsetopt auto_menu beep list_beep\n"
        "LISTMAX=10000\n"
        'show-line() { print -r -- "<$BUFFER>"; exit }\n'
        "zle -N show-line\n"
        "bindkey '^Y' list-choices '^T' expand-or-complete '^X' show-line\n"
        "PROMPT='ready> '\n"
    )
    variables = {"PATH": os.environ["PATH"], "ZDOTDIR": str(home), "TERM": "dumb", "LANG": "C"}
    screen = typed(["zsh", "-i"], "ready> ", f"{line}\x19\x14\x18", folder, variables)
    (shown,) = re.findall(r"<(.*)>", screen)
    if isinstance(expected, str):
        assert shown == expected, screen
    else:
        assert expected <= set(re.findall(r"[\w-]+", screen)), screen


def typed(
    command: list[str], prompt: str, keys: str, folder: Path, variables: dict[str, str]
) -> str:
    """The screen of a program on a terminal of its own, which gets keys at the first prompt."""
    here, there = pty.openpty()
    fcntl.ioctl(here, termios.TIOCSWINSZ, struct.pack("4H", 100, 200, 0, 0))
    program = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=there,
        stdout=there,
        stderr=there,
        start_new_session=True,
    )
    os.close(there)
    shown, end, sent = "", time.monotonic() + 30 * PATIENCE, False
    try:
        while select.select([here], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                shown += os.read(here, 1 << 16).decode()
            except OSError:
                return shown  # The program has ended, and its terminal with it.
            if prompt in shown and not sent:
                sent = True
                os.write(here, keys.encode())
        raise AssertionError(shown)
    finally:
        program.kill()
        program.wait()
        os.close(here)
