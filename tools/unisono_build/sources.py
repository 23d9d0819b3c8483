"""The sources as archives: the one inside the wheel, and the source distribution.

Both are the same bytes for the same files: sorted, of one owner and one time. In a checkout they
hold what git tracks, so what else lies there changes nothing. Where there is no git, as in an
unpacked source distribution, they hold what lies in the folders that are named here, less what a
build leaves behind.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

# The files that `cargo build -p unisono-torch` reads. Its workspace names the tests, so they must
# be there.
_TO_BUILD = (
    *("Cargo.toml", "Cargo.lock", "LICENSE-APACHE", "LICENSE-MIT", "csrc", "include", "rust"),
    *("tests/c", "tests/cuda", "tests/rust", "tools/unisono_build"),
)
_ALL = (
    *(".ci", ".clang-format", ".editorconfig", ".github", ".gitignore"),
    ".shellcheckrc",
    *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("Cargo.lock", "Cargo.toml", "LICENSE", "LICENSE-APACHE", "LICENSE-MIT", "Makefile"),
    *("README.md", "benchmarks", "clippy.toml", "csrc", "deny.toml", "docs", "examples", "fuzz"),
    *("include", "mkdocs.yml", "pyproject.toml", "python", "rust", "rustfmt.toml"),
    *("tests", "tools"),
)
# The files that a build or a tool leaves among them.
_LEFT_BEHIND = {"__pycache__", "target", "artifacts", "coverage", "build", ".pytest_cache"}
_BUILT = {".so", ".pyc", ".o", ".a", ".new"}


def archive_for_the_wheel(root: Path) -> bytes:
    """Return a ``.tar.gz`` of what builds the torch door."""
    return _archive(root, _TO_BUILD, prefix="", more={})


def source_distribution(root: Path, name: str, metadata: bytes) -> bytes:
    """Return the ``.tar.gz`` of the project in a folder `name`, with `metadata` as ``PKG-INFO``."""
    return _archive(root, _ALL, prefix=f"{name}/", more={"PKG-INFO": metadata})


def _archive(root: Path, tops: tuple[str, ...], prefix: str, more: dict[str, bytes]) -> bytes:
    time = int(
        os.environ.get("SOURCE_DATE_EPOCH", "315532800")
    )  # 1980, the first year that a zip knows
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=time, filename="") as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, data in sorted(more.items()):
            _add(archive, prefix + name, data, 0o644, time)
        for path in sorted(_files(root, tops)):
            executable = os.access(path, os.X_OK)
            name = prefix + path.relative_to(root).as_posix()
            _add(archive, name, path.read_bytes(), 0o755 if executable else 0o644, time)
    return packed.getvalue()


def _files(root: Path, tops: tuple[str, ...]) -> Iterable[Path]:
    tracked = _tracked(root, tops)
    # A file that is tracked may have been removed.
    return _walk(root, tops) if tracked is None else filter(Path.is_file, tracked)


def _tracked(root: Path, tops: tuple[str, ...]) -> list[Path] | None:
    """Return what git tracks below the `tops`; None if this is no checkout, or git is missing."""
    # Sources that were unpacked inside another project's checkout are not part of it.
    if not (root / ".git").exists():
        return None
    try:
        said = subprocess.run(
            ["git", "ls-files", "-z", "--", *tops], cwd=root, capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return [root / os.fsdecode(name) for name in said.stdout.split(b"\0") if name]


def _walk(root: Path, tops: tuple[str, ...]) -> Iterator[Path]:
    for top in tops:
        if (root / top).is_file():
            yield root / top
        for folder, folders, names in os.walk(root / top):
            here = Path(folder)
            folders[:] = [
                n
                for n in folders
                if n not in _LEFT_BEHIND and here / n != root / "python" / "unisono" / "c"
            ]
            yield from (here / name for name in names if Path(name).suffix not in _BUILT)


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int, time: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(data), mode, time
    archive.addfile(entry, io.BytesIO(data))
