"""A plug-in of vLLM: the collectives of its workers on CPUs, where unisono serves their groups.

vLLM loads it by itself (entry point ``vllm.general_plugins``). It acts where vLLM's gloo groups are
unisono's, which ``UNISONO_AS_GLOO=1`` or ``unisono run`` asks for::

    UNISONO_AS_GLOO=1 vllm serve MODEL --tensor-parallel-size 2

vLLM's own shared memory, which is for 2, 3, 4 or 8 ranks of one host, is left aside then.
"""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = ["register"]


def register() -> None:
    """Put unisono behind vLLM's ``CpuCommunicator``. Called by vLLM in each of its processes."""
    asked = os.environ.get("UNISONO_AS_GLOO", "").strip().lower()
    if asked not in ("1", "on", "yes", "true"):
        return
    from vllm.distributed.device_communicators import cpu_communicator

    if not hasattr(cpu_communicator.CpuCommunicator, "unisono_group"):
        cpu_communicator.CpuCommunicator = _over_unisono(cpu_communicator.CpuCommunicator)


def _over_unisono(base: type) -> type:
    """Return vLLM's communicator with the collectives of groups that unisono serves."""

    class CpuCommunicator(base):  # type: ignore[misc]
        @property
        def unisono_group(self) -> str | None:
            """The name of the group, or None where something else serves it."""
            if "_unisono_group" not in self.__dict__:
                self._unisono_group = _served(self.device_group)
            name: str | None = self._unisono_group
            return name

        def _all_group_ranks_share_shm_group_name(self) -> bool:
            # All ranks of a group have the same backend. Without it vLLM makes no shared memory.
            if self.unisono_group is not None:
                return False
            return bool(super()._all_group_ranks_share_shm_group_name())

        def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
            if self.unisono_group is None:
                result: torch.Tensor = super().all_reduce(input_)
                return result
            torch.ops.unisono.all_reduce_(input_, self.unisono_group)
            return input_

        def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
            if self.unisono_group is None:
                result: torch.Tensor = super().all_gather(input_, dim)
                return result
            gathered = torch.ops.unisono.all_gather(input_, self.unisono_group)
            if dim % input_.dim() == 0:
                return gathered
            return torch.cat(gathered.chunk(self.world_size), dim)

    CpuCommunicator.__qualname__ = base.__qualname__
    CpuCommunicator.__module__ = base.__module__
    return CpuCommunicator


def _served(group: Any) -> str | None:
    """Return the name of a group that unisono serves on the CPU, else None."""
    if group is None or torch.device("cpu") not in group._device_types:
        return None
    backend = group._get_backend(torch.device("cpu"))
    return str(group.group_name) if backend.name() == "unisono" else None
