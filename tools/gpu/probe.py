#!/usr/bin/env python3
"""What a CUDA driver does, asked without unisono: two processes on one GPU, in about a minute.

    python3 tools/gpu/probe.py [rust/core/src/transport/cuda/kernels/ptx]

It needs nothing but Python and the driver. It answers what unisono's speed and safety on devices
rest on: what a word written by a stream costs, how long a GPU takes to go from one process to
another, which calls wait for a stream that waits, whether memory operations can be captured, and
what becomes of memory whose process was killed. Every line of output is ``[process] name: value``;
a process that hangs is ended by its alarm.
"""

from __future__ import annotations

import ctypes
import gzip
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

PTX = b"""
.version 8.0
.target sm_60
.address_size 64
.visible .entry empty() { ret; }
.visible .entry spin(.param .u64 cycles)
{
  .reg .b64 %rd<5>;
  .reg .pred %p<2>;
  ld.param.u64 %rd1, [cycles];
  mov.u64 %rd2, %clock64;
again:
  mov.u64 %rd3, %clock64;
  sub.s64 %rd4, %rd3, %rd2;
  setp.lt.u64 %p1, %rd4, %rd1;
  @%p1 bra again;
  ret;
}
"""
# Of sm_70 and later: a kernel that tells another process itself, as a memory operation would, and
# one each of whose blocks reads a word.
TELLING = b"""
.version 8.0
.target sm_70
.address_size 64
.visible .entry tell(.param .u64 address, .param .u32 value)
{
  .reg .b64 %rd<3>;
  .reg .b32 %r<2>;
  ld.param.u64 %rd1, [address];
  ld.param.u32 %r1, [value];
  cvta.to.global.u64 %rd2, %rd1;
  st.release.sys.global.u32 [%rd2], %r1;
  ret;
}
.visible .entry look(.param .u64 address)
{
  .reg .b64 %rd<3>;
  .reg .b32 %r<3>;
  .reg .pred %p<2>;
  mov.u32 %r1, %tid.x;
  setp.ne.u32 %p1, %r1, 0;
  @%p1 ret;
  ld.param.u64 %rd1, [address];
  cvta.to.global.u64 %rd2, %rd1;
  ld.volatile.global.u32 %r2, [%rd2];
  setp.ne.u32 %p1, %r2, 77;
  @%p1 ret;
  trap;
}
"""
# Bytes into the registered page.
PING, PONG, GATE, BLOCK = 0, 64, 128, 192
# The host's page: a counter for each process, then a handle of each.
MEET = 4096
HANDLES = MEET + 256
ROUNDS = 100


def wait(address: int, value: int, flags: int = 0) -> bytes:
    """Return a wait of a batch: with flag 0 for a value that has come, with 2 for a bit."""
    return struct.pack("<I4xQQI4xQ8x", 1, address, value, flags, 0)


def write(address: int, value: int) -> bytes:
    """Return a write of a batch."""
    return struct.pack("<I4xQQI4xQ8x", 2, address, value, 0, 0)


def write_long(address: int, value: int) -> bytes:
    """Return a write of 64 bits of a batch."""
    return struct.pack("<I4xQQI4xQ8x", 5, address, value, 0, 0)


