"""The rank functions of `test_horovod.py`; each one runs on every rank and checks itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono.horovod.torch as hvd
from unisono.horovod.torch import _calls

STEPS = 6


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def world() -> None:
    with pytest.raises(ValueError, match="not initialized"):
        hvd.rank()
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    assert dist.get_backend() == "unisono"
    assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert not hvd.nccl_built()
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert not dist.is_initialized()
    hvd.init()
    same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(hvd.size())))
    hvd.shutdown()


def beside_a_group(backend: str) -> None:
    dist.init_process_group(backend)
    hvd.init()
    same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(hvd.size())))
    names = [group.name() for group in dist.distributed_c10d._world.pg_map]
    assert len(names) == (1 if backend == "unisono" else 2)
    hvd.shutdown()
    assert dist.is_initialized()
    dist.barrier()


def reductions() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ranks = torch.arange(size, dtype=torch.float32)
    mine = torch.full((5, 3), float(rank + 1))

    def all_same(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((5, 3), value, dtype=dtype)

    total = float((ranks + 1).sum())
    same(hvd.allreduce(mine), all_same(total / size))
    same(hvd.allreduce(mine, average=False), all_same(total))
    same(hvd.allreduce(mine, name="x", op=hvd.Min), all_same(1.0))
    same(hvd.allreduce(mine, op=hvd.Max), all_same(float(size)))
    same(hvd.allreduce(mine, op=hvd.Product), all_same(float((ranks + 1).prod())))
    same(
        hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        2 * all_same(total),
    )
    same(hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16), all_same(total))
    # Averages of integers are rounded toward zero.
    whole = torch.full((5, 3), -(rank + 1))
    same(hvd.allreduce(whole), all_same(-(int(total) // size), torch.int64))
    # Also those whose sum does not fit their type.
    bytes_ = torch.full((2 * size, 3), 200, dtype=torch.uint8)
    same([hvd.allreduce(bytes_), hvd.reducescatter(bytes_)], [bytes_, bytes_[:2]])
    same(hvd.reducescatter(bytes_[1:]), bytes_[: 2 - (rank == size - 1)])
    same(mine, all_same(float(rank + 1)))
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.allreduce(mine, op=hvd.Adasum)
    with pytest.raises(ValueError, match="older form"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)

    handle = hvd.allreduce_async(mine, op=hvd.Sum)
    result = hvd.synchronize(handle)
    assert hvd.poll(handle)
    same(result, all_same(total))
    same(hvd.synchronize(handle), result)
    turned = torch.full((3, 5), float(rank + 1)).t()
    assert hvd.allreduce_(turned, op=hvd.Sum) is turned
    same(turned, all_same(total))

    group = [torch.full((7,), float(rank)), torch.full((2, 2), rank), torch.zeros(0)]
    sums = hvd.grouped_allreduce(group, op=hvd.Sum)
    same(
        sums, [torch.full((7,), float(ranks.sum())), torch.full((2, 2), int(ranks.sum())), group[2]]
    )
    averages = hvd.synchronize(hvd.grouped_allreduce_async_(group))
    assert averages[0] is group[0]
    same(group[0], torch.full((7,), float(ranks.mean())))
    same(group[1], torch.full((2, 2), int(ranks.sum()) // size))

    for rows in (2 * size, 2 * size + 1, 1):
        table = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3) + rank
        expected = table - rank + ranks.mean()
        counts = [rows // size + (place < rows % size) for place in range(size)]
        part = expected.split(counts)[rank]
        torch.testing.assert_close(hvd.reducescatter(table), part)
        torch.testing.assert_close(hvd.grouped_reducescatter([table], op=hvd.Sum)[0], part * size)
    sparse = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,))
    dense = hvd.synchronize(hvd.sparse_allreduce_async(sparse, "s", hvd.Sum)).to_dense()
    same(dense, torch.tensor([1.0] * size + [2.0 * size]))


def exchanges() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    # Uneven, and rank 0 brings nothing.
    gathered = hvd.allgather(torch.full((rank, 2), float(rank)))
    same(gathered, torch.cat([torch.full((other, 2), float(other)) for other in range(size)]))
    same(hvd.allgather(torch.zeros(0, 4)), torch.zeros(0, 4))
    both = hvd.grouped_allgather([torch.tensor([rank]), torch.tensor([True])])
    same(both, [torch.arange(size), torch.ones(size, dtype=torch.bool)])
    with pytest.raises(ValueError, match="at least one dimension"):
        hvd.allgather(torch.tensor(1.0))

    root = size - 1
    mine = torch.full((3,), rank)
    same(hvd.broadcast(mine, root), torch.full((3,), root))
    same(mine, torch.full((3,), rank))
    assert hvd.broadcast_(mine, root_rank=root) is mine
    same(mine, torch.full((3,), root))
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast(mine, size)

    # Rank r sends d + 1 rows to rank d.
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    rows = torch.full((int(splits.sum()), 2), float(rank))
    output, received = hvd.alltoall(rows, splits)
    same(received, torch.full((size,), rank + 1, dtype=torch.int32))
    same(output, torch.cat([torch.full((rank + 1, 2), float(other)) for other in range(size)]))
    even = hvd.alltoall(torch.arange(size) + 10 * rank)
    same(even, 10 * torch.arange(size) + rank)
    if size > 1:
        with pytest.raises(ValueError, match="do not divide"):
            hvd.alltoall(torch.arange(size + 1))
    with pytest.raises(ValueError, match="do not divide"):
        hvd.alltoall(torch.arange(size), splits=[size + 1] + [-1] * (size - 1))

    assert hvd.broadcast_object({"rank": rank}, root) == {"rank": root}
    assert hvd.allgather_object("x" * rank) == ["x" * other for other in range(size)]


def gradients() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    def gradient(call: Callable[[Tensor], Tensor], rows: int = size) -> Tensor:
        leaf = torch.ones(rows, requires_grad=True)
        (call(leaf) * (rank + 1)).sum().backward()
        return leaf.grad

    mean = (size + 1) / 2
    same(gradient(hvd.allreduce), torch.full((size,), mean))
    same(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0)),
         torch.full((size,), 2 * mean * size))  # fmt: skip
    same(gradient(hvd.allgather, rank + 1), torch.full((rank + 1,), mean))
    expected = mean if rank == 0 else 0.0
    same(gradient(lambda x: hvd.broadcast(x, 0)), torch.full((size,), expected))
    same(gradient(hvd.alltoall), torch.arange(1.0, size + 1))
    same(gradient(hvd.reducescatter), torch.arange(1.0, size + 1))
    with pytest.raises(NotImplementedError, match="no gradient"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max))


def process_sets() -> None:
    pair = hvd.ProcessSet([1, 0])
    hvd.init(process_sets=[pair])
    rank, size = hvd.rank(), hvd.size()
    last = hvd.add_process_set([size - 1])
    assert pair.ranks == [0, 1]
    assert (pair.process_set_id, last.process_set_id) == (1, 2)
    assert hvd.global_process_set.size() == size
    with pytest.raises(ValueError, match="is known"):
        hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match="does not name"):
        hvd.add_process_set([size])
    if rank < 2:
        assert (pair.included(), pair.rank(), pair.size()) == (True, rank, 2)
        same(hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=pair), torch.tensor([1]))
        assert hvd.allgather_object(rank, process_set=pair) == [0, 1]
    else:
        assert (pair.included(), pair.rank()) == (False, -1)
        with pytest.raises(ValueError, match="is not in"):
            hvd.allreduce(torch.tensor([rank]), process_set=pair)
    if last.included():
        same(hvd.broadcast(torch.tensor([rank]), rank, process_set=last), torch.tensor([rank]))
    assert hvd.remove_process_set(last)
    assert not hvd.remove_process_set(last)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="is not known"):
        last.size()
    hvd.barrier()


def joins() -> list[int]:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    lasts = []
    for _ in range(2):
        # Rank r has data for r + 1 rounds, and the last one is slow to come.
        for step in range(rank + 1):
            left = size - step
            total = hvd.allreduce(torch.ones(4), op=hvd.Sum)
            same(total, torch.full((4,), float(left)))
            same(hvd.allreduce(torch.full((2,), 3.0), op=hvd.Min), torch.full((2,), 3.0))
            handles = [hvd.allreduce_async(torch.ones(n + 1), op=hvd.Sum) for n in range(3)]
            for handle in handles:
                assert float(hvd.synchronize(handle)[0]) == left
            assert hvd.allgather_object(rank) == list(range(step, size))
            same(hvd.broadcast(torch.tensor([rank]), size - 1), torch.tensor([size - 1]))
            hvd.barrier()
        lasts.append(hvd.join())
    same(hvd.allreduce(torch.ones(4), op=hvd.Sum), torch.full((4,), float(size)))
    # All at once.
    lasts.append(int(hvd.join() in range(size)))
    return lasts


class Late:
    """A work that ends just after a wait for it is over, well or not."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.waits = 0

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self, _: object) -> None:
        self.waits += 1
        if self.waits == 1 or self.fails:
            raise dist.DistBackendError(f"wait {self.waits}")


