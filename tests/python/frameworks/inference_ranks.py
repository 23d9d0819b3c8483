"""The rank functions of `test_inference.py`: the doors of vLLM and DeepSpeed to unisono's sums."""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StandIn:
    """The parts of vLLM's CpuCommunicator that `unisono.vllm` needs, as vLLM 0.32 has them."""

    def __init__(
        self,
        cpu_group: Any,
        device: torch.device | None = None,
        device_group: Any = None,
        unique_name: str = "",
    ) -> None:
        self.device = device
        self.device_group = device_group
        self.unique_name = unique_name
        self.world_size = cpu_group.size()
        for_shared_memory = unique_name.startswith(("tp", "pp"))
        self.own_memory = for_shared_memory and self._all_group_ranks_share_shm_group_name()
        if for_shared_memory and not self.own_memory:
            logging.getLogger("vllm").info("the ranks do not share a name")
        self.expert_parallel = "ep" in unique_name

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return True

    def all_reduce(self, input_: Tensor) -> Tensor:
        dist.all_reduce(input_, group=self.device_group)
        return input_

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        parts = [torch.empty_like(input_) for _ in range(self.world_size)]
        dist.all_gather(parts, input_, group=self.device_group)
        return torch.cat(parts, dim)


def module_of_vllm(real: bool) -> ModuleType:
    """Return vLLM's module, or one with a stand-in in its place."""
    name = "vllm.distributed.device_communicators.cpu_communicator"
    if not real:
        for end in (4, 16, 37, len(name)):
            module = ModuleType(name[:end])
            module.__path__ = []
            sys.modules[name[:end]] = module
        sys.modules[name.rpartition(".")[0]].cpu_communicator = module
        module.CpuCommunicator = StandIn
        module.logger = logging.getLogger("vllm")
        return module
    from vllm.distributed.device_communicators import cpu_communicator

    return cpu_communicator


class Kept(logging.Handler):
    """Keeps the lines that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def vllm(real: bool, by_call: bool = False) -> dict[str, Any]:
    """Make the communicator of a tensor-parallel group as vLLM does, and call it."""
    module = module_of_vllm(real)
    import unisono.vllm

    unisono.vllm.register()
    if by_call:
        from unisono.torch import replace_gloo

        assert not hasattr(module.CpuCommunicator, "unisono_group")
        replace_gloo()
    unisono.vllm.register()
    os.environ["VLLM_DIST_IDENT"] = "test"
    kept = Kept()
    module.logger.addHandler(kept)
    module.logger.setLevel(logging.INFO)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    made = module.CpuCommunicator
    communicator = made(
        cpu_group=group,
        device=torch.device("cpu"),
        device_group=group,
        unique_name="tp:0",
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) + rank
    all_of_them = [mine - rank + each for each in range(ranks)]
    for dim in (0, 1, -1, -2):
        assert torch.equal(communicator.all_gather(mine, dim), torch.cat(all_of_them, dim))
    assert torch.equal(communicator.all_reduce(mine), sum(all_of_them))
    served = getattr(communicator, "unisono_group", None)
    found = {
        "serves": served is not None and served == group.group_name,
        "own_memory": getattr(communicator, "own_memory", False),
        "name": f"{made.__module__}.{made.__qualname__}",
        "unique_name": communicator.unique_name,
        "log": list(kept.lines),
    }
    if not real:
        # By other names vLLM knows what else a group is for.
        found["expert_parallel"] = made(group, None, group, "ep:0").expert_parallel
    dist.destroy_process_group()
    return found


def deepspeed() -> dict[str, Any]:
    """Sum as DeepSpeed's tensor-parallel layers do."""
    import deepspeed

    import unisono.deepspeed

    unisono.deepspeed.install()
    unisono.deepspeed.install()
    deepspeed.init_distributed(verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
    calls = []
    direct = torch.ops.unisono.all_reduce_

    class Counted:
        def all_reduce_(self, *args: Any) -> None:
            calls.append(args)
            direct(*args)

    torch.ops.unisono = Counted()
    part = torch.full((5,), float(rank), dtype=torch.bfloat16)
    deepspeed.comm.inference_all_reduce(part)
    if rank < 2:
        other = torch.ones(3)
        deepspeed.comm.inference_all_reduce(other, group=pair)
        assert other.tolist() == [2.0] * 3
    largest = torch.tensor([float(rank)])
    deepspeed.comm.inference_all_reduce(largest, op=deepspeed.comm.ReduceOp.MAX)
    found = {
        "backend": dist.get_backend(),
        "sum": part.tolist() == [ranks * (ranks - 1) / 2] * 5,
        "max": largest.item() == ranks - 1,
        "calls": len(calls),
    }
    dist.destroy_process_group()
    return found
