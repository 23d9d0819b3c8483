"""The stub, the documents and the command line say what the native module does."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from unisono.__main__ import table

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "python" / "unisono" / "_core.pyi"


def test_options_of_the_stub_are_the_settings():
    tree = ast.parse(STUB.read_text())
    options = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Options")
    new = next(n for n in options.body if isinstance(n, ast.FunctionDef) and n.name == "__new__")
    assert [argument.arg for argument in new.args.kwonlyargs] == [
        setting.name for setting in unisono.settings()
    ]


def test_the_documented_settings_are_the_settings():
    text = (ROOT / "docs" / "settings.md").read_text()
    between = text.split("<!-- settings:begin -->")[1].split("<!-- settings:end -->")[0]
    assert between.strip() == table(), "paste the output of: python -m unisono settings"


@pytest.mark.parametrize(
    "path", [STUB, ROOT / "python" / "unisono" / "__init__.py"], ids=["stub", "package"]
)
def test_everything_public_is_listed(path):
    names = next(
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    assert all(hasattr(unisono, name) for name in names)


def test_everything_public_is_documented():
    public = [getattr(unisono, name) for name in unisono.__all__]
    classes = [thing for thing in public if isinstance(thing, type)]
    members = [
        (owner.__name__, name, member)
        for owner in [unisono.Communicator, unisono.Work, unisono.ReduceOp, unisono.Options]
        for name, member in vars(owner).items()
        if not name.startswith("_") and not isinstance(member, owner)
    ]
    assert all(inspect.getdoc(thing) for thing in [*classes, unisono.init, unisono.settings])
    assert [f"{owner}.{name}" for owner, name, member in members if not member.__doc__] == []


def test_the_command_line():
    run = [sys.executable, "-m", "unisono"]
    overview = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert unisono.__version__ in overview
    assert "UNISONO_TIMEOUT=1800" in overview
    settings = subprocess.run([*run, "settings"], check=True, capture_output=True, text=True).stdout
    assert settings.strip() == table()
    assert subprocess.run([*run, "nonsense"], check=False, capture_output=True).returncode == 2


def test_the_stub_agrees_with_the_module():
    pytest.importorskip("mypy")
    run = [sys.executable, "-m", "mypy.stubtest", "unisono._core"]
    done = subprocess.run(run, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
