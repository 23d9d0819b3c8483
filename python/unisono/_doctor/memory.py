"""Two processes of this host meet as ranks, and try each way of shared memory.

Run as a module, this file is such a rank: it prints a line of JSON after each step, since a filter
of the system (seccomp) may end a process for a call.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

import unisono
from unisono._doctor import host, interfaces
from unisono._doctor.finding import ADVICE, BROKEN, OK, Finding, run_module
from unisono._launch import RANK_VARIABLES

SECONDS = 20.0
# Long enough to be lent.
_LARGE = 1 << 20
# Variables by which launchers tell a rank of its job. The two ranks have a job of their own.
_OF_A_LAUNCHER = (
    *RANK_VARIABLES,
    *("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("UNISONO_LAUNCH_SECRET", "UNISONO_LOG"),
)
_CAP_SYS_PTRACE = 19
_APART = "two ranks on this host cannot meet"
_UNCONFINED = "docker run --cap-add SYS_PTRACE (or --security-opt seccomp=unconfined)"


def try_out() -> list[Finding]:
    """Start the two ranks, and return what they have found."""
    variables = {name: text for name, text in os.environ.items() if name not in _OF_A_LAUNCHER}
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-doctor-") as folder:
            # Files of such a user are refused.
            store = f"tcp://127.0.0.1:{_free_port()}" if _is_nobody() else f"file://{folder}/store"
            words = [[str(rank), store] for rank in (0, 1)]
            started = [run_module("unisono._doctor.memory", one, variables) for one in words]
            told = [_told(process) for process in started]
    except OSError as error:
        line = f"{_APART}: no process can be started or no folder made for them: {error}"
        return [Finding("memory", BROKEN, line, "ulimit -a; df /tmp")]
    return judge(*told)


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The answers of a rank, with how it has ended and its last words."""
    with process:
        try:
            out, err = process.communicate(timeout=2 * SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    told: dict[str, Any] = {"status": process.returncode, "words": err}
    for line in out.splitlines():
        told.update(json.loads(line))
    return told


def judge(first: dict[str, Any], second: dict[str, Any]) -> list[Finding]:
    """Return the findings in the answers of both ranks."""
    for told in (second, first):
        if refused := told.get("refused"):
            # The words name the variable, and the nearest that there is.
            words = refused.partition(" (there are: ")[0]
            mend = "a change of the environment; `unisono settings` prints what each one takes"
            return [Finding("settings", BROKEN, words, mend)]
    found = [_settings()]
    found += interfaces.examine(first.get("listening", []))
    if second["status"] == -signal.SIGSYS and "sum" in second:
        return [*found, _ended_by_filter()]
    wrong = first.get("error") or second.get("error")
    if wrong or "sum" not in first or first["sum"] != second.get("sum"):
        words = wrong or f"sums {first.get('sum')} and {second.get('sum')}: {_last(first['words'])}"
        line = f"{_APART}: {words}"
        mend = "UNISONO_TRANSPORT=tcp unisono doctor, which tells whether they can without memory"
        return [*found, Finding("memory", BROKEN, line, mend)]
    way = first["way"]
    found.append(_shared(second) if way == "shared memory" else _over_tcp(way, first, second))
    return found


def _settings() -> Finding:
    known = {setting.variable for setting in unisono.settings()}
    set_here = sorted(f"{name}={os.environ[name]}" for name in known & os.environ.keys())
    return Finding("settings", OK, ", ".join(set_here) or "no UNISONO_ variable changes a default")


def _ended_by_filter() -> Finding:
    line = "a seccomp filter ends a rank that reads another one's memory (process_vm_readv)"
    if os.environ.get("UNISONO_LEND_BYTES") == "none":
        line = f"ranks of this host share memory, and large messages are copied twice: {line}"
        return Finding("memory", ADVICE, line, _UNCONFINED)
    # So ends a rank that is sent large messages, sooner or later.
    mend = f"export UNISONO_LEND_BYTES=none\nor {_UNCONFINED}"
    return Finding("memory", BROKEN, line, mend)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason given"


def _over_tcp(way: str, *told: dict[str, Any]) -> Finding:
    """The two use TCP: the reason, and how to change it."""
    begin = f"ranks of this host reach each other over {way.partition(' ')[0].upper() or 'TCP'}"
    if os.environ.get("UNISONO_TRANSPORT") == "tcp":
        line = f"{begin}, as UNISONO_TRANSPORT=tcp says"
        return Finding("memory", ADVICE, line, "unset UNISONO_TRANSPORT")
    for one in told:
        if number := one.get("memfd"):
            line = f"{begin}: memfd_create is refused ({os.strerror(number)})"
            mend = "docker run --security-opt seccomp=PROFILE that allows memfd_create"
            return Finding("memory", ADVICE, line, mend)
        if number := one.get("unix"):
            line = f"{begin}: abstract Unix sockets are refused ({os.strerror(number)})"
            mend = "a sandbox or profile (seccomp, AppArmor, Landlock) that allows them"
            return Finding("memory", ADVICE, line, mend)
    if _is_nobody():
        line = f"{begin}: this user is one that its user namespace does not know"
        mend = "a mapping for this user (docker run --user, podman run --userns=keep-id)"
        return Finding("memory", ADVICE, line, mend)
    reasons = [reason for one in told for reason in one.get("set_back", [])]
    line = f"{begin}: {reasons[0] if reasons else 'they do not say why'}"
    return Finding("memory", ADVICE, line, "UNISONO_LOG=debug on the ranks tells more")


def _is_nobody() -> bool:
    """Whether the number of this user stands for all that the user namespace does not know."""
    overflow = host.read("/proc/sys/kernel/overflowuid") or "65534"
    users = host.read("/proc/self/uid_map").split()
    return str(os.geteuid()) == overflow and users[2:] != ["4294967295"]


def _shared(told: dict[str, Any]) -> Finding:
    """The two share memory. Where one reads the memory of the other as well, that is faster."""
    begin = "ranks of this host share memory"
    number = told.get("read")
    if number == 0:
        line = f"{begin}, and read each other's large messages in place (process_vm_readv)"
        return Finding("memory", OK, line)
    reason, mend = why_unread(number, told)
    line = f"{begin}; large messages are copied twice, for process_vm_readv is refused: {reason}"
    return Finding("memory", ADVICE, line, f"{mend}\nor arrays of unisono.empty, which need none")


def why_unread(number: int | None, told: dict[str, Any]) -> tuple[str, str]:
    """Return why a rank does not read another one's memory, and how to change it."""
    status = dict(
        line.split(":", 1) for line in host.read("/proc/self/status").splitlines() if ":" in line
    )
    capabilities = int(status.get("CapEff", "0").strip() or "0", 16)
    has_filter = status.get("Seccomp", "0").strip() == "2"
    scope = host.read("/proc/sys/kernel/yama/ptrace_scope") or "0"
    if number == errno.EPERM and scope != "0" and not capabilities >> _CAP_SYS_PTRACE & 1:
        mend = "sysctl -w kernel.yama.ptrace_scope=0, or the capability CAP_SYS_PTRACE"
        if scope == "3":
            mend = "kernel.yama.ptrace_scope=0 in /etc/sysctl.d, and a new start of the system"
        return f"kernel.yama.ptrace_scope is {scope}", mend
    if pidfd := told.get("pidfd"):
        return f"pidfd_open fails ({os.strerror(pidfd)})", "Linux 5.3 or newer, or a filter with it"
    words = "it has ended before the answer" if number is None else os.strerror(number)
    if has_filter and number in (errno.EPERM, errno.ENOSYS, errno.EACCES, None):
        return f"a seccomp filter stands in the way ({words})", _UNCONFINED
    return words, _UNCONFINED


def main(rank: int, store: str) -> int:
    """Be one of the two ranks."""
    try:
        comm = unisono.init(store, rank=rank, world_size=2, timeout=SECONDS)
    except unisono.Error as error:
        is_setting = isinstance(error, unisono.InvalidArgumentError) or "secret" in str(error)
        _tell(**{"refused" if is_setting else "error": str(error)})
        return 1
    _tell(memfd=_errno(lambda: os.close(os.memfd_create("unisono"))), unix=_errno(_bind))
    with comm:
        try:
            _tell(**comm.stats()["network"])
            total = comm.all_reduce(np.full(_LARGE, rank + 1.0, np.float32))
            stats = comm.stats()
            _tell(set_back=stats["network"]["set_back"], way=stats["links"][0]["by"])
            _tell(sum=float(total.mean()))
            mark = np.frombuffer(os.urandom(_LARGE), np.uint8)
            if rank == 0:
                about = np.array([os.getpid(), mark.ctypes.data], np.int64)
                comm.send(about, 1)
                comm.send(mark, 1)
            else:
                comm.recv(about := np.empty(2, np.int64), 0)
                comm.recv(there := np.empty(_LARGE, np.uint8), 0)
                pid, address = map(int, about)
                _tell(pidfd=_errno(lambda: os.close(os.pidfd_open(pid))))
                _tell(read=_read(pid, address, there[:64].tobytes()))
            comm.barrier()
        except unisono.Error as error:
            _tell(error=str(error))
            return 1
    return 0


def _tell(**answers: object) -> None:
    print(json.dumps(answers), flush=True)


def _errno(call: Any) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or errno.EIO
    except AttributeError:
        # A Python that was built on an older system.
        return 0
    return 0


def _bind() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.bind("\0unisono-doctor-" + os.urandom(16).hex())


def _read(pid: int, address: int, expected: bytes) -> int:
    """Read the other rank's memory by the kernel; 0, or the number of the error."""

    class Piece(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    here = ctypes.create_string_buffer(len(expected))
    local = Piece(ctypes.addressof(here), len(expected))
    remote = Piece(address, len(expected))
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
    count = call(pid, ctypes.byref(local), one, ctypes.byref(remote), one, zero)
    if count < 0:
        return ctypes.get_errno()
    # Another process, where the other one has its number in another namespace.
    return 0 if here.raw == expected else errno.ESRCH


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
