"""The ranks of ``test_status``: one of them asks for the state of its job while the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import unisono
from unisono._status import ask as asking
from unisono._status import words

# Within this time the others have begun to wait, also on a busy machine.
SOON = 20.0
NOBODY = 65534
# Of a rank that is late in each, and by how many seconds.
CALLS = 120
LATE = 0.02


@dataclass(frozen=True)
class Told:
    """The lines about a group, and the pids of its ranks."""

    lines: list[str]
    pids: list[int]


def ask(pids: list[int], until: Callable[[str], bool]) -> Told:
    """Ask the processes with these pids, again and again until the answer is as it should be."""
    deadline = time.monotonic() + SOON
    while True:
        found = [process for process in asking.processes() if process.pid in pids]
        text = words.text(found)
        if until(text):
            # Where one waits long for another to begin, that one was late.
            lines = text.splitlines()
            return Told([line for line in lines if " was late: " not in line], pids)
        assert time.monotonic() < deadline, text
        time.sleep(0.01)


def begin() -> tuple[unisono.Communicator, list[int]]:
    comm = unisono.init()
    pids = comm.all_gather(np.array([os.getpid()], np.int64))
    return comm, pids.reshape(-1).tolist()


def _groups(process: asking.Process) -> set[str]:
    return {group["id"] for group in process.answer["groups"]}


def is_late(door: str) -> tuple[dict[str, Any], Told | None]:
    """The last rank computes for 20 ms before each call."""
    data = np.ones(1000, np.float32)
    if door == "torch":
        import torch
        import torch.distributed as dist

        from unisono.torch import stats

        dist.init_process_group("unisono")
        rank, world = dist.get_rank(), dist.get_world_size()
        tensor = torch.from_numpy(data)
        call = functools.partial(dist.all_reduce, tensor)
    elif door == "c":
        from unisono._chaos import c_library

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        in_c = c_library.Communicator.from_url(url, rank, world)
        call, stats = functools.partial(in_c.all_reduce, data), in_c.stats
    else:
        comm = unisono.init()
        rank, world = comm.rank, comm.size
        call, stats = functools.partial(comm.all_reduce, data), comm.stats
    for _ in range(CALLS):
        if rank == world - 1:
            time.sleep(LATE)
        call()
    found = stats()
    told = None
    if rank == world - 1:
        # Others have counted their last call by then.
        time.sleep(0.5)
        found_here = [one for one in asking.processes() if one.answer]
        own = next(one for one in found_here if one.pid == os.getpid())
        mine = [one for one in found_here if _groups(one) & _groups(own)]
        told = Told(words.text(mine).splitlines(), [])
    call()
    return found, told


def is_late_and_does_not_come() -> str | None:
    """The last rank is late in some calls, and stays away from the next."""
    comm = unisono.init(timeout=2)
    for _ in range(20):
        if comm.rank == comm.size - 1:
            time.sleep(0.02)
        comm.all_reduce(np.ones(10))
    if comm.rank == comm.size - 1:
        time.sleep(4)
        return None
    try:
        comm.all_reduce(np.ones(10))
    except unisono.Error as error:
        return str(error)
    return None


def is_in_its_data_loader() -> Told | None:
    """The last rank computes while the others wait for it."""
    comm, pids = begin()
    told = None
    if comm.rank == comm.size - 1:
        waits = rf"all_reduce #2.*waits for rank {comm.rank}\n"
        told = ask(pids, lambda text: len(re.findall(waits, text)) == comm.rank)
    comm.all_reduce(np.ones(3))
    return told


def is_stopped() -> Told | None:
    """Rank 1 stops, and the others wait for it. Rank 0 asks meanwhile."""
    comm, pids = begin()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    work = comm.all_reduce(np.ones(3), async_op=True)
    told = None
    if comm.rank == 0:
        told = ask(pids, lambda text: "is stopped" in text and "2 ranks wait" in text)
        os.kill(pids[1], signal.SIGCONT)
    work.wait()
    return told


def waits_for_a_message() -> Told | None:
    """Rank 0 asks; rank 1 waits for a message of rank 2, which waits in a subgroup for rank 0."""
    comm, pids = begin()
    part = comm.split(color=0 if comm.rank != 1 else None)
    told = None
    if comm.rank == 0:
        told = ask(pids, lambda text: "recv" in text and "barrier" in text)
    if comm.rank == 1:
        comm.recv(np.zeros(2), source=2)
    else:
        part.barrier()
    if comm.rank == 2:
        comm.send(np.zeros(2), dest=1)
    return told


def waits_in_a_window() -> tuple[Told, Told] | None:
    """Rank 1 waits for a signal of rank 0, and then for rank 2, which is stopped, to take a put."""
    comm, pids = begin()
    # Not in the heap: it is reached through a port, which is connected by the first put.
    window = comm.window(np.zeros(1 << 20, np.uint8))
    ones = np.ones(1 << 20, np.uint8)
    told = None
    if comm.rank == 1:
        window.put(ones[:1], 2)
        window.wait_signal(0)
        window.put(ones, 2)
    elif comm.rank == 0:
        # Longer than a part of the wait takes.
        signalled = r"wait_signal for (0\.[3-9]|[1-9]).*, waits for rank 0\n"
        first = ask(pids, lambda text: re.search(signalled, text) is not None)
        os.kill(pids[2], signal.SIGSTOP)
        try:
            window.signal(1)
            put = r"put for \d.*, waits for rank 2\n"
            told = first, ask(pids, lambda text: re.search(put, text) is not None)
        finally:
            os.kill(pids[2], signal.SIGCONT)
    window.fence()
    return told


def has_failed() -> Told | None:
    """Rank 0 asks after an abort, in which rank 1 waits."""
    comm, pids = begin()
    if comm.rank == 1:
        with contextlib.suppress(unisono.AbortedError):
            comm.barrier()
        return None
    comm.abort("for a test")
    return ask(pids, lambda text: "has failed" in text)


def is_asked_by_another_user() -> tuple[bytes, str]:
    """A child of this rank that belongs to another user hears nothing."""
    comm, _ = begin()
    reader, writer = os.pipe()
    name = next(
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if f"{asking.PREFIX}{os.getpid()}-" in line
    )
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        heard = b""
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("\0" + name[1:])
            with contextlib.suppress(ConnectionError):
                heard = stranger.recv(100)
        said = asking._ask(name)
        os.write(writer, heard + b"|" + (said.trouble.encode() if said else b"gone"))
        os._exit(0)
    os.waitpid(child, 0)
    heard, _, said = os.read(reader, 4096).partition(b"|")
    comm.barrier()
    return heard, said.decode()


def runs_the_command() -> tuple[int, str, list[int]] | None:
    comm, pids = begin()
    told = None
    if comm.rank == 0:
        command = [sys.executable, "-m", "unisono", "status", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        told = done.returncode, done.stdout, pids
    comm.barrier()
    return told


def asks_through_torch() -> Told | None:
    import torch
    import torch.distributed as dist

    import unisono.torch  # noqa: F401

    dist.init_process_group("unisono", timeout=timedelta(seconds=60))
    pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(pids, torch.tensor([os.getpid()]))
    told = None
    if dist.get_rank() == 1:
        told = ask(pids.tolist(), lambda text: "waits for it in all_reduce" in text)
    dist.all_reduce(torch.ones(5))
    return told


def is_shown_by_top(modules: str) -> tuple[str, str, int, list[int]] | None:
    """Rank 0 looks by ``unisono top``, once and on a terminal, while the others wait for it.

    `modules` is a folder whose modules come before all others.
    """
    comm, pids = begin()
    told = None
    if comm.rank == 0:
        # For longer than ranks wait in a job that goes well.
        ask(pids, lambda text: re.search(r"2 ranks wait .* for [1-9]", text) is not None)
        own = next(one for one in asking.processes() if one.pid == os.getpid())
        (group,) = _groups(own)
        path = os.pathsep.join([modules, *(entry for entry in sys.path if entry)])
        environment = {**os.environ, "PYTHONPATH": path, "TERM": "xterm"}
        command = [sys.executable, "-m", "unisono", "top", "--interval", "0.3", "--group", group]
        once = subprocess.run(
            [*command, "--once"], capture_output=True, text=True, env=environment, check=True
        )
        screen, code = _on_a_terminal(command, environment, b"rank 0 (host")
        told = once.stdout, screen, code, pids
    comm.all_reduce(np.ones(3))
    return told


def _on_a_terminal(command: list[str], env: dict[str, str], seen: bytes) -> tuple[str, int]:
    """Run a command on a terminal of its own, and press q when it has shown something."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 150, 0, 0))
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        screen, deadline = b"", time.monotonic() + SOON
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    screen += os.read(ours, 1 << 16)
                except OSError:
                    # The other side has closed it.
                    break
            if seen in screen:
                os.write(ours, b"q")
                seen = b"\0never"
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            code = -1
    os.close(ours)
    return screen.decode(), code


