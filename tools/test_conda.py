"""``make test-conda``: the package for conda, installed from its channel into fresh environments.

    python tools/test_conda.py [--python PYTHON]... dist/conda

It runs in an environment that has py-rattler-build and py-rattler. A copy of the channel gets two
stand-ins, by which the test needs no other channel: a ``python`` of links to an interpreter of this
machine, and a ``numpy`` of the files that this interpreter has. They have the names and versions of
conda-forge's packages, and are not its builds.

For each interpreter the tests of the recipe are run. Then rattler, by which pixi installs as well,
solves and links an environment; ranks run in it, a C program is compiled against it, and the
package is removed again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import rattler
import rattler_build
import test_wheel
from build_conda import index, leave
from rattler.exceptions import SolverError
from test_wheel import Environment, FailedError, expect

# Of an interpreter: its version, where it is, and the files of its NumPy.
ASK = """
import importlib.metadata as m, json, os, sys
numpy = m.distribution("numpy")
files = [str(file) for file in numpy.files if ".." not in file.parts and file.suffix != ".pyc"]
print(json.dumps({
    "version": "%d.%d.%d" % sys.version_info[:3], "program": os.path.realpath(sys.executable),
    "site": str(numpy.locate_file("")), "numpy": numpy.version, "files": files,
}))
"""


@dataclass
class Interpreter:
    """An interpreter of this machine, and its NumPy."""

    version: str
    program: str
    site: str
    numpy: str
    files: list[str]

    @property
    def name(self) -> str:
        """The name of its program and of its folder of modules."""
        return f"python{self.version.rpartition('.')[0]}"

    def stand_in(self, channel: Path, scratch: Path) -> None:
        """Put packages of this interpreter and its NumPy into a channel."""
        # This file makes the environment a virtual one for the interpreter, which then sees no
        # modules of the folder where it really lies.
        root = scratch / "python"
        (root / "bin").mkdir(parents=True)
        for name in ("python", "python3", self.name):
            (root / "bin" / name).symlink_to(self.program)
        home = Path(self.program).parent
        (root / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
        package(channel, "python", self.version, root)
        root = scratch / "numpy"
        for file in self.files:
            copy = root / "lib" / self.name / "site-packages" / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(self.site) / file, copy)
        same_minor = f"python {self.name.removeprefix('python')}.*"
        package(channel, "numpy", self.numpy, root, depends=[same_minor])


def interpreter(program: str) -> Interpreter:
    """Ask an interpreter for what its stand-ins are made of."""
    said = subprocess.run([program, "-c", ASK], capture_output=True, text=True, check=False)
    if said.returncode:
        raise FailedError(f"{program} is no Python with NumPy:\n{said.stderr}")
    return Interpreter(**json.loads(said.stdout))


def package(
    channel: Path, name: str, version: str, files: Path, depends: list[str] | None = None
) -> None:
    """Make a stand-in of files."""
    rattler_build.assemble_package(
        name,
        version,
        target_platform=str(rattler.Subdir.current()),
        build_string="stand_in_0",
        output_dir=channel / str(rattler.Subdir.current()),
        files_dir=files,
        depends=depends,
        summary="a stand-in for tests",
        compression_level=1,
        detect_prefix=False,
    )


def solve(channel: Path, what: str, glibc: str | None = None) -> list[rattler.RepoDataRecord]:
    """Let rattler choose packages, for this machine or for one of another glibc."""
    overrides = rattler.VirtualPackageOverrides()
    if glibc is not None:
        overrides.libc = rattler.Override.string(glibc)
    return asyncio.run(
        rattler.solve(
            [rattler.Channel(channel.as_uri())],
            [what],
            virtual_packages=rattler.VirtualPackage.detect(overrides),
        )
    )


def link(records: list[rattler.RepoDataRecord], prefix: Path) -> None:
    """Make an environment one of exactly these packages."""
    asyncio.run(rattler.install(records, prefix, show_progress=False))


def check(channel: Path, at: Environment) -> None:
    """Run the recipe's tests; install the package, use it and remove it."""
    (made,) = (channel / str(rattler.Subdir.current())).glob("unisono-*.conda")
    for result in rattler_build.Package.from_file(made).run_tests(channel=[channel.as_uri()]):
        if not result.success:
            raise FailedError("\n".join(["a test of the recipe", *result.output]))
    try:
        solve(channel, "unisono", glibc="2.17")
    except SolverError as error:
        expect(str(error), "__glibc")
    else:
        raise FailedError("it would be installed beside glibc 2.17")
    records = solve(channel, "unisono")
    others = [record for record in records if record.name.normalized != "unisono"]
    if len(others) != len(records) - 1:
        raise FailedError(f"chosen were {records}")
    prefix = at.folder / "venv"
    link(others, prefix)
    before = at.files()
    link(records, prefix)
    use(at, prefix)
    link(others, prefix)
    left = at.files() - before
    if left:
        raise FailedError(f"left after it was removed: {sorted(left)}")


def use(at: Environment, prefix: Path) -> None:
    """Run ranks and a C program in an environment."""
    expect(at.run("unisono"), rf"unisono \S+, in {prefix}/lib/python\S+/unisono\n")
    arrays = test_wheel.program(at, "arrays.py")
    expect(at.run("unisono", "launch", "-n", "2", arrays), "arrays are right")
    flags = at.run(at.python, "-m", "unisono", "--cflags", "--libs")
    expect(flags, rf"-I{prefix}/include -L{prefix}/lib ")
    test_wheel.check_c(at)


def main() -> None:
    """Test the package of a channel with each interpreter."""
    parser = argparse.ArgumentParser(description="Test unisono's package for conda.")
    parser.add_argument("channel", type=Path)
    parser.add_argument(
        "--python", action="append", metavar="PYTHON", help="one that has NumPy (this one)"
    )
    chosen = parser.parse_args()
    if not any(chosen.channel.glob(f"{rattler.Subdir.current()}/unisono-*.conda")):
        raise FailedError(f"{chosen.channel} has no package for this machine (`make conda`)")
    for program in chosen.python or [sys.executable]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="unisono-conda-") as name:
            folder = Path(name).resolve()
            # Stand-ins stay out of the user's cache of packages.
            os.environ["RATTLER_CACHE_DIR"] = str(folder / "packages")
            channel = shutil.copytree(chosen.channel, folder / "channel")
            found = interpreter(program)
            found.stand_in(channel, folder / "stand-ins")
            asyncio.run(index(channel))
            at = Environment(folder, torch=None)
            at.work.mkdir()
            check(channel, at)
        took = time.monotonic() - began
        print(f"Python {found.version}, NumPy {found.numpy}: {took:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except FailedError as error:
        print(f"conda: {error}", file=sys.stderr)
        leave(1)
    leave(0)
