"""The rank functions of ``test_torch_reconfigure``: groups whose members change by handles."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

SHORT = timedelta(seconds=2)


class Meeting:
    """A folder in which processes leave their handles: any means would do."""

    def __init__(self, folder: str, number: int) -> None:
        self.folder, self.number = Path(folder), number
        self.rounds = 0

    def tell(self) -> None:
        """Leave the handle of this process."""
        whole = self.folder / f"new-{self.number}"
        whole.write_text(c10d._get_reconfigure_handle())
        whole.rename(self.folder / str(self.number))

    def handles(self, numbers: Sequence[int]) -> list[str]:
        """The handles of these processes, once they have come."""
        paths = [self.folder / str(number) for number in numbers]
        while not all(path.exists() for path in paths):
            time.sleep(0.01)
        return [path.read_text() for path in paths]

    def wait_for(self, numbers: Sequence[int]) -> None:
        """Wait until these processes have come to this point."""
        self.rounds += 1
        (self.folder / f"{self.number} at {self.rounds}").touch()
        paths = [self.folder / f"{number} at {self.rounds}" for number in numbers]
        while not all(path.exists() for path in paths):
            time.sleep(0.01)


def form(meeting: Meeting, uuid: int, numbers: Sequence[int], kind: type = list) -> None:
    """Reconfigure to these processes, and check that the group is theirs."""
    work = c10d._reconfigure(uuid=uuid, handles=kind(meeting.handles(numbers)))
    work.wait()
    check(meeting, numbers, kind)


def check(meeting: Meeting, numbers: Sequence[int], kind: type = list) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == len(numbers)
    if kind is list:
        assert rank == numbers.index(meeting.number)
    total = torch.tensor([float(meeting.number), 1.0 * rank])
    dist.all_reduce(total)
    assert total.tolist() == [sum(numbers), sum(range(size))]


def begin(backend: str, folder: str) -> Meeting:
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group(
        backend,
        store=store,
        rank=number,
        world_size=world,
        timeout=timedelta(seconds=30),
        enable_reconfigure=True,
    )
    assert c10d._supports_reconfigure()
    group = dist.group.WORLD
    assert group is not None
    assert group._get_backend(torch.device("cpu")).name() == "unisono"
    meeting = Meeting(folder, number)
    meeting.tell()
    return meeting


def changes_members(backend: str, folder: str) -> None:
    """Groups of the same processes, of fewer, of one, and of more again."""
    meeting = begin(backend, folder)
    me, everyone = meeting.number, [0, 1, 2, 3]
    with pytest.raises(ValueError, match="reconfigured first"):
        dist.barrier()
    form(meeting, 1, everyone)
    # The same, and in another order; ranks that unisono chooses.
    form(meeting, 2, everyone)
    form(meeting, 3, [3, 1, 0, 2])
    form(meeting, 4, everyone, set)
    for uuid in (3, 4):
        with pytest.raises(ValueError, match="was used for an earlier group"):
            c10d._reconfigure(uuid=uuid, handles=meeting.handles(everyone))
    check(meeting, everyone, set)
    # Without the last one, without one in the middle; those that are left out are alone.
    for uuid, members in ((5, [0, 1, 2]), (6, [0, 2, 3]), (7, [2, 0])):
        form(meeting, uuid, members if me in members else [me])
    # Two parts become one, and one rank all of them.
    form(meeting, 8, [0, 1] if me < 2 else [3, 2])
    form(meeting, 9, everyone)
    form(meeting, 10, [me])
    form(meeting, 11, everyone)
    if me in (1, 2):
        data = torch.full((1000,), float(me))
        (dist.send if me == 1 else dist.recv)(data, 3 - me)
        assert data[0] == 1
    with pytest.raises(ValueError, match="not among the 2"):
        others = [number for number in everyone if number != me][:2]
        c10d._reconfigure(uuid=12, handles=meeting.handles(others))
    check(meeting, everyone)
    # Calls under way end with the group before, on all ranks: none is in the one before still.
    meeting.wait_for(everyone)
    waits = dist.all_reduce(torch.ones(1), async_op=True) if me == 0 else None
    form(meeting, 13, everyone)
    if waits is not None:
        with pytest.raises(dist.DistError):
            waits.wait()
    group = dist.group.WORLD
    assert group is not None
    meeting.wait_for(everyone)
    group.abort()
    with pytest.raises(dist.DistError):
        dist.barrier()
    form(meeting, 14, everyone)
    dist.destroy_process_group()


def replaces(folder: str) -> list[float]:
    """Rank 1 dies, and a process that was not in the group takes its place."""
    meeting = begin("unisono", folder)
    me = meeting.number
    if me < 3:
        form(meeting, 1, [0, 1, 2])
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistError, match="rank 1"):
            while True:
                dist.barrier()
    began = time.monotonic()
    # One that does not come ends the wait for all.
    with pytest.raises(dist.DistError):
        c10d._reconfigure(uuid=2, handles=meeting.handles([0, 1, 2, 3]), timeout=SHORT).wait()
    seconds = [time.monotonic() - began]
    form(meeting, 3, [0, 3, 2])
    seconds.append(time.monotonic() - began)
    dist.destroy_process_group()
    return seconds
