"""The rank functions of `test_torch_ddp.py`: train with DDP in every way that torch has for it.

A scenario is a function from a process group to the tensors it ends with, usually the weights. The
ranks of the group train on shards of batches that every rank can make; what they should end with is
computed in each process alone, from the same batches. `run_scenarios` runs every scenario three
times: on unisono; on gloo, which must give the same bits, for a sum of two numbers has one correct
rounding; and with each rank in a group of its own, where the comparison must fail.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

# The time that a rank waits for a peer that failed in the same scenario.
PATIENCE = timedelta(seconds=20)
STEPS = 5
ROWS = 4

Group = dist.ProcessGroup
Scenario = Callable[[Group], Sequence[Tensor]]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass
class Outcome:
    """How a scenario ended on one rank: its tensors, or a traceback, or why it was skipped."""

    tensors: list[Tensor] = field(default_factory=list)
    error: str = ""
    skipped: str = ""


class NotHereError(Exception):
    """The build of torch does not let the scenario run; says why."""


def run_scenarios(backend: str, names: Sequence[str]) -> dict[str, Outcome]:
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    outcomes = {name: outcome(globals()[name]) for name in names}
    # The store that new groups meet at is rank 0's: it stays until all ranks have made theirs.
    dist.barrier()
    return outcomes


def outcome(scenario: Scenario) -> Outcome:
    # Made before anything can fail on one rank alone, and new for every scenario: after a failure
    # the ranks meet again in the next one, where they may have to wait for each other.
    dist.barrier()
    group = dist.new_group(timeout=PATIENCE)
    gloo = dist.new_group(timeout=PATIENCE, backend="gloo")
    groups = [dist.new_group([rank], timeout=PATIENCE) for rank in range(dist.get_world_size())]
    try:
        tensors = [tensor.detach().clone() for tensor in scenario(group)]
        if scenario not in WITHOUT_GLOO:
            same_bits(tensors, scenario(gloo))
        try:
            same_bits(scenario(groups[dist.get_rank()]), tensors)
        except AssertionError:
            return Outcome(tensors)
        raise RuntimeError("the comparison holds even if the ranks do not communicate")
    except NotHereError as reason:
        return Outcome(skipped=str(reason))
    except Exception:
        return Outcome(error=traceback.format_exc())


def same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(actual), list(expected), rtol=0, atol=0)


def close(actual: Sequence[Tensor], expected: Sequence[Tensor], **tolerance: float) -> None:
    """Compare as far as the order of additions leaves it open: a few units in the last place."""
    torch.testing.assert_close(list(actual), list(expected), **tolerance)


def perceptron(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def replica(
    group: Group, make: Callable[[int], nn.Module] = perceptron, **options: Any
) -> DistributedDataParallel:
    """A model whose weights come from rank 0, in buckets so small that there are several."""
    model = make(dist.get_rank())
    return DistributedDataParallel(
        model, process_group=group, **{"bucket_cap_mb": 0.0005, **options}
    )


def batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = ROWS * dist.get_world_size()
    return [
        (torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator))
        for _ in range(steps)
    ]


def shard(batch: tuple[Tensor, Tensor], rank: int | None = None) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank() if rank is None else rank
    inputs, targets = batch
    return inputs[rank * ROWS :][:ROWS], targets[rank * ROWS :][:ROWS]


def shards(batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return (shard(batch, rank) for rank in range(dist.get_world_size()))


def squares(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    data: Sequence[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
    loss_of: Loss = squares,
) -> Tensor:
    """Take a step for each of ``data`` and return the losses."""
    optimizer = optimizer or descent(model)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def mean_over(group: Group, values: Tensor) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, group=group)
    return values / dist.get_world_size()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def trains_like_one_process(
    group: Group,
    make: Callable[[int], nn.Module] = perceptron,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = descent,
    **options: Any,
) -> tuple[list[Tensor], DistributedDataParallel]:
    alone = make(0)
    expected = train(alone, batches(), optimizer(alone))
    mine = replica(group, make, **options)
    losses = train(mine, [shard(batch) for batch in batches()], optimizer(mine))
    losses = mean_over(group, losses)
    close([losses, *weights(mine)], [expected, *weights(alone)])
    return [losses, *weights(mine)], mine


# Options of DDP itself.


def gradient_as_bucket_view(group: Group) -> list[Tensor]:
    tensors, model = trains_like_one_process(
        group, gradient_as_bucket_view=True, bucket_cap_mb=0.004
    )
    storages = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) < len(weights(model)), "no two gradients share a bucket"
    return tensors


class Branches(nn.Module):
    """Two ways through, one for a caller to take, and a layer that is never used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(6, 8)
        self.ways = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        self.unused = nn.Linear(8, 3)

    def forward(self, inputs: Tensor, way: int) -> Tensor:
        return self.ways[way](torch.tanh(self.stem(inputs)))


