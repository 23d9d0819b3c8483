"""The torch door: ``torch.distributed.init_process_group("unisono")``.

torch finds the backend by itself, through the entry points ``torch.distributed.backends`` (2.14 and
newer) and ``torch.backends`` (older). Importing this module is cheap: native code is loaded when
the first group is made.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    import torch
    from torch.distributed.debug._frontend import DebugHandler

    from unisono._torch_hooks import average_hook, int8_hook
    from unisono._torch_options import Options

__all__ = [
    "Options",
    "average_hook",
    "create_backend",
    "debug_handler",
    "int8_hook",
    "mask",
    "mem_pool",
    "register",
    "replace_gloo",
    "stats",
]

# Where the driver of NVIDIA's GPUs shows itself: on a host, in a subsystem for Linux, on a Jetson.
_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu")
_ready = False
_preparing = threading.Lock()


def __getattr__(name: str) -> Any:
    # Its base class is torch's, and this module is imported while torch is.
    if name == "Options":
        from unisono._torch_options import Options

        return Options
    if name in ("average_hook", "int8_hook"):
        from unisono import _torch_hooks

        return getattr(_torch_hooks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Make ``"unisono"`` known to ``torch.distributed``. Called by torch; may be called again."""
    import torch.distributed as dist

    if not dist.is_available() or "UNISONO" in dist.Backend._plugins:
        return
    from unisono._torch_names import settle_early

    devices = ["cpu", "cuda"] if _may_have_gpu() else ["cpu"]
    dist.Backend.register_backend("unisono", create_backend, extended_api=True, devices=devices)
    settle_early()


def replace_gloo() -> None:
    """Make unisono what this process gets where it asks for gloo, from the next group on.

    By the name (``init_process_group("gloo")``, ``new_group(backend="gloo")``, the default for the
    CPU) and by the class ``ProcessGroupGloo``; ``get_backend()`` still says gloo. The environment
    variable ``UNISONO_AS_GLOO=1`` does the same at ``import torch``. Every rank of a group must do
    it: a group of both kinds is refused. docs/gloo.md says what stays on gloo.
    """
    from unisono import _as_gloo

    register()
    _as_gloo.replace("unisono.torch.replace_gloo()")


def mask(
    group: torch.distributed.ProcessGroup | None = None, exclude: Sequence[int] = ()
) -> list[int]:
    """Let a group go on without the ranks that are gone; the others keep their ranks.

    All of those that are left call it, usually after an operation has failed. ``get_rank()`` and
    ``get_world_size()`` stay as they are; each collective is one of the ranks that are left, and
    averages are of what these give. Tensors for the others are neither sent nor written. A rank
    that is gone is no source and no destination. Each group goes on by itself.

    A model under DistributedDataParallel is wrapped anew. It divides its gradients by the world
    size, so let it average by a hook; and it takes rank 0's parameters, buffers and order of
    buckets, which it must not where that rank may be gone::

        model = DistributedDataParallel(
            module, init_sync=False, broadcast_buffers=False, find_unused_parameters=True
        )
        model.register_comm_hook(None, unisono.torch.average_hook)

    Parameters
    ----------
    group
        The default one if None.
    exclude
        Ranks of the group that are left out although they live.

    Returns
    -------
    list of int
        The ranks of the group that are left.

    Raises
    ------
    ValueError
        The group is not served by unisono, or a rank in `exclude` is wrong.
    DistBackendError
        A rank that lives has not called it within the time for joining, which names such ranks; or
        the ranks that can be reached are a minority.
    """
    import torch
    import torch.distributed as dist

    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise ValueError("unisono.torch.mask: there is no default group; call init_process_group")
    return list(torch.ops.unisono.mask(chosen.group_name, list(exclude)))


def stats(group: torch.distributed.ProcessGroup | None = None) -> dict[str, Any]:
    """Return for whom the operations of this rank have waited in a group, and how long.

    Any rank may call it at any time; nothing is sent. A rank that is late has waited little itself,
    so compare the ranks: ``unisono status`` does.

    Parameters
    ----------
    group
        The default one if None.

    Returns
    -------
    dict
        As ``unisono.Communicator.stats``; ranks are those of the group. Of a group that has been
        aborted nothing.

    Raises
    ------
    ValueError
        The group is not served by unisono, or there is no default group.
    """
    import torch
    import torch.distributed as dist

    chosen = group if group is not None else dist.group.WORLD
    if chosen is None:
        raise ValueError("unisono.torch.stats: there is no default group; call init_process_group")
    found: dict[str, Any] = json.loads(torch.ops.unisono.stats(chosen.group_name))
    return found


def debug_handler() -> DebugHandler:
    """Return the page "unisono" of torch's debug server: the ranks, and whom they wait for.

    A server that starts when this process has a group of unisono has the page by itself. Where the
    server starts first, or with a list of pages, it is one of them::

        from torch.distributed.debug import start_debug_server
        from torch.distributed.debug._debug_handlers import default_handlers

        start_debug_server(handlers=[*default_handlers(), unisono.torch.debug_handler()])

    Only rank 0 makes it. The page is ``/unisono``, and its dump, for ``enabled_dumps``, "unisono".

    Returns
    -------
    torch.distributed.debug._frontend.DebugHandler

    Raises
    ------
    ImportError
        This torch has no debug server, or a package that it needs is not installed.
    """
    from unisono import _torch_debug

    return _torch_debug.handler()


