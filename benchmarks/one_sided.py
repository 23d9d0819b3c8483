"""One-sided transfers: unisono's transport beside a plain copy and, where it is there, NIXL.

    python benchmarks/one_sided.py
    python benchmarks/one_sided.py --sizes 4K 64M --seconds 3
    python benchmarks/one_sided.py --rates 1000 0 --rounds 3

One process reads and writes tensors that another has registered, through torch's
`torch.distributed._transport` (torch 2.15 and newer), while the other one sleeps. `private` is
ordinary memory of torch, `heap` lies in unisono's shared heap; `copy` is `Tensor.copy_` between two
tensors of the same size inside the process. They take turns, block by block, in one pair of
processes. A figure is the median over blocks of the time for a call, and in brackets the time of a
copy over it: 1.00 is as fast as copying.

`--rates` measures between two hosts instead, which are network namespaces (as root), with links of
each of these rates in Mbit/s; 0 has no limit. `sockets` is a connection of TCP by which as many
bytes go, and a short answer for each transfer. In brackets is the share of the link's rate, or
without a limit the rate in GB/s; the last columns are NIXL's time over unisono's.

`pip install nixl` brings NVIDIA's NIXL, whose transport is part of torch (by UCX, over what UCX
chooses; between hosts over TCP). A thread of it polls in each process, and would slow the others
down, so it has a pair of processes of its own, after the others in each of the `--rounds`, and with
a copy of its own. Where it is missing it is left out, and the program says so.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from harness import report
from harness.arguments import size as in_bytes
from harness.arguments import size_name
from harness.beds import Bed
from namespaces import Hosts, join, why_not
from torch.distributed._transport import Transport, new_transport

import unisono

SIZES = ["8", "4K", "64K", "1M", "16M", "64M"]
SIZES_OF_HOSTS = ["4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M", "256M"]
KINDS = ["private", "heap", "nixl"]
KINDS_OF_HOSTS = ["private", "sockets", "nixl"]
# Between hosts NIXL has the means that unisono has.
OF_HOSTS = {"UNISONO_INTERFACE": "eth0", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
BLOCK = 0.02  # seconds of calls before another one's turn
LIMIT = 60.0  # seconds in which the other process answers
QUICK = 0.02  # seconds: a longer call is not tried several times before it counts
Call = Callable[[], Any]
Times = dict[int, dict[str, list[float]]]  # of blocks, by size and by what was done
REQUEST = struct.Struct("<cQ")  # b"w" or b"r", and the bytes that follow or are to follow


def tensors(kind: str, size: int) -> torch.Tensor:
    """Return a tensor of that many bytes which was written to."""
    if kind == "heap":
        return torch.from_numpy(unisono.empty(size, "uint8")).fill_(1)
    return torch.ones(size, dtype=torch.uint8)


def serve(names: list[str], sizes: list[int], host: str | None, pipe: Connection) -> None:
    """Be the target: register a tensor of each size and kind, and sleep until the end."""
    if host is not None:
        join(host)
    ends: dict[str, Transport] = {}
    kept, buffers = [], {}
    for name in names:
        if name == "sockets":
            continue
        ends.setdefault(backend(name), new_transport(backend(name), "cpu"))
        for size in sizes:
            kept.append(tensors(name, size))
            memory = ends[backend(name)].register_memory(kept[-1])
            buffers[name, size] = memory.to_remote_buffer()
    urls: dict[str, Any] = {name: end.bind() for name, end in ends.items()}
    answering = None
    if "sockets" in names:
        listener = socket.create_server((Hosts.address(1), 0))
        urls["sockets"] = listener.getsockname()
        answering = threading.Thread(target=serve_by_socket, args=(listener, sizes), daemon=True)
        answering.start()
    pipe.send(urls)
    for name, url in pipe.recv().items():
        # NIXL's peers both connect; unisono's need not.
        ends[name].connect(url)
    pipe.send({key: (type(buffer), buffer.serialize()) for key, buffer in buffers.items()})
    pipe.recv()
    if answering is not None:
        answering.join(LIMIT)
    for end in ends.values():
        end.close()


def serve_by_socket(listener: socket.socket, sizes: list[int]) -> None:
    views = {size: memoryview(tensors("sockets", size).numpy()) for size in sizes}
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := connection.recv(REQUEST.size, socket.MSG_WAITALL):
        what, size = REQUEST.unpack(request)
        if what == b"w":
            receive(connection, views[size])
            connection.sendall(b"k")
        else:
            connection.sendall(views[size])


def receive(connection: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if count == 0:
            raise EOFError("the other process has closed its socket")
        done += count


def calls_by_socket(connection: socket.socket, size: int) -> dict[str, Call]:
    """Return the write and the read by a socket."""
    view = memoryview(tensors("sockets", size).numpy())

    def write() -> None:
        connection.sendall(REQUEST.pack(b"w", size))
        connection.sendall(view)
        connection.recv(1)

    def read() -> None:
        connection.sendall(REQUEST.pack(b"r", size))
        receive(connection, view)

    return {"write": write, "read": read}


def backend(name: str) -> str:
    return "nixl" if name == "nixl" else "unisono"


def calls(
    name: str, ends: dict[str, Transport], remote: Any, size: int
) -> tuple[dict[str, Call], torch.Tensor]:
    """Return the write and the read of one kind of memory, and the local tensor."""
    end = ends[backend(name)]
    local = tensors(name, size)
    memory = end.register_memory(local)
    view, mutable = memory.to_view(), memory.to_mutable_view()
    check(end, local, view, mutable, remote)
    return {
        "write": lambda: end.write(view, remote),
        "read": lambda: end.read(mutable, remote),
    }, local


def check(end: Transport, local: torch.Tensor, view: Any, mutable: Any, remote: Any) -> None:
    """Raise unless what is written can be read again."""
    local.copy_(torch.arange(local.numel()) % 251)
    end.write(view, remote)
    local.zero_()
    end.read(mutable, remote)
    if not torch.equal(local, (torch.arange(local.numel()) % 251).to(torch.uint8)):
        raise ValueError("what was read is not what was written")


def timed(call: Call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def take_turns(ready: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Return the time of each call, block by block."""
    counts = {}
    for name, call in ready.items():
        once = timed(call, 1)
        if once < QUICK:
            once = min(timed(call, 3) for _ in range(3))
        counts[name] = max(1, min(2000, round(BLOCK / once)))
    blocks: dict[str, list[float]] = {name: [] for name in ready}
    began = time.perf_counter()
    while not blocks[name] or time.perf_counter() - began < seconds:
        for name, call in ready.items():
            blocks[name].append(timed(call, counts[name]))
    return blocks