def find_unused_parameters(group: Group) -> list[Tensor]:
    def way(step: int, rank: int) -> int:
        # Together, apart, and together on the other one.
        return (step + rank * (step % 2)) % 2

    alone, mine = Branches(0), replica(group, Branches, find_unused_parameters=True)
    one, many = descent(alone), descent(mine)
    for step, batch in enumerate(batches(6)):
        one.zero_grad()
        many.zero_grad()
        losses = [
            nn.functional.mse_loss(alone(inputs, way(step, rank)), targets)
            for rank, (inputs, targets) in enumerate(shards(batch))
        ]
        torch.stack(losses).mean().backward()
        inputs, targets = shard(batch)
        nn.functional.mse_loss(mine(inputs, way(step, dist.get_rank())), targets).backward()
        one.step()
        many.step()
    assert mine.module.unused.weight.grad is None
    close(weights(mine), weights(alone))
    return weights(mine)


class Reentered(nn.Module):
    """One layer used twice, one that is computed again in backward, and one never used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.twice, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.unused = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(2):
            hidden = torch.tanh(checkpoint(self.twice, hidden, use_reentrant=True))
        return self.last(hidden)


def static_graph(group: Group) -> list[Tensor]:
    return trains_like_one_process(group, Reentered, static_graph=True)[0]


def no_sync(group: Group) -> list[Tensor]:
    """Two batches gather gradients silently and the third sends them all."""
    data = batches(6)
    alone, mine = perceptron(), replica(group)
    one, many = descent(alone), descent(mine)
    for start in (0, 3):
        one.zero_grad()
        many.zero_grad()
        local = copy.deepcopy(mine.module)
        for index in range(start, start + 3):
            squares(alone, *data[index]).backward()
            silent = index < start + 2
            with mine.no_sync() if silent else nullcontext():
                squares(mine, *shard(data[index])).backward()
            if silent:
                squares(local, *shard(data[index])).backward()
                same_bits(gradients(mine), gradients(local))
        close(gradients(mine), gradients(alone))
        one.step()
        many.step()
    close(weights(mine), weights(alone))
    return weights(mine)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


class Mixed(nn.Module):
    """Layers of three types, one behind the other."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.plain = nn.Linear(6, 16)
        self.wide = nn.Linear(16, 16, dtype=torch.float64)
        self.short = nn.Linear(16, 3, dtype=torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(torch.tanh(self.plain(inputs)).double()))
        return self.short(hidden.bfloat16()).float()


def mixed_dtypes(group: Group) -> list[Tensor]:
    alone, mine = Mixed(0), replica(group, Mixed)
    train(alone, batches())
    train(mine, [shard(batch) for batch in batches()])
    # bfloat16 has 8 bits: half a unit in the last place of each gradient is 0.2 % of it.
    close([p.double() for p in weights(mine)], [p.double() for p in weights(alone)], **COARSE)
    assert {p.dtype for p in weights(mine)} == {torch.float32, torch.float64, torch.bfloat16}
    return weights(mine)


COARSE = {"rtol": 0.0, "atol": 4e-3}


