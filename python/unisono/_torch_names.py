"""Where torch compares a backend's name with "gloo" or "nccl", and what is done about it.

Each function here takes care of one place. It changes what torch does for groups on unisono alone:
any other group goes to torch's own code. docs/torch.md lists these places, and those that need
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

_NAME = "unisono"


def _is_ours(c10d: Any, group: Any) -> bool:
    """Return whether `group` (None: the default one) runs on unisono, also in gloo's place.

    Some calls get a group that is not registered in torch's world: torch's RPC gives a bare backend
    to an object collective. torch's own functions serve these.
    """
    from unisono import _as_gloo

    chosen = c10d._get_default_group() if group is None else group
    if chosen not in c10d._world.pg_map:
        return False
    if c10d.get_backend(chosen) == _NAME:
        return True
    if not _as_gloo.is_active():
        return False
    return any(_as_gloo.is_ours(chosen._get_backend(device)) for device in chosen._device_types)


def settle_early() -> None:
    """See to functions that a user may import by name before the first group exists."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    _close_windows(dist, c10d)
    _gather_by_thread(dist, c10d)
    _serve_objects(dist, c10d)
    _hear_signals_at_the_store(dist, c10d)
    if hasattr(dist.Backend, "_ensure_backend_registered"):
        return  # torch 2.14 and newer ask what a backend can do.
    _open_monitored_barrier(dist, c10d)
    _open_set_timeout(c10d)


