"""A plug-in of vLLM: weights for its workers, and the collectives of its workers on CPUs.

vLLM loads it by itself (entry point ``vllm.general_plugins``). It makes the backend ``unisono`` of
vLLM's weight transfer known (``unisono.vllm_weights``). The collectives are unisono's where vLLM's
gloo groups are, which ``UNISONO_AS_GLOO=1``, ``unisono run`` or ``unisono.torch.replace_gloo()``
asks for::

    UNISONO_AS_GLOO=1 vllm serve MODEL --tensor-parallel-size 2

vLLM's own shared memory, which is for 2, 3, 4 or 8 ranks of one host, is left aside then, and
vLLM's log says that unisono serves the group.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from unisono import _as_gloo

__all__ = ["NAME", "register", "register_weights"]

# The backend of vLLM's weight transfer.
NAME = "unisono"


def register() -> None:
    """Make the weight transfer known, and put unisono behind vLLM's ``CpuCommunicator``.

    The latter where unisono is in gloo's place. vLLM calls this in each of its processes, and a
    trainer, which is none of these, by importing ``unisono.vllm_weights``. Where gloo is replaced
    later, ``unisono.torch.replace_gloo`` calls it again.
    """
    register_weights()
    if not _as_gloo.is_active():
        return
    from vllm.distributed.device_communicators import cpu_communicator

    if not hasattr(cpu_communicator.CpuCommunicator, "unisono_group"):
        cpu_communicator.CpuCommunicator = _over_unisono(cpu_communicator)


def register_weights() -> None:
    """Make the backend of vLLM's weight transfer known in this process. May be called again."""
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError:
        # An older vLLM.
        return
    for registry, engine in (
        (factory.WeightTransferEngineFactory, "WorkerEngine"),
        (factory.WeightTransferTrainerFactory, "TrainerEngine"),
    ):
        if NAME not in registry._registry:
            registry.register_engine(NAME, "unisono.vllm_weights", engine)


def _over_unisono(module: Any) -> type:
    """Return vLLM's communicator with the collectives of groups that unisono serves."""
    base: Any = module.CpuCommunicator
    signature = inspect.signature(base)

    class CpuCommunicator(base):  # type: ignore[misc]
        # The name of the group, or None where something else serves it. By this `register` knows
        # the class again.
        unisono_group: str | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            name = given.arguments.get("unique_name", "")
            self.unisono_group = _served(given.arguments.get("device_group"))
            if self.unisono_group is not None and name.startswith(("tp", "pp")):
                # vLLM makes shared memory for the groups of these names, or logs a reason why it
                # does not, which would be none of ours.
                given.arguments["unique_name"] = ""
            super().__init__(*given.args, **given.kwargs)
            if self.unisono_group is not None:
                self.unique_name = name
                module.logger.info(
                    "unisono serves group %s, in the place of vLLM's shared memory and of gloo",
                    name or self.unisono_group,
                )

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
