"""The hooks of PEP 517 and 660: what ``pip install .`` calls.

maturin does the work for the Python package. These hooks look for the compilers first, and add the
torch door for the torch of the environment that is installed into, the C library, and the sources
that ``python -m unisono build-torch`` compiles. Without torch the wheel has all but the door.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import maturin

from unisono_build import assemble, licences, parts, sources, toolchain, torches

_Settings = dict[str, Any] | None
ROOT = torches.ROOT
PACKAGE = ROOT / "python" / "unisono"


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
    return str(maturin.prepare_metadata_for_build_wheel(folder, config_settings))


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(
    folder: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel for this platform and the torch that is there; return its name."""
    torch = torches.find()
    toolchain.check(ROOT, torch=torch)
    with tempfile.TemporaryDirectory() as scratch:
        name = maturin.build_wheel(scratch, config_settings, metadata_directory)
        more = Path(scratch) / "parts"
        add_parts(parts.Build(ROOT, ROOT / "target"), [torch] if torch else [], more)
        return assemble.add(Path(scratch) / name, more, Path(folder), ROOT).name


def build_editable(
    folder: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Build into the package's folder in this checkout, and return the wheel that leads to it."""
    torch = torches.find()
    toolchain.check(ROOT, torch=torch)
    name = maturin.build_editable(folder, config_settings, metadata_directory)
    build = parts.Build(ROOT, ROOT / "target")
    if torch is not None:
        parts.torch_door(build, torch, PACKAGE)
    parts.c_library(build, PACKAGE)
    return str(name)


def build_sdist(folder: str, config_settings: _Settings = None) -> str:
    """Pack the sources; return the archive's name."""
    with tempfile.TemporaryDirectory() as scratch:
        info = Path(scratch) / maturin.prepare_metadata_for_build_wheel(scratch)
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
