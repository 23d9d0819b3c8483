"""Communication hooks for ``DistributedDataParallel.register_comm_hook``.

torch compares their annotations with its classes: they must not become strings.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

# One thread for each group, so that its buckets come in one order on all ranks.
_threads: dict[str, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def int8_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over the ranks, sent between hosts in 8 bits: for slow links.

    ``model.register_comm_hook(None, unisono.torch.int8_hook)``. Inside a host gradients are summed
    in float32; between hosts 128 neighbours share a scale, which is the largest magnitude among
    them, and each becomes one of 255 multiples of 1/127 of it. With ``h`` hosts an average of ``n``
    ranks is off by at most 1/254 of the largest magnitude among its neighbours: once for each of
    ``h - 1`` hosts' sums, divided by ``n``, and once for the average. All ranks get the same bits.
    What is not finite makes its 128 neighbours NaN.

    Parameters
    ----------
    state
        The process group, of unisono; None for the default one.
    bucket
        What DDP gives: gradients on the CPU, of any float type.

    Returns
    -------
    Future
        Completes with the averages, in the bucket's own buffer.

    Raises
    ------
    ValueError
        The gradients are not on the CPU.
    """
    group = state if state is not None else dist.group.WORLD
    assert group is not None, "DDP has a group"
    buffer = bucket.buffer()
    if not buffer.is_cpu:
        raise ValueError(
            f"unisono.torch.int8_hook is for gradients on the CPU, these are on {buffer.device}: "
            "leave the hook out, or use torch's own bf16_compress_hook"
        )
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def average() -> None:
        try:
            values = buffer if buffer.dtype == torch.float32 else buffer.float()
            torch.ops.unisono.all_reduce_int8_(values, group.group_name, "avg")
            if values is not buffer:
                buffer.copy_(values)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(buffer)

    _thread_of(group).submit(average)
    return future


def _thread_of(group: Any) -> ThreadPoolExecutor:
    with _lock:
        if group.group_name not in _threads:
            _threads[group.group_name] = ThreadPoolExecutor(1, "unisono-int8")
        return _threads[group.group_name]
