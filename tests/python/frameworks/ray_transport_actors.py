"""Actors of Ray at the edges of unisono's tensor transports, for `test_ray_transport.py`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch
from ray.experimental import set_target_for_ref

import unisono
import unisono.ray
from unisono import _offers

unisono.ray.register_transports()


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Source:
    def __init__(self) -> None:
        self.weight = torch.ones(10)

    @ray.method(tensor_transport="UNISONO")
    def weights(self) -> list[torch.Tensor]:
        return [self.weight, torch.zeros(10)]

    def move_weights(self) -> None:
        self.weight.data = torch.full((20,), 2.0)

    @ray.method(tensor_transport="UNISONO")
    def tensors(self, size: int) -> list[torch.Tensor]:
        return [torch.arange(size, dtype=torch.int32), torch.full((2, 3), 0.5)]

    @ray.method(tensor_transport="UNISONO")
    def columns(self) -> torch.Tensor:
        return torch.ones(4, 4)[:, 0]

    def process(self) -> int:
        return os.getpid()

    def offered(self) -> int:
        return len(_offers._process.own().regions._counted)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Target:
    def total(self, tensors: list[torch.Tensor]) -> float:
        return sum(float(tensor.sum()) for tensor in tensors)

    def process(self) -> int:
        return os.getpid()


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def failure(ref: object) -> Exception:
    try:
        ray.get(ref)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def into_memory_of_the_receiver(source: object) -> None:
    ref = source.tensors.remote(1000)
    buffers = [torch.empty(1000, dtype=torch.int32), torch.empty(2, 3)]
    set_target_for_ref(ref, buffers)
    got = ray.get(ref)
    assert all(one is other for one, other in zip(got, buffers, strict=True))
    assert torch.equal(buffers[0], torch.arange(1000, dtype=torch.int32))
    print("into memory of the receiver")


def from_the_driver(target: object) -> None:
    ref = ray.put([torch.ones(1 << 20), torch.tensor(2.0)], _tensor_transport="UNISONO")
    assert ray.get(target.total.remote(ref)) == (1 << 20) + 2
    array = np.arange(6.0).reshape(2, 3)
    assert ray.get(ray.put(array, _tensor_transport="UNISONO_NUMPY")) is array
    print("from the driver")


def offers_end_with_their_objects(source: object) -> None:
    refs = [source.tensors.remote(10) for _ in range(3)]
    refs.append(source.weights.remote())
    ray.get(refs)
    assert ray.get(source.offered.remote()) >= 8
    ray.get(source.move_weights.remote())
    del refs
    deadline = time.monotonic() + 20
    while (left := ray.get(source.offered.remote())) > 0:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    print("offers end with their objects")


def a_source_that_dies(target: object) -> None:
    source = Source.remote()
    ref = source.tensors.remote(1 << 20)
    before = ray.get(target.process.remote())
    assert ray.get(target.total.remote(ref)) > 0
    pid = ray.get(source.process.remote())
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    while alive(pid):
        assert time.monotonic() - began < 20, pid
        time.sleep(0.01)
    error = failure(target.total.remote(ref))
    assert time.monotonic() - began < 50
    assert ray.get(target.process.remote()) == before
    print(f"a source that dies: {error}")


def main() -> None:
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    try:
        source, target = Source.remote(), Target.remote()
        into_memory_of_the_receiver(source)
        from_the_driver(target)
        offers_end_with_their_objects(source)
        error = failure(source.columns.remote())
        assert "only contiguous tensors can be moved" in str(error), error
        a_source_that_dies(target)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