def waits_for_late_works() -> int:
    hvd.init()
    late = Late(fails=False)
    _calls.wait(late, torch.device("cpu"))
    with pytest.raises(hvd.HorovodInternalError, match="wait 2"):
        _calls.wait(Late(fails=True), torch.device("cpu"))
    return late.waits


def joined_root() -> str:
    hvd.init()
    try:
        if hvd.rank() == 0:
            hvd.join()
        else:
            hvd.broadcast(torch.ones(1), 0)
    except hvd.HorovodInternalError as error:
        return str(error)
    return "nothing"


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(4, 6, generator=generator)
    return images, torch.randint(3, (4,), generator=generator)


def train(network: nn.Module, optimizer: Any, passes: int = 1) -> list[float]:
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for one in range(passes):
            images, labels = batch(step * passes + one, hvd.rank())
            loss = nn.functional.cross_entropy(network(images), labels)
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
    return losses


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def against_ddp(world: int) -> None:
    """The same losses and parameters as DDP; to the bit for two ranks."""
    hvd.init()
    tolerance = {"rtol": 0.0, "atol": 0.0} if world == 2 else {"rtol": 1e-5, "atol": 1e-6}
    reference = model(0)
    ddp = nn.parallel.DistributedDataParallel(reference)
    expected = train(ddp, sgd(reference))
    for options in ({}, {"groups": 2}, {"num_groups": 3}, {"gradient_predivide_factor": 2.0}):
        network = model(hvd.rank())
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(sgd(network), network.named_parameters(), **options)
        assert isinstance(optimizer, torch.optim.SGD)
        losses = train(network, optimizer)
        torch.testing.assert_close(losses, expected, **tolerance)
        torch.testing.assert_close(
            list(network.parameters()), list(reference.parameters()), **tolerance
        )
        hvd.barrier()