class Words(nn.Module):
    """Sparse gradients beside dense ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(20, 8, sparse=True)
        self.bags = nn.EmbeddingBag(20, 8, mode="sum", sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        # Words that repeat within a row, and rows whose words no other rank has.
        words = (inputs.abs() * 7).long() % 20
        return self.head(self.table(words).mean(1) + self.bags(words))


def sparse_embeddings(group: Group) -> list[Tensor]:
    def plain_descent(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    tensors, model = trains_like_one_process(group, Words, plain_descent)
    assert model.module.table.weight.grad.is_sparse
    return tensors


class Normed(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.register_buffer("first_seen_by", torch.tensor(seed))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def buffers_come_from_rank_0(group: Group) -> list[Tensor]:
    """Statistics are each rank's own within a step, and rank 0's at the start of the next."""
    alone, mine = Normed(0), replica(group, Normed)
    optimizer = descent(alone)
    for batch in batches():
        optimizer.zero_grad()
        before = copy.deepcopy(list(alone.buffers()))
        for rank in reversed(range(dist.get_world_size())):
            for buffer, value in zip(alone.buffers(), before, strict=True):
                buffer.copy_(value)
            (squares(alone, *shard(batch, rank)) / dist.get_world_size()).backward()
        # The buffers now hold the values of rank 0, which came last.
        optimizer.step()
    train(mine, [shard(batch) for batch in batches()])
    # One more forward, before which rank 0's buffers go round.
    mine.eval()
    mine(torch.zeros(1, 6))
    expected = [*weights(alone), *alone.buffers()]
    close([*weights(mine), *mine.module.buffers()], expected)
    return [*weights(mine), *mine.module.buffers()]


# Uneven inputs.


def uneven(rank: int) -> int:
    """How many of the batches a rank has."""
    return STEPS - 2 * rank


def steps_while_others_last(
    model: nn.Module, optimizer: torch.optim.Optimizer, divide_by_all: bool
) -> None:
    """The steps of one process for ranks that run out of data one by one."""
    world = dist.get_world_size()
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        losses = [
            squares(model, *shard(batch, rank)) for rank in range(world) if step < uneven(rank)
        ]
        (torch.stack(losses).sum() / (world if divide_by_all else len(losses))).backward()
        optimizer.step()


def my_uneven_shards() -> list[tuple[Tensor, Tensor]]:
    return [shard(batch) for batch in batches()[: uneven(dist.get_rank())]]


def join_uneven_inputs(group: Group) -> list[Tensor]:
    tensors = []
    for divide_by_all in (True, False):
        alone, mine = perceptron(), replica(group)
        steps_while_others_last(alone, descent(alone), divide_by_all)
        with mine.join(divide_by_initial_world_size=divide_by_all):
            train(mine, my_uneven_shards())
        close(weights(mine), weights(alone))
        tensors += weights(mine)
    return tensors


def join_stops_everyone_early(group: Group) -> list[Tensor]:
    """With throw_on_early_termination every rank hears of the first that runs out."""
    mine, done = replica(group), 0
    optimizer = descent(mine)
    try:
        with mine.join(throw_on_early_termination=True):
            for batch in my_uneven_shards():
                train(mine, [batch], optimizer)
                done += 1
    except RuntimeError as error:
        assert "exhausted" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("the ranks ended well though one of them had fewer inputs")
    alone = perceptron()
    fewest = uneven(dist.get_world_size() - 1)
    train(alone, batches()[:fewest])
    assert done == fewest
    close(weights(mine), weights(alone))
    return weights(mine)


class HandedOn(Joinable):
    """Gives rank 0's gradients to all, so that a rank without data has some to optimize with."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        super().__init__()
        self.model, self.group = model, group

    def __call__(self) -> None:
        Join.notify_join_context(self)
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.broadcast(parameter.grad, group_src=0, group=self.group)

    def join_hook(self, **_: Any) -> JoinHook:
        hook = JoinHook()
        hook.main_hook = self.__call__
        return hook

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Group:
        return self.group


def join_of_several(group: Group) -> list[Tensor]:
    """DDP, a class of one's own and a sharded optimizer run out of data together."""
    alone = perceptron()
    steps_while_others_last(alone, torch.optim.Adam(alone.parameters(), lr=0.01), True)
    mine = replica(group)
    handed_on = HandedOn(mine, group)
    optimizer = ZeroRedundancyOptimizer(
        mine.parameters(), torch.optim.Adam, process_group=group, lr=0.01
    )
    with Join([mine, handed_on, optimizer]):
        for batch in my_uneven_shards():
            optimizer.zero_grad()
            squares(mine, *batch).backward()
            handed_on()
            optimizer.step()
    close(weights(mine), weights(alone), **AFTER_ADAM)
    return weights(mine)


# Adam divides by the root of a square: where a gradient is near 0 its noise shows in the weights.
AFTER_ADAM = {"rtol": 1e-4, "atol": 1e-4}


