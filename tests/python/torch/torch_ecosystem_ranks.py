"""The rank functions of ``test_torch_ecosystem``: one per feature of torch.distributed.

``run_scenarios`` calls them one after another in one launch, because importing torch costs more
than all of them together. Each gets a group of its own, so that one that fails, or waits for a
peer that failed, leaves the others alone.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Long enough for a slow machine; what a rank waits for a peer whose scenario failed.
PATIENCE = timedelta(seconds=40)
STEPS = 3


@dataclass
class Job:
    """The input of a scenario: its group, its rank there, and a folder that all ranks share."""

    group: dist.ProcessGroup
    folder: Path

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)


def run_scenarios(backend: str, names: list[str], folder: str) -> dict[str, str | None]:
    """Run the scenarios called ``names``; by name, the traceback of each that failed, or None."""
    dist.init_process_group(backend, timeout=PATIENCE)
    jobs = {name: Job(dist.new_group(timeout=PATIENCE), Path(folder)) for name in names}
    return {name: trouble_of(globals()[name], job) for name, job in jobs.items()}


def trouble_of(scenario: Callable[..., None], *args: Any) -> str | None:
    try:
        scenario(*args)
    except Exception:
        return traceback.format_exc()
    return None


# Stores


def stores(backend: str, folder: str, ports: list[int]) -> dict[str, str | None]:
    """Join and leave through every kind of store, one after another in the same process."""
    here = Path(folder)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = {"rank": rank, "world_size": world}

    def tcp_store() -> dict[str, Any]:
        return {"store": dist.TCPStore("127.0.0.1", ports[0], world, rank == 0), **shared}

    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "TCPStore": tcp_store,
        "FileStore": lambda: {"store": dist.FileStore(str(here / "store"), world), **shared},
        "HashStore": lambda: {"store": dist.HashStore(), "rank": 0, "world_size": 1},
        "PrefixStore": lambda: {
            "store": dist.PrefixStore("mine", dist.FileStore(str(here / "prefixed"), world)),
            **shared,
        },
        "file://": lambda: {"init_method": f"file://{here}/method", **shared},
        "tcp://": lambda: {"init_method": f"tcp://127.0.0.1:{ports[1]}", **shared},
        "env://": lambda: {"init_method": "env://"},
    }
    return {name: trouble_of(joins_and_leaves, backend, way) for name, way in ways.items()}


def joins_and_leaves(backend: str, way: Callable[[], dict[str, Any]]) -> None:
    options = way()
    dist.init_process_group(backend, timeout=PATIENCE, **options)
    try:
        world = dist.get_world_size()
        assert world == options.get("world_size", world)
        for group in (None, dist.new_group()):
            tensor = torch.full((1000,), dist.get_rank(group) + 1.0)
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, torch.full((1000,), world * (world + 1) / 2)), tensor
        # The first rank serves the TCPStore: it must not leave before the last has arrived.
        dist.barrier()
    finally:
        dist.destroy_process_group()


# Objects


class Word:
    """An object of a class of ours, as pickle has to find it again."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def things(rank: int) -> list[Any]:
    """Objects whose pickles differ in size from rank to rank."""
    return [None, {"rank": rank, "text": "x" * 1000 * rank}, Word(f"of {rank}"), torch.arange(rank)]


def same(actual: list[Any], expected: list[Any]) -> bool:
    return len(actual) == len(expected) and all(
        torch.equal(one, two) if isinstance(two, torch.Tensor) else one == two
        for one, two in zip(actual, expected, strict=True)
    )