def measure(names: list[str], sizes: list[int], seconds: float, host: str | None = None) -> Times:
    """Return the times of blocks, with the target on that host."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(names, sizes, host, theirs))
    process.start()
    theirs.close()
    through = dict.fromkeys(backend(name) for name in names if name != "sockets")
    ends = {name: new_transport(name, "cpu") for name in through}
    try:
        urls = answer(ours)
        by_socket = urls.pop("sockets", None)
        if by_socket:
            connection = socket.create_connection(by_socket)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, url in urls.items():
            ends[name].connect(url)
        ours.send({name: end.bind() for name, end in ends.items()})
        remote = {key: kind.deserialize(data) for key, (kind, data) in answer(ours).items()}
        found = {}
        for size in sizes:
            ready: dict[str, Call] = {}
            if host is None:
                source, target = tensors("private", size), tensors("private", size)
                ready["copy"] = lambda to=target, of=source: to.copy_(of)
            for name in names:
                if name == "sockets":
                    both = calls_by_socket(connection, size)
                else:
                    both, _ = calls(name, ends, remote[name, size], size)
                ready.update({f"{name} {what}": call for what, call in both.items()})
            found[size] = take_turns(ready, seconds)
        if by_socket:
            connection.close()
        ours.send("done")
        process.join(LIMIT)
        for end in ends.values():
            end.close()
        return found
    finally:
        process.kill()
        process.join()


def initiate(
    hosts: list[str], names: list[str], sizes: list[int], seconds: float, pipe: Connection
) -> None:
    """Measure from the first of two hosts to the second, and tell what was found."""
    join(hosts[0])
    os.environ.update(OF_HOSTS)
    torch.set_num_threads(1)
    pipe.send(measure(names, sizes, seconds, hosts[1]))


def between_hosts(args: argparse.Namespace, rate: int) -> Times:
    """Return the times of blocks between two hosts."""
    spawn = multiprocessing.get_context("spawn")
    sizes = [in_bytes(size) for size in args.sizes]
    found: Times = {size: {} for size in sizes}
    with Bed((1, 1), rate=rate).made() as net:
        for _ in range(args.rounds):
            for names in together(args.kinds):
                ours, theirs = spawn.Pipe()
                words = (net.names, names, sizes, args.seconds, theirs)
                process = spawn.Process(target=initiate, args=words)
                process.start()
                theirs.close()
                try:
                    add_up(found, ours.recv())
                    process.join(LIMIT)
                finally:
                    process.kill()
                    process.join()
    return found


def add_up(found: Times, more: Times) -> None:
    for size, blocks in more.items():
        for name, times in blocks.items():
            found[size].setdefault(name, []).extend(times)


def answer(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT):
        raise TimeoutError(f"the other process said nothing for {LIMIT:g} s")
    return pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", nargs="+", help="bytes, with K or M")
    add("--seconds", type=float, default=2.0, help="for each size")
    add("--kinds", nargs="+", help=f"of {', '.join(KINDS)}; of {', '.join(KINDS_OF_HOSTS)}")
    add("--rates", nargs="+", type=int, metavar="MBIT", help="between hosts with such links")
    add("--rounds", type=int, default=1, help="how often each pair of processes is started")
    add("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    args = parser.parse_args()
    args.sizes = args.sizes or (SIZES_OF_HOSTS if args.rates else SIZES)
    args.kinds = args.kinds or (KINDS_OF_HOSTS if args.rates else KINDS)
    torch.set_num_threads(1)
    if args.rates and (trouble := why_not()):
        sys.exit(f"no hosts can be made here: {trouble}")
    if "nixl" in args.kinds:
        try:
            importlib.import_module("nixl")
        except ImportError as error:
            print(f"NIXL is left out: {error}")
            args.kinds.remove("nixl")
    figures: list[dict[str, Any]] = []
    for rate in args.rates or ():
        medians = medians_of(between_hosts(args, rate))
        show_rates(medians, rate)
        figures += [{"rate": rate, "size": size, "seconds": of} for size, of in medians.items()]
    if not args.rates:
        for found in on_one_host(args):
            show(found)
            figures += [{"size": size, "seconds": times} for size, times in found.items()]
    if args.json is not None:
        report.write_json(args.json, figures=figures)


def on_one_host(args: argparse.Namespace) -> list[dict[int, dict[str, float]]]:
    """Return the medians of each set of kinds that have the same processes."""
    sizes = [in_bytes(size) for size in args.sizes]
    parts = together(args.kinds)
    found: list[Times] = [{size: {} for size in sizes} for _ in parts]
    for _ in range(args.rounds):
        for part, names in zip(found, parts, strict=True):
            add_up(part, measure(names, sizes, args.seconds))
    return [medians_of(part) for part in found]


def medians_of(found: Times) -> dict[int, dict[str, float]]:
    return {
        size: {name: statistics.median(times) for name, times in blocks.items()}
        for size, blocks in found.items()
    }


def together(kinds: list[str]) -> list[list[str]]:
    """Return the kinds of memory by those that are measured in the same processes."""
    parts = [[kind for kind in kinds if kind != "nixl"], [kind for kind in kinds if kind == "nixl"]]
    return [part for part in parts if part]


def show(found: dict[int, dict[str, float]]) -> None:
    print("microseconds of a call, and the time of a plain copy over it")
    columns = list(next(iter(found.values())))
    print(f"{'':>10}" + "".join(f"{column:>21}" for column in columns))
    for size, times in found.items():
        cells = (f"{t * 1e6:13.1f} ({times['copy'] / t:5.2f})" for t in times.values())
        print(f"{size:>10}" + "".join(cells), flush=True)


def show_rates(found: dict[int, dict[str, float]], rate: int) -> None:
    link = f"{rate} Mbit/s" if rate else "no limit"
    unit = "the share of the link's rate" if rate else "GB/s"
    print(f"links of {link}: microseconds of a call, and {unit}")
    columns = list(next(iter(found.values())))
    heads = [f"{column:>22}" for column in columns]
    has_nixl = "nixl write" in columns and "private write" in columns
    if has_nixl:
        heads.append(f"{'NIXL / unisono: write':>24}{'read':>7}")
    print(f"{'':>8}" + "".join(heads))
    for size, times in found.items():
        per_second = {name: size / seconds for name, seconds in times.items()}
        shares = {
            name: of * 8 / (rate * 1e6) if rate else of / 1e9 for name, of in per_second.items()
        }
        line = f"{size_name(size):>8}"
        line += "".join(f"{t * 1e6:14.1f} ({shares[name]:5.2f})" for name, t in times.items())
        if has_nixl:
            ratios = [
                times[f"nixl {what}"] / times[f"private {what}"] for what in ("write", "read")
            ]
            line += f"{ratios[0]:24.2f}{ratios[1]:7.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
