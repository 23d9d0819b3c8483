"""Start ranks as forks of one process that has imported what they need.

``import torch`` takes some seconds of CPU, more than most tests need for anything else; the first
optimizer, which imports ``torch._dynamo``, nearly as much again; and NumPy a sixth of a second. So
the first rank that may be forked starts a server: this file as a program. It imports these, makes
no group, starts no thread, and forks a child for each request. There is one for ranks with torch
and one for those without. The child then does the same as a new interpreter (``ranks.run``), with
the environment, the search path, the output file, the session and the network namespace that it is
asked for. It ends as a process ends; but of ranks with torch that have done well only the first
one does (``_end_soon``).

The two sides speak over a pair of sockets that keep the boundaries of messages. A request is JSON;
the answer is the pid of the child. The exit status follows when the child has ended. The server
reaps a child only when it is told to, so until then no other process can get its pid. The server
ends when the socket closes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import namespaces

# Of these variables torch, its backends and unisono read nothing before a group is made, and the
# emulated CUDA driver nothing before it is loaded, so a fork can still be given them. Other
# variables make a server of their own.
READ_LATE = (
    "CUDA_EMULATOR_",
    "EMULATED_DEVICE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
    "PYTEST_CURRENT_TEST",
    "RANK",
    "UNISONO_",
    "WORLD_SIZE",
)
# The package reads this one when it is imported, and prints something of values other than these.
READ_AT_IMPORT = "UNISONO_AS_GLOO"
SILENT = ("0", "1")
# One takes some 200 MB.
MOST_SERVERS = 4
LARGEST_MESSAGE = 1 << 17


class Server:
    """The process that forks ranks, and the messages that have come from it."""

    def __init__(self, environment: Mapping[str, str], *, torch: bool) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
            command += ["torch"] if torch else []
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.running = 0
        self.statuses: dict[int, int] = {}

    def close(self) -> None:
        """End the server, and with it the children that still run."""
        self.link.close()
        self.process.wait()

    def start(self, request: dict[str, Any]) -> Forked:
        """Fork a child that runs ``ranks._child``: `start` below says what a request has."""
        self.link.sendall(json.dumps(request).encode())
        while (message := self._receive()).keys() != {"started"}:
            self._note(message)
        self.running += 1
        return Forked(self, message["started"])

    def status(self, pid: int) -> int | None:
        """The exit status of a child, negative for a signal; None while it runs."""
        while pid not in self.statuses and select.select([self.link], [], [], 0)[0]:
            self._note(self._receive())
        return self.statuses.get(pid)

    def wait(self, pid: int) -> int:
        """The same, when it has ended."""
        while pid not in self.statuses:
            self._note(self._receive())
        return self.statuses[pid]

    def reap(self, pid: int) -> None:
        """Forget a child that has ended; from now on its pid may be another process's."""
        del self.statuses[pid]
        self.link.sendall(json.dumps({"reap": pid}).encode())

    def _receive(self) -> dict[str, int]:
        message = self.link.recv(LARGEST_MESSAGE)
        if not message:
            raise RuntimeError(f"the server of ranks has ended: {self.process.wait()}")
        return json.loads(message)

    def _note(self, message: dict[str, int]) -> None:
        self.running -= 1
        self.statuses[message["ended"]] = message["status"]


