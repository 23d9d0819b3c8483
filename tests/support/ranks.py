"""Start the ranks of a job as child processes, and say what each was in when it goes wrong.

``run_ranks`` starts one process per rank with the variables torchrun would set, collects what
a function returned on each, and enforces a hard limit. A rank is a fork of a process that has
imported what it needs (``forkserver``). A rank that outlives the limit is asked for its
Python stacks (faulthandler on SIGUSR1, which answers even from inside native code) and then
killed. Every rank leads a session of its own, so killing its process group takes what it started
with it and nothing else. ``run_torchrun`` does the same for a script under torchrun.

This file is also the program a rank runs: see ``_child``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import io
import itertools
import json
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forkserver
import namespaces

HERE = Path(__file__).resolve().parent
# After one rank fails the others have this long to notice before their stacks are taken. A rank
# that lost a peer should end by itself; a test that wants to see how uses ``check=False``.
# An emulated processor needs more time for everything.
PATIENCE = float(os.environ.get("UNISONO_TEST_PATIENCE", "1"))
GRACE = 10.0 * PATIENCE
STACK_TIME = 0.5
OUTPUT_LINES = 60
# Below what Linux gives to sockets that ask for any port.
PORTS = range(12000, 32000)
MOST_WORKERS = 16
_PR_SET_PDEATHSIG = 1
# Objects that the emulated CUDA driver may not report at the end of a rank that ends well.
LEFT_IN_THE_DRIVER = (
    "allocations",
    "pinned",
    "registrations",
    "imports",
    "freed_while_imported",
    "streams",
    "unfinished_operations",
    "events",
    "graphs",
    "graph_executables",
    "error",
)


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    ``exit_code`` is negative for a signal and None if the rank had to be killed; ``value`` is what
    the target function returned; ``error`` is the traceback of the exception that ended it;
    ``stack`` holds the Python stacks of a rank that had to be killed.
    """

    rank: int
    exit_code: int | None
    value: Any = None
    error: str | None = None
    output: str = ""
    stack: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the rank ended by itself, without an exception and with status 0."""
        return self.exit_code == 0 and self.error is None

    def report(self) -> str:
        """Everything known about how this rank ended, for a person to read."""
        if self.exit_code is None:
            ending = f"still running after {self.seconds:.1f} s, killed"
        elif self.exit_code < 0:
            ending = f"killed by {signal.Signals(-self.exit_code).name} after {self.seconds:.1f} s"
        else:
            ending = f"exit code {self.exit_code} after {self.seconds:.1f} s"
        parts = [f"rank {self.rank}: {ending}"]
        if self.error:
            parts.append(_indent(self.error))
        tail = self.output.splitlines()[-OUTPUT_LINES:]
        if tail:
            parts += ["  last output:", _indent("\n".join(tail), 4)]
        if self.stack:
            parts += ["  was in:", _indent(self.stack, 4)]
        return "\n".join(parts)


class RanksError(AssertionError):
    """A rank failed or outlived the limit; ``results`` holds how every rank ended."""

    def __init__(self, headline: str, results: Sequence[RankResult]) -> None:
        self.results = list(results)
        super().__init__("\n".join([headline, *(result.report() for result in results)]))


def run_ranks(
    world: int,
    target: str | os.PathLike[str],
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    torch: bool = False,
    check: bool = True,
    prefix: Callable[[int], Sequence[str]] | None = None,
    host: Callable[[int], str] | None = None,
) -> list[RankResult]:
    """Run ``target`` on ``world`` ranks and return how each ended, in rank order.

    Parameters
    ----------
    world
        How many ranks to start. Each gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        MASTER_ADDR and MASTER_PORT (a free port of this host).
    target
        ``"module:function"``, called with ``args`` (pickled; so is what it returns), or the path
        of a script, run with ``args`` as its command line.
    timeout
        Seconds for the whole run; what still runs then is dumped and killed.
    env
        Variables to add for every rank, or a function from a rank to them.
    torch
        Limit torch to one thread per rank, and destroy the process group a function leaves.
    check
        Raise ``RanksError`` unless every rank ended well. Without it the results say which ranks
        failed. The timeout, and what ranks that ended well left in the emulated CUDA driver, raise
        all the same.
    prefix
        From a rank to the command that becomes it, such as ``ip netns exec host``. One that does
        not replace itself by the program that follows ends when it is asked for its stacks.
    host
        From a rank to the network namespace that it runs in (``Hosts.names``).
    """
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-ranks-")))
        spec = folder / "spec"
        spec.write_bytes(pickle.dumps((str(target), args, torch)))
        ranks = []
        stack.callback(_kill_all, ranks)
        for rank in range(world):
            extra = env(rank) if callable(env) else env
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **({"OMP_NUM_THREADS": "1"} if torch else {}),
                **reporting(folder, rank),
                **(extra or {}),
            }
            program = [sys.executable, str(HERE / "ranks.py"), "rank", str(folder)]
            where = host(rank) if host else None
            if prefix or not forkserver.serves(variables):
                first = [
                    *(namespaces.enter(where) if where else ()),
                    *(prefix(rank) if prefix else ()),
                ]
                ranks.append(_Rank(rank, folder, [*first, *program], variables))
            else:
                fork = functools.partial(forkserver.start, host=where, torch=torch)
                ranks.append(_Rank(rank, folder, program[2:], variables, fork=fork))
        timed_out = _wait(ranks, timeout, stop_on_failure=check)
        results = [rank.finish() for rank in ranks]
        ended_well = {result.rank: result.ok for result in results}
        left = [] if timed_out else left_in_the_driver(folder, ended_well, torch=torch)
    if timed_out:
        late = [result.rank for result in results if result.exit_code is None]
        raise RanksError(f"{target}: ranks {late} of {world} outlived {timeout} s", results)
    failed = [result.rank for result in results if not result.ok]
    if check and failed:
        raise RanksError(f"{target}: ranks {failed} of {world} failed", results)
    if left:
        headline = "\n".join([f"{target}: left in the emulated CUDA driver", *left])
        raise RanksError(headline, results)
    return results


def run_torchrun(
    script: str | os.PathLike[str],
    nproc: int,
    args: Sequence[str] = (),
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run ``script`` under torchrun with ``nproc`` processes and return all they printed.

    Raises ``RanksError`` when it fails or outlives ``timeout``, with the stacks of every process.
    """
    with tempfile.TemporaryDirectory(prefix="unisono-torchrun-") as name:
        folder = Path(name)
        command = [sys.executable, str(HERE / "ranks.py"), "torchrun", str(folder)]
        command += ["--standalone", "--nproc-per-node", str(nproc), str(HERE / "ranks.py")]
        command += ["script", str(folder), str(script), *map(str, args)]
        agent = _Rank(0, folder, command, {"OMP_NUM_THREADS": "1", **(env or {})}, "torchrun")
        try:
            timed_out = _wait([agent], timeout, stop_on_failure=False)
            stacks = _stacks_of_workers(folder) if timed_out else ""
        finally:
            agent.terminate()
        result = agent.finish()
    if timed_out or not result.ok:
        trouble = f"outlived {timeout} s" if timed_out else "failed"
        headline = f"torchrun --nproc-per-node {nproc} {script}: {trouble}"
        raise RanksError("\n".join(filter(None, [headline, stacks])), [result])
    return result.output


