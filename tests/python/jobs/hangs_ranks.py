"""The ranks of ``test_hangs``: jobs that hang as those of public reports do.

A rank writes its number into a file once it is about to hang, and ends when another file comes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

END = "end"


def _end_with(folder: Path) -> None:
    while not (folder / END).exists():
        time.sleep(0.05)
    os._exit(0)


def _begin(folder: Path) -> tuple[int, int]:
    """Join the job through torch; one operation has gone well."""
    import torch
    import torch.distributed as dist

    threading.Thread(target=_end_with, args=(folder,), daemon=True).start()
    dist.init_process_group("unisono", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(4))
    rank = dist.get_rank()
    (folder / f"{rank}.pid").write_text(f"{os.getpid()}\n")
    return rank, dist.get_world_size()


def _stay() -> None:
    """Go on, as a server does, or a trainer that has an exception to report."""
    threading.Event().wait()


def other_call(folder: Path) -> None:
    """The last rank gathers, while the others reduce; the error is caught."""
    import torch
    import torch.distributed as dist

    rank, world = _begin(folder)
    try:
        if rank == world - 1:
            dist.all_gather(list(torch.ones(world, 4)), torch.ones(4))
        else:
            dist.all_reduce(torch.ones(4))
    except RuntimeError:
        _stay()


def data_loader(folder: Path) -> None:
    """The last rank waits for its next batch."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    rank, world = _begin(folder)

    class Slow(Dataset):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, at: int) -> torch.Tensor:
            if rank == world - 1 and at == 4:
                time.sleep(1000)
            return torch.ones(4)

    for batch in DataLoader(Slow(), batch_size=2):
        dist.all_reduce(batch)


def one_left(folder: Path) -> None:
    """The last rank has fewer batches, and leaves the group; its process goes on."""
    import torch
    import torch.distributed as dist

    rank, world = _begin(folder)
    try:
        for _ in range(3 if rank == world - 1 else 5):
            dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
    except RuntimeError:
        pass
    _stay()


def two_groups(folder: Path) -> None:
    """Ranks 0 and 1 call the operations of two groups in opposite orders."""
    import torch
    import torch.distributed as dist

    rank, world = _begin(folder)
    first = dist.new_group(list(range(world)))
    second = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=first)
    if rank == 1:
        dist.all_reduce(torch.ones(4), group=second)
    dist.barrier(group=first)
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=second)


def stopped_host(folder: Path) -> None:
    """The ranks of the second host stop."""
    import torch
    import torch.distributed as dist

    _begin(folder)
    if os.environ["UNISONO_HOST"] == "b":
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))


def full_disk(folder: Path, place: str) -> None:
    """Rank 0 saves a checkpoint, where it is blocked or tries again and again."""
    import torch
    import torch.distributed as dist

    rank, _ = _begin(folder)
    while rank == 0:
        with contextlib.suppress(OSError), Path(place).open("wb", buffering=0) as file:
            torch.save({"weights": torch.ones(1 << 20)}, file)
        time.sleep(0.5)
    dist.barrier()
