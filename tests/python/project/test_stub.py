"""The stub, the documents and the command line say what the native module does."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from unisono import _native
from unisono.__main__ import table

ROOT = Path(__file__).resolve().parents[3]
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
    settings = subprocess.run([*run, "settings"], check=True, capture_output=True, text=True).stdout
    assert settings.strip() == table()
    assert subprocess.run([*run, "nonsense"], check=False, capture_output=True).returncode == 2


def test_the_overview_tells_what_is_here_and_every_setting():
    run = [sys.executable, "-m", "unisono"]
    lines = subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()
    built = ", ".join(_native.doors())
    built = f"torch {built}" if built else "no torch"
    uses = r"served: init_process_group\(\"unisono\"\) uses core-torch-2\S+\.so"
    here = [
        rf"unisono {re.escape(unisono.__version__)}, in {re.escape(str(_native.FOLDER))}",
        rf"  torch here   (2\.\S+, ({uses}|not served: .+)|not installed; NumPy and DLPack .+)",
        rf"  built for    {re.escape(built)}",
        r"  C library    (/.+/c/lib \(--cflags, .+\)|not installed: .+ does not hold .+)",
        r"  CUDA         (the NVIDIA driver is here, for CUDA \d+\.\d+|no NVIDIA driver here: .+)",
        "",
        r"Settings, each by its variable or as a keyword of unisono\.Options:",
    ]
    for line, wanted in zip(lines, here, strict=False):
        assert re.fullmatch(wanted, line), (line, wanted)
    assert lines[len(here) :] == [
        text
        for setting in unisono.settings()
        for text in (
            f"  {setting.variable}={setting.default}  ({setting.accepts})",
            f"      {setting.consequence}",
        )
    ]


def test_the_stub_agrees_with_the_module():
    pytest.importorskip("mypy")
    run = [sys.executable, "-m", "mypy.stubtest", "unisono._core"]
    done = subprocess.run(run, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