# Communication hooks.


def hooked(group: Group, hook: Callable[..., Any], state: Any = None) -> list[Tensor]:
    mine = replica(group, bucket_cap_mb=0.002)
    mine.register_comm_hook(state, hook)
    losses = train(mine, [shard(batch) for batch in batches()])
    return [mean_over(group, losses), *weights(mine)]


def compressed(group: Group, hook: Callable[..., Any], bits: int) -> list[Tensor]:
    """A hook that rounds gradients to ``bits`` bits; they sum up to a few units over the steps."""
    tensors = hooked(group, hook, group)
    alone = perceptron()
    losses = train(alone, batches())
    close(tensors, [losses, *weights(alone)], rtol=0, atol=4 * 2.0**-bits)
    return tensors


def allreduce_hook(group: Group) -> list[Tensor]:
    return compressed(group, default_hooks.allreduce_hook, 20)  # of 24: losses add up many


def fp16_compress_hook(group: Group) -> list[Tensor]:
    return compressed(group, default_hooks.fp16_compress_hook, 11)


def bf16_compress_hook(group: Group) -> list[Tensor]:
    if not (torch.version.cuda and dist.is_nccl_available()):
        raise NotHereError("DDP takes this hook only from a torch that was built with NCCL")
    return compressed(group, default_hooks.bf16_compress_hook, 8)


def builtin_hooks(group: Group) -> list[Tensor]:
    """The same in C++."""
    tensors = []
    for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        mine, alone = replica(group), perceptron()
        mine._register_builtin_comm_hook(hook)
        train(mine, [shard(batch) for batch in batches()])
        train(alone, batches())
        close(weights(mine), weights(alone), rtol=0, atol=4 * 2.0**-11)
        tensors += weights(mine)
    return tensors


def power_sgd(group: Group, hook: Callable[..., Any], **options: Any) -> list[Tensor]:
    state = powerSGD_hook.PowerSGDState(
        group, start_powerSGD_iter=2, min_compression_rate=1.5, **options
    )
    tensors = hooked(group, hook, state)
    before, after = state.total_numel_before_compression, state.total_numel_after_compression
    assert after < before, (before, after)
    return tensors


def power_sgd_hook(group: Group) -> list[Tensor]:
    return [
        tensor
        for rank in (1, 2)
        for tensor in power_sgd(group, powerSGD_hook.powerSGD_hook, matrix_approximation_rank=rank)
    ]


def power_sgd_hook_in_halves(group: Group) -> list[Tensor]:
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    return power_sgd(group, hook, orthogonalization_epsilon=1e-6)


# Sharded optimizers.


def zero_redundancy_optimizer(group: Group) -> list[Tensor]:
    tensors = []
    for view in (False, True):
        alone, mine = perceptron(), replica(group, gradient_as_bucket_view=view)
        one = torch.optim.Adam(alone.parameters(), lr=0.01)
        many = ZeroRedundancyOptimizer(
            mine.parameters(),
            torch.optim.Adam,
            process_group=group,
            parameters_as_bucket_view=view,
            lr=0.01,
        )
        train(alone, batches(), one)
        train(mine, [shard(batch) for batch in batches()], many)
        close(weights(mine), weights(alone), **AFTER_ADAM)
        assert len(many.optim.state) < len(weights(mine)), "every rank keeps all of the state"
        many.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            expected = one.state_dict()["state"]
            torch.testing.assert_close(many.state_dict()["state"], expected, **AFTER_ADAM)
        tensors += weights(mine)
    return tensors


def zero_in_backward(
    group: Group, make_hook: Callable[..., Any], *, shard_buckets: bool, **options: Any
) -> list[Tensor]:
    alone, mine = perceptron(), replica(group, **options)
    many = ZeroRedundancyOptimizer(
        mine.parameters(),
        torch.optim.SGD,
        process_group=group,
        overlap_with_ddp=True,
        lr=0.1,
        momentum=0.9,
    )
    hook = make_hook(default_hooks.allreduce_hook, mine, many, shard_buckets=shard_buckets)
    mine.register_comm_hook(group, hook)
    train(mine, [shard(batch) for batch in batches()], many)
    # DDP settles its buckets in the first two steps, and the optimizer waits for that.
    train(alone, batches()[2:])
    close(weights(mine), weights(alone))
    return weights(mine)


