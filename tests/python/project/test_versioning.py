"""The promises of the current minor version, as docs/versioning.md gives them, are still kept."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import record_version as tool

ROOT = Path(__file__).resolve().parents[3]
MINOR = tool.minor_version()
RELEASED = (
    f"{MINOR} is released and programs rely on this. Restore it, or raise the minor version in "
    "Cargo.toml and run: python tools/record_version.py"
)
UNRELEASED = (
    f"{MINOR} is not released yet, so it may change: if that is meant, run "
    "python tools/record_version.py. Else restore it"
)


def test_nothing_that_this_version_has_is_gone():
    broken = tool.broken(tool.recorded_facts(), tool.current_facts())
    assert not broken, "\n".join([*broken, RELEASED if tool.is_released() else UNRELEASED])


def test_what_is_new_is_recorded():
    new = tool.new(tool.recorded_facts(), tool.current_facts())
    assert not new, "\n".join([*new, "Record it: python tools/record_version.py"])


def test_everything_public_is_recorded():
    facts = tool.recorded_facts()
    package = (ROOT / "python" / "unisono" / "__init__.py").read_text("utf-8")
    names = re.findall(r'^    "(\w+)",$', package, re.MULTILINE)
    assert len(names) > 20
    recorded = {re.split(r"[ :.]", fact.removeprefix("unisono."))[0] for fact in facts}
    assert set(names) <= recorded
    assert "unisono.Communicator.all_reduce parameter 2 op: ReduceOp | str = 'sum'" in facts
    assert any(fact.startswith("wire transport/handshake/mod.rs VERSION") for fact in facts)


def test_the_c_abi_has_its_own_record():
    assert (ROOT / "tests" / "c" / "abi" / f"{MINOR}.txt").exists()
    # A new minor version is another library until 1.0: nothing finds the node of the last one.
    symbols = (ROOT / "rust" / "capi" / "unisono.map").read_text("utf-8")
    assert f"UNISONO_{MINOR} {{" in symbols


BEFORE = """
class Thing:
    @property
    def name(self) -> str: ...
    def call(self, array: Array, /, root: int = 0, *, timeout: float | None = None) -> None: ...
    @overload
    def both(self, *, later: Literal[False] = False) -> None: ...
    @overload
    def both(self, *, later: Literal[True]) -> Work: ...
"""


def facts_of(source: str) -> set[str]:
    (thing,) = ast.parse(source).body
    return set(tool._facts("Thing", thing))


@pytest.mark.parametrize(
    "before, after",
    [
        ("name(self) -> str", "title(self) -> str"),
        ("name(self) -> str", "name(self) -> int"),
        ("root: int = 0", "root: int"),
        ("root: int = 0", "root: int = 1"),
        ("root: int = 0, *", "*, root: int = 0"),
        ("root: int = 0", "tag: int = 0, root: int = 0"),
        ("*, timeout: float | None = None", "*, timeout: float | None = None, tag: int"),
        (", *, timeout: float | None = None", ""),
        ("-> Work", "-> None"),
    ],
)
def test_what_breaks_a_caller_is_noticed(before, after):
    assert before in BEFORE
    assert tool.broken(facts_of(BEFORE), facts_of(BEFORE.replace(before, after))) != []


@pytest.mark.parametrize(
    "before, after",
    [
        ("*, timeout: float | None = None", "*, timeout: float | None = None, tag: int = 0"),
        ("root: int = 0", "root: int = 0, tag: int = 0"),
        (
            "    @overload",
            "    @overload\n    def both(self, *, later: int) -> None: ...\n    @overload",
        ),
        ("    @property", "    def more(self, tag: int) -> None: ...\n    @property"),
    ],
)
def test_what_is_new_breaks_no_program(before, after):
    assert before in BEFORE
    current = facts_of(BEFORE.replace(before, after))
    assert tool.broken(facts_of(BEFORE), current) == []
    assert tool.new(facts_of(BEFORE), current) != []
