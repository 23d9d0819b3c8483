"""Tests a package where it will be used: in fresh environments, with no checkout on any path.

    python tools/test_wheel.py dist/unisono-*.whl [--only 3.11:2.15.0 ...] [--build-torch]

Takes a wheel, a source distribution or a folder with the sources. For each environment (a Python,
and a torch or none): install, run the README's lines, the digits demo, a sample of collectives,
DDP, arrays, and a C program compiled with what ``python -m unisono`` says; uninstall, and look for
traces. In the first with a torch, with ``--build-torch`` and where a wheel is tested in all, the
door goes away and ``build-torch`` brings it back, which takes cargo and g++.

Every Python that is asked for must be on this machine: else nothing is tested, unless
``--allow-missing`` says that the rest will do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# To resolve the extras pip fetches much of what it would install: gigabytes.
EVERY = (
    *("extras", "3.10:2.11.0", "3.10:2.12.1", "3.11:2.13.0", "3.12:2.14.1", "3.13:2.15.0"),
    "3.12:none",
)
# Each is a build of everything.
OF_SOURCES = ("3.12:2.15.0", "3.12:none")
# The packages of the demo; ours are installed alone, so that the ones they bring are seen.
NEEDED = ("numpy", "scikit-learn", "rich", "setuptools")
PATIENCE = 300  # seconds for a program
LONG = 1800  # seconds for what downloads torch or compiles


class FailedError(Exception):
    """A command failed; holds what it was and what it printed."""


@dataclass
class Environment:
    """A fresh virtual environment, and a folder to work in."""

    folder: Path
    torch: str | None

    @property
    def python(self) -> str:
        """The interpreter."""
        return str(self.folder / "venv" / "bin" / "python")

    @property
    def work(self) -> Path:
        """The working directory of every command."""
        return self.folder / "work"

    @property
    def cache(self) -> Path:
        """The user's cache, where a door that is built here goes."""
        return self.folder / "cache"

    def run(self, *command: str | Path, patience: float = PATIENCE) -> str:
        """Run a command as a user would, and return what it printed.

        Raises
        ------
        Failed
            It ended with an error, or not in time; its processes are ended then.
        """
        variables = {
            k: v for k, v in os.environ.items() if not k.startswith(("UNISONO_", "PYTHON"))
        }
        variables |= {
            "PATH": f"{self.folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        variables |= {
            "XDG_CACHE_HOME": str(self.cache),
            "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip")),
        }
        words = [str(word) for word in command]
        process = subprocess.Popen(
            words,
            cwd=self.work,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            raise FailedError(
                f"{' '.join(words)}\n  did not end within {patience:.0f} s\n{said}"
            ) from None
        if process.returncode:
            raise FailedError(f"{' '.join(words)}\n  exit status {process.returncode}\n{said}")
        return said

    def launch(self, *program: str | Path, ranks: int = 2) -> str:
        """Run a program on some ranks by unisono's launcher."""
        return self.run(self.python, "-m", "unisono", "launch", "-n", str(ranks), *program)

    def files(self) -> set[str]:
        """Return all files of the environment but what Python compiles of other packages."""
        venv = self.folder / "venv"
        return {
            str(p.relative_to(venv))
            for p in venv.rglob("*")
            if "__pycache__" not in p.parts or "unisono" in p.parts
        }


def interpreter(version: str) -> str | None:
    """Return a Python of this minor version, or None."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{version}.*/bin/{name}"))
    fit = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    for candidate in (*map(str, installed), shutil.which(name), sys.executable):
        if candidate is None:
            continue
        tried = subprocess.run([candidate, "-c", fit], capture_output=True, check=False)
        if tried.returncode == 0:
            return candidate
    return None


@contextlib.contextmanager
def environment(python: str, torch: str | None) -> Iterator[Environment]:
    """Make an environment with `torch` and what the programs need, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="unisono-wheel-") as folder:
        made = Environment(Path(folder), torch)
        made.work.mkdir()
        made.run(python, "-m", "venv", str(made.folder / "venv"))
        pip = [made.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        made.run(*pip, *NEEDED, *([f"torch=={torch}"] if torch else []), patience=LONG)
        yield made


def check(package: Path, at: Environment, build_torch: bool) -> None:
    """Install the package and use all of it."""
    before = at.files()
    # A wheel brings all it needs but NumPy; sources need maturin.
    alone = ["--no-index"] if package.suffix == ".whl" else []
    pip = [at.python, "-m", "pip"]
    at.run(*pip, "install", "--disable-pip-version-check", *alone, package, patience=LONG)
    told = at.run(at.python, "-m", "unisono")
    if at.torch:
        expect(told, rf"torch here +{re.escape(at.torch)}\S*, served")
        check_torch(at)
    else:
        expect(told, "torch here +not installed")
    expect(at.launch(program(at, "arrays.py"), ranks=4), "arrays are right")
    check_c(at)
    if (at.cache / "unisono").exists():
        raise FailedError(f"something was written to {at.cache / 'unisono'}")
    if build_torch:
        check_build_torch(at)
    at.run(*pip, "uninstall", "--yes", "unisono")
    # Whatever wrote it: pip, or a program that ran. pip removes the bytecode of our modules.
    left = at.files() - before
    find = "import importlib.util as u; print(u.find_spec('unisono'))"
    if left or at.run(at.python, "-c", find).strip() != "None":
        raise FailedError(f"left after pip uninstall: {sorted(left)}")


def check_torch(at: Environment) -> None:
    """Train, by the README's lines and the demo; compare collectives and DDP with what is right."""
    readme = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert readme is not None
    (at.work / "train.py").write_text(readme[1])
    train(at)
    demo = ROOT / "examples" / "torch" / "train_digits.py"
    shutil.copy(demo, at.work)
    expect(at.launch(demo.name), r"accuracy")
    torchrun = [at.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    expect(at.run(*torchrun, program(at, "collectives.py")), "collectives are right")
    expect(at.launch(program(at, "ddp.py")), "DDP is right")


def train(at: Environment) -> None:
    """Run the README's lines, which learn a function that can be learned exactly."""
    loss = expect(at.launch("train.py"), r"loss (\d+\.\d+)")
    if float(loss[1]) > 0.01:
        raise FailedError(f"the README's lines end with a loss of {loss[1]}")


def check_build_torch(at: Environment) -> None:
    """Take the door for this torch away, do what the error says, and train again."""
    assert at.torch is not None
    minor, version = at.torch.rpartition(".")[0], rf"{re.escape(at.torch)}\S*"
    (door,) = at.folder.glob(f"venv/lib/python*/site-packages/unisono/core-torch-{minor}.so")
    door.unlink()
    # The whole of the message: a line of a rank's output, after the error's name.
    sentence = (
        rf"ImportError: unisono is installed for (no torch|torch [\d., ]+), and this is torch "
        rf"{version}: `python -m unisono build-torch` makes a build for it "
        r"\(needs cargo and g\+\+\)\n"
    )
    try:
        train(at)
    except FailedError as error:
        expect(str(error), sentence)
    else:
        raise FailedError(f"the README's lines train without {door.name}")
    expect(at.run(at.python, "-m", "unisono"), rf"torch here +{version}, not served: `python -m")
    built = expect(
        at.run(at.python, "-m", "unisono", "build-torch", patience=LONG), r"built (\S+) in \d+ s"
    )
    made = Path(built[1])
    if at.cache not in made.parents:
        raise FailedError(f"{made} is not in the user's cache, {at.cache}")
    told = at.run(at.python, "-m", "unisono")
    expect(told, rf"torch here +{version}, served: .* uses {re.escape(made.name)}")
    expect(told, rf"built for +torch .*{version}")
    train(at)


def check_c(at: Environment) -> None:
    """Compile a C program against the installed library, and run it."""
    flags = at.run(at.python, "-m", "unisono", "--cflags", "--libs").split()
    for name in ("hello.c", "example.h"):
        shutil.copy(ROOT / "examples" / "c" / name, at.work)
    at.run("cc", "-Wall", "-Wextra", "-Werror", "hello.c", *flags, "-o", "hello")
    at.launch("./hello", ranks=3)


def program(at: Environment, name: str) -> str:
    """Copy a program of tests/wheel to where it runs."""
    shutil.copy(ROOT / "tests" / "wheel" / name, at.work)
    return name


def expect(said: str, pattern: str) -> re.Match[str]:
    """Return the match of `pattern` in what a command printed."""
    found = re.search(pattern, said)
    if found is None:
        raise FailedError(f"expected {pattern!r} in:\n{said}")
    return found


@contextlib.contextmanager
def dry_runs(*tools: str) -> Iterator[tuple[Environment, list[str | Path]]]:
    """Make an environment with `tools`, and a command by which pip says what it would install."""
    with tempfile.TemporaryDirectory(prefix="unisono-wheel-") as folder:
        at = Environment(Path(folder), None)
        at.work.mkdir()
        at.run(sys.executable, "-m", "venv", str(at.folder / "venv"))
        if tools:
            at.run(at.python, "-m", "pip", "install", "--quiet", *tools)
        dry = ["install", "--dry-run", "--quiet", "--ignore-installed"]
        yield at, [at.python, "-m", "pip", *dry, "--report", at.work / "report.json"]


def would_install(at: Environment, dry: list[str | Path], what: str) -> dict[str, dict[str, Any]]:
    """Return the metadata of all that pip would install, by name."""
    at.run(*dry, what, patience=LONG)
    report = json.loads((at.work / "report.json").read_text())
    return {item["metadata"]["name"].lower(): item["metadata"] for item in report["install"]}


def check_metadata(package: Path) -> None:
    """Let pip and twine read the metadata: what it requires, and for whom."""
    with dry_runs("twine", "trove-classifiers") as (at, dry):
        if package.is_file():
            at.run(at.python, "-m", "twine", "check", "--strict", str(package))
        found = would_install(at, dry, f"{package}[examples]")
        if not {"unisono", "numpy", "scikit-learn", "rich"} <= found.keys() or "torch" in found:
            raise FailedError(f"unisono[examples] would install {sorted(found)}")
        ours = found["unisono"]
        if ours["requires_python"] != ">=3.10":
            raise FailedError(f"it requires Python {ours['requires_python']}")
        known = at.run(at.python, "-m", "trove_classifiers").splitlines()
        if not ours["classifier"] or set(ours["classifier"]) - set(known):
            raise FailedError(f"no index knows all of {ours['classifier']}")
        if package.suffix == ".whl":
            check_old_python(package, at, dry)


def check_old_python(wheel: Path, at: Environment, dry: list[str | Path]) -> None:
    """Make sure that pip refuses the wheel for a Python that is too old."""
    old = ["--python-version", "3.9", "--only-binary=:all:", "--no-deps"]
    try:
        at.run(*dry, *old, "--target", at.work, wheel)
    except FailedError as error:
        expect(str(error), "requires a different Python|not a supported wheel")
    else:
        raise FailedError("pip would install it for Python 3.9")


def check_extras(package: Path) -> None:
    """Let pip resolve all extras at once, and so each of them."""
    with dry_runs() as (at, dry):
        extras = would_install(at, dry, str(package))["unisono"]["provides_extra"]
        if "torch" not in extras:
            raise FailedError(f"the extras are {extras}")
        found = would_install(at, dry, f"{package}[{','.join(extras)}]")
        if "torch" not in found:
            raise FailedError(f"unisono[{','.join(extras)}] would install {sorted(found)}")


def main() -> None:
    """Test the package in every environment that is asked for."""
    parser = argparse.ArgumentParser(description="Test unisono in clean environments.")
    parser.add_argument("package", type=Path, help="a wheel, a .tar.gz or a folder of sources")
    parser.add_argument(
        "--only", action="append", metavar="PYTHON:TORCH", help="such as 3.11:2.15.0 or 3.12:none"
    )
    parser.add_argument(
        "--build-torch", action="store_true", help="build a door as well, in the first with a torch"
    )
    parser.add_argument(
        "--allow-missing", action="store_true", help="skip environments whose Python is not here"
    )
    chosen = parser.parse_args()
    package = chosen.package.resolve(strict=True)
    of_wheel = package.suffix == ".whl"
    names = chosen.only or (EVERY if of_wheel else OF_SOURCES)
    for name in names:
        if name != "extras" and not re.fullmatch(r"3\.\d+:(none|2\.\d+\.\d+)", name):
            parser.error(f"{name} is no environment: 3.12:2.15.0, 3.12:none or extras")
    pythons = {name: interpreter(name.split(":")[0]) for name in names if ":" in name}
    missing = [name for name, python in pythons.items() if python is None]
    if missing and not chosen.allow_missing:
        sys.exit(f"not on this machine: the Python of {', '.join(missing)} (or --allow-missing)")
    build_in = None
    if chosen.build_torch or (of_wheel and not chosen.only):
        build_in = next((n for n in names if n not in missing and is_with_torch(n)), None)
        if build_in is None:
            parser.error("build-torch needs an environment with a torch")
    failed = 0
    for name in ("metadata", *names):
        began = time.monotonic()
        try:
            outcome = test(package, name, pythons.get(name), name == build_in)
        except FailedError as error:
            failed += 1
            outcome = f"FAILED\n{error}"
        print(f"{name}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
    sys.exit(1 if failed else 0)


def is_with_torch(name: str) -> bool:
    """Whether an environment has a torch."""
    return ":" in name and not name.endswith(":none")


def test(package: Path, name: str, python: str | None, build_torch: bool) -> str:
    """Test the package in one environment, and return what came of it."""
    if name in ("metadata", "extras"):
        (check_metadata if name == "metadata" else check_extras)(package)
        return "passed"
    version, _, torch = name.partition(":")
    if python is None:
        return f"skipped: no Python {version} on this machine"
    with environment(python, None if torch == "none" else torch) as made:
        check(package, made, build_torch)
    return "passed, and so did build-torch" if build_torch else "passed"


if __name__ == "__main__":
    main()
