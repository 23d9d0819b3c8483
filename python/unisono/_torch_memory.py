"""Memory of CUDA devices that the other ranks of the host read where it lies.

torch's caching allocator takes it from unisono in the parts that a ``torch.cuda.MemPool`` is made
of, and hands it out by its own rules for streams and graphs.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_making = threading.Lock()
# By devices: a pool has its allocator on the device that was current when it was made.
_pools: dict[int, torch.cuda.MemPool] = {}
# torch lets one thread at a time allocate from a pool.
_allocating = threading.Lock()
# Devices whose driver shares no memory between processes, or has none left.
_without: set[int] = set()
_library: torch.library.Library | None = None


def pool(device: torch.device | int | None = None) -> torch.cuda.MemPool:
    """Return this process's pool on a device, the current one by default, for all groups."""
    import torch

    from unisono._native import load_for_torch

    index = torch.cuda._utils._get_device_index(device, optional=True)
    with _making:
        if index not in _pools:
            allocate, free = load_for_torch().device_allocator()
            allocator = torch._C._cuda_customAllocator(allocate, free)
            with torch.cuda.device(index):
                _pools[index] = torch.cuda.MemPool(allocator)
        return _pools[index]


def serve() -> None:
    """Have backends allocate from the pool for those that ask them, as DDP and FSDP do. Once."""
    global _library  # noqa: PLW0603
    import torch

    _keep_complex()
    if _library is None and torch.version.cuda is not None:
        library = torch.library.Library("unisono", "FRAGMENT")
        library.impl("allocate", _allocate, "CompositeExplicitAutograd")
        _library = library


def _keep_complex() -> None:
    """See that ``backend.allocate_tensor`` gives complex numbers where it is asked for them.

    DDP asks a backend, in C++, for complex numbers and takes what it gets for the reals that they
    are made of; so that is what ours gives (csrc/memory.cpp). FSDP2 asks here.
    """
    import torch
    from torch._C._distributed_c10d import Backend

    original = Backend.allocate_tensor

    def allocate_tensor(
        self: Any, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        tensor = original(self, size, dtype=dtype, device=device)
        if dtype.is_complex and not tensor.is_complex():
            tensor = torch.view_as_complex(tensor.view(size, 2))
        return tensor

    allocate_tensor.__doc__ = original.__doc__
    setattr(Backend, "allocate_tensor", allocate_tensor)  # noqa: B010


def _allocate(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    def elsewhere() -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    # Without CUDA something else allocates for these devices.
    if not torch.cuda.is_available():
        return elsewhere()
    index = torch.cuda._utils._get_device_index(device, optional=True)
    if index in _without:
        return elsewhere()
    with _allocating:
        try:
            with torch.cuda.use_mem_pool(pool(index), index):
                return torch.empty(size, dtype=dtype, device=device)
        except torch.cuda.OutOfMemoryError:
            _without.add(index)
        except RuntimeError:
            # The caller allocates from it already.
            pass
    return elsewhere()