def free_port() -> int:
    """A TCP port of 127.0.0.1 that no process listens on, and none is given by the kernel.

    The kernel gives ports above these to sockets that ask for any, so the port stays free until
    its user comes. Tests that run beside each other have parts of their own.
    """
    while True:
        port = next(_ports)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            return port


def _own_ports() -> Iterator[int]:
    """The ports of this process, over and over, from any of them on."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = (PORTS.stop - PORTS.start) // MOST_WORKERS
    first = PORTS.start + worker % MOST_WORKERS * count
    begin = random.randrange(count)
    return (first + (begin + number) % count for number in itertools.count())


_ports = _own_ports()


def reporting(folder: Path, rank: int) -> dict[str, str]:
    """Have the emulated CUDA driver, if the rank finds it, report what is left in it at the end."""
    return {"CUDA_EMULATOR_REPORT": str(folder / f"rank-{rank}.driver-%p")}


def left_in_the_driver(
    folder: Path,
    ended_well: Mapping[int, bool],
    *,
    torch: bool = False,
    kinds: Sequence[str] = LEFT_IN_THE_DRIVER,
) -> list[str]:
    """Objects, beside contexts and modules, that ranks that ended well left in the emulated driver.

    Contexts and modules live as long as the process, and so do the streams that unisono lends to
    torch. A rank that did not end by itself leaves no report, and what it had mapped stays mapped.
    """
    reports = {rank: sorted(folder.glob(f"rank-{rank}.driver-*")) for rank in ended_well}
    someone_died = any(reports.values()) and not all(reports.values())
    owed = {"freed_while_imported": someone_died, "streams": torch}
    left = []
    for rank, paths in reports.items():
        for path in paths if ended_well[rank] else ():
            report = json.loads(path.read_text())
            found = [kind for kind in kinds if report[kind] != 0 and not owed.get(kind)]
            if found:
                counts = ", ".join(f"{kind} {report[kind]}" for kind in found)
                left.append(f"rank {rank}: {counts}")
    return left


class _Rank:
    """A running child: its process, and the files it writes its output, result and stacks to."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        command: list[str],
        variables: Mapping[str, str],
        name: str = "",
        fork: Callable[..., forkserver.Forked] | None = None,
    ) -> None:
        self.rank = rank
        self.folder = folder
        self.name = name or f"rank-{rank}"
        self.started = time.monotonic()
        self.ended: float | None = None
        self.killed = False
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}
        self.process: subprocess.Popen[bytes] | forkserver.Forked
        if fork:
            self.process = fork(command, environment, self.file("output"))
        else:
            self.process = self._start(command, environment)

    def _start(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.file("output").open("wb") as output:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def file(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{kind}"

    def running(self) -> bool:
        if self.process.poll() is None:
            return True
        self.ended = self.ended or time.monotonic()
        return False

    def ask_for_stack(self) -> None:
        # Before the handler is in place SIGUSR1 would kill, which is what comes next anyway.
        if self.file("stack").exists() and self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        # Until the child is reaped no other process can get its pid, nor its group.
        if self.process.poll() is None:
            self.killed = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def terminate(self) -> None:
        """End torchrun's agent in the way that lets it end its workers."""
        if self.process.poll() is None:
            self.killed = True
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
                return
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def finish(self) -> RankResult:
        seconds = (self.ended or time.monotonic()) - self.started
        value, error = None, None
        if self.file("result").exists():
            value, error = pickle.loads(self.file("result").read_bytes())
        return RankResult(
            rank=self.rank,
            exit_code=None if self.killed else self.process.returncode,
            value=value,
            error=error,
            output=self.file("output").read_text(errors="replace"),
            stack=_read(self.file("stack")) if self.killed else "",
            seconds=seconds,
        )


def _wait(ranks: list[_Rank], timeout: float, *, stop_on_failure: bool) -> bool:
    """Wait for all, then dump and kill what still runs. True if that was for the timeout."""
    deadline = time.monotonic() + timeout * PATIENCE
    timed_out = True
    pause = 0.005
    while (running := [rank for rank in ranks if rank.running()]) and time.monotonic() < deadline:
        failed = any(not rank.running() and rank.process.returncode for rank in ranks)
        if failed and stop_on_failure and time.monotonic() + GRACE < deadline:
            deadline, timed_out = time.monotonic() + GRACE, False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    if not running:
        return False
    for rank in running:
        rank.ask_for_stack()
    time.sleep(STACK_TIME)
    if running[0].name != "torchrun":
        _kill_all(running)
    return timed_out


def _kill_all(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.kill()


def _stacks_of_workers(folder: Path) -> str:
    """Ask torchrun's workers, by the pids they left, for their stacks and kill them."""
    workers = sorted(folder.glob("rank-*.pid"))
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(worker.read_text()), signal.SIGUSR1)
    time.sleep(STACK_TIME)
    parts = []
    for worker in workers:
        parts.append(f"{worker.stem} was in:\n{_indent(_read(worker.with_suffix('.stack')), 4)}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(worker.read_text()), signal.SIGKILL)
    return "\n".join(parts)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _indent(text: str, width: int = 2) -> str:
    return "\n".join(" " * width + line for line in text.rstrip().splitlines())


def _die_with_parent(sig: signal.Signals) -> None:
    """Have the kernel send us ``sig`` when our parent ends: no test leaves orphans."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(sig))


def _answer_with_stacks(path: Path) -> None:
    """Write the stacks of all threads to ``path`` whenever SIGUSR1 comes."""
    # The handler of an interpreter that ends gives way to the one before it, which must not kill.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # A bare descriptor, which nothing closes before the process ends.
    stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def _child(mode: str, folder: Path, rest: list[str]) -> None:
    """The work of a started process: one rank, a script under torchrun, or torchrun itself."""
    # A job started in the background may ignore it; here it interrupts, as usual.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    if mode == "torchrun":
        _die_with_parent(signal.SIGTERM)
        from torch.distributed.run import main

        main(rest)
        return
    rank = os.environ["RANK"]
    if mode == "script":
        # In this order: a process that has read the pid may send the signal.
        _answer_with_stacks(folder / f"rank-{rank}.stack")
        (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
        _run_script(rest[0], rest[1:])
        return
    _die_with_parent(signal.SIGKILL)
    _answer_with_stacks(folder / f"rank-{rank}.stack")
    target, args, torch = pickle.loads((folder / "spec").read_bytes())
    if ":" not in target:
        _run_script(target, [str(arg) for arg in args])
        return
    value, error = None, None
    try:
        value = _call(target, args, torch)
        outcome = pickle.dumps((value, None))
    except Exception:
        error = traceback.format_exc()
        outcome = pickle.dumps((None, error))
    (folder / f"rank-{rank}.result").write_bytes(outcome)
    if error is not None:
        sys.exit(1)


def _call(target: str, args: Sequence[Any], with_torch: bool) -> Any:
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not with_torch:
        return function(*args)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    value = function(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _run_script(script: str, args: list[str]) -> None:
    sys.argv = [script, *args]
    # A script sees its own folder first on the path, as when Python starts it.
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def run(argv: Sequence[str]) -> None:
    """The main function of this file as a program, and of a fork of the server."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    mode, folder, *rest = argv
    _child(mode, Path(folder), rest)


if __name__ == "__main__":
    run(sys.argv[1:])
