"""The rank functions of ``test_torch_lifecycle``, and, as a script, a job that torchrun restarts.

The script trains under torchrun, saves a checkpoint after every step, and in the first attempt
loses rank 1 without a word. It trains by step and rank alone, so that an attempt that resumes
ends with the same weights as one that was never interrupted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import own_threads
import pytest
import torch
import torch.distributed as dist
from torch import nn

STEPS = 6
DIES_BEFORE = 3
ROUNDS = 300
WARM_UP = 100


# Groups without ranks that are gone


def shrinks(gone: list[int], how: str) -> list[float]:
    """Ranks end; the others make a group without them, and train on in it."""
    dist.init_process_group("unisono", timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    # A rank that is quicker may end it, or itself.
    with contextlib.suppress(dist.DistError):
        dist.barrier()
    if how == "die" and rank in gone:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "live" and rank in gone:
        with pytest.raises(dist.DistError, match="SHRINK_ABORT"):
            dist.barrier()
        return []
    if how == "die":
        with pytest.raises(dist.DistError, match=r"rank \d"):
            dist.barrier()
        if len(gone) > 1:
            with pytest.raises(dist.DistError, match=f"rank {gone[1]} is gone, too"):
                dist.shrink_group(gone[:1])
        dist.shrink_group(gone)
    else:
        dist.shrink_group(gone, shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    left = [number for number in range(world) if number not in gone]
    assert (dist.get_rank(), dist.get_world_size()) == (left.index(rank), len(left))
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    assert tensor.item() == sum(left)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.barrier(group=pair)
    gradient = model.module.weight.grad
    assert gradient is not None
    dist.destroy_process_group()
    return gradient.flatten().tolist()


# Groups made and destroyed


def resources() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(fields["Threads"]),
        "mappings": len(maps.splitlines()),
        "memory": int(fields["VmRSS"].split()[0]) * 1024,
        # Programs beside this one have others there.
        "shared": sum(
            "unisono" in path.name or str(path) in maps for path in Path("/dev/shm").iterdir()
        ),
    }


def makes_and_destroys_groups(backend: str) -> tuple[dict[str, int], dict[str, int]]:
    """The resources of this process after the warm-up, and after many more groups."""
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    before: dict[str, int] = {}
    for round_number in range(ROUNDS):
        if round_number == WARM_UP:
            dist.barrier()
            before = resources()
        # All ranks but one, for each rank in turn, then all.
        members = [r for r in range(world) if r != round_number % (world + 1)]
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.full((1000,), rank + 1.0)
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == sum(r + 1 for r in members)
            dist.destroy_process_group(group)
    dist.barrier()
    after = resources()
    dist.barrier()
    return before, after


def has_threads_while_it_has_groups(backend: str, path: str) -> list[str]:
    """The threads of unisono that are left when the last group has been destroyed, twice."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for attempt in range(2):
        file = f"file://{path}/{attempt}"
        dist.init_process_group(backend, file, rank=rank, world_size=world)
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
        work.get_future().then(lambda done: done.value()[0]).wait()
        assert own_threads.names()
        dist.destroy_process_group()
        # The work, and so what it holds of its group, is still there.
        left = own_threads.left_after(10)
        if left or not work.is_completed():
            break
    return left


# State that a fork inherits


def leaves_at_once(backend: str) -> bool:
    """Rank 0, which serves torch's store, ends as soon as it has joined, without a word."""
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    if dist.get_rank() == 0:
        os._exit(0)
    return True


def finds_the_file_of_a_killed_job(backend: str, path: str) -> str:
    """The error for a store file that a job before this one has left."""

    def join() -> None:
        limit = timedelta(seconds=20)
        dist.init_process_group(backend, f"file://{path}", limit, rank=0, world_size=1)

    child = os.fork()
    if child == 0:
        try:
            join()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(ValueError, match="two processes claim rank 0") as raised:
        join()
    return str(raised.value)


def is_forked(backend: str) -> int:
    """A child ends as a Python process does, though it has none of the threads of its parent."""
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    if dist.get_rank() == 0:
        # Not begun by the other rank, and so not ended in the child either.
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        child = os.fork()
        if child == 0:
            raise SystemExit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        dist.distributed_c10d._get_default_store().set("ended", b"")
        work.wait()
        return code
    dist.distributed_c10d._get_default_store().wait(["ended"])
    dist.all_reduce(torch.ones(1000))
    return 0


def destroys_in_a_child(backend: str) -> list[int]:
    """A child that destroys its copy of the group takes nothing back that its parent lends."""
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    group = dist.distributed_c10d._get_default_group()
    ours = group._get_backend(torch.device("cpu"))
    tensor = ours.allocate_tensor(1 << 20, dtype=torch.float32, device=torch.device("cpu"))
    codes = []
    for _ in range(2):
        dist.all_reduce(tensor.fill_(1))
        child = os.fork()
        if child == 0:
            dist.destroy_process_group()
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        dist.all_reduce(tensor.fill_(1))
        assert float(tensor.sum()) == dist.get_world_size() * (1 << 20)
    return codes