def mem_pool(device: torch.device | int | None = None) -> torch.cuda.MemPool:
    """Return the pool of a CUDA device's memory that the other ranks of the host read in place.

    Large collectives on tensors from it copy nothing into windows first: an all_reduce reads each
    element once and writes it once. Use it as any pool, on every rank for the tensors that are
    large and communicated often::

        with torch.cuda.use_mem_pool(unisono.torch.mem_pool()):
            gradients = torch.empty(64 << 20, device="cuda")

    DDP's buckets come from it by themselves, and FSDP2's buffers after
    ``set_allocate_memory_from_process_group_for_comm(True)``. docs/cuda.md says which collectives
    have something of it. The pool keeps the memory that it has taken of the device.

    Parameters
    ----------
    device
        The current one by default. Each has a pool of its own.

    Raises
    ------
    ImportError
        No build for this version of torch is installed.
    """
    from unisono import _torch_memory

    return _torch_memory.pool(device)


def _may_have_gpu() -> bool:
    """Whether CUDA tensors are possible here.

    Some places in torch put tensors on any device that a group's backend is registered for, and so
    fail on a host without a GPU if "cuda" is among them. torch itself would have to load the driver
    to tell, which takes long at `import torch` and does not survive a fork.
    """
    import torch

    if torch.version.cuda is None:
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return False
    return any(os.path.exists(node) for node in _GPU_NODES)  # noqa: PTH110 -- at `import torch`


def create_backend(opts: Any, pg_options: Any = None) -> Any:
    """Join a process group and return its backend: the creator that ``register_backend`` takes.

    Parameters
    ----------
    opts
        torch's ``_DistributedBackendOptions``: store, rank, size, timeout of the group.
    pg_options
        Settings for this group alone: an :class:`Options`, or any mapping of settings by name, such
        as ``{"transport": "tcp"}``; or None.

    Raises
    ------
    ValueError
        A setting that does not exist or a value it does not take.
    DistBackendError, DistNetworkError
        Not all ranks came within the timeout, or one could not be reached.
    ImportError
        No build for this version of torch is installed.
    """
    import torch
    from torch.distributed import ProcessGroup

    _prepare()
    settings, milliseconds = _settings(opts.timeout, pg_options)
    group = ProcessGroup(opts.store, opts.group_rank, opts.group_size)
    if getattr(opts, "enable_reconfigure", False):
        # Its members come by `reconfigure`, and the store is not asked.
        torch.ops.unisono.attach_apart(group.boxed(), settings, milliseconds)
        return group._get_backend(torch.device("cpu"))
    # One object serves every device; torch puts it under those that it was registered for.
    torch.ops.unisono.attach(
        group.boxed(), settings, milliseconds, list(opts.global_ranks_in_group)
    )
    return group._get_backend(torch.device("cpu"))


def _settings(timeout: timedelta, pg_options: Any) -> tuple[dict[str, str], int]:
    from unisono import Options as Settings

    seconds = timeout.total_seconds()
    settings = {"timeout": str(seconds)}
    if "UNISONO_JOIN_TIMEOUT" not in os.environ:
        settings["join_timeout"] = str(seconds)
    own = getattr(pg_options, "settings", pg_options)
    if hasattr(own, "keys"):
        settings |= dict(Settings(**dict(own)))
    return settings, round(_seconds(settings["timeout"]) * 1000)


def _seconds(timeout: str) -> float:
    # Longer than any job runs; torch has no word for a limit that never comes.
    return 3e9 if timeout == "none" else float(timeout)


def _prepare() -> None:
    """Load the native module, once, and see to a quiet exit."""
    global _ready  # noqa: PLW0603
    # Threads may make their groups at the same time.
    with _preparing:
        if not _ready:
            _load()
            _ready = True


def _load() -> None:
    from unisono import _queues, _torch_debug, _torch_memory
    from unisono._native import load_for_torch
    from unisono._torch_names import settle

    _queues.widen()
    core = load_for_torch()
    settle()
    _torch_memory.serve()
    _torch_debug.serve()
    # DDP asks a backend for the memory of its buckets only where this is 0; it looks at each making
    # of buckets. A value that is already set is the user's choice.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    # To name the frames of Python torch's flight recorder imports torch's compiler, which takes
    # seconds. After 15 it gives up, and leaves a thread behind that ends the process if it meets
    # the interpreter's end; that end waits for a minute.
    if "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC" not in os.environ:
        os.environ.setdefault("TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC", "45000")
    # Before the interpreter goes: callbacks of operations under way need it, and peers wait for our
    # farewell.
    atexit.register(core.close_torch_groups)


def _autoload() -> None:
    """Register with a torch that has no other way to find us; runs at ``import torch``.

    An exception here would break ``import torch``, and so would slowness: nothing native is loaded.
    """
    try:
        register()
    except Exception:
        # init_process_group will say that it knows no such backend, where the user can act on it.
        return
    _obey_the_variable()


def _obey_the_variable() -> None:
    """Put unisono in gloo's place where the environment asks for it."""
    asked = os.environ.get("UNISONO_AS_GLOO", "").strip().lower()
    if asked in ("", "0", "off", "no", "false"):
        return
    if asked not in ("1", "on", "yes", "true"):
        print(f"unisono: UNISONO_AS_GLOO={asked} is neither 1 nor 0; gloo stays", file=sys.stderr)
        return
    from unisono import _as_gloo

    try:
        _as_gloo.replace(f"UNISONO_AS_GLOO={asked}")
    except Exception as error:
        print(f"unisono: gloo stays, for it could not be replaced: {error!r}", file=sys.stderr)
