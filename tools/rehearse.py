"""``make rehearse``: a release published to an index on this machine, and installed from there.

    python tools/rehearse.py [--only 3.12:2.15.0]... DIST

It runs in an environment that has pypiserver, twine and wheel. The files of ``dist/``
are uploaded by twine, as the workflow uploads them, after a wheel of a lower version, which is the
same wheel under another number. In each clean environment pip then installs that version and
upgrades it by name. At the end the release is yanked, for which a static index is made of the same
files: pypiserver knows no yanked ones.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import test_wheel
from test_wheel import Environment, FailedError, environment, expect

LOWER = "0.0.1"
# A module that the lower version alone has: an upgrade takes it away.
LEFT_BEHIND = "unisono/only_in_the_lower_version.py"
PYPI = "https://pypi.org/simple/"
REASON = "a rehearsal"


def lower(wheel: Path, folder: Path) -> Path:
    """Return the wheel again, as that of a lower version and with one module more."""
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as scratch:
        call("wheel", "unpack", "--dest", scratch, wheel)
        (tree,) = Path(scratch).iterdir()
        info = (tree / f"unisono-{version}.dist-info").rename(tree / f"unisono-{LOWER}.dist-info")
        metadata = (info / "METADATA").read_text("utf-8")
        changed = re.sub(r"(?m)^Version: .*$", f"Version: {LOWER}", metadata, count=1)
        (info / "METADATA").write_text(changed, "utf-8")
        (tree / LEFT_BEHIND).write_text('"""Not in the release."""\n')
        call("wheel", "pack", "--dest-dir", folder, tree)
    (made,) = folder.glob(f"unisono-{LOWER}-*.whl")
    return made


def call(module: str, *arguments: object) -> str:
    """Run a module of this environment, and return what it printed."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise FailedError(f"{' '.join(command)}\n  exit status {done.returncode}\n{done.stdout}")
    return done.stdout


@contextlib.contextmanager
def served(module: str, *arguments: object) -> Iterator[str]:
    """Run a server at a free port, in place of PORT in the arguments; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = [str(word).replace("PORT", port) for word in arguments]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words], stdout=said, stderr=subprocess.STDOUT
        )
        try:
            url = f"http://127.0.0.1:{port}/"
            deadline = time.monotonic() + 30
            while not answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    raise FailedError(f"{module} does not serve at {url}:\n{said.read()}")
                time.sleep(0.1)
            yield url
        finally:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    """Whether a server answers there."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def pypiserver(files: Path) -> Iterator[str]:
    """Serve an index that takes uploads, and leads on to the user's index for all else."""
    options = ["-i", "127.0.0.1", "-p", "PORT", "-a", ".", "-P", "."]
    other = os.environ.get("PIP_INDEX_URL") or PYPI
    with served("pypiserver", "run", *options, "--fallback-url", other, files) as url:
        yield url


