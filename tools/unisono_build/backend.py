"""The hooks of PEP 517 and 660: what ``pip install .`` calls.

maturin does the work for the Python package. These hooks look for the compilers first, and add the
torch door for the torch of the environment that is installed into, the C library, and the sources
that ``python -m unisono build-torch`` compiles. Without torch the wheel has all but the door.

pip unpacks the sources in /tmp and calls the hooks there; ``toolchain`` says why no compiler is
run there. maturin's own hooks would do that, so its program is called as they call it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import maturin

from unisono_build import assemble, licences, parts, sources, toolchain, torches

_Settings = dict[str, Any] | None
ROOT = torches.ROOT
PACKAGE = ROOT / "python" / "unisono"
# The crate that maturin builds, as pyproject.toml has it.
MANIFEST = Path("rust", "module", "Cargo.toml")


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """Say what else must be installed to build: nothing, but the compilers must be there."""
    # maturin's own hook would install a Rust of its own where there is none.
    toolchain.check(ROOT, torch=torches.find())
    return []


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings: _Settings = None) -> list[str]:
    """Say what else must be installed to pack the sources: nothing."""
    return []


def prepare_metadata_for_build_wheel(folder: str, config_settings: _Settings = None) -> str:
    """Write the metadata, which is maturin's."""
    toolchain.check(ROOT, torch=torches.find())
    place = ["--metadata-directory", str(Path(folder).absolute())]
    return _maturin("write-dist-info", [*place, "--interpreter", sys.executable], config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(
    folder: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel for this platform and the torch that is there; return its name."""
    torch = torches.find()
    toolchain.check(ROOT, torch=torch)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _maturin_wheel(Path(scratch), config_settings, metadata_directory)
        more = Path(scratch) / "parts"
        add_parts(parts.Build(ROOT, ROOT / "target"), [torch] if torch else [], more)
        return assemble.add(wheel, more, Path(folder), ROOT).name


def build_editable(
    folder: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Build into the package's folder in this checkout, and return the wheel that leads to it."""
    torch = torches.find()
    toolchain.check(ROOT, torch=torch)
    wheel = _maturin_wheel(Path(folder), config_settings, metadata_directory, "--editable")
    build = parts.Build(ROOT, ROOT / "target")
    if torch is not None:
        parts.torch_door(build, torch, PACKAGE)
    parts.c_library(build, PACKAGE)
    return wheel.name


def build_sdist(folder: str, config_settings: _Settings = None) -> str:
    """Pack the sources; return the archive's name."""
    with tempfile.TemporaryDirectory() as scratch:
        info = Path(scratch) / prepare_metadata_for_build_wheel(scratch)
        metadata = (info / "METADATA").read_bytes()
    fields = dict(
        line.split(b": ", 1) for line in metadata.split(b"\n\n")[0].splitlines() if b": " in line
    )
    name = f"unisono-{fields[b'Version'].decode()}"
    path = Path(folder) / f"{name}.tar.gz"
    path.write_bytes(sources.source_distribution(ROOT, name, metadata))
    return path.name


def add_parts(build: parts.Build, chosen: list[Path], folder: Path) -> None:
    """Build all but maturin's part into `folder`, with a door for each of the `chosen`."""
    folder.mkdir(parents=True, exist_ok=True)
    for torch in chosen:
        parts.torch_door(build, torch, folder)
    parts.c_library(build, folder)
    (folder / "third-party-licences.txt").write_text(licences.collect(build))
    (folder / "source.tar.gz").write_bytes(sources.archive_for_the_wheel(ROOT))


def _maturin_wheel(
    folder: Path, config_settings: _Settings, metadata_directory: str | None, *more: str
) -> Path:
    """Have maturin build its part of the wheel, into `folder`."""
    # Of the platform that it is built on, and not judged.
    arguments = ["--interpreter", sys.executable, "--compatibility", "off", *more]
    arguments += ["--out", str(folder.absolute())]
    known = {}
    if metadata_directory is not None:
        known["MATURIN_PEP517_METADATA_DIR"] = str(Path(metadata_directory).absolute())
    return folder / Path(_maturin("build-wheel", arguments, config_settings, **known)).name


def _maturin(what: str, arguments: list[str], config_settings: _Settings, **known: str) -> str:
    """Call maturin as its own hooks do, but in another folder; return the last line it prints."""
    command = ["maturin", "pep517", what, "--manifest-path", str(ROOT / MANIFEST), *arguments]
    command += maturin.get_maturin_pep517_args(config_settings)
    said = subprocess.run(
        command,
        cwd=toolchain.ANYWHERE,
        env=toolchain.variables() | known,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    # A front end may read what a hook prints.
    sys.stdout.write(said.stdout)
    if said.returncode:
        raise SystemExit(f"unisono: `{' '.join(command)}` failed; what it said is above")
    return said.stdout.strip().splitlines()[-1]
