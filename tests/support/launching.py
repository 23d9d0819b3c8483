"""Starts ``unisono launch``, other launchers and scripts for the tests, with a limit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from namespaces import Hosts

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
LIMIT = 180.0

# The first lines of a rank of Python, so that a test that takes too long can say where each was.
HEADER = "import faulthandler, os, signal, sys, time\nfaulthandler.register(signal.SIGUSR1)\n"
SUM = """
import numpy as np, unisono
comm = unisono.init()
array = np.full(1000, comm.rank + 1.0)
comm.all_reduce(array)
# In one piece: not every launcher keeps lines whole.
print(f"rank {comm.rank} of {comm.size} has {array[0]}\\n", end="")
"""


def doors() -> dict[str, list[str]]:
    """The ways to call the launcher: through Python, and the binary if it is built."""
    found = {"python": [sys.executable, "-m", "unisono", "launch"]}
    built = [TARGET / profile / "unisono" for profile in ("debug", "release")]
    built = [path for path in built if path.exists()]
    if built:
        newest = max(built, key=lambda path: path.stat().st_mtime)
        found["binary"] = [str(newest), "launch"]
    return found


@dataclass
class Done:
    """How a launcher ended, and what it and its ranks printed."""

    code: int
    out: list[str]
    err: list[str]


@contextlib.contextmanager
def started(
    command: list[str], env: Mapping[str, str] | None = None, **options: object
) -> Iterator[subprocess.Popen[str]]:
    """A running launcher, which is killed at the end if it has not ended by then."""
    modules = os.pathsep.join(entry for entry in sys.path if entry)
    # The binary runs scripts with the first python3 it finds: this one, whose modules those are.
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    process = subprocess.Popen(
        command,
        env={**os.environ, "PATH": programs, "PYTHONPATH": modules, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **{"stdin": subprocess.DEVNULL, **options},
    )
    try:
        with process:
            try:
                yield process
            finally:
                # Its ranks end with it: that is what is tested here.
                process.kill()
    finally:
        process.wait()


def finish(process: subprocess.Popen[str], text: str | None = None, limit: float = LIMIT) -> Done:
    """Wait for the launcher to end; past the limit, say what each rank was in."""
    try:
        out, err = process.communicate(text, timeout=limit)
    except subprocess.TimeoutExpired:
        state = "\n".join(below(process.pid))
        # Python's ranks answer with their stacks; the launcher passes it on.
        process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        process.kill()
        out, err = process.communicate()
        pytest.fail(
            f"{process.args} outlived {limit} s\n{state}\n{out}\nerrors, stacks last:\n{err}"
        )
    return Done(process.returncode, (out or "").splitlines(), err.splitlines())


def run(
    command: list[str], text: str | None = None, limit: float = LIMIT, **options: object
) -> Done:
    if text is not None:
        options["stdin"] = subprocess.PIPE
    with started(command, **options) as process:
        return finish(process, text, limit)


def run_python(script: Path, *args: str, timeout: float) -> str:
    """Run a script that starts its ranks itself; return what they printed, or fail with it.

    The script leads a session of its own, so that a timeout ends its ranks too.
    """
    process = subprocess.Popen(
        [sys.executable, "-u", str(script), *args],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{script.name} outlived {timeout} s; it printed:\n{output}")
    assert process.returncode == 0, output
    return output


def on_every_host(
    net: Hosts,
    command: Callable[[int], list[str]],
    timeout: float,
    env: Callable[[int], Mapping[str, str]] = lambda _host: {},
) -> list[str]:
    """Run a command on every host, and return what each printed once all have ended well.

    ``env`` gives the variables that a host's command has besides those of this process.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    always = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    started = [
        subprocess.Popen(
            [*net.enter(host), *command(host)],
            env={**os.environ, **always, **env(host)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for host in range(len(net.names))
    ]
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in started]
    except subprocess.TimeoutExpired:
        # A launcher that is asked to end takes its workers with it.
        for process in started:
            process.terminate()
        printed = [said(process) for process in started]
        pytest.fail("\n".join([f"not ended after {timeout} s:", *printed]))
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(printed)
    return printed


def said(process: subprocess.Popen) -> str:
    try:
        return process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        return f"process {process.pid} does not end either"


def below(pid: int) -> list[str]:
    """The processes below `pid`, and the calls they are in, as far as the kernel tells."""
    lines = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                folder = Path("/proc") / child
                with contextlib.suppress(OSError):
                    command = (folder / "cmdline").read_text().replace("\0", " ")
                    threads = [
                        f"{read(thread / 'comm')} in {read(thread / 'wchan')}"
                        for thread in (folder / "task").iterdir()
                    ]
                    lines.append(f"{child} {command}: {', '.join(threads)}")
                lines += below(int(child))
    return lines


def read(path: Path) -> str:
    return path.read_text().strip()


def find(program: str) -> str | None:
    """The path of `program`, beside this Python or wherever the shell finds it."""
    beside = Path(sys.executable).with_name(program)
    return str(beside) if beside.exists() else shutil.which(program)


def mpirun(ranks: int) -> list[str] | None:
    """The words that start that many ranks under MPI, on any machine, if it is installed."""
    found = find("mpirun")
    if found is None:
        return None
    is_open_mpi = "Open MPI" in "".join(run([found, "--version"]).out)
    options = ["--allow-run-as-root", "--oversubscribe"] if is_open_mpi else []
    return [found, *options, "-n", str(ranks)]


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT} s"
        time.sleep(0.01)


def state(pid: int) -> str:
    """The letter by which the kernel tells it; X for a process that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    return state(pid) not in "ZX"


def pids(folder: Path, count: int) -> list[int]:
    """The numbers that `count` processes wrote into files of `folder`, once all have."""

    def texts() -> list[str]:
        return [path.read_text() for path in folder.glob("*.pid")]

    until(lambda: sum(text.endswith("\n") for text in texts()) == count, f"{count} processes")
    return [int(text) for text in texts()]


def script(folder: Path, body: str) -> Path:
    path = folder / "program.py"
    path.write_text(HEADER + body)
    return path