@contextlib.contextmanager
def yanked(files: Path, version: str) -> Iterator[str]:
    """Serve an index of the same files that has taken that version back."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        shutil.copytree(files, site / "files")
        links = []
        for file in files.glob("unisono-*"):
            back = f' data-yanked="{REASON}"' if f"-{version}" in file.name else ""
            place = f"../../files/{file.name}#sha256={digest(file)}"
            links.append(f'<a href="{place}"{back}>{file.name}</a>')
        # As PEP 503 has an index, and PEP 592 a file that was taken back.
        page = site / "simple" / "unisono" / "index.html"
        page.parent.mkdir(parents=True)
        page.write_text(f"<!DOCTYPE html><html><body>{' '.join(links)}</body></html>")
        with served("http.server", "--bind", "127.0.0.1", "--directory", site, "PORT") as url:
            yield url


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def upload(url: str, *files: Path) -> str:
    """Upload files as the workflow does."""
    anyone = ["--repository-url", url, "--username", "anyone", "--password", "any"]
    plain = ["--non-interactive", "--disable-progress-bar", "--verbose"]
    return call("twine", "upload", *plain, *anyone, *files)


def install(at: Environment, url: str, what: str, *options: str) -> str:
    """Let pip install from the index at the URL, and return what it printed."""
    command = [at.python, "-m", "pip", "install", "--index-url", f"{url}simple/", "--no-cache-dir"]
    return at.run(*command, *options, what, patience=test_wheel.LONG)


def version_in(at: Environment) -> str:
    """Return the version that is installed, by its metadata."""
    find = "from importlib.metadata import version; print(version('unisono'))"
    return at.run(at.python, "-c", find).strip()


def demand(at: Environment, version: str, when: str) -> None:
    """Raise unless that version is installed, and only files of it."""
    found = version_in(at)
    has_more = any(at.folder.glob(f"venv/lib/python*/site-packages/{LEFT_BEHIND}"))
    if found != version or has_more != (version == LOWER):
        raise FailedError(f"{when}: unisono {found} and not {version}, or files of another")


def check(at: Environment, index: str, taken_back: str, version: str) -> None:
    """Install by name, upgrade, and follow a yank."""
    install(at, index, f"unisono=={LOWER}")
    demand(at, LOWER, "the lower version")
    install(at, index, "unisono")
    demand(at, LOWER, "pip install with a version there")
    install(at, index, "unisono", "--upgrade")
    demand(at, version, "pip install --upgrade")
    told = at.run(at.python, "-m", "unisono")
    if at.torch:
        expect(told, rf"torch here +{re.escape(at.torch)}\S*, served")
        test_wheel.check_torch(at)
    expect(at.launch(test_wheel.program(at, "arrays.py"), ranks=2), "arrays are right")
    at.run(at.python, "-m", "pip", "uninstall", "--yes", "unisono")
    install(at, index, "unisono")
    demand(at, version, "pip install in an environment without it")
    at.run(at.python, "-m", "pip", "uninstall", "--yes", "unisono")
    install(at, taken_back, "unisono")
    demand(at, LOWER, "pip install after the yank")
    expect(install(at, taken_back, f"unisono=={version}"), rf"(?s)yanked.*{REASON}")
    demand(at, version, "pip install of the yanked version by its number")


def check_files(index: str, files: list[Path]) -> None:
    """Download each file by name, and compare it; no file is taken twice."""
    with tempfile.TemporaryDirectory() as folder:
        plain = ["--no-deps", "--no-cache-dir", "--dest", folder, "--index-url", f"{index}simple/"]
        for kind in ("--only-binary", "--no-binary"):
            call("pip", "download", *plain, kind, "unisono", "unisono")
        got = {file.name: digest(file) for file in Path(folder).iterdir()}
    if got != {file.name: digest(file) for file in files}:
        raise FailedError(f"pip downloads {sorted(got)}, or other bytes than were uploaded")
    try:
        upload(index, files[0])
    except FailedError as error:
        expect(str(error), r"already\s+exists")
    else:
        raise FailedError(f"{files[0].name} was taken a second time")


def main() -> None:
    """Rehearse the release of the files in a folder."""
    parser = argparse.ArgumentParser(description="Publish unisono to an index on this machine.")
    parser.add_argument("dist", type=Path, help="the folder with one wheel of this machine")
    parser.add_argument(
        "--only", action="append", metavar="PYTHON:TORCH", help="such as 3.11:2.15.0 or 3.12:none"
    )
    chosen = parser.parse_args()
    # A proxy would not find this machine's index.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    machine = os.uname().machine
    (wheel,) = chosen.dist.glob(f"unisono-*_{machine}.whl")
    version = wheel.name.split("-")[1]
    files = [wheel, *chosen.dist.glob(f"unisono-{version}.tar.gz")]
    print("published:", ", ".join(file.name for file in files), flush=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-index-")))
        (store := folder / "index").mkdir()
        index = stack.enter_context(pypiserver(store))
        upload(index, lower(wheel, folder))
        upload(index, *files)
        check_files(index, files)
        print("files: each is what was uploaded, and none is taken twice", flush=True)
        taken_back = stack.enter_context(yanked(store, version))
        for name in chosen.only or test_wheel.OF_SOURCES:
            began = time.monotonic()
            number, _, torch = name.partition(":")
            python = test_wheel.interpreter(number)
            if python is None:
                sys.exit(f"not on this machine: Python {number}")
            with environment(python, None if torch == "none" else torch) as at:
                check(at, index, taken_back, version)
            print(f"{name}: {LOWER}, {version}, and back: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except FailedError as error:
        sys.exit(f"rehearse: {error}")