def zero_after_backward(group: Group) -> list[Tensor]:
    hook = ddp_zero_hook.hook_with_zero_step
    return [
        tensor
        for shard_buckets in (False, True)
        for tensor in zero_in_backward(group, hook, shard_buckets=shard_buckets)
    ]


def zero_interleaved_with_backward(group: Group) -> list[Tensor]:
    """One bucket, so that nothing else is started while its callback broadcasts.

    With more of them threads race to start broadcasts and all_reduces, in an order that differs
    between ranks wherever a future completes later than its operation is started.
    """
    hook = ddp_zero_hook.hook_with_zero_step_interleaved
    return zero_in_backward(group, hook, shard_buckets=False, bucket_cap_mb=25)


# Averages of models instead of gradients.


def average(models: Sequence[nn.Module], read: Callable[[Tensor], Tensor]) -> None:
    """Give what ``read`` finds in the parameters of all ``models`` their mean."""
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([read(parameter) for parameter in same]).mean(0)
        for parameter in same:
            read(parameter).copy_(mean)


def local_sgd_in_one_process(
    warmup: int, near: int, average_after: Callable[[int], int], steps: int
) -> list[nn.Module]:
    """The model of every rank.

    Gradients are averaged over all ranks for ``warmup`` steps and then over ``near`` neighbours;
    after step ``i`` models are averaged over ``average_after(i)`` neighbours.
    """
    world = dist.get_world_size()
    models = [perceptron() for _ in range(world)]
    optimizers = [descent(model) for model in models]
    for step, batch in enumerate(batches(steps)):
        for model, optimizer, mine in zip(models, optimizers, shards(batch), strict=True):
            optimizer.zero_grad()
            squares(model, *mine).backward()
        size = world if step < warmup else near
        for first in range(0, world, size):
            average(models[first : first + size], lambda parameter: parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
        size = average_after(step)
        for first in range(0, world, size):
            average(models[first : first + size], lambda parameter: parameter.data)
    return models


WARMUP = 2


def local_sgd(group: Group, size: int, averager: Any, steps: int) -> list[Tensor]:
    mine = replica(group)
    # My neighbours, on the backend that the group has; alone when the group is me.
    size = min(size, group.size())
    near, _ = dist.new_subgroups(size, timeout=PATIENCE, backend=dist.get_backend(group))
    state = post_localSGD_hook.PostLocalSGDState(group, near, start_localSGD_iter=WARMUP)
    mine.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(descent(mine), averager)
    train(mine, [shard(batch) for batch in batches(steps)], optimizer)
    return weights(mine)


def post_local_sgd(group: Group) -> list[Tensor]:
    """From the third step on gradients stay local, and every second step averages models."""
    steps, world = 7, dist.get_world_size()
    averager = PeriodicModelAverager(2, WARMUP, process_group=group)
    mine = local_sgd(group, 1, averager, steps)

    def averaged_after(step: int) -> int:
        return world if step >= WARMUP and (step - WARMUP) % 2 == 0 else 1

    by_rank = local_sgd_in_one_process(WARMUP, 1, averaged_after, steps)
    close(mine, weights(by_rank[dist.get_rank()]))
    return mine


def hierarchical_sgd(group: Group) -> list[Tensor]:
    """Pairs average their models every second step, and all four every fourth."""
    steps, world = 8, dist.get_world_size()
    sizes = OrderedDict([(2, min(2, group.size())), (4, group.size())])
    averager = HierarchicalModelAverager(sizes, WARMUP, process_group=group)
    mine = local_sgd(group, 1, averager, steps)

    def averaged_after(step: int) -> int:
        if step < WARMUP or step % 2:
            return 1
        return 2 if step % 4 else world

    by_rank = local_sgd_in_one_process(WARMUP, 1, averaged_after, steps)
    # The last step averages nothing: the weights of all ranks differ.
    close(mine, weights(by_rank[dist.get_rank()]))
    return mine


# SyncBatchNorm. torch has its kernels for GPUs alone and refuses the module on CPU; its autograd
# function, which does all of the communication, asks only for the kernels.


def over_channels(values: Tensor) -> Tensor:
    """Sum over all dimensions but that of the channels, which is the second."""
    return values.transpose(0, 1).flatten(1).sum(1)


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def batch_norm_stats(inputs: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = inputs.numel() / inputs.size(1)
    mean = over_channels(inputs) / rows
    variance = over_channels((inputs - per_channel(mean, inputs)) ** 2) / rows
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    inputs: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    total, share = counts.sum(), (counts / counts.sum()).unsqueeze(1)
    mean = (means * share).sum(0)
    variance = ((inverses**-2 - eps + (means - mean) ** 2) * share).sum(0)
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(variance * total / (total - 1), momentum)
    return mean, (variance + eps).rsqrt()


def batch_norm_elemt(
    inputs: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    scaled = (inputs - per_channel(mean, inputs)) * per_channel(inverse * weight, inputs)
    return scaled + per_channel(bias, inputs)


def batch_norm_backward_reduce(
    gradient: Tensor, inputs: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = over_channels(gradient)
    product = over_channels(gradient * (inputs - per_channel(mean, inputs)))
    return total, product, product * inverse, total


def batch_norm_backward_elemt(
    gradient: Tensor,
    inputs: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    total: Tensor,
    product: Tensor,
    counts: Tensor,
) -> Tensor:
    rows = counts.sum()
    slope = per_channel(inverse**2 * product / rows, inputs)
    rest = gradient - per_channel(total / rows, inputs)
    rest = rest - (inputs - per_channel(mean, inputs)) * slope
    return rest * per_channel(inverse * weight, inputs)


@functools.cache
def library_with_kernels() -> torch.library.Library:
    """The kernels above, given to torch in the processes that need them."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        library.impl(kernel.__name__, kernel)
    return library


class Synchronized(nn.BatchNorm1d):
    """SyncBatchNorm without its look at the device."""

    group: Group

    def forward(self, inputs: Tensor) -> Tensor:
        return SyncBatchNormFunction.apply(
            inputs,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.eps,
            self.momentum,
            self.group,
            self.group.size(),
        )


def sync_batch_norm(group: Group) -> list[Tensor]:
    """The ranks normalize by the statistics of all rows; one rank has more of them."""
    library_with_kernels()
    alone = Normed(0)

    def make(seed: int) -> nn.Module:
        model = Normed(seed)
        model.layers[1] = Synchronized(8)
        model.layers[1].group = group
        return model

    mine = replica(group, make)
    world, rank = dist.get_world_size(), dist.get_rank()
    first = 0 if rank == 0 else ROWS * rank + 2
    last = ROWS * (rank + 1) + 2 if rank < world - 1 else ROWS * world
    one, many = descent(alone), descent(mine)
    for inputs, targets in batches():
        one.zero_grad()
        many.zero_grad()
        squares(alone, inputs, targets).backward()
        # DDP takes the mean over ranks, which are not equal here: so each scales its part.
        errors = nn.functional.mse_loss(mine(inputs[first:last]), targets[first:last])
        (errors * (last - first) / ROWS).backward()
        one.step()
        many.step()
    statistics = [mine.module.layers[1].running_mean, mine.module.layers[1].running_var]
    expected = [alone.layers[1].running_mean, alone.layers[1].running_var]
    close([*weights(mine), *statistics], [*weights(alone), *expected], rtol=1e-5, atol=1e-5)
    return [*weights(mine), *statistics]


# gloo refuses the first two by name. The last averages over more than two ranks, in any order.
WITHOUT_GLOO = [zero_after_backward, zero_interleaved_with_backward, hierarchical_sgd]
ON_TWO_RANKS = [
    gradient_as_bucket_view,
    find_unused_parameters,
    static_graph,
    no_sync,
    mixed_dtypes,
    sparse_embeddings,
    buffers_come_from_rank_0,
    join_uneven_inputs,
    join_stops_everyone_early,
    join_of_several,
    allreduce_hook,
    fp16_compress_hook,
    bf16_compress_hook,
    builtin_hooks,
    zero_redundancy_optimizer,
    zero_after_backward,
    zero_interleaved_with_backward,
    post_local_sgd,
    sync_batch_norm,
]
# These wait in the callback of one future for another.
NESTED_ON_TWO_RANKS = [power_sgd_hook, power_sgd_hook_in_halves]
ON_FOUR_RANKS = [hierarchical_sgd]
