"""Tests a wheel where it will be used: in fresh environments, with no checkout on any path.

    python tools/test_wheel.py dist/unisono-*.whl [--only 3.11:2.15.0 ...]

For each environment (a Python, and a torch or none): install, run the README's lines, the digits
demo, a sample of collectives, DDP, arrays, and a C program compiled with what ``python -m unisono``
says; uninstall, and look for traces.
A Python that is not on this machine is skipped, and the skip is printed.
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

ROOT = Path(__file__).resolve().parent.parent
EVERY = ("3.10:2.11.0", "3.10:2.12.1", "3.11:2.13.0", "3.12:2.14.1", "3.13:2.15.0", "3.12:none")
# What the demo needs; ours are installed alone, so that what they bring is seen.
NEEDED = ("numpy", "scikit-learn", "rich", "setuptools")
PATIENCE = 300  # seconds for a program; installing torch has more


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
        # Builds of a door would go there.
        variables |= {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
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
        """Return all files of the environment but those that Python compiles on the way."""
        venv = self.folder / "venv"
        return {str(p.relative_to(venv)) for p in venv.rglob("*") if "__pycache__" not in p.parts}


def interpreter(version: str) -> str | None:
    """Return a Python of this minor version, or None."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{version}.*/bin/{name}"))
    candidates = [*map(str, installed), shutil.which(name)]
    for candidate in candidates:
        if (
            candidate
            and subprocess.run(
                [candidate, "-c", "import venv, ensurepip"], capture_output=True, check=False
            ).returncode
            == 0
        ):
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
        made.run(*pip, *NEEDED, *([f"torch=={torch}"] if torch else []), patience=1800)
        yield made


def check(wheel: Path, at: Environment) -> None:
    """Install the wheel and use all of it."""
    before = at.files()
    at.run(
        at.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-index", str(wheel)
    )
    installed = at.files() - before
    told = at.run(at.python, "-m", "unisono")
    if at.torch:
        expect(told, rf"torch here +{re.escape(at.torch)}\S*, served")
        check_torch(at)
    else:
        expect(told, "torch here +not installed")
    expect(at.launch(program(at, "arrays.py"), ranks=4), "arrays are right")
    check_c(at)
    at.run(at.python, "-m", "pip", "uninstall", "--yes", "unisono")
    left = at.files() & installed
    if (
        left
        or at.run(
            at.python, "-c", "import importlib.util as u; print(u.find_spec('unisono'))"
        ).strip()
        != "None"
    ):
        raise FailedError(f"left after pip uninstall: {sorted(left)}")


def check_torch(at: Environment) -> None:
    """Train, by the README's lines and the demo; compare collectives and DDP with what is right."""
    readme = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert readme is not None
    (at.work / "train.py").write_text(readme[1])
    loss = expect(at.launch("train.py"), r"loss (\d+\.\d+)")
    if float(loss[1]) > 0.01:
        raise FailedError(f"the README's lines end with a loss of {loss[1]}")
    demo = ROOT / "examples" / "torch" / "train_digits.py"
    shutil.copy(demo, at.work)
    expect(at.launch(demo.name), r"accuracy")
    torchrun = [at.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    expect(at.run(*torchrun, program(at, "collectives.py")), "collectives are right")
    expect(at.launch(program(at, "ddp.py")), "DDP is right")


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


def check_metadata(wheel: Path) -> None:
    """Let pip and twine read the metadata: what it requires, and for whom."""
    with tempfile.TemporaryDirectory() as folder:
        at = Environment(Path(folder), None)
        at.work.mkdir()
        at.run(sys.executable, "-m", "venv", str(at.folder / "venv"))
        at.run(at.python, "-m", "pip", "install", "--quiet", "twine")
        at.run(at.python, "-m", "twine", "check", "--strict", str(wheel))
        dry = [at.python, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]
        report = json.loads(at.run(*dry, "--report", "-", f"{wheel}[examples]"))
        names = {item["metadata"]["name"].lower() for item in report["install"]}
        if not {"unisono", "numpy", "scikit-learn", "rich"} <= names or "torch" in names:
            raise FailedError(f"unisono[examples] would install {sorted(names)}")
        (ours,) = [
            item["metadata"] for item in report["install"] if item["metadata"]["name"] == "unisono"
        ]
        if ours["requires_python"] != ">=3.10" or not ours.get("classifier"):
            raise FailedError(f"the metadata are {ours}")
        old = [
            "--python-version",
            "3.9",
            "--only-binary=:all:",
            "--target",
            str(at.work),
            "--no-deps",
        ]
        try:
            at.run(*dry, *old, str(wheel))
        except FailedError as error:
            expect(str(error), "requires a different Python|not a supported wheel")
        else:
            raise FailedError("pip would install it for Python 3.9")


def main() -> None:
    """Test the wheel in every environment that is asked for."""
    parser = argparse.ArgumentParser(description="Test a wheel of unisono in clean environments.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--only", action="append", metavar="PYTHON:TORCH", help="such as 3.11:2.15.0 or 3.12:none"
    )
    chosen = parser.parse_args()
    wheel = chosen.wheel.resolve(strict=True)
    failed = 0
    for name in ("metadata", *(chosen.only or EVERY)):
        began = time.monotonic()
        try:
            outcome = test(wheel, name)
        except FailedError as error:
            failed += 1
            outcome = f"FAILED\n{error}"
        print(f"{name}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
    sys.exit(1 if failed else 0)


def test(wheel: Path, name: str) -> str:
    """Test the wheel in one environment, and return what came of it."""
    if name == "metadata":
        check_metadata(wheel)
        return "passed"
    version, torch = name.split(":")
    python = interpreter(version)
    if python is None:
        return f"skipped: no Python {version} on this machine"
    with environment(python, None if torch == "none" else torch) as made:
        check(wheel, made)
    return "passed"


if __name__ == "__main__":
    main()