def optimizer_options() -> None:
    hvd.init()
    rank = hvd.rank()

    def trained(passes: int = 1, **options: Any) -> list[Tensor]:
        network = model(0)
        optimizer = hvd.DistributedOptimizer(
            sgd(network), network.named_parameters(), backward_passes_per_step=passes, **options
        )
        train(network, optimizer, passes)
        return [one.detach() for one in network.parameters()]

    # By hand: the gradients of all passes summed, and averaged over ranks.
    network = model(0)
    by_hand = sgd(network)
    for step in range(STEPS):
        by_hand.zero_grad()
        for one in range(2):
            images, labels = batch(step * 2 + one, rank)
            nn.functional.cross_entropy(network(images), labels).backward()
        for parameter in network.parameters():
            hvd.allreduce_(parameter.grad)
        by_hand.step()
    same(trained(passes=2), [one.detach() for one in network.parameters()])
    plain = trained()
    torch.testing.assert_close(
        trained(compression=hvd.Compression.fp16), plain, rtol=0.05, atol=0.01
    )
    alone = hvd.add_process_set([0])
    other = trained(process_set=alone)
    assert not torch.equal(other[0], plain[0])
    checks(network)


def checks(network: nn.Module) -> None:
    names = list(network.named_parameters())
    with pytest.raises(ValueError, match="lacks 1"):
        hvd.DistributedOptimizer(sgd(network), names[1:])
    with pytest.raises(ValueError, match="more than once"):
        hvd.DistributedOptimizer(sgd(network), [*names, names[0]])
    with pytest.raises(ValueError, match="needs op=Average"):
        hvd.DistributedOptimizer(sgd(network), names, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.DistributedOptimizer(sgd(network), names, op=hvd.Adasum)
    optimizer = hvd.DistributedOptimizer(sgd(network), names)
    images, labels = batch(0, hvd.rank())
    nn.functional.cross_entropy(network(images), labels).backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="backward_passes_per_step"):
        nn.functional.cross_entropy(network(images), labels).backward()
    optimizer.synchronize()
    reduced = [one.grad.clone() for one in network.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    same([one.grad for one in network.parameters()], reduced)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    nn.functional.cross_entropy(network(images), labels).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def unused_and_sparse() -> None:
    """Ranks whose graphs differ, with sparse gradients too, end with equal parameters."""
    hvd.init()
    rank = hvd.rank()
    for sparse_as_dense in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        branches = nn.ModuleList([nn.Linear(4, 2) for _ in range(hvd.size())])
        parameters = [*table.parameters(), *branches.parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.5), sparse_as_dense=sparse_as_dense
        )
        before = copy.deepcopy([one.detach() for one in parameters])
        for step in range(3):
            optimizer.zero_grad()
            branches[rank](table(torch.tensor([rank, step + 2]))).sum().backward()
            optimizer.step()
        for parameter, old in zip(parameters, before, strict=True):
            assert not torch.equal(parameter, old)
            everyone = hvd.allgather(parameter.detach()[None])
            same(everyone, parameter.detach()[None].expand_as(everyone))


