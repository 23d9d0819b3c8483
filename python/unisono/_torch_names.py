"""Where torch compares a backend's name with "gloo" or "nccl", and what is done about it.

Each function here takes care of one place. It changes what torch does for groups on unisono alone:
any other group goes to torch's own code. docs/torch.md lists these places, and those that need
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

_NAME = "unisono"


def settle_early() -> None:
    """See to functions that a user may import by name before the first group exists."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if hasattr(dist.Backend, "_ensure_backend_registered"):
        return  # torch 2.14 and newer ask what a backend can do.
    _open_monitored_barrier(dist, c10d)
    _open_set_timeout(c10d)


def settle() -> None:
    """See to everything else; runs when the first group is made."""
    _accept_other_members()
    _open_all_gather_backward()


def _open_monitored_barrier(dist: Any, c10d: Any) -> None:
    """Torch 2.11 lets the name gloo pass and no other."""
    original = c10d.monitored_barrier

    def monitored_barrier(
        group: Any = None,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        if c10d._rank_not_in_group(group) or c10d.get_backend(group) != _NAME:
            original(group, timeout, wait_all_ranks)
            return
        chosen = c10d._get_default_group() if group is None else group
        limit = timeout or c10d._get_default_timeout(_NAME)
        chosen.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    monitored_barrier.__doc__ = original.__doc__
    dist.monitored_barrier = c10d.monitored_barrier = monitored_barrier


def _open_set_timeout(c10d: Any) -> None:
    """Torch 2.11 sets the timeout of gloo's and nccl's groups and warns for others."""
    original = c10d._set_pg_timeout

    def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        if c10d._rank_not_in_group(group) or c10d.get_backend(group) != _NAME:
            original(timeout, group)
            return
        chosen = c10d._get_default_group() if group is None else group
        chosen.set_timeout(timeout)

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


def _open_all_gather_backward() -> None:
    """The gradient of `torch.distributed.nn`'s all_gather into one tensor: nccl and xccl alone."""
    import torch
    import torch.distributed as dist
    from torch.distributed.nn import functional

    original = functional._AllGatherBase.backward

    def backward(ctx: Any, grad_output: Any) -> Any:
        if dist.get_backend(ctx.group) != _NAME:
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
