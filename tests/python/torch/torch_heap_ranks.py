"""The rank functions of `test_torch_heap.py`: train with buffers that the backend makes."""

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
    """The rest of the heap once everything was let go of."""
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


TRAINED = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TRAINED += [torch.complex64, torch.complex128]
MOVED = [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bool]
MOVED += [torch.uint8, torch.int16, torch.uint32, torch.int64, torch.complex32]


class OfAllTypes(nn.Module):
    """Parameters of every type that is trained, of two shapes, one of them not in order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        for dtype in TRAINED:
            name = f"of_{str(dtype)[6:]}"
            ordered = torch.randn(9, 4).to(dtype)
            self.register_parameter(name, nn.Parameter(ordered))
            self.register_parameter(f"{name}_turned", nn.Parameter(ordered[:3, :2].clone().t()))

    def forward(self, scale: complex) -> Tensor:
        """Its gradient in a complex parameter is the conjugate of `scale`, else the real part."""
        products = (p * (scale if p.is_complex() else scale.real) for p in self.parameters())
        return sum((each.real if each.is_complex() else each).double().sum() for each in products)


def types() -> dict[str, object]:
    """All that torch asks of a backend only where it allocates tensors, with every type."""
    dist.init_process_group("unisono")
    rank = dist.get_rank()
    backend = dist.group.WORLD._get_backend(CPU)
    kinds = []
    for dtype in [*TRAINED, *MOVED]:
        tensor = backend.allocate_tensor(6, dtype=dtype, device=CPU)
        none = backend.allocate_tensor(0, dtype=dtype, device=CPU)
        kinds.append(
            (tensor.view(torch.uint8) in unisono.heap(), tuple(tensor.shape), none.numel())
        )
        assert tensor.dtype == none.dtype == dtype
        assert tensor.is_contiguous()
    for view in (False, True):
        model = DistributedDataParallel(OfAllTypes(), gradient_as_bucket_view=view)
        # torch makes its buckets anew after the first step.
        for step in range(3):
            model.zero_grad(set_to_none=step == 1)
            model(complex(2 + 4 * rank, 6 - 8 * rank)).backward()
            for name, parameter in model.module.named_parameters():
                expected = complex(4, -2) if parameter.is_complex() else 4
                assert parameter.grad.dtype == parameter.dtype
                assert torch.equal(parameter.grad, torch.full_like(parameter, expected)), name
                assert not view or parameter.grad in unisono.heap()
    sharded_gradients(rank)
    return {"kinds": kinds}


def sharded_gradients(rank: int) -> None:
    """The same of FSDP2, which takes parameters of one type at a time."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for dtype in TRAINED:
        layer = nn.Linear(4, 6, bias=False, dtype=dtype)
        fully_shard(layer, mesh=mesh)
        layer.set_allocate_memory_from_process_group_for_comm(True)
        given = torch.full((1, 4), complex(2 + 4 * rank, 0) if dtype.is_complex else 2 + 4 * rank)
        result = layer(given.to(dtype))
        (result.real if dtype.is_complex else result).sum().backward()
        gradient = layer.weight.grad.full_tensor()
        assert torch.equal(gradient, torch.full_like(gradient, 4)), dtype


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