def objects(job: Job) -> None:
    rank, world, group = job.rank, job.world, job.group
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, things(rank), group=group)
    assert all(same(by_rank[r], things(r)) for r in range(world)), by_rank
    for root in range(world):
        box = things(rank)
        dist.broadcast_object_list(box, src=root, group=group)
        assert same(box, things(root)), box

        gathered: list[Any] | None = [None] * world if rank == root else None
        dist.gather_object(things(rank), gathered, dst=root, group=group)
        if gathered is not None:
            assert all(same(gathered[r], things(r)) for r in range(world)), gathered

        mine: list[Any] = [None]
        sent = [things(r + root) for r in range(world)] if rank == root else None
        dist.scatter_object_list(mine, sent, src=root, group=group)
        assert same(mine[0], things(rank + root)), mine

    if rank == 0:
        dist.send_object_list(things(7), dst=1, group=group)
    elif rank == 1:
        box = [None] * len(things(7))
        assert dist.recv_object_list(box, src=0, group=group) == 0
        assert same(box, things(7)), box


# Point to point


def batches(job: Job) -> None:
    """Sends and receives of a batch meet by tag, whatever the order in which a rank lists them.

    Some tensors are larger than anything a transport would buffer, so that a send that waited
    for its receive before the next was posted would wait forever.
    """
    rank, world, group = job.rank, job.world, job.group
    sizes = [1, 1000, 0, 2_000_000, 70_000, 3]

    def content(source: int, target: int, tag: int) -> torch.Tensor:
        return torch.full((sizes[tag],), source * 100.0 + target * 10 + tag)

    for seed in range(6):
        receives: list[tuple[torch.Tensor, torch.Tensor]] = []
        operations = []
        for peer in range(world):
            for tag in range(len(sizes)) if peer != rank else ():
                arrives = torch.zeros(sizes[tag])
                receives.append((arrives, content(peer, rank, tag)))
                leaves = content(rank, peer, tag)
                operations.append(
                    dist.P2POp(dist.isend, leaves, group=group, group_peer=peer, tag=tag)
                )
                operations.append(
                    dist.P2POp(dist.irecv, arrives, group=group, group_peer=peer, tag=tag)
                )
        random.Random(seed * world + rank).shuffle(operations)
        works = dist.batch_isend_irecv(operations)
        random.Random(seed).shuffle(works)
        for work in works:
            work.wait()
        for arrived, expected in receives:
            assert torch.equal(arrived, expected), (arrived, expected)


def batches_without_tags(job: Job) -> None:
    """Without tags messages between two ranks keep their order; sends may still come first."""
    rank, group = job.rank, job.group
    peer = 1 - rank
    for sends_first in (True, False, rank == 0):
        sent = [torch.full((500_000,), rank * 10.0 + i) for i in range(3)]
        received = [torch.zeros(500_000) for _ in range(3)]
        leave = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor in sent]
        come = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor in received]
        for work in dist.batch_isend_irecv(leave + come if sends_first else come + leave):
            work.wait()
        for i, tensor in enumerate(received):
            assert torch.equal(tensor, torch.full((500_000,), peer * 10.0 + i)), (i, tensor)


# Gradients through collectives: torch.distributed.nn

Spread = Callable[[torch.Tensor], torch.Tensor]
Whole = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def check_gradient(job: Job, across: Spread, alone: Whole) -> None:
    """Compare output and gradient of ``across`` with ``alone``, which has all inputs at hand.

    The gradient that a rank gets is that of the sum of the losses of all ranks. The values are
    small integers, so the sums are exact and the comparison is of bits.
    """
    rank, world = job.rank, job.world
    random_numbers = torch.Generator().manual_seed(11)

    def leaf() -> torch.Tensor:
        values = torch.randint(-9, 9, (world, 2, 3), generator=random_numbers)
        return values.to(torch.float64).requires_grad_()

    inputs = [leaf() for _ in range(world)]
    outputs = alone(inputs)
    weights = [torch.randint(-9, 9, out.shape, generator=random_numbers) for out in outputs]
    torch.stack(
        [(out * weight).sum() for out, weight in zip(outputs, weights, strict=True)]
    ).sum().backward()
    expected = inputs[rank].grad

    mine = inputs[rank].detach().clone().requires_grad_()
    output = across(mine)
    assert torch.equal(output, outputs[rank]), (output, outputs[rank])
    (output * weights[rank]).sum().backward()
    assert mine.grad is not None
    assert torch.equal(mine.grad, expected), (mine.grad, expected)