class Handle(ctypes.Structure):
    """Of memory that another process may map; the driver takes it by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Probe:
    """One of the two processes."""

    def __init__(self, rank: int, memory: mmap.mmap) -> None:
        """Open the first device, and say what it can."""
        self.rank, self.memory, self.meetings, self.value = rank, memory, 0, 0
        self.host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.library = ctypes.CDLL("libcuda.so.1")
        self.cu("cuInit", 0)
        version, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self.cu("cuDriverGetVersion", ctypes.byref(version))
        self.cu("cuDeviceGet", ctypes.byref(device), 0)
        start = time.perf_counter()
        self.cu("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.cu("cuCtxSetCurrent", context)
        self.context = context
        self.say("driver", f"{version.value}, context in {time.perf_counter() - start:.2f} s")
        for name, number in (
            ("64-bit memops", 122),
            ("NOR", 123),
            ("flush remote writes", 98),
            ("pageable access", 88),
            ("host page tables", 100),
        ):
            value = ctypes.c_int(-1)
            self.cu("cuDeviceGetAttribute", ctypes.byref(value), number, device, check=False)
            if rank == 0:
                self.say(f"attribute {name} ({number})", value.value)
        self.cu(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(self.host),
            ctypes.c_size_t(4096),
            ctypes.c_uint(3),
        )
        self.page = self.made(
            "cuMemHostGetDevicePointer_v2", ctypes.c_void_p(self.host), ctypes.c_uint(0)
        )
        self.say("memfd page registered; device address equals host's", self.page == self.host)
        self.stream = ctypes.c_void_p(self.made("cuStreamCreate", ctypes.c_uint(1)))
        module = ctypes.c_void_p(self.made("cuModuleLoadData", ctypes.c_char_p(PTX)))
        self.empty = ctypes.c_void_p(self.made("cuModuleGetFunction", module, b"empty"))
        self.spin = ctypes.c_void_p(self.made("cuModuleGetFunction", module, b"spin"))
        module = ctypes.c_void_p(self.made("cuModuleLoadData", ctypes.c_char_p(TELLING)))
        self.telling = ctypes.c_void_p(self.made("cuModuleGetFunction", module, b"tell"))
        self.looking = ctypes.c_void_p(self.made("cuModuleGetFunction", module, b"look"))
        self.a = self.made("cuMemAlloc_v2", ctypes.c_size_t(32 << 20))
        self.b = self.made("cuMemAlloc_v2", ctypes.c_size_t(32 << 20))
        self.pinned = self.made("cuMemAllocHost_v2", ctypes.c_size_t(16 << 20))
        self.launch(self.empty)
        self.launch_spin(1000)
        self.copy(16 << 20)
        self.sync()

    def cu(self, name: str, *arguments: object, check: bool = True) -> int:
        """Call the driver."""
        code = getattr(self.library, name)(*arguments)
        if check and code:
            self.say("FAILED", f"{name}: CUDA error {code}")
            os._exit(1)
        return code

    def made(self, name: str, *arguments: object) -> int:
        """Return what a call of the driver makes."""
        place = ctypes.c_size_t()
        self.cu(name, ctypes.byref(place), *arguments)
        return place.value

    def say(self, name: str, value: object) -> None:
        """Print a line."""
        sys.stdout.write(f"[{self.rank}] {name}: {value}\n")
        sys.stdout.flush()

    def word(self, at: int, value: int | None = None) -> int:
        """Return a word of the shared pages, after writing it."""
        if value is not None:
            struct.pack_into("<I", self.memory, at, value)
        return struct.unpack_from("<I", self.memory, at)[0]

    def meet(self) -> None:
        """Wait for the other process."""
        self.meetings += 1
        self.word(MEET + 64 * self.rank, self.meetings)
        while self.word(MEET + 64 * (1 - self.rank)) < self.meetings:
            time.sleep(0.0002)

    def operate(self, *operations: bytes) -> None:
        """Enqueue memory operations."""
        self.cu(
            "cuStreamBatchMemOp_v2",
            self.stream,
            ctypes.c_uint(len(operations)),
            ctypes.create_string_buffer(b"".join(operations), 48 * len(operations)),
            ctypes.c_uint(0),
        )

    def launch(self, function: ctypes.c_void_p, parameters: object = None, blocks: int = 1) -> None:
        """Enqueue a kernel of one thread, or of blocks of 256."""
        one, none = ctypes.c_uint(1), ctypes.c_uint(0)
        self.cu(
            "cuLaunchKernel",
            function,
            ctypes.c_uint(blocks),
            one,
            one,
            one if blocks == 1 else ctypes.c_uint(256),
            one,
            one,
            none,
            self.stream,
            parameters,
            None,
        )

    def launch_spin(self, cycles: int) -> None:
        """Enqueue a kernel that lasts `cycles` cycles."""
        number = ctypes.c_uint64(cycles)
        self.launch(self.spin, (ctypes.c_void_p * 1)(ctypes.addressof(number)))

    def launch_telling(self, address: int, value: int) -> None:
        """Enqueue a kernel that writes a word for all of the system to see."""
        where, what = ctypes.c_uint64(address), ctypes.c_uint32(value)
        places = (ctypes.addressof(where), ctypes.addressof(what))
        self.launch(self.telling, (ctypes.c_void_p * 2)(*places))

    def launch_looking(self, address: int, blocks: int) -> None:
        """Enqueue a kernel each of whose blocks reads a word."""
        where = ctypes.c_uint64(address)
        self.launch(self.looking, (ctypes.c_void_p * 1)(ctypes.addressof(where)), blocks)

    def copy_by_engine(self, size: int, source: int | None = None) -> bool:
        """Enqueue a copy within the device that leaves the multiprocessors to others, if it can."""
        if not hasattr(self.library, "cuMemcpyBatchAsync_v2"):
            return False
        attributes = struct.pack("<iiiiiI", 1, 0, 0, 0, 0, 1)
        one = ctypes.c_size_t(1)
        code = self.cu(
            "cuMemcpyBatchAsync_v2",
            ctypes.byref(ctypes.c_uint64(self.b)),
            ctypes.byref(ctypes.c_uint64(self.a if source is None else source)),
            ctypes.byref(ctypes.c_size_t(size)),
            one,
            ctypes.create_string_buffer(attributes, len(attributes)),
            ctypes.byref(ctypes.c_size_t(0)),
            one,
            self.stream,
            check=False,
        )
        return code == 0

    def copy_peer(self, size: int) -> None:
        """Enqueue a copy as between the memory of two contexts."""
        self.cu(
            "cuMemcpyPeerAsync",
            ctypes.c_uint64(self.b),
            self.context,
            ctypes.c_uint64(self.a),
            self.context,
            ctypes.c_size_t(size),
            self.stream,
        )

    def copy_to_host(self, size: int) -> None:
        """Enqueue a copy into registered memory of the host."""
        self.cu(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(self.pinned),
            ctypes.c_uint64(self.a),
            ctypes.c_size_t(size),
            self.stream,
        )

    def copy_from_host(self, size: int) -> None:
        """Enqueue a copy from there."""
        self.cu(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(self.b),
            ctypes.c_void_p(self.pinned),
            ctypes.c_size_t(size),
            self.stream,
        )

    def copy_rows_from_host(self, width: int) -> None:
        """Enqueue a copy of two rows from there, one right after the other."""
        unified = 4
        side = struct.pack("<QQi4xQ", 0, 0, unified, 0)
        rows = side + struct.pack("<QQQ", self.pinned, 0, width)
        rows += side + struct.pack("<QQQ", self.b, 0, width) + struct.pack("<QQ", width, 2)
        self.cu("cuMemcpy2DAsync_v2", ctypes.create_string_buffer(rows, len(rows)), self.stream)

    def copy(self, size: int, source: int | None = None) -> None:
        """Enqueue a copy within the device."""
        self.cu(
            "cuMemcpyAsync",
            ctypes.c_uint64(self.b),
            ctypes.c_uint64(self.a if source is None else source),
            ctypes.c_size_t(size),
            self.stream,
        )

    def sync(self) -> None:
        """Wait for the stream."""
        self.cu("cuStreamSynchronize", self.stream)

    def ping_pong(
        self, name: str, work: Callable[[], None] = lambda: None, *, by_kernel: bool = False
    ) -> None:
        """Both enqueue all rounds behind a gate; then the time is the device's alone."""
        mine, theirs = (PING, PONG) if self.rank == 0 else (PONG, PING)
        first = self.value + 1

        def tell(number: int) -> None:
            if by_kernel:
                self.launch_telling(self.page + mine, number)
            else:
                self.operate(write(self.page + mine, number))

        self.operate(wait(self.page + GATE, first))
        for number in range(first, first + ROUNDS):
            if self.rank == 0:
                tell(number)
                self.operate(wait(self.page + theirs, number))
                work()
            else:
                self.operate(wait(self.page + theirs, number))
                work()
                tell(number)
        self.value += ROUNDS
        self.meet()
        start = time.perf_counter()
        if self.rank == 0:
            self.word(GATE, first)
        self.sync()
        took = time.perf_counter() - start
        if self.rank == 0:
            self.say(f"round trip between processes, {name}", f"{took / ROUNDS * 1e6:.1f} us")
        self.meet()

    def time_of(self, name: str, call: Callable[[], object], times: int = 100) -> None:
        """Time a call, on the host and in all."""
        call()
        self.sync()
        start = time.perf_counter()
        for _ in range(times):
            call()
        host = time.perf_counter() - start
        self.sync()
        total = time.perf_counter() - start
        self.say(
            f"alone: {name}",
            f"{host / times * 1e6:.2f} us of the host, {total / times * 1e6:.2f} us in all",
        )

    def alone(self) -> None:
        """Time what a process does while the other waits on the host."""
        addresses = [self.page + 1024 + 64 * i for i in range(16)]
        self.time_of("1 write", lambda: self.operate(write(addresses[0], 1)))
        self.time_of(
            "9 writes in a batch", lambda: self.operate(*(write(a, 1) for a in addresses[:9]))
        )
        self.time_of("1 satisfied wait", lambda: self.operate(wait(addresses[0], 1)))
        self.time_of("empty kernel", lambda: self.launch(self.empty))
        self.time_of(
            "kernel that writes a word for the system",
            lambda: self.launch_telling(addresses[0], 1),
        )
        for where, address in (("host's", addresses[0]), ("device's", self.a)):
            for blocks in (1, 16, 256, 1056):
                self.time_of(
                    f"{blocks} blocks that each read a word of the {where} memory",
                    lambda address=address, blocks=blocks: self.launch_looking(address, blocks),
                )
        self.time_of("copy of 8 B to the host", lambda: self.copy_to_host(8))
        self.time_of("copy of 8 B from the host", lambda: self.copy_from_host(8))
        self.time_of("copy of 16 MiB to the host", lambda: self.copy_to_host(16 << 20), 20)
        self.time_of("copy of 16 MiB from the host", lambda: self.copy_from_host(16 << 20), 20)
        if self.copy_by_engine(8):
            self.time_of("copy of 16 MiB by an engine", lambda: self.copy_by_engine(16 << 20), 50)
        self.time_of("copy of 8 B", lambda: self.copy(8))
        self.time_of("copy of 16 MiB", lambda: self.copy(16 << 20), 50)
        out, status = ctypes.c_void_p(), ctypes.c_uint()

        def push_pop() -> None:
            self.cu("cuCtxPushCurrent_v2", self.context)
            self.cu("cuCtxPopCurrent_v2", ctypes.byref(out))

        self.time_of("push and pop", push_pop)
        self.time_of(
            "is capturing",
            lambda: self.cu("cuStreamIsCapturing", self.stream, ctypes.byref(status)),
        )

    def one_after_the_other(self, step: Callable[[], None]) -> None:
        """Let each process do it while the other waits."""
        for rank in range(2):
            if rank == self.rank:
                step()
            self.meet()

    def beside_a_blocked_process(self) -> None:
        """Ask whether a stream that waits takes time slices from another process."""
        for blocked in (False, True):
            self.value += 1
            if self.rank == 1 and blocked:
                self.operate(wait(self.page + BLOCK, self.value))
            self.meet()
            if self.rank == 0:
                start = time.perf_counter()
                for _ in range(200):
                    self.launch_spin(180_000)  # about 0.1 ms
                self.sync()
                took = time.perf_counter() - start
                self.say(
                    f"200 kernels of 0.1 ms, the other process {'waits' if blocked else 'idles'}",
                    f"{took * 1e3:.1f} ms",
                )
                self.word(BLOCK, self.value)
            self.meet()
            self.sync()

    def both_at_once(self) -> None:
        """Ask what two busy processes lose to taking turns, and how long a turn is."""
        for busy in (1, 2):
            self.meet()
            start = time.perf_counter()
            if self.rank < busy:
                for _ in range(200):
                    self.copy(16 << 20)
                self.sync()
            self.meet()
            if self.rank == 0:
                rate = busy * 200 * (32 << 20) / (time.perf_counter() - start) / 1e9
                self.say(f"copies of 16 MiB, processes at it: {busy}", f"{rate:,.0f} GB/s in all")
        if self.rank == 1:
            for _ in range(3000):
                self.launch_spin(180_000)
        else:
            time.sleep(0.02)
            times = []
            for _ in range(30):
                start = time.perf_counter()
                self.launch(self.empty)
                self.sync()
                times.append((time.perf_counter() - start) * 1e6)
            times.sort()
            self.say(
                "an empty kernel beside a process with kernels of 0.1 ms",
                f"{times[0]:.0f} us at the least, {times[15]:.0f} in the middle, "
                f"{times[-1]:.0f} at the most",
            )
        self.sync()
        self.meet()

    def export(self, address: int) -> None:
        """Leave a handle of memory in this process's place for it."""
        place = (ctypes.c_char * 64).from_buffer(self.memory, HANDLES + 64 * self.rank)
        self.cu("cuIpcGetMemHandle", place, ctypes.c_uint64(address))

    def exported(self, rank: int) -> Handle:
        """Return the handle that the other process has left."""
        return Handle.from_buffer_copy(self.memory, HANDLES + 64 * rank)

    def calls_that_may_wait(self) -> None:
        """Ask which calls return while a stream of the same context waits for a word."""
        anonymous = mmap.mmap(-1, 16 << 20)
        at, place = ctypes.addressof(ctypes.c_char.from_buffer(anonymous)), ctypes.c_size_t()
        theirs = ctypes.c_uint64()
        spare = self.made("cuMemAlloc_v2", ctypes.c_size_t(32 << 20))
        host = self.made("cuMemAllocHost_v2", ctypes.c_size_t(4 << 20))
        calls = {
            "cuMemHostRegister 16 MiB": lambda: self.cu(
                "cuMemHostRegister_v2",
                ctypes.c_void_p(at),
                ctypes.c_size_t(16 << 20),
                ctypes.c_uint(3),
            ),
            "cuMemHostUnregister": lambda: self.cu("cuMemHostUnregister", ctypes.c_void_p(at)),
            "cuMemAlloc 64 MiB": lambda: self.cu(
                "cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(64 << 20)
            ),
            "cuMemFree 32 MiB": lambda: self.cu("cuMemFree_v2", ctypes.c_uint64(spare)),
            "cuMemAllocHost 4 MiB": lambda: self.cu(
                "cuMemAllocHost_v2", ctypes.byref(place), ctypes.c_size_t(4 << 20)
            ),
            "cuMemFreeHost 4 MiB": lambda: self.cu("cuMemFreeHost", ctypes.c_void_p(host)),
            "cuModuleLoadData": lambda: self.cu(
                "cuModuleLoadData", ctypes.byref(place), ctypes.c_char_p(PTX)
            ),
            "cuStreamCreate": lambda: self.cu(
                "cuStreamCreate", ctypes.byref(place), ctypes.c_uint(1)
            ),
            "cuIpcGetMemHandle": lambda: self.export(self.b),
            "cuIpcOpenMemHandle": lambda: self.cu(
                "cuIpcOpenMemHandle_v2", ctypes.byref(theirs), self.exported(1), ctypes.c_uint(1)
            ),
            "cuIpcCloseMemHandle": lambda: self.cu("cuIpcCloseMemHandle", theirs),
        }
        for name, call in calls.items():
            self.value += 1
            self.operate(wait(self.page + BLOCK, self.value))

            def run(call: Callable[[], object] = call) -> None:
                self.cu("cuCtxSetCurrent", self.context)
                call()

            start = time.perf_counter()
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(1.0)
            waits = thread.is_alive()
            took = time.perf_counter() - start
            self.word(BLOCK, self.value)
            thread.join()
            self.sync()
            self.say(
                f"{name} beside a stream that waits",
                "WAITS for it" if waits else f"returns in {took * 1e3:.2f} ms",
            )

    def graph(self) -> None:
        """Capture memory operations, and replay them."""
        self.word(256, 0)
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self.cu("cuStreamBeginCapture_v2", self.stream, ctypes.c_uint(0))
        self.operate(
            write(self.page + 256, 1), wait(self.page + 256, 1, 2), write(self.page + 256, 0)
        )
        self.copy(4096)
        self.launch(self.empty)
        self.operate(write(self.page + 320, 7))
        self.cu("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.cu("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        for _ in range(5):
            self.word(320, 0)
            self.cu("cuGraphLaunch", executable, self.stream)
            self.sync()
            if self.word(320) != 7:
                self.say("FAILED", "memory operations of a graph are not carried out")
        self.say("memory operations in a graph", "captured, replayed")
        self.time_of(
            "graph of 3 + 1 memory operations, copy, kernel",
            lambda: self.cu("cuGraphLaunch", executable, self.stream),
            50,
        )

    def modules(self, folder: str) -> None:
        """Load modules twice: the second time the driver has kept what it compiled."""
        for path in sorted(Path(folder).glob("*.ptx.gz")):
            text = gzip.decompress(path.read_bytes()) + b"\0"
            times = []
            for _ in range(2):
                place, start = ctypes.c_size_t(), time.perf_counter()
                code = self.cu(
                    "cuModuleLoadData", ctypes.byref(place), ctypes.c_char_p(text), check=False
                )
                times.append(f"{(time.perf_counter() - start) * 1e3:.0f} ms")
            self.say(f"load {path.name}", f"code {code}, {', '.join(times)}")

    def memory_of_the_dead(self) -> None:
        """Read memory of the other process, alive and killed."""
        if self.rank == 0:
            self.cu(
                "cuMemsetD32_v2",
                ctypes.c_uint64(self.a),
                ctypes.c_uint(0x5EED),
                ctypes.c_size_t(8 << 20),
            )
            self.cu("cuCtxSynchronize")
            self.export(self.a)
            self.meet()
            self.meet()
            os.kill(os.getpid(), signal.SIGKILL)
        self.meet()
        handle = self.exported(0)
        start = time.perf_counter()
        theirs = self.made("cuIpcOpenMemHandle_v2", handle, ctypes.c_uint(1))
        self.say("map 32 MiB of the other process", f"{(time.perf_counter() - start) * 1e6:.0f} us")
        self.time_of(
            "copy of 16 MiB from the other process", lambda: self.copy(16 << 20, theirs), 50
        )
        seen = ctypes.c_uint32()

        def look(when: str) -> None:
            code = self.cu(
                "cuMemcpyDtoD_v2",
                ctypes.c_uint64(self.b),
                ctypes.c_uint64(theirs),
                ctypes.c_size_t(32 << 20),
                check=False,
            )
            code = code or self.cu("cuCtxSynchronize", check=False)
            code = code or self.cu(
                "cuMemcpyDtoH_v2",
                ctypes.byref(seen),
                ctypes.c_uint64(self.b + (31 << 20)),
                ctypes.c_size_t(4),
                check=False,
            )
            self.say(
                f"memory of the other process, {when}",
                f"code {code}, {seen.value:#x} (0x5eed is right)",
            )

        look("alive")
        self.meet()
        time.sleep(2)
        self.cu(
            "cuMemsetD32_v2", ctypes.c_uint64(self.b), ctypes.c_uint(0), ctypes.c_size_t(8 << 20)
        )
        seen.value = 0
        look("killed 2 s ago")
        self.say(
            "unmap it",
            f"code {self.cu('cuIpcCloseMemHandle', ctypes.c_uint64(theirs), check=False)}",
        )


def run(rank: int, memory: mmap.mmap, folder: str | None) -> None:
    """Do all that one of the two processes does."""
    signal.alarm(150)
    probe = Probe(rank, memory)
    probe.meet()
    probe.one_after_the_other(probe.alone)
    probe.ping_pong("memory operations alone")
    probe.ping_pong("told by kernels", by_kernel=True)
    probe.ping_pong("an empty kernel each", lambda: probe.launch(probe.empty))
    probe.ping_pong("a copy of 8 B each", lambda: probe.copy(8))
    probe.ping_pong("a copy of 16 MiB each", lambda: probe.copy(16 << 20))
    for size, name in (
        (8, "8 B"),
        (1 << 10, "1 KiB"),
        (2 << 10, "2 KiB"),
        (64 << 10, "64 KiB"),
        (16 << 20, "16 MiB"),
    ):
        probe.ping_pong(
            f"a copy of {name} to the host each", lambda size=size: probe.copy_to_host(size)
        )
        probe.ping_pong(
            f"a copy of {name} from the host each", lambda size=size: probe.copy_from_host(size)
        )
    probe.ping_pong(
        "a copy of two rows of 4 B from the host each", lambda: probe.copy_rows_from_host(4)
    )
    probe.ping_pong(
        "a write of 8 B into the device's memory each",
        lambda: probe.operate(write_long(probe.a, 1)),
    )
    if probe.copy_by_engine(8):
        probe.ping_pong("a copy of 8 B by an engine each", lambda: probe.copy_by_engine(8))
        probe.ping_pong(
            "a copy of 8 B by an engine from the host each",
            lambda: probe.copy_by_engine(8, probe.pinned),
        )
        probe.ping_pong(
            "a copy of 8 B within the device as if between two each", lambda: probe.copy_peer(8)
        )
        probe.ping_pong(
            "a copy of 16 MiB by an engine each", lambda: probe.copy_by_engine(16 << 20)
        )
    probe.beside_a_blocked_process()
    probe.both_at_once()
    probe.export(probe.a)
    probe.meet()
    if rank == 0:
        probe.calls_that_may_wait()
        probe.graph()
        if folder:
            probe.modules(folder)
    probe.meet()
    probe.memory_of_the_dead()


def main() -> None:
    """Start both processes, and wait for them."""
    file = os.memfd_create("probe")
    os.ftruncate(file, 8192)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            memory = mmap.mmap(file, 8192, mmap.MAP_SHARED)
            run(rank, memory, sys.argv[1] if len(sys.argv) > 1 else None)
            os._exit(0)
        children.append(child)
    for child in children:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        print(f"process {child} ended with {code} (-9 is expected of the first)")


if __name__ == "__main__":
    main()
