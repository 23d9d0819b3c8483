"""Runs the doctor as a program, without torch and CUDA, which take long, and with troubles made.

doctor_ranks.py [refuse:CALL | kill:CALL | files:N | two_hosts]... [-- arguments of the doctor]
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import time
import types

from unisono._doctor import doctor, machine, pairs

CALLS = {
    "x86_64": {"process_vm_readv": 310, "memfd_create": 319},
    "aarch64": {"process_vm_readv": 270, "memfd_create": 279},
}
# Seconds by which the clock of the second host is ahead.
AHEAD = 5
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


def hinder(call: str, action: int) -> None:
    """Let the kernel refuse a call of this process and those it starts, or end them for it."""
    number = CALLS[platform.machine()][call]
    steps = [
        struct.pack("HBBI", _LOAD, 0, 0, 0),
        struct.pack("HBBI", _JUMP_IF_EQUAL, 0, 1, number),
        struct.pack("HBBI", _RETURN, 0, 0, action),
        struct.pack("HBBI", _RETURN, 0, 0, _ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(steps))
    about = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) == 0
    assert libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), about, zero, zero) == 0


def make(trouble: str) -> None:
    kind, _, what = trouble.partition(":")
    if kind == "refuse":
        hinder(what, _ERRNO | errno.EPERM)
    elif kind == "kill":
        hinder(what, _KILL_PROCESS)
    elif kind == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(what), int(what)))
    elif kind == "two_hosts":
        last = os.environ["RANK"] == "2"
        os.environ["UNISONO_HOST"] = "b" if last else "a"
        late = types.SimpleNamespace(
            time=lambda: time.time() + AHEAD * last, perf_counter=time.perf_counter
        )
        pairs.time = late
    else:
        raise ValueError(trouble)


if __name__ == "__main__":
    machine.try_out = list
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    for word in words[:at]:
        make(word)
    sys.exit(doctor(words[at + 1 :], "unisono"))
