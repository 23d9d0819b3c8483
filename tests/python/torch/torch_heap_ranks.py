"""What the ranks of `test_torch_heap.py` do: train with buffers that torch asks the backend for."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import unisono

CPU = torch.device("cpu")
STEPS = 3


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 200))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def left() -> dict[str, object]:
    """What there is of the heap once everything was let go of."""
    dist.destroy_process_group()
    gc.collect()
    deadline = time.monotonic() + 10
    while unisono.heap().segments and time.monotonic() < deadline:
        time.sleep(0.01)
    heap = unisono.heap()
    maps = Path("/proc/self/maps").read_text().count("memfd:unisono heap")
    return {"blocks": heap.blocks, "segments": heap.segments, "maps": maps}


def ddp(view: bool) -> dict[str, object]:
    """A plain DDP script."""
    dist.init_process_group("unisono")
    plain = DistributedDataParallel(network(), gradient_as_bucket_view=view, bucket_cap_mb=0.5)
    train(plain)
    heap = unisono.heap()
    gradients = [parameter.grad in heap for parameter in plain.parameters()]
    trained = weights(plain)
    del plain
    return {"gradients": gradients, "in_use": heap.in_use, "weights": trained, "left": left()}


def sharded(ask: bool) -> nn.Module:
    model = network()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        if ask:
            module.set_allocate_memory_from_process_group_for_comm(True)
    return model


def fsdp(ask: bool) -> dict[str, object]:
    """FSDP2, which takes the backend's memory when that is set."""
    dist.init_process_group("unisono")
    model = sharded(ask)
    train(model)
    trained = [parameter.detach().full_tensor().clone() for parameter in model.parameters()]
    peak = unisono.heap().peak
    del model
    return {"peak": peak, "weights": trained, "left": left()}


def tensors() -> dict[str, object]:
    """Tensors of the backend's memory, in all the ways that torch uses a tensor."""
    dist.init_process_group("unisono")
    backend = dist.group.WORLD._get_backend(CPU)
    seen: dict[str, object] = {"supported": backend.supports_tensor_alloc(CPU)}
    seen["cuda"] = backend.supports_tensor_alloc(torch.device("cuda", 0))
    tensor = backend.allocate_tensor(1000, dtype=torch.bfloat16, device=CPU)
    seen["kind"] = (tuple(tensor.shape), str(tensor.dtype), tensor.device.type)
    seen["in_heap"] = tensor in unisono.heap()
    seen["stats"] = backend.memory_stats()["heap_bytes"] if hasattr(backend, "memory_stats") else 1
    tensor.fill_(1)
    # As FSDP frees and makes storage again, and as it grows.
    storage = tensor.untyped_storage()
    blocks = unisono.heap().blocks
    storage.resize_(0)
    seen["freed"] = blocks - unisono.heap().blocks
    storage.resize_(2000)
    seen["again"] = tensor in unisono.heap()
    tensor.fill_(2)
    tensor.resize_(5000)
    seen["grown"] = (tensor in unisono.heap(), float(tensor[:1000].float().sum()))
    seen["none"] = backend.allocate_tensor(0, dtype=torch.float32, device=CPU).numel()
    # Fake tensors have no memory.
    with FakeTensorMode():
        fake = backend.allocate_tensor(1000, dtype=torch.float32, device=CPU)
    seen["fake"] = isinstance(fake, FakeTensor)
    # A forked child has its own heap, and this memory for itself; so torch's workers may be forked.
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mine = backend.allocate_tensor(1000, dtype=torch.float32, device=CPU)
            own = mine in unisono.heap() and float(mine.fill_(3).sum()) == 3000
            same = float(tensor[:1000].float().sum()) == 2000 and tensor not in unisono.heap()
            tensor.zero_()
            del mine, tensor
            gc.collect()
            status = int(not (own and same))
        finally:
            os._exit(status)
    seen["child"] = os.waitpid(child, 0)[1]
    seen["after"] = float(tensor[:1000].float().sum())
    # It outlives its group.
    copy = backend.allocate_tensor(10, dtype=torch.float32, device=CPU).fill_(4)
    del tensor, storage, backend, fake
    dist.destroy_process_group()
    seen["outlives"] = float(copy.sum())
    del copy
    gc.collect()
    seen["blocks"] = unisono.heap().blocks
    return seen
