"""Memory of CUDA devices that the other ranks of the host read where it lies.

torch's caching allocator takes it from unisono in the parts that a ``torch.cuda.MemPool`` is made
of, and hands it out by its own rules for streams and graphs.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_lock = threading.Lock()
_pool: torch.cuda.MemPool | None = None
_library: torch.library.Library | None = None


def pool() -> torch.cuda.MemPool:
    """Return this process's pool; one serves all devices and groups."""
    global _pool  # noqa: PLW0603
    import torch

    from unisono._native import load_for_torch

    with _lock:
        if _pool is None:
            allocate, free = load_for_torch().device_allocator()
            allocator = torch._C._cuda_customAllocator(allocate, free)
            _pool = torch.cuda.MemPool(allocator)
        return _pool


def serve() -> None:
    """Have backends allocate from the pool for those that ask them, as DDP and FSDP do. Once."""
    global _library  # noqa: PLW0603
    import torch

    if _library is None and torch.version.cuda is not None:
        _library = torch.library.Library("unisono", "FRAGMENT")
        _library.impl("allocate", _allocate, "CompositeExplicitAutograd")


def _allocate(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    if not torch.cuda.is_available():
        # Something else allocates for these devices.
        return torch.empty(size, dtype=dtype, device=device)
    with torch.cuda.use_mem_pool(pool(), device):
        return torch.empty(size, dtype=dtype, device=device)
