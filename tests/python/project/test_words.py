"""Comments and docs say things plainly, in lines that ``.editorconfig`` allows.

Refused are sentences that begin with "What", and "of which" and "so many": each is a clause in the
place of a noun. Code, error messages, tables and lines that cannot be broken are left alone.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REFUSED = re.compile(r"(?:(?:^|[.!?]\s+)What\b|\b[Oo]f which\b|\b[Ss]o many\b)[^.]{0,60}")
# A comment of a language with slashes; the first group has its text.
SLASHES = re.compile(r"(?:^|\s)//[/!]? ?(.*)$")
HASHES = re.compile(r"^\s*# ?(.*)$")
INSIDE = re.compile(r"^\s*(?:/\*\*?|\*) ?(.*?)(?:\*/)?$")
SLASHED = {".rs", ".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}
HASHED = {".sh", ".toml", ".yml", ".yaml"}

# A line of prose: its number, from 1, and its text.
Line = tuple[int, str]


def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a checkout of git")
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


def in_slashes(text: str) -> Iterator[Line]:
    for number, line in enumerate(text.splitlines(), 1):
        for pattern in (SLASHES, INSIDE):
            if found := pattern.search(line):
                yield number, found[1]
                break


def in_hashes(text: str) -> Iterator[Line]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := HASHES.match(line):
            yield number, found[1]


def in_python(text: str) -> Iterator[Line]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.removeprefix("#").strip()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and (doc := ast.get_docstring(node, clean=False)):
            first = node.body[0].lineno
            for number, line in enumerate(doc.splitlines(), first):
                yield number, line.strip()
            # It does not go on in the next one.
            yield first + doc.count("\n") + 1, ""


def in_markdown(text: str) -> Iterator[Line]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.lstrip().startswith("|"):
            yield number, line.strip().lstrip("#-*0123456789. ")


def prose(path: Path) -> Iterable[Line]:
    readers = {
        **dict.fromkeys(SLASHED, in_slashes),
        **dict.fromkeys(HASHED, in_hashes),
        ".py": in_python,
        ".pyi": in_python,
        ".md": in_markdown,
    }
    is_script = path.name in ("Makefile", "run")
    reader = in_hashes if is_script else readers.get(path.suffix)
    return sorted(reader(path.read_text(encoding="utf-8"))) if reader else ()


def paragraphs(lines: Iterable[Line]) -> Iterator[Line]:
    """Lines that follow one another, joined, with the number of the first."""
    first, last, text = 0, 0, ""
    for number, line in lines:
        begins = re.match(r"(?:[-*] |\d+\. |# )", line)
        if text and (number != last + 1 or not line.strip() or begins):
            yield first, text
            text = ""
        if line.strip():
            first = first if text else number
            text = f"{text} {line.strip().lstrip('-* ')}".strip()
        last = number
    if text:
        yield first, text


def test_sentences_have_nouns() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {refused[0].strip()}"
        for path in files()
        for number, text in paragraphs(prose(path))
        for refused in REFUSED.finditer(text)
        if path != Path(__file__)
    ]
    assert not found, "\n".join([f"{len(found)} sentences without a noun", *found])


def limits() -> dict[str, int]:
    """The lengths that ``.editorconfig`` names for kinds of files, by their suffixes."""
    text = (ROOT / ".editorconfig").read_text()
    sections = re.findall(r"\[\*\.\{?([\w,]+)\}?\]\nmax_line_length = (\d+)", text)
    return {f".{kind}": int(limit) for kinds, limit in sections for kind in kinds.split(",")}


def test_lines_are_within_the_limit() -> None:
    found = []
    known = limits()
    assert {".rs", ".md", ".sh"} <= known.keys()
    for path in files():
        # ruff and clang-format see to the others.
        limit = known.get(path.suffix)
        if limit is None:
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, _ in prose(path):
            line = lines[number - 1]
            can_be_broken = " " in line.strip()[:limit].removeprefix("/// ").strip()
            if len(line) > limit and can_be_broken and "](http" not in line:
                found.append(f"{path.relative_to(ROOT)}:{number}: {len(line)} of {limit}")
    assert not found, "\n".join([f"{len(found)} lines that are too long", *found])
