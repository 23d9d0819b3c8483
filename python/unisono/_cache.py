"""The folder of the doors that were built on this machine, from which code is run.

It is the user's own. Nothing in it is used unless every folder on the way to it, itself and the
file belong to the user or to root, and nobody else may write to them. A folder that all may write
to, such as /tmp, may lie on the way if it has the sticky bit: nobody but the owner of what lies in
it can take that away.

The way to a file may change between a look at it and its use. So each folder is opened in the one
before it and judged as it was opened, and a library is loaded by the descriptor of its file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_NOT_FOLLOWED = os.O_NOFOLLOW | os.O_CLOEXEC
# Kept open: glibc takes a library of the same name, here the number, for one that is loaded.
_loaded: list[int] = []


class UntrustedError(Exception):
    """Another user may have written what lies there; says where, and what to do."""


def home() -> Path:
    """Return the folder of the caches of all versions of unisono, which may not exist.

    Raises
    ------
    RuntimeError
        The user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says the standard.
    return (Path(named) if named.startswith("/") else Path.home() / ".cache") / "unisono"


def make(folder: Path) -> None:
    """Make the folder, and those above it that are missing, for the user alone.

    Raises
    ------
    UntrustedError
        Another user may write to it or to one above it, or owns that.
    OSError
        It cannot be made.
    """
    os.close(_open_folder(folder, make=True))


def is_trusted(path: Path) -> bool:
    """Return whether what lies there, a folder or a file, is there and can be nobody else's."""
    try:
        os.close(_open_folder(path) if path.is_dir() else _open_file(path))
    except (OSError, UntrustedError):
        return False
    return True


def problem(folder: Path) -> str | None:
    """Return why nothing is used of the folder, or None if it may be used or is not there."""
    try:
        os.close(_open_folder(folder))
    except UntrustedError as error:
        return str(error)
    except OSError:
        return None
    return None


def pinned(library: Path) -> str:
    """Return the name by which to load the library, which means this very file as long as we run.

    Raises
    ------
    UntrustedError, OSError
        It is not to be loaded.
    """
    file = _open_file(library)
    _loaded.append(file)
    return f"/proc/self/fd/{file}"


def _open_file(path: Path) -> int:
    folder = _open_folder(path.parent)
    try:
        file = os.open(path.name, os.O_RDONLY | os.O_NONBLOCK | _NOT_FOLLOWED, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _judge(file, path)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise UntrustedError(f"{path} is no file")
    except BaseException:
        os.close(file)
        raise
    return file


def _open_folder(path: Path, *, make: bool = False) -> int:
    # Links are followed first. Wherever they lead, each folder on that way is judged.
    parts = Path(os.path.realpath(path)).parts
    # Some folders may be passed through and not read.
    how = os.O_PATH | os.O_DIRECTORY | _NOT_FOLLOWED
    here = os.open("/", how)
    try:
        _judge(here, Path("/"), is_passed=len(parts) > 1)
        for count, part in enumerate(parts[1:], start=2):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=here)
            inner = os.open(part, how, dir_fd=here)
            os.close(here)
            here = inner
            _judge(here, Path(*parts[:count]), is_passed=count < len(parts))
    except BaseException:
        os.close(here)
        raise
    return here


def _judge(descriptor: int, path: Path, *, is_passed: bool = False) -> None:
    status = os.fstat(descriptor)
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{path} belongs to another user (uid {status.st_uid})")
    is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_open and not (is_passed and status.st_mode & stat.S_ISVTX):
        raise UntrustedError(f"other users may write to {path} (chmod go-w {path})")