def makes_a_group_in_a_child(backend: str, folder: str) -> list[int]:
    """A forked child forms a group with those of other ranks, as a DataLoader's worker may."""
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(1000))
    model = nn.parallel.DistributedDataParallel(nn.Linear(200, 200), gradient_as_bucket_view=True)
    model(torch.ones(1, 200)).sum().backward()
    before = model.module.weight.grad.clone()
    # A thread of the library's waits for the end of it at the fork.
    work = dist.all_reduce(torch.ones(1000), async_op=True) if rank == 0 else None
    codes = []
    for destroys in (True, False):
        child = os.fork()
        if child == 0:
            signal.alarm(40)
            model.zero_grad(set_to_none=False)
            store = dist.FileStore(f"{folder}/{destroys}", world)
            if destroys:
                dist.destroy_process_group()
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20)
                )
                for count in (1, 500_000):
                    tensor = torch.ones(count)
                    dist.all_reduce(tensor)
                    assert float(tensor[-1]) == world
                boxes: list[object] = [None] * world
                dist.all_gather_object(boxes, rank)
                assert boxes == list(range(world))
                dist.destroy_process_group()
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if rank != 0:
        dist.all_reduce(torch.ones(1000))
    if work is not None:
        work.wait()
    # The child has cleared its own copy of them.
    assert torch.equal(model.module.weight.grad, before)
    dist.barrier()
    return codes


# monitored_barrier


def misses_a_monitored_barrier(backend: str) -> None:
    """Rank 0's error names the ranks that did not come: the first of them, or all if it asks."""
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    limit = timedelta(seconds=1)
    one, all_of_them, passed = (dist.new_group() for _ in range(3))
    dist.monitored_barrier(passed, timedelta(seconds=30))
    dist.monitored_barrier(passed, timedelta(seconds=30), wait_all_ranks=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(one, limit)
        with pytest.raises(RuntimeError, match=r"(?is)failed to pass.*rank 1\b.*rank 2\b"):
            dist.monitored_barrier(all_of_them, limit, wait_all_ranks=True)
    dist.barrier()


# TORCH_DISTRIBUTED_DEBUG=DETAIL


def debugs(backend: str) -> dict[str, str]:
    """Run the basic collectives, then let the ranks disagree; what each disagreement said."""
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    for group in (None, dist.new_group()):
        collectives_give_what_they_should(rank, world, group)

    said = {}
    ones = torch.ones(4)
    disagreements = {
        "shapes": lambda group: dist.all_reduce(torch.ones(4 + rank), group=group),
        "types": lambda group: dist.all_reduce(
            ones.to([torch.int32, torch.float32][rank]), group=group
        ),
        "operations": lambda group: (
            dist.all_reduce(ones, group=group) if rank else dist.broadcast(ones, 0, group=group)
        ),
    }
    for name, call in disagreements.items():
        group = dist.new_group()
        with pytest.raises(RuntimeError) as caught:
            call(group)
        said[name] = str(caught.value)
    collectives_give_what_they_should(rank, world, None)
    return said


def collectives_give_what_they_should(
    rank: int, world: int, group: dist.ProcessGroup | None
) -> None:
    mine = torch.arange(4.0) + rank
    by_rank = [torch.arange(4.0) + r for r in range(world)]
    total = torch.stack(by_rank).sum(0)

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.equal(actual, expected), (actual, expected)

    dist.all_reduce(tensor := mine.clone(), group=group)
    check(tensor, total)
    dist.all_reduce(tensor := mine.clone(), group=group, async_op=True).wait()
    check(tensor, total)
    dist.broadcast(tensor := mine.clone(), 1, group=group)
    check(tensor, by_rank[1])
    dist.reduce(tensor := mine.clone(), 0, group=group)
    check(tensor, total if rank == 0 else mine)
    dist.all_gather(outputs := [torch.zeros(4) for _ in by_rank], mine, group=group)
    check(torch.stack(outputs), torch.stack(by_rank))
    dist.all_gather_into_tensor(output := torch.zeros(4 * world), mine, group=group)
    check(output, torch.cat(by_rank))
    dist.reduce_scatter_tensor(output := torch.zeros(4 // world), mine, group=group)
    check(output, total.chunk(world)[rank])
    dist.all_to_all_single(output := torch.zeros(4), mine, group=group)
    check(output, torch.cat([other.chunk(world)[rank] for other in by_rank]))
    dist.gather(mine, outputs if rank == 0 else None, 0, group=group)
    dist.scatter(output := torch.zeros(4), by_rank if rank == 0 else None, 0, group=group)
    check(output, mine)
    if rank == 0:
        dist.send(mine, 1, group=group)
    elif rank == 1:
        dist.recv(output, 0, group=group)
        check(output, by_rank[0])
    dist.barrier(group=group)


# Training that survives a rank


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def train_step(
    network: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, world: int
) -> None:
    random_numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 5, generator=random_numbers)
    targets = torch.randn(8, 2, generator=random_numbers)
    optimizer.zero_grad()
    nn.functional.mse_loss(network(inputs[rank::world]), targets[rank::world]).backward()
    optimizer.step()


def trained_alone() -> nn.Module:
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        train_step(network, optimizer, step, 0, 1)
    return network


def train_under_torchrun(backend: str, folder: Path) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    first = 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    # No rank may save before all have loaded.
    dist.barrier()
    print(f"attempt {attempt}: rank {rank} begins at step {first}", flush=True)
    parallel = nn.parallel.DistributedDataParallel(network)
    for step in range(first, STEPS):
        if attempt == 0 and rank == 1 and step == DIES_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(parallel, optimizer, step, rank, world)
        if rank == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    dist.destroy_process_group()
    print(f"attempt {attempt}: rank {rank} is done", flush=True)


if __name__ == "__main__":
    train_under_torchrun(sys.argv[1], Path(sys.argv[2]))
