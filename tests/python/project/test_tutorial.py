"""The programs and commands of docs/tutorial.md run, and print what stands there.

Commands run in the order of the page, in a folder with the programs that it says to save. Its two
hosts are network namespaces, and ``ssh`` is a program that enters them. Only ``pip install`` is
left to test_install.py.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, run
from namespaces import hosts, why_not

PAGE = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
BLOCKS = re.findall(r"(?ms)^```(\w+)\n(.*?)^```$", PAGE)
SAVED = re.findall(r"(?ms)save as (\w+\.py):\n\n```python\n(.*?)^```$", PAGE, re.IGNORECASE)
INSTALL = "pip install unisono"
NODES = ("node0", "node1")
HERE = """#!/bin/sh
exec {python} -m unisono "$@"
"""
# Its last arguments are the name of a host and the line to run there.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
case $1 in
  {cases}
  *) exit 255 ;;
esac
"""


def commands() -> list[tuple[str, list[str]]]:
    """Each command of the page, with the lines below it."""
    found: list[tuple[str, list[str]]] = []
    for language, text in BLOCKS:
        for line in text.splitlines() if language == "console" else ():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def settled(lines: list[str]) -> list[str]:
    """The lines, sorted, without the parts that differ from run to run and from place to place."""
    text = "\n".join(lines)
    text = re.sub(r"\b\d+\.\d+ s\b", "T s", text)
    text = re.sub(r"host \S+, pid \d+", "host H, pid P", text)
    text = re.sub(r"in /\S+/unisono$", "in FOLDER", text, flags=re.MULTILINE)
    text = re.sub(r"2\.\d+\.\d+\S*(, served: .* uses core-torch-)2\.\d+", r"TORCH\1TORCH", text)
    return sorted(text.splitlines())


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """A folder with ``unisono``, and with ``ssh`` to two hosts where such can be made."""
    folder = tmp_path / "bin"
    folder.mkdir()
    put(folder / "unisono", HERE.format(python=sys.executable))
    if why_not():
        yield folder
        return
    with hosts(len(NODES)) as net:
        addresses = {name: net.address(host) for host, name in enumerate(NODES)}
        cases = []
        for host, name in enumerate(NODES):
            net.name_hosts(host, addresses)
            cases.append(f'{name}) exec {" ".join(net.enter(host))} sh -c "$2" ;;')
        put(folder / "ssh", SSH.format(cases="\n  ".join(cases)))
        yield folder


def put(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_every_program_is_saved_and_every_block_known() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "console"}
    assert len(SAVED) == sum(language == "python" for language, _ in BLOCKS) >= 4
    ran = " ".join(command for command, _ in commands())
    assert all(name in ran for name, _ in SAVED)


def test_the_commands_print_what_the_page_says(programs: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name, text in SAVED:
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    # torch warns where the address of a host has no name, as in a namespace.
    env = {"PATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    left_out = []
    for command, expected in commands():
        if "--hosts" in command and why_not():
            left_out.append(command)
        elif command != INSTALL:
            done = run(["sh", "-c", command], limit=90, cwd=tmp_path, env=env)
            assert done.code == 0, (command, done)
            printed = [*done.err, *done.out]
            if expected[-1:] == ["..."]:
                expected.pop()
                printed = printed[: len(expected)]
            assert settled(printed) == settled(expected), command
    if left_out:
        pytest.skip(f"run but for {left_out}: {why_not()}")