def is_exported(folder: Path) -> tuple[str, str, str, list[int]] | None:
    """Rank 0 exports the metrics in each way; rank 1 waits for it."""
    comm, pids = begin()
    told = None
    if comm.rank == 0:
        ask(pids, lambda text: "rank 1 waits for it" in text)
        command = [sys.executable, "-m", "unisono", "metrics"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        subprocess.run([*command, "--file", str(folder / "unisono.prom")], check=True)
        with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as http:
            try:
                with urllib.request.urlopen(http.stdout.readline().strip(), timeout=SOON) as page:
                    served = page.headers["Content-Type"] + "\n" + page.read().decode()
            finally:
                http.terminate()
        told = printed, (folder / "unisono.prom").read_text(), served, pids
    comm.barrier()
    return told


def writes_flight_records(folder: Path) -> str | None:
    """The last rank has its operations written while the others wait for it in one.

    A message from rank 0 to rank 1 has come, and rank 0 waits for another one of the last rank.
    """
    comm, pids = begin()
    comm.all_gather(np.ones(3, np.float32))
    printed = waited = None
    if comm.rank == 0:
        comm.send(np.ones(6, np.float32), 1, tag=7)
        waited = comm.irecv(np.ones(5, np.float32), comm.size - 1, tag=9)
    elif comm.rank == 1:
        comm.recv(np.ones(6, np.float32), 0, tag=7)
    if comm.rank == comm.size - 1:
        ask(pids, lambda text: "2 ranks wait for it" in text)
        command = [sys.executable, "-m", "unisono", "status", "--pid", str(os.getpid())]
        command += ["--records", str(folder / "rank_")]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        comm.send(np.ones(5, np.float32), 0, tag=9)
    comm.all_reduce(np.ones(5))
    if waited:
        waited.wait()
    return printed