def states() -> None:
    hvd.init()
    for make in (sgd, lambda network: torch.optim.Adam(network.parameters(), lr=0.01)):
        network = model(0)
        optimizer = make(network)
        if hvd.rank() == 1:
            images, labels = batch(0, 0)
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.25
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        hvd.broadcast_parameters(list(network.named_parameters()), root_rank=1)
        assert optimizer.param_groups[0]["lr"] == 0.25
        for state in hvd.allgather_object(optimizer.state_dict()):
            assert state["state"]
            same(state["state"], optimizer.state_dict()["state"])
        same(next(network.parameters()), hvd.broadcast(next(network.parameters()), 0))
    with pytest.raises(ValueError, match="not a tensor"):
        hvd.broadcast_parameters({"x": 3}, 0)


def elastic() -> tuple[int, list[int], list[float]]:
    """Train with a failure on the way; return the calls, the steps done and the parameters."""
    hvd.init()
    network = model(hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd(network), network.named_parameters())
    pair = hvd.add_process_set(range(hvd.size() - 1)) if hvd.size() > 2 else None
    state = hvd.elastic.TorchState(network, optimizer, step=0, log=[])
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.rank())])
    calls = []

    @hvd.elastic.run
    def training(state: Any) -> None:
        calls.append(state.step)
        while state.step < STEPS:
            images, labels = batch(state.step, hvd.rank())
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
            state.log.append(state.step)
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
            if state.step == 3 and len(calls) == 1 and hvd.rank() == 1:
                # The others wait for a sum, this one says something else.
                hvd.allgather(torch.ones(3))

    training(state)
    assert resets == [hvd.rank()]
    if pair is not None and pair.included():
        same(hvd.allreduce(torch.ones(1), process_set=pair), torch.ones(1))
    hvd.shutdown()
    return len(calls), state.log, [float(one.detach().sum()) for one in network.parameters()]


def uninterrupted() -> list[float]:
    hvd.init()
    network = model(0)
    train_from = hvd.DistributedOptimizer(sgd(network), network.named_parameters())
    train(network, train_from)
    return [float(one.detach().sum()) for one in network.parameters()]


def sampler() -> None:
    hvd.init()
    data = list(range(10))
    chosen = hvd.elastic.ElasticSampler(data, shuffle=False)
    assert len(chosen) == -(-10 // hvd.size())
    chosen.record_batch(0, 2)
    state = hvd.elastic.TorchState(sampler=chosen)
    state.sync()
    done = set().union(*hvd.allgather_object(chosen.processed))
    left = set(data) - done
    assert set().union(*hvd.allgather_object(set(chosen))) == left
    chosen.set_epoch(1)
    assert set().union(*hvd.allgather_object(set(chosen))) == set(data)


def lost_peer() -> str:
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(0.5)
        return "left"
    try:
        hvd.allreduce(torch.ones(3))
    except hvd.HorovodInternalError as error:
        return str(error)
    return "nothing"
