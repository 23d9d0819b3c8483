"""DeepSpeed over unisono on CPUs: its groups, and the sums of its tensor-parallel inference.

::

    import unisono.deepspeed

    unisono.deepspeed.install()
    deepspeed.init_distributed()
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["install"]


def install() -> None:
    """Make unisono the backend of DeepSpeed's accelerator for the CPU, and serve its inference.

    Call it before ``deepspeed.init_distributed()``. DeepSpeed then compiles no operator of its own
    for sums in shared memory: ``deepspeed.comm.inference_all_reduce`` takes unisono's, for groups
    of any size, on one host or several.

    Raises
    ------
    RuntimeError
        DeepSpeed's accelerator is not the CPU.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import TorchBackend

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        raise RuntimeError(
            f"unisono.deepspeed.install() is for CPUs, and DeepSpeed's accelerator is "
            f"{accelerator.device_name()}; set DS_ACCELERATOR=cpu, or name the backend: "
            f'deepspeed.init_distributed("unisono")'
        )
    accelerator._communication_backend_name = "unisono"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not hasattr(TorchBackend, "_unisono_serves"):
        TorchBackend._unisono_serves = True
        TorchBackend.inference_all_reduce = _serving(TorchBackend.inference_all_reduce)


def _serving(other: Any) -> Any:
    """Return ``TorchBackend.inference_all_reduce`` with unisono's sums; `other` for the rest."""

    def inference_all_reduce(self: Any, tensor: torch.Tensor, op: Any, group: Any = None) -> Any:
        group = dist.group.WORLD if group is None else group
        is_sum = str(getattr(op, "name", op)).upper() == "SUM"
        backend = group._get_backend(tensor.device).name()
        if backend != "unisono" or not is_sum:
            return other(self, tensor, op, group)
        if group.size() > 1:
            torch.ops.unisono.all_reduce_(tensor, group.group_name)
        return tensor

    return inference_all_reduce
