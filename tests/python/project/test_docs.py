"""The statements of the documents about the checkout are true."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ["", "docs/", "benchmarks/", "benchmarks/results/", "examples/*/"]
DOCUMENTS = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}*.md"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def headings(document: Path) -> set[str]:
    """The fragments that lead into a document, as GitHub makes them of its headings."""
    text = re.sub(r"(?ms)^```.*?^```", "", document.read_text())
    lines = re.findall(r"(?m)^#+ (.*)", text)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).lower() for line in lines]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", document.read_text())
    for name, fragment in links:
        if "://" in name:
            continue
        target = document.parent / name if name else document
        assert target.exists(), name
        if fragment and target.suffix == ".md":
            assert fragment in headings(target), f"{name}#{fragment}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_nothing_is_left_to_be_filled_in(document):
    """A line of capitals stands where a table or a number was to come."""
    assert re.findall(r"(?m)^[A-Z][A-Z_]{3,}$", document.read_text()) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_make_targets_exist(document):
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    used = set(re.findall(r"(?:`|\$ )make ([a-z0-9-]+)", document.read_text()))
    assert used <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_tests_that_are_named_exist(document):
    for path, name in re.findall(r"`(tests/[\w/.]+)::(\w+)`", document.read_text()):
        assert re.search(rf"\b(?:def|fn) {name}\(", (ROOT / path).read_text()), f"{path}::{name}"


def test_every_error_code_is_documented_with_its_cost():
    source = (ROOT / "rust/core/src/error.rs").read_text()
    codes = re.findall(r'Self::(\w+) => "\1"', source)
    local = re.findall(r"Self::(\w+)", re.search(r"!matches!\(self, (.*)\)", source)[1])
    rows = re.findall(r"(?m)^\| (\w+) \| (local|fatal) \|", (ROOT / "docs/errors.md").read_text())
    assert len(codes) >= 8
    assert rows == [(code, "local" if code in local else "fatal") for code in codes]


def messages_of_rust(text: str) -> list[str]:
    """The lines of Rust or C++, without comments and each literal on one line."""
    text = re.sub(r"(?m)^\s*//.*$", "", text.split("mod tests {", maxsplit=1)[0])
    return re.sub(r'\\\n\s*|"\s*\n\s*"', "", text).splitlines()


def messages_of_python(text: str) -> Iterator[str]:
    """The literals of Python, with braces where values are put in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(part, "value", None) for part in node.values]
            yield "".join(part if isinstance(part, str) else "{}" for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def messages() -> list[str]:
    """All that the sources may print, and more."""
    found: list[str] = []
    for pattern in ("rust/*/src/**/*.rs", "csrc/*.[ch]pp"):
        for path in ROOT.glob(pattern):
            if not {"tests", "world", "tests.rs"} & set(path.parts):
                found += messages_of_rust(path.read_text())
    for path in (ROOT / "python").glob("**/*.py"):
        found += messages_of_python(path.read_text())
    return found


def quotations() -> dict[str, re.Pattern[str]]:
    """The quotations in the first columns of messages.md; dots stand for any text."""
    page = (ROOT / "docs/messages.md").read_text()
    rows = re.findall(r"(?m)^\| (.*?) \| .*? \| .* \|$", page)
    quoted = [text for row in rows for text in re.findall(r"`([^`]*)`", row)]
    assert len(quoted) > 100
    assert [text for text in quoted if len(text.replace("...", "")) < 10] == []
    parts = {text: map(str.strip, text.split("...")) for text in quoted}
    return {text: re.compile(".*".join(map(re.escape, of))) for text, of in parts.items()}


def test_the_messages_of_the_documents_are_those_of_the_sources():
    known = messages()
    gone = [t for t, pattern in quotations().items() if not any(map(pattern.search, known))]
    assert gone == []


def test_every_message_that_ends_a_call_between_ranks_is_documented():
    """Those that are written where the error is made; others are put together from several."""
    code = r"Error::new\(\s*Code::(?:Timeout|PeerLost|Mismatch|Aborted)"
    made = code + r',\s*(?:format!\(\s*)?"(.*?)"[,)]'
    found = set()
    for path in ROOT.glob("rust/*/src/**/*.rs"):
        if not {"tests", "world", "tests.rs", "fuzzing.rs"} & set(path.parts):
            lines = messages_of_rust(path.read_text())
            found |= set(re.findall(made, "\n".join(lines)))
    # Without a word of its own, it is the context's.
    found = {text for text in found if len(re.sub(r"{.*?}", "", text)) > 10}
    assert len(found) > 30
    documented = quotations().values()
    assert [text for text in found if not any(one.search(text) for one in documented)] == []
