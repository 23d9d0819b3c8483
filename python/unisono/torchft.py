"""torchft over unisono: the process group that its ``Manager`` forms anew for its replicas.

Use it where torchft's documentation has ``ProcessGroupGloo``::

    from torchft import Manager
    from unisono.torchft import ProcessGroupUnisono

    manager = Manager(pg=ProcessGroupUnisono(timeout=timedelta(seconds=5)), ...)

A replica that dies ends the operation under way on the others at once, with an error that names it;
torchft then forms a group of those that are left, and takes in one that comes back.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torchft.process_group import ProcessGroupWrapper

from unisono.torch import create_backend

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["ProcessGroupUnisono"]


class ProcessGroupUnisono(ProcessGroupWrapper):  # type: ignore[misc]
    """A process group of torchft that runs on unisono.

    Parameters
    ----------
    timeout
        How long forming a group and each operation may take; 60 s by default.
    """

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        group = ProcessGroup(store, rank, world_size)
        options = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=world_size,
            timeout=self._timeout,
            global_ranks_in_group=self._global_ranks or [],
        )
        backend: Any = create_backend(options)
        kind = ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(kind)
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        for device in devices:
            group._register_backend(torch.device(device), kind, backend)
        return group

    def getBackendName(self) -> str:  # noqa: N802 -- torch's
        """Return the name by which torch knows this kind of group."""
        return "torchft-unisono"
