"""Puts the parts into the wheel that maturin made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def add(wheel: Path, parts: Path, folder: Path, root: Path) -> Path:
    """Add what lies below `parts` to the package in `wheel`; return the new wheel, in `folder`.

    The wheel's list of files and their hashes is made anew. With ``SOURCE_DATE_EPOCH`` the same
    files give the same bytes, whatever the umask; maturin's bill of materials names the crates of
    the workspace by where it lies, which `root` is replaced for.
    """
    with tempfile.TemporaryDirectory() as scratch:
        _wheel("unpack", "--dest", scratch, str(wheel))
        (unpacked,) = Path(scratch).iterdir()
        shutil.copytree(parts, unpacked / "unisono", dirs_exist_ok=True)
        for bill in unpacked.glob("*.dist-info/sboms/*"):
            bill.write_text(bill.read_text().replace(str(root), "/unisono"))
        for path in filter(Path.is_file, unpacked.rglob("*")):
            path.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
        packed = Path(scratch) / "packed"
        packed.mkdir()
        _wheel("pack", "--dest-dir", str(packed), str(unpacked))
        (made,) = packed.iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(str(made), str(folder / made.name)))


def _wheel(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "wheel", *arguments], stdout=sys.stderr, check=True)
