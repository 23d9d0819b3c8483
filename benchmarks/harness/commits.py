"""Builds of unisono from several commits, side by side: a package of Python for each.

Another commit's sources are unpacked below target/against/, where its build and its package stay
for the next time. A package is a copy of the sources' folder `unisono` with the modules that were
built from them, so PYTHONPATH says which commit a process uses, and no build gets in the way of
this checkout's own.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from harness.build import CHECKOUT, MissingError

PLACE = CHECKOUT / "target" / "against"  # git ignores it
THIS = "this"
DOORS = ("numpy", "torch")


@dataclasses.dataclass(frozen=True)
class Build:
    """Where one commit, or this checkout as it is, is built."""

    name: str
    sources: Path
    target: Path
    # A folder to put first on PYTHONPATH.
    package: Path


def checkout() -> Build:
    """Return this checkout as it is, with what is not committed."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", CHECKOUT / "target")).resolve()
    return Build(THIS, CHECKOUT, target, PLACE / THIS)


def commit(name: str) -> Build:
    """Unpack the sources of a commit, unless that has been done, and return where they are."""
    number = git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if not number:
        raise MissingError(f"{name} is no commit of this repository")
    short = number[:12]
    folder = PLACE / short
    sources = folder / "sources"
    if not sources.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Unpacked beside and then renamed: what is there is whole.
        with tempfile.TemporaryDirectory(dir=folder) as room:
            archive = Path(room) / "sources.tar"
            git("archive", "--output", str(archive), number)
            with tarfile.open(archive) as packed:
                # Pythons before 3.11.4 have no filters; git has written it.
                guarded = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                packed.extractall(Path(room) / "sources", **guarded)
            (Path(room) / "sources").rename(sources)
    return Build(short, sources, folder / "target", folder / "package")


def git(*words: str) -> str:
    command = ["git", "-C", str(CHECKOUT), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and done.stderr:
        raise MissingError(f"{' '.join(command)}:\n{done.stderr.strip()}")
    return done.stdout.strip()


def build(of: Build, doors: Iterable[str]) -> None:
    """Build its modules for these doors, in the release profile of its own Cargo.toml."""
    modules = {name: module for door in doors for name, module in [build_door(of, door)]}
    fresh = of.package.with_name(f"{of.package.name}.{os.getpid()}")
    built_before = shutil.ignore_patterns("*.so", "__pycache__", "c")
    shutil.copytree(of.sources / "python/unisono", fresh / "unisono", ignore=built_before)
    for name, module in modules.items():
        shutil.copy(module, fresh / "unisono" / name)
    shutil.rmtree(of.package, ignore_errors=True)
    fresh.rename(of.package)


def build_door(of: Build, door: str) -> tuple[str, Path]:
    """Build one module. Returns the name it has in the package, and where it is."""
    name, variables, target = "_core.abi3.so", {"PYO3_NO_PYTHON": "1"}, of.target
    what, library = ["-p", "unisono-module"], "lib_core.so"
    if door == "torch":
        name, torch = torch_door()
        variables |= {"UNISONO_TORCH_DIR": str(torch), "UNISONO_DOOR": name}
        what, library = ["-p", "unisono-torch"], "libcore_torch.so"
    if not (of.sources / "rust" / "torch").exists():
        # An older commit, where one package has both doors and their libraries have one name.
        what, library = ["-p", "unisono-python"], "lib_core.so"
        if door == "torch":
            what += ["--features", "torch"]
            target /= name.removeprefix("core-").removesuffix(".so")
    variables["CARGO_TARGET_DIR"] = str(target)
    command = [os.environ.get("CARGO", "cargo"), "build", "--release", *what]
    if shutil.which(command[0]) is None:
        raise MissingError("cargo is not installed (https://rust-lang.org/tools/install)")
    done = subprocess.run(
        command,
        cwd=of.sources,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MissingError(f"{of.name} could not be built for {door}:\n{done.stderr.strip()}")
    return name, target / "release" / library


def torch_door() -> tuple[str, Path]:
    """Return the file name of the door for this Python's torch, and torch's folder."""
    sys.path.append(str(CHECKOUT / "tools"))
    from unisono_build import torches

    torch = torches.find()
    if torch is None:
        raise MissingError("this Python has no torch to build a door for")
    return torches.door_of(torch), torch