def total(inputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(inputs).sum(0)


def gradient_of_all_reduce(job: Job) -> None:
    from torch.distributed.nn import functional

    check_gradient(
        job,
        lambda x: functional.all_reduce(x, group=job.group),
        lambda xs: [total(xs)] * job.world,
    )


def gradient_of_reduce(job: Job) -> None:
    from torch.distributed.nn import functional

    root = job.world - 1

    def across(x: torch.Tensor) -> torch.Tensor:
        reduced = functional.reduce(x, root, group=job.group)
        # Elsewhere than at the root it holds nothing of meaning.
        return reduced if job.rank == root else reduced * 0

    check_gradient(
        job,
        across,
        lambda xs: [total(xs) * (r == root) for r in range(job.world)],
    )


def gradient_of_broadcast(job: Job) -> None:
    from torch.distributed.nn import functional

    for root in range(job.world):
        check_gradient(
            job,
            lambda x, root=root: functional.broadcast(x, root, group=job.group),
            # The others' inputs get a gradient of zeros, not none.
            lambda xs, root=root: [xs[root] + 0 * total(xs)] * job.world,
        )


def gradient_of_all_gather(job: Job) -> None:
    from torch.distributed.nn import functional

    check_gradient(
        job,
        lambda x: torch.cat(functional.all_gather(x, group=job.group)),
        lambda xs: [torch.cat(xs)] * job.world,
    )


def gradient_of_all_gather_base(job: Job) -> None:
    from torch.distributed.nn import functional

    check_gradient(
        job,
        lambda x: functional._all_gather_base(
            torch.empty(job.world * job.world, 2, 3, dtype=x.dtype), x, group=job.group
        ),
        lambda xs: [torch.cat(xs)] * job.world,
    )


def gradient_of_reduce_scatter(job: Job) -> None:
    from torch.distributed.nn import functional

    check_gradient(
        job,
        lambda x: functional.reduce_scatter(
            torch.empty_like(x[0]), list(x.unbind()), group=job.group
        ),
        lambda xs: list(total(xs).unbind()),
    )


def gradient_of_all_to_all(job: Job) -> None:
    from torch.distributed.nn import functional

    check_gradient(
        job,
        lambda x: torch.stack(
            functional.all_to_all(
                [torch.empty_like(x[0]) for _ in range(job.world)],
                list(x.unbind()),
                group=job.group,
            )
        ),
        lambda xs: list(torch.stack(xs).transpose(0, 1).unbind()),
    )


def gradient_of_all_to_all_single(job: Job) -> None:
    from torch.distributed.nn import functional

    world = job.world
    rows = 2 * world

    def sizes(source: int) -> list[int]:
        """How many of its rows a rank sends to each: all differ, and the sum is what it has."""
        cut = [1] * world
        cut[source] += rows - world
        return cut

    def across(x: torch.Tensor) -> torch.Tensor:
        sends = sizes(job.rank)
        receives = [sizes(r)[job.rank] for r in range(world)]
        output = torch.empty(sum(receives), 3, dtype=x.dtype)
        return functional.all_to_all_single(
            output, x.reshape(rows, 3), receives, sends, group=job.group
        )

    def alone(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        parts = [x.reshape(rows, 3).split(sizes(r)) for r, x in enumerate(xs)]
        return [torch.cat([parts[source][r] for source in range(world)]) for r in range(world)]

    check_gradient(job, across, alone)


def gradient_of_gather(job: Job) -> None:
    from torch.distributed.nn import functional

    for root in range(job.world):
        check_gradient(
            job,
            lambda x, root=root: torch.cat(functional.gather(x, root, group=job.group)),
            # Elsewhere than at the root torch gives zeros.
            lambda xs, root=root: [torch.cat(xs) * (r == root) for r in range(job.world)],
        )


def gradient_of_scatter(job: Job) -> None:
    from torch.distributed.nn import functional

    for root in range(job.world):
        check_gradient(
            job,
            lambda x, root=root: functional.scatter(list(x.unbind()), root, group=job.group),
            lambda xs, root=root: [xs[root][r] + 0 * total(xs).sum() for r in range(job.world)],
        )


# torch.compile


def example(rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def compiled_collectives(job: Job, compiler: str) -> None:
    """The collectives stay in the graph: ``fullgraph`` refuses to break it at one."""
    from torch.distributed import _functional_collectives as functional

    world, group = job.world, job.group

    def program(x: torch.Tensor) -> torch.Tensor:
        summed = functional.all_reduce(x * 2, "sum", group)
        gathered = functional.all_gather_tensor(summed + x, 0, group)
        scattered = functional.reduce_scatter_tensor(gathered.sin(), "avg", 0, group)
        splits = [4 // world] * world
        exchanged = functional.all_to_all_single(scattered + 1, splits, splits, group)
        return exchanged.cos() + summed.mean()

    inputs = [example(rank) for rank in range(world)]
    summed = torch.stack([x * 2 for x in inputs]).sum(0)
    gathered = torch.cat([summed + x for x in inputs])
    # Every rank contributes the same tensor, which is its own average.
    parts = [(part + 1).split(4 // world) for part in gathered.sin().chunk(world)]
    mine = torch.cat([part[job.rank] for part in parts])
    expected = mine.cos() + summed.mean()

    compiled = torch.compile(program, backend=compiler, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(inputs[job.rank]), expected, rtol=1e-5, atol=1e-5)
    # In place, as many models do it: dynamo rewrites it into the functional one.

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        dist.all_reduce(y, group=group)
        return y * 2

    compiled = torch.compile(in_place, backend=compiler, fullgraph=True)
    expected = torch.stack([x + 1 for x in inputs]).sum(0) * 2
    torch.testing.assert_close(compiled(inputs[job.rank]), expected, rtol=1e-5, atol=1e-5)


def compiled_collectives_aot_eager(job: Job) -> None:
    compiled_collectives(job, "aot_eager")


def compiled_collectives_inductor(job: Job) -> None:
    compiled_collectives(job, "inductor")


def model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(7)
    layers = nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    return nn.Sequential(*layers)


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of a rank in the batch of a step; all of it for ``world`` = 1."""
    random_numbers = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(8, 6, generator=random_numbers)
    targets = torch.randn(8, 4, generator=random_numbers)
    return inputs[rank::world], targets[rank::world]


def train(
    network: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, world: int
) -> None:
    for step in steps:
        inputs, targets = batch(step, rank, world)
        optimizer.zero_grad()
        nn.functional.mse_loss(network(inputs), targets).backward()
        optimizer.step()


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    # Plain SGD: its step is linear in the gradient, so rounding stays rounding.
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def trained_alone(steps: int, width: int = 16) -> nn.Sequential:
    network = model(width)
    train(network, optimizer_of(network), range(steps), 0, 1)
    return network


def compiled_ddp(job: Job, compiler: str) -> None:
    # The middle layer fills a bucket by itself: torch splits the graph where one ends.
    width = 600
    network = model(width)
    parallel = nn.parallel.DistributedDataParallel(
        network, process_group=job.group, bucket_cap_mb=1
    )
    compiled = torch.compile(parallel, backend=compiler)
    train(compiled, optimizer_of(network), range(STEPS), job.rank, job.world)
    same_weights(network, trained_alone(STEPS, width))


def compiled_ddp_aot_eager(job: Job) -> None:
    compiled_ddp(job, "aot_eager")


def compiled_ddp_inductor(job: Job) -> None:
    compiled_ddp(job, "inductor")


# Distributed checkpoints


def sharded(group: dist.ProcessGroup) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    network = model()
    fully_shard(network, mesh=DeviceMesh.from_group(group, "cpu"))
    return network, optimizer_of(network)


def state_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, momenta = get_state_dict(network, optimizer)
    return {"model": weights, "optimizer": momenta, "note": {"steps": STEPS}}


def restore(
    network: nn.Module, optimizer: torch.optim.Optimizer, path: Path, **options: Any
) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = state_of(network, optimizer)
    state["note"]["steps"] = -1
    checkpoint.load(state, checkpoint_id=path, **options)
    assert state["note"] == {"steps": STEPS}, state["note"]
    set_state_dict(
        network,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def whole(network: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in network.parameters()]


def same_weights(network: nn.Module, expected: nn.Module) -> None:
    for mine, other in zip(whole(network), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def checkpoints(job: Job) -> None:
    """Two ranks train and save; one loads, trains on and saves; two load and train on."""
    from torch.distributed import checkpoint

    rank, world, group = job.rank, job.world, job.group
    first, second = job.folder / "first", job.folder / "second"
    both = sharded(group)
    train(*both, range(STEPS), rank, world)
    checkpoint.save(state_of(*both), checkpoint_id=first, process_group=group)
    same_weights(both[0], trained_alone(STEPS))

    only = dist.new_group([0])
    if rank == 0:
        one = sharded(only)
        restore(*one, first, process_group=only)
        same_weights(one[0], trained_alone(STEPS))
        train(*one, range(STEPS, 2 * STEPS), 0, 1)
        checkpoint.save(state_of(*one), checkpoint_id=second, process_group=only)
    dist.barrier(group)

    again = sharded(group)
    restore(*again, second, process_group=group)
    same_weights(again[0], trained_alone(2 * STEPS))
    train(*again, range(2 * STEPS, 3 * STEPS), rank, world)
    same_weights(again[0], trained_alone(3 * STEPS))


def checkpoints_while_training(job: Job) -> None:
    """``async_save`` writes the state when it was called, whatever training does since."""
    from torch.distributed import checkpoint

    rank, world = job.rank, job.world
    aside = dist.new_group(timeout=PATIENCE)
    path = job.folder / "aside"
    live = sharded(job.group)
    train(*live, range(STEPS), rank, world)
    saved = checkpoint.async_save(state_of(*live), checkpoint_id=path, process_group=aside)
    train(*live, range(STEPS, 3 * STEPS), rank, world)
    saved.result()
    same_weights(live[0], trained_alone(3 * STEPS))
    again = sharded(job.group)
    restore(*again, path, process_group=job.group)
    same_weights(again[0], trained_alone(STEPS))


def checkpoints_of_uneven_tensors(job: Job) -> None:
    """Tensors that do not divide by the ranks, sharded by column and replicated."""
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(job.group, "cpu")
    values = torch.arange(35.0).reshape(5, 7)
    path = job.folder / "uneven"
    before = {
        "rows": distribute_tensor(values, mesh, [Shard(0)]),
        "columns": distribute_tensor(values + 100, mesh, [Shard(1)]),
        "whole": distribute_tensor(values + 200, mesh, [Replicate()]),
        # Fewer rows than ranks: the last rank has none.
        "short": distribute_tensor(values[:1] + 300, mesh, [Shard(0)]),
        "plain": values + 400,
    }
    checkpoint.save(before, checkpoint_id=path, process_group=job.group)
    after = {
        "rows": distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1)]),
        "columns": distribute_tensor(torch.zeros(5, 7), mesh, [Replicate()]),
        "whole": distribute_tensor(torch.zeros(5, 7), mesh, [Shard(0)]),
        "short": distribute_tensor(torch.zeros(1, 7), mesh, [Shard(1)]),
        "plain": torch.zeros(5, 7),
    }
    checkpoint.load(after, checkpoint_id=path, process_group=job.group)
    for name, tensor in after.items():
        full = getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
        expected = before[name]
        expected = getattr(expected, "full_tensor", lambda expected=expected: expected)()
        assert torch.equal(full, expected), (name, full)