class Forked:
    """A child of the server, with the part of ``subprocess.Popen`` that ``ranks`` uses."""

    def __init__(self, server: Server, pid: int) -> None:
        self.server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None and (status := self.server.status(self.pid)) is not None:
            self._ended(status)
        return self.returncode

    def wait(self) -> int:
        """Wait until it has ended."""
        if self.returncode is None:
            self._ended(self.server.wait(self.pid))
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: signal.Signals) -> None:
        """Send a signal if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _ended(self, status: int) -> None:
        self.returncode = status
        self.server.reap(self.pid)


# The one that was used last is the last.
_servers: dict[tuple[Any, ...], Server] = {}


def serves(environment: Mapping[str, str]) -> bool:
    """Whether a fork behaves as an interpreter does that starts with ``environment``."""
    return environment.get(READ_AT_IMPORT, "0") in SILENT


def start(
    argv: list[str],
    environment: Mapping[str, str],
    output: Path,
    *,
    host: str | None,
    torch: bool,
) -> Forked:
    """Start a rank as a fork of the server for the variables that are read early.

    It runs ``ranks._child`` with ``argv`` and ``environment``, writes to ``output``, and is in the
    network namespace ``host``.
    """

    def is_early(name: str) -> bool:
        return name == READ_AT_IMPORT or not name.startswith(READ_LATE)

    early = sorted(variable for variable in environment.items() if is_early(variable[0]))
    key = (torch, *early)
    server = _servers.pop(key, None)
    if server is None:
        idle = [key for key, server in _servers.items() if server.running == 0]
        if len(_servers) >= MOST_SERVERS and idle:
            _servers.pop(idle[0]).close()
        variables = {**dict(early), "PYTHONPATH": environment["PYTHONPATH"]}
        # Its threads would be lost in a fork.
        variables.setdefault("OPENBLAS_NUM_THREADS", "1")
        server = Server(variables, torch=torch)
    _servers[key] = server
    request = {"argv": argv, "env": dict(environment), "output": str(output), "host": host}
    return server.start(request)


@atexit.register
def _close() -> None:
    for server in _servers.values():
        server.close()


class _InChild(BaseException):
    """Leads a forked child out of the server's loop."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv


def _serve(link: socket.socket) -> None:
    """Fork what is asked for until the other side closes. Raises ``_InChild`` in each child."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    while True:
        readable, _, _ = select.select([link, wake], [], [])
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        for pid in sorted(running):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if (ended := os.waitid(os.P_PID, pid, options)) is not None:
                running.remove(pid)
                by_itself = ended.si_code == os.CLD_EXITED
                status = ended.si_status if by_itself else -ended.si_status
                link.sendall(json.dumps({"ended": pid, "status": status}).encode())
        if link not in readable:
            continue
        message = link.recv(LARGEST_MESSAGE)
        if not message:
            return
        request = json.loads(message)
        if "reap" in request:
            os.waitpid(request["reap"], 0)
            continue
        pid = _fork(request, [link.fileno(), wake, woken])
        running.add(pid)
        link.sendall(json.dumps({"started": pid}).encode())


def _fork(request: dict[str, Any], ours: list[int]) -> int:
    """The pid of a child that leads its session already; raises ``_InChild`` in it."""
    led, leads = os.pipe()
    if pid := os.fork():
        os.close(leads)
        os.read(led, 1)
        os.close(led)
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if request["host"]:
        namespaces.join(request["host"])
    for descriptor in [led, leads, output, *ours]:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    asked = request["env"]["PYTHONPATH"].split(os.pathsep)
    # A script takes the place of the first entry, so that folder may be needed further on.
    sys.path[:] = [sys.path[0], *dict.fromkeys([*asked, *sys.path])]
    raise _InChild(request["argv"])


def _main(link: socket.socket, *, torch: bool) -> None:
    import ranks

    ctypes.CDLL(None).prctl(ranks._PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if torch:
        _import_torch()
    else:
        importlib.import_module("numpy")
    # A child that collects leaves the imported objects alone, so it copies none of their pages:
    # its end takes 0.3 s of CPU, and 0.7 s otherwise.
    gc.collect()
    gc.freeze()
    try:
        _serve(link)
    except _InChild as child:
        argv = child.argv
        link.detach()
    else:
        return
    ranks.run(argv)
    # The first rank shows a fault at the end of a process. The emulated CUDA driver reports there.
    if torch and os.environ.get("RANK") != "0" and not _is_loaded("libcuda.so"):
        _end_soon()


def _is_loaded(library: str) -> bool:
    return library in Path("/proc/self/maps").read_text()


def _end_soon() -> NoReturn:
    """End the process without taking torch apart, which takes longer than many a test."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _import_torch() -> None:
    # Triton is for GPUs, and at the end of a process reports the objects as leaked that `gc.freeze`
    # has kept.
    sys.modules["triton"] = None  # type: ignore[assignment]
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.nn.parallel

    torch.set_num_threads(1)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), torch=sys.argv[2:] == ["torch"])
