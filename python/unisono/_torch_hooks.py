"""Communication hooks for ``DistributedDataParallel.register_comm_hook``.

torch compares their annotations with its classes: they must not become strings.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

# For each group one thread, so that its buckets come in one order on all ranks; and how many of its
# buckets are under way.
_threads: dict[Any, ThreadPoolExecutor] = {}
_under_way: dict[Any, int] = {}
_lock = threading.Lock()


def average_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over the ranks that take part, also where some are gone.

    ``model.register_comm_hook(None, unisono.torch.average_hook)``. DDP itself sums them and divides
    by the size of the group, which a :func:`mask` leaves as it was.

    Parameters
    ----------
    state
        The process group; None for the default one.
    bucket
        What DDP gives.

    Returns
    -------
    Future
        Completes with the averages, in the bucket's own buffer.
    """
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=state, async_op=True)
    assert work is not None, "it is asynchronous"
    return work.get_future().then(lambda done: done.value()[0])


def int8_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over the ranks, sent between hosts in 8 bits: for slow links.

    ``model.register_comm_hook(None, unisono.torch.int8_hook)``. Inside a host gradients are summed
    in float32; between hosts 128 neighbours share a scale, which is the largest magnitude among
    them, and each becomes one of 255 multiples of 1/127 of it. With ``h`` hosts an average of ``n``
    ranks is off by at most 1/254 of the largest magnitude among its neighbours: once for each of
    ``h - 1`` hosts' sums, divided by ``n``, and once for the average. Where hosts have different
    numbers of ranks nothing is summed inside them, and the contributions of ``n - 1`` ranks are
    rounded. All ranks get the same bits. A value that is not finite makes its 128 neighbours NaN.

    Parameters
    ----------
    state
        The process group, of unisono; None for the default one.
    bucket
        What DDP gives: gradients on the CPU, of any real float type.

    Returns
    -------
    Future
        Completes with the averages, in the bucket's own buffer.

    Raises
    ------
    ValueError
        The gradients are not on the CPU, or complex.
    """
    group = state if state is not None else dist.group.WORLD
    assert group is not None, "DDP has a group"
    buffer = bucket.buffer()
    if not buffer.is_cpu or not buffer.is_floating_point():
        raise ValueError(
            f"unisono.torch.int8_hook takes real gradients on the CPU, these are {buffer.dtype} on "
            f"{buffer.device}: leave the hook out, or use torch's own bf16_compress_hook"
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
        finally:
            with _lock:
                _under_way[group] -= 1

    with _lock:
        if not _threads:
            threading.Thread(target=_abort_at_the_end, name="unisono-end", daemon=True).start()
        if group not in _threads:
            _threads[group] = ThreadPoolExecutor(1, "unisono-int8")
        _under_way[group] = _under_way.get(group, 0) + 1
        _threads[group].submit(average)
    # An exception becomes one of the future only where a callback raises it.
    return future.then(lambda done: done.wait())


def _abort_at_the_end() -> None:
    """End what is under way when the main thread has ended.

    The interpreter waits for the threads of pools before it calls what is registered with
    ``atexit``, and so for peers that do not come when this process has failed.
    """
    threading.main_thread().join()
    with _lock:
        waiting = [group for group, number in _under_way.items() if number]
    for group in waiting:
        group._get_backend(torch.device("cpu")).abort()


def _forget() -> None:
    """Forget the parent's threads, in a forked child."""
    global _lock  # noqa: PLW0603 -- a thread of the parent may hold the one that is there
    _lock = threading.Lock()
    _threads.clear()
    _under_way.clear()


os.register_at_fork(after_in_child=_forget)