def _hear_signals_at_the_store(dist: Any, c10d: Any) -> None:
    """Torch's store waits for all ranks to connect to it in C++, where no handler of a signal runs.

    So it is made on a thread of its own, while the thread that wants it hears signals.
    """
    meet = c10d.rendezvous
    make = dist.init_process_group
    making = threading.local()

    def rendezvous(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        found = meet(url, *args, **kwargs)
        if getattr(making, "ours", False):
            yield _beside(functools.partial(next, found))
        yield from found

    @functools.wraps(make)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        making.ours = _means_us(backend)
        try:
            make(backend, *args, **kwargs)
        finally:
            making.ours = False

    c10d.rendezvous = rendezvous
    dist.init_process_group = c10d.init_process_group = init_process_group


def _means_us(backend: Any) -> bool:
    """Return whether a group that is made with this argument runs on unisono, at least in part."""
    from unisono import _as_gloo

    if backend is None:
        return _as_gloo.is_active()
    names = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    return _NAME in names or (_as_gloo.is_active() and "gloo" in names)


def _beside(call: Callable[[], Any]) -> Any:
    """Return what `call` returns on a thread of its own; an exception of a handler comes first."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    # The interpreter does not wait for it: it may be asking for a host that never answers.
    threading.Thread(target=run, name="unisono-store", daemon=True).start()
    return future.result()


def settle() -> None:
    """See to everything else; runs when the first group is made."""
    _accept_other_members()
    _open_split_group()
    _open_all_gather_backward()


def _serve_objects(dist: Any, c10d: Any) -> None:
    """Object collectives take torch two rounds and more, ours one."""
    from unisono import _torch_objects

    _torch_objects.serve(dist, c10d, functools.partial(_is_ours, c10d))


def _open_monitored_barrier(dist: Any, c10d: Any) -> None:
    """Torch 2.11 lets the name gloo pass and no other."""
    original = c10d.monitored_barrier

    def monitored_barrier(
        group: Any = None,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        if c10d._rank_not_in_group(group) or not _is_ours(c10d, group):
            original(group, timeout, wait_all_ranks)
            return
        chosen = c10d._get_default_group() if group is None else group
        limit = c10d._get_default_timeout(_NAME) if timeout is None else timeout
        chosen.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    monitored_barrier.__doc__ = original.__doc__
    dist.monitored_barrier = c10d.monitored_barrier = monitored_barrier


def _open_set_timeout(c10d: Any) -> None:
    """Torch 2.11 sets the timeout of gloo's and nccl's groups and warns for others."""
    original = c10d._set_pg_timeout

    def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        if c10d._rank_not_in_group(group) or not _is_ours(c10d, group):
            original(timeout, group)
            return
        chosen = c10d._get_default_group() if group is None else group
        for device in chosen._device_types:
            backend = chosen._get_backend(device)
            # TORCH_DISTRIBUTED_DEBUG=DETAIL puts it behind one that sets no timeouts.
            while hasattr(backend, "wrapped_pg"):
                backend = backend.wrapped_pg
            backend.set_timeout(timeout)

    _set_pg_timeout.__doc__ = original.__doc__
    c10d._set_pg_timeout = _set_pg_timeout


def _accept_other_members() -> None:
    """`new_group` calls this on ranks that are not in the group; only nccl's class has it.

    With a device bound to the default group, torch makes subgroups of backends that can split by
    splitting. Members of ours meet through the store, and the others have nothing to do.
    """
    from torch._C._distributed_c10d import Backend

    if not hasattr(Backend, "perform_nocolor_split"):
        setattr(Backend, "perform_nocolor_split", lambda _self, _device: None)  # noqa: B010


# Options of backends that the class of another backend has built, where torch does not tell them.
_built_with: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def keep_options(backend: Any, options: Any) -> None:
    """Have ``backend.options`` give these, on a torch that asks no backend of a plugin for them."""
    _built_with[backend] = options


def _open_split_group() -> None:
    """Torch 2.11 copies the options of the backend that it splits; a plugin's have no Python class.

    It does so in `split_group`, and so in `init_device_mesh` where there is a GPU and the default
    group has a device. Without options, its C++ code asks the backend for them.
    """
    from torch._C._distributed_c10d import Backend

    if hasattr(Backend, "options"):
        return

    def options(backend: Any) -> Any:
        if backend.name() != _NAME:
            raise AttributeError(f"{type(backend).__name__!r} object has no attribute 'options'")
        return _built_with.get(backend)

    setattr(Backend, "options", property(options))  # noqa: B010


def _open_all_gather_backward() -> None:
    """The gradient of `torch.distributed.nn`'s all_gather into one tensor: nccl and xccl alone."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.nn import functional

    original = functional._AllGatherBase.backward

    def backward(ctx: Any, grad_output: Any) -> Any:
        if not _is_ours(c10d, ctx.group):
            return original(ctx, grad_output)
        rows, rest = divmod(grad_output.size(0), dist.get_world_size(ctx.group))
        if rest:
            raise ValueError(
                f"the first dimension of the gradient, {grad_output.size(0)}, does not divide "
                f"among {dist.get_world_size(ctx.group)} ranks"
            )
        gradient = torch.empty_like(grad_output[:rows], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(gradient, grad_output.contiguous(), group=ctx.group)
        return None, gradient, None

    functional._AllGatherBase.backward = staticmethod(backward)


def _close_windows(dist: Any, c10d: Any) -> None:
    """See that no window of calls stays open when an exception ends its block.

    torch does not; later calls of that thread would be collected or estimated, not carried out.
    """

    def end_coalescing(group: Any, device: Any) -> None:
        group._end_coalescing(device)

    def end_estimate(group: Any, device: Any) -> None:
        group._get_backend(device)._end_time_estimate()

    ends = {"_coalescing_manager": end_coalescing, "_time_estimator": end_estimate}
    for name, end in ends.items():
        original = getattr(c10d, name, None)
        if original is not None:
            _replace(dist, c10d, name, _closing(original, end, c10d))


def _gather_by_thread(dist: Any, c10d: Any) -> None:
    """A coalescing manager gathers the calls of the thread that opened it, and no other's.

    torch keeps what is gathered in one table for the process, by group, and looks there in every
    call: one of another thread on the same group, inside a manager of its own or in none, would be
    added to it and be answered with None. Here a thread that has opened a manager has a table of
    its own until it closes it. All of torch's functions look the table up where they need it.
    """
    original = c10d._coalescing_manager
    everyone = c10d._World.pg_coalesce_state.fget
    thread = threading.local()

    def pg_coalesce_state(world: Any) -> dict[Any, list[Any]]:
        own: dict[Any, list[Any]] | None = getattr(thread, "gathered", None)
        return everyone(world) if own is None else own

    @functools.wraps(original)
    @contextlib.contextmanager
    def manager(group: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # One inside another, of another group, shares the table.
        opens = getattr(thread, "gathered", None) is None and _is_ours(c10d, group)
        if opens:
            thread.gathered = {}
        try:
            with original(group, *args, **kwargs) as opened:
                yield opened
        finally:
            if opens:
                thread.gathered = None

    pg_coalesce_state.__doc__ = c10d._World.pg_coalesce_state.__doc__
    c10d._World.pg_coalesce_state = property(pg_coalesce_state)
    _replace(dist, c10d, "_coalescing_manager", manager)


def _replace(dist: Any, c10d: Any, name: str, function: Any) -> None:
    setattr(c10d, name, function)
    # A name that is in `dist` too was copied at its import.
    if hasattr(dist, name):
        setattr(dist, name, function)


def _closing(original: Any, end: Callable[[Any, Any], None], c10d: Any) -> Any:
    @functools.wraps(original)
    @contextlib.contextmanager
    def manager(group: Any = None, device: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            with original(group, device, *args, **kwargs) as opened:
                yield opened
        except BaseException:
            chosen = group or c10d._get_default_group()
            if _is_ours(c10d, chosen):
                c10d._world.pg_coalesce_state.pop(chosen, None)
                # There may be none: it depends on where the exception came from.
                with contextlib.suppress(RuntimeError):
                    end(chosen, device or chosen._device_types[0])
            raise

    return manager
