"""``python -m unisono run PROGRAM``: run what has a launcher of its own, with unisono for gloo.

The program is a child of this process, in the same process group, so a terminal reaches it as if it
had been started by itself. Its exit status is passed on, or the signal that ended it, and so are
the signals that this process gets from others. Processes that it starts inherit the environment,
and with it ``UNISONO_AS_GLOO``.

At the end this process says so if unisono did nothing: if no process here made a group on gloo. One
that makes a group tells it at a socket, which has its name in the environment and no file
(``unisono._as_gloo``).
"""

from __future__ import annotations

import ctypes
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys

USAGE = """\
usage: unisono run COMMAND [ARGUMENTS]...
       unisono run SCRIPT.py [ARGUMENTS]...
       unisono run -m MODULE [ARGUMENTS]...

Run a program and what it starts with unisono wherever PyTorch is asked for
gloo: a script or a module by this Python, any other command as it is. The same
as UNISONO_AS_GLOO=1 before it.

The program starts its processes itself, or has a launcher that does. To start
ranks of a script that has none: `unisono launch --as-gloo -n 4 train.py`.

Examples:
  unisono run torchrun --nproc-per-node 4 train.py
  unisono run accelerate launch --cpu --num_processes 2 train.py
  unisono run -m torch.distributed.run --nproc-per-node 4 train.py"""

NOTHING = (
    "unisono run: no process on this host made a group on gloo, so unisono served nothing. `run` "
    "starts no ranks: put the command that does after it, such as torchrun, or use `unisono launch "
    "--as-gloo -n RANKS PROGRAM`"
)
# Signals that others may send to this process and mean for the program. Of those that a terminal
# sends to its process group, the program has got its own.
_PASSED_ON = {
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT),
}
_BY_A_PROCESS = 0  # SI_USER: everything that the kernel sends of itself is above it.
_PR_SET_PDEATHSIG = 1


def run(arguments: list[str]) -> int:
    """Run the program that `arguments` name, and return its exit status; end as it ended."""
    from unisono import _as_gloo, _python

    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    first = arguments[0]
    if first == "-m" or first.endswith(".py"):
        note = _python.note("run")
        if note:
            print(f"unisono run: {note}", file=sys.stderr)
        program, command = sys.executable, [sys.executable, *arguments]
    else:
        found = shutil.which(first)
        if found is None:
            print(f"unisono run: there is no command {first!r}", file=sys.stderr)
            return 127
        program, command = found, arguments
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        print(
            "unisono run: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from finding unisono; unset "
            "it, or call unisono.torch.replace_gloo() in the program",
            file=sys.stderr,
        )
        return 2
    os.environ[_as_gloo.VARIABLE] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    if _as_gloo.MARK in os.environ:
        # Inside another `unisono run`, which will say it.
        return _end_as(_wait_for(program, command))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mark:
        name = f"unisono-run-{secrets.token_hex(16)}"
        mark.bind(f"\0{name}")
        os.environ[_as_gloo.MARK] = name
        status = _wait_for(program, command)
        if status >= 0 and not _has_word(mark):
            print(NOTHING, file=sys.stderr, flush=True)
    return _end_as(status)


def _has_word(mark: socket.socket) -> bool:
    try:
        mark.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


def _wait_for(program: str, command: list[str]) -> int:
    """Run the program to its end; return its exit status, or the signal that ended it, below 0."""
    # In place before there is a child, so that none is missed.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def prepare() -> None:
        # Killed, this process could pass nothing on any more.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        child = subprocess.Popen(
            command,
            executable=program,
            close_fds=False,
            preexec_fn=prepare,  # noqa: PLW1509 -- this process has one thread
        )
    except OSError as error:
        print(f"unisono run: {program}: {error.strerror}", file=sys.stderr)
        return 126
    while True:
        what = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if what.si_signo == signal.SIGCHLD:
            if _has_ended(child):
                return child.returncode
            _stop_with(child)
        elif what.si_code <= _BY_A_PROCESS and not _is_of_our_group(what.si_pid):
            child.send_signal(what.si_signo)


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    if os.getpid() == 1:
        # The first process of a container gets the orphans of all others.
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == child.pid:
                break
            os.waitpid(ended.si_pid, 0)
    return child.poll() is not None


def _stop_with(child: subprocess.Popen[bytes]) -> None:
    """Stop, as the program has, if job control stopped it: whoever started us is to see that."""
    stopped = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG)
    if stopped is not None and stopped.si_status == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)


def _is_of_our_group(pid: int) -> bool:
    """Whether the sender of a signal is in our process group.

    Such a one, ``timeout`` is one, sends it to the whole group.
    """
    try:
        return os.getpgid(pid) == os.getpgrp()
    except OSError:
        return False


def _end_as(status: int) -> int:
    """Return the exit status `status`, or end by the signal that it stands for."""
    if status >= 0:
        return status
    number = -status
    # The program has dumped its core, where that is wanted.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    # The first process of a container is not ended by its own signals.
    return 128 + number
