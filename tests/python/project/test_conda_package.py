"""The package for conda: it says the same as the wheel, and is built, installed and used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import TARGET
from unisono_build import licences, parts, sources

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "unisono"
RECIPE = ROOT / "tools" / "conda" / "recipe.yaml"
# The environment that `make conda-tools` fills.
TOOLS = TARGET / "conda-tools"
LIMIT = 280


def run(*command: object, **variables: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), env=clean | variables, cwd=ROOT, timeout=LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_recipe_says_what_pyproject_says() -> None:
    recipe = yaml.safe_load(RECIPE.read_text("utf-8"))
    project = (ROOT / "pyproject.toml").read_text("utf-8")

    def said(pattern: str) -> str:
        (found,) = re.findall(pattern, project, re.MULTILINE)
        return found

    needed = [line.replace(" ", "") for line in recipe["requirements"]["run"]]
    assert needed[0] == "python" + said('^requires-python = "(.*)"$')
    assert needed[1] == said(r'^dependencies = \["(.*)"\]$')
    assert len(needed) == 3
    assert recipe["about"]["license"] == said('^license = "(.*)"$')
    assert recipe["about"]["summary"] == said('^description = "(.*)"$')
    script = said(r'^\[project\.scripts\]\nunisono = "(.*)"$')
    assert recipe["build"]["python"]["entry_points"] == [f"unisono = {script}"]
    files = json.loads(said(r"^license-files = (\[.*\])$"))
    assert recipe["about"]["license_file"] == [*files, "third-party-licences.txt"]


def test_a_c_library_in_the_prefix_is_found_where_the_package_has_none(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("c", "__pycache__", "core-torch-*")
    shutil.copytree(PACKAGE, tmp_path / "unisono", ignore=ignore)
    prefix = tmp_path / "prefix"
    program = (
        "import sys; sys.prefix = sys.argv[1]; from unisono import _c; "
        "print(_c.answer(['--includedir', '--libdir']))"
    )
    ask = [sys.executable, "-c", program, prefix]
    for file in ("include/unisono.h", "lib/libunisono.so"):
        (prefix / file).parent.mkdir(parents=True)
        (prefix / file).touch()
    said = run(*ask, PYTHONPATH=str(tmp_path))
    assert said.split() == [str(prefix / "include"), str(prefix / "lib")]
    # A wheel that pip put into the same environment has its own, of its own version.
    own = tmp_path / "unisono" / "c"
    shutil.copytree(prefix, own)
    assert run(*ask, PYTHONPATH=str(tmp_path)).split() == [str(own / "include"), str(own / "lib")]


def wheel_of_this_checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pack the modules that are built here, without a door, as `make wheel` packs its own."""
    backend = pytest.importorskip("unisono_build.backend", reason="maturin is not installed")
    release = pytest.importorskip("unisono_build.release")
    missing = [name for name in ("cargo", "strip") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")
    # maturin's program lies beside this Python.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("UNISONO_TORCH_DIR", "none")
    tree = folder / "tree"
    backend.prepare_metadata_for_build_wheel(str(tree))
    ignore = shutil.ignore_patterns("__pycache__", "core-torch-*")
    package = Path(shutil.copytree(PACKAGE, tree / "unisono", ignore=ignore))
    for library in (package / "_core.abi3.so", *package.glob("c/lib/libunisono.so.*")):
        run("strip", "--strip-unneeded", library)
    (package / "third-party-licences.txt").write_text(licences.collect(parts.Build(ROOT, TARGET)))
    (package / "source.tar.gz").write_bytes(sources.archive_for_the_wheel(ROOT))
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", folder, tree)
    (wheel,) = folder.glob("unisono-*.whl")
    return release.tagged(parts.Build(ROOT, TARGET), wheel)


# 10 s of a core, with two programs that each have their own limit.
@pytest.mark.timeout(3 * LIMIT)
def test_the_package_is_built_and_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (TOOLS / ".unisono").exists():
        pytest.skip("py-rattler-build is not installed (`make conda-tools`)")
    wheel, channel = wheel_of_this_checkout(tmp_path, monkeypatch), tmp_path / "channel"
    python = TOOLS / "bin" / "python"
    run(python, ROOT / "tools" / "build_conda.py", "--channel", channel, wheel)
    (index,) = channel.glob("linux-*/repodata.json")
    (record,) = json.loads(index.read_text())["packages.conda"].values()
    # As CEP 20 has packages with the stable ABI: of a machine, and for every Python.
    assert (record["subdir"], record["noarch"]) == (index.parent.name, "python")
    assert record["version"] == wheel.name.split("-")[1]
    assert [need.split()[0] for need in record["depends"]] == ["python", "numpy", "__glibc"]
    assert "NumPy" in run(python, ROOT / "tools" / "test_conda.py", channel)
