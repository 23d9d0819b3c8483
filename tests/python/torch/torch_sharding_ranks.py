"""The rank functions of test_torch_sharding.py, one per scenario.

``run`` gives every scenario a process group of its own, so that one that fails leaves the others
their chance, and returns what became of each. Expected values come from one process that does the
work of all ranks: nothing here is compared with a second run over the same backend.

Where a sum has two terms, or the order of the terms is the same, the same bits are asked for.
Elsewhere ``torch.testing.assert_close`` with its tolerance for float32 (1.3e-6 of the value): sums
of a few dozen terms near 1 whose order differs.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipelines
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

Scenario = Callable[[], None]
close = torch.testing.assert_close
# A scenario that hangs fails by itself after this long, well before the limit of the whole run.
TIMEOUT = timedelta(seconds=20)
STEPS = 3
# Rows of the batch for each data-parallel rank.
ROWS = 4


def run(names: list[str], backend: str = "unisono") -> dict[str, str | None]:
    """Run scenarios and return, by name, None or the traceback of the one that failed."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*master, world, rank == 0)
    outcomes = {}
    for name in names:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(name, store),
            rank=rank,
            world_size=world,
            timeout=TIMEOUT,
        )
        try:
            globals()[name]()
            outcomes[name] = None
        except Exception:
            outcomes[name] = traceback.format_exc()
        dist.destroy_process_group()
    # Rank 0 serves the store: it stays until no rank needs it.
    store.add("finished", 1)
    if rank == 0:
        store.wait([f"finished by {peer}" for peer in range(1, world)])
    else:
        store.set(f"finished by {rank}", "")
    return outcomes


class Network(nn.Module):
    """Three layers, none of whose sizes two or four ranks divide evenly, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 13)
        self.norm = nn.LayerNorm(13)
        self.second = nn.Linear(13, 5)
        self.last = nn.Linear(5, 3, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.first(rows)))
        return self.last(torch.tanh(self.second(hidden)))


def batches(rows: int, outputs: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of every step, for all ranks together."""
    torch.manual_seed(1)
    return [(torch.randn(rows, 6), torch.randn(rows, outputs)) for _ in range(STEPS)]


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    # Not Adam, which forgets the scale of gradients: a SUM in place of AVG would pass.
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def train_alone(
    ranks: int,
    divisor: float | None = None,
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
) -> tuple[Network, list[list[float]]]:
    """Do in one process what data-parallel ranks do, in the same order of arithmetic.

    Each rank's rows go through a copy in ``dtype``; its gradients are summed in float32 and divided
    by ``divisor``, the number of ranks if None. Returns the network and the losses of each step.
    """
    network = Network()
    optimizer = optimizer_of(network)
    losses = []
    for inputs, targets in batches(ranks * ROWS):
        optimizer.zero_grad()
        losses.append([])
        for rows, wanted in zip(inputs.chunk(ranks), targets.chunk(ranks), strict=True):
            copy = Network().to(dtype)
            with torch.no_grad():
                for theirs, ours in zip(copy.parameters(), network.parameters(), strict=True):
                    theirs.copy_(ours)
            loss = functional.mse_loss(copy(rows.to(dtype)), wanted.to(dtype))
            loss.backward()
            losses[-1].append(loss.item())
            for theirs, ours in zip(copy.parameters(), network.parameters(), strict=True):
                assert theirs.grad is not None
                gradient = theirs.grad.float()
                ours.grad = gradient if ours.grad is None else ours.grad + gradient
        for parameter in network.parameters():
            parameter.grad /= divisor or ranks
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
    return network, losses


def train(
    network: nn.Module,
    ranks: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
) -> list[float]:
    optimizer = optimizer_of(network)
    losses = []
    for inputs, targets in batches(ranks * ROWS):
        optimizer.zero_grad()
        loss = functional.mse_loss(
            network(inputs.chunk(ranks)[rank]), targets.chunk(ranks)[rank].to(dtype)
        )
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    close(actual, expected, rtol=0, atol=0)


def compare(
    network: nn.Module,
    expected: nn.Module,
    check: Callable[[torch.Tensor, torch.Tensor], None] = same_bits,
) -> None:
    for (name, mine), theirs in zip(network.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(mine, DTensor), name
        check(mine.full_tensor().detach(), theirs.detach())


def sharded(mesh: DeviceMesh, **options: Any) -> Network:
    """Two groups of parameters: those of ``first``, and the rest."""
    network = Network()
    fully_shard(network.first, mesh=mesh, **options)
    return fully_shard(network, mesh=mesh, **options)


def line(name: str = "dp") -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


# Two ranks: fully sharded data parallelism.


def fsdp2_trains() -> None:
    rank, mesh = dist.get_rank(), line()
    expected, losses = train_alone(2)
    for options in ({}, {"reshard_after_forward": False}):
        network = sharded(mesh, **options)
        assert train(network, 2, rank) == [step[rank] for step in losses]
        compare(network, expected)


def fsdp2_clips_gradients() -> None:
    # The norm of a sharded gradient is a Partial: reading it is an all_reduce.
    rank = dist.get_rank()
    expected, losses = train_alone(2, clip=0.1)
    network = sharded(line())
    close(torch.tensor(train(network, 2, rank, clip=0.1)), torch.tensor(losses)[:, rank])
    compare(network, expected, close)


def fsdp2_accumulates_without_communication() -> None:
    rank, network = dist.get_rank(), sharded(line())
    inputs, targets = batches(2 * ROWS)[0]
    expected = Network()
    functional.mse_loss(expected(inputs), targets).backward()
    for half in range(2):
        last = half == 1
        network.set_requires_gradient_sync(last)
        rows = slice(rank * ROWS + half * 2, rank * ROWS + half * 2 + 2)
        (functional.mse_loss(network(inputs[rows]), targets[rows]) / 2).backward()
        if not last:
            assert all(parameter.grad is None for parameter in network.parameters())
    for mine, theirs in zip(network.parameters(), expected.parameters(), strict=True):
        close(mine.grad.full_tensor(), theirs.grad)


def fsdp2_mixes_precision() -> None:
    rank, half = dist.get_rank(), torch.bfloat16
    expected, losses = train_alone(2, dtype=half)
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    network = sharded(line(), mp_policy=policy)
    assert train(network, 2, rank, half) == [step[rank] for step in losses]
    compare(network, expected)
    assert all(parameter.dtype == torch.float32 for parameter in network.parameters())


def fsdp2_reduces_in_half_precision() -> None:
    # float16 may overflow: torch divides before and after a SUM instead of asking for AVG.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    expected, _ = train_alone(2)
    network = sharded(line(), mp_policy=policy)
    train(network, 2, dist.get_rank())
    # Gradients are rounded to 11 bits, and rounded again after the division.
    compare(network, expected, lambda mine, theirs: close(mine, theirs, rtol=2e-3, atol=1e-3))


class Watched(ReduceScatter):
    """The reduce_scatter of torch, which also says with which operator it was called."""

    def __init__(self) -> None:
        self.operators: list[Any] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.operators.append(op)
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )


def fsdp2_divides_by_another_factor() -> None:
    rank, mesh = dist.get_rank(), line()
    ops = dist.ReduceOp
    for factor, operator in ((None, ops.AVG), (2.0, ops.AVG), (3.0, ops.PREMUL_SUM)):
        network, watched = sharded(mesh), Watched()
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(watched)
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
        train(network, 2, rank)
        assert len(watched.operators) == 2 * STEPS
        assert all(op == operator for op in watched.operators), (factor, watched.operators)
        expected, _ = train_alone(2, factor)
        # A multiplication by 1/3 before the sum rounds otherwise than a division after it.
        compare(network, expected, same_bits if operator == ops.AVG else close)


def fsdp1_trains() -> None:
    rank = dist.get_rank()
    expected, losses = train_alone(2)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        network = Network()
        options = {"device_id": torch.device("cpu"), "use_orig_params": True}
        network.first = FullyShardedDataParallel(
            network.first, sharding_strategy=strategy, **options
        )
        network = FullyShardedDataParallel(network, sharding_strategy=strategy, **options)
        close(torch.tensor(train(network, 2, rank)), torch.tensor(losses)[:, rank])
        with FullyShardedDataParallel.summon_full_params(network):
            for mine, theirs in zip(network.parameters(), expected.parameters(), strict=True):
                close(mine.detach(), theirs.detach())


# Two ranks: distributed tensors and tensor parallelism.


def dtensor_redistributes() -> None:
    mesh = line()
    one_dimension = [Replicate(), Shard(0), Shard(1), Shard(2), Partial()]
    check_redistribution(mesh, [[placement] for placement in one_dimension])


def check_redistribution(mesh: DeviceMesh, layouts: list[list[Placement]]) -> None:
    """Bring tensors from every layout to every other, some of whose dimensions divide unevenly."""
    for shape in ((4, 6, 8), (5, 3, 1), (7, 1, 2), (1, 2, 3)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for source in layouts:
            partial = any(placement.is_partial() for placement in source)
            if partial:
                # Every rank holds all of it, and the sum over a Partial dimension counts them.
                copies = 1
                for size, placement in zip(mesh.shape, source, strict=True):
                    copies *= size if placement.is_partial() else 1
                kept = [Replicate() if p.is_partial() else p for p in source]
                local = distribute_tensor(whole, mesh, kept).to_local() / copies
                tensor = DTensor.from_local(
                    local, mesh, source, shape=whole.shape, stride=whole.stride()
                )
            else:
                tensor = distribute_tensor(whole, mesh, source)
            for target in layouts:
                # Making a Partial of something else is for torch's internal use.
                if target != source and any(placement.is_partial() for placement in target):
                    continue
                moved = tensor.redistribute(mesh, target)
                assert list(moved.placements) == target
                same_bits(moved.full_tensor(), whole)
                if not any(placement.is_partial() for placement in target):
                    local = distribute_tensor(whole, mesh, target).to_local()
                    same_bits(moved.to_local(), local)


def dtensor_computes() -> None:
    mesh = line()
    torch.manual_seed(3)
    left, right, bias = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
    for ours, theirs in (
        ([Shard(0)], [Replicate()]),
        ([Replicate()], [Shard(1)]),
        # The product is a Partial: adding the bias makes it whole.
        ([Shard(1)], [Shard(0)]),
    ):
        a, b, c = (tensor.clone().requires_grad_() for tensor in (left, right, bias))
        expected = functional.softmax(a @ b + c, dim=1)
        weights = torch.arange(15.0).view(5, 3)
        (expected * weights).sum().backward()
        x = distribute_tensor(left, mesh, ours).requires_grad_()
        y = distribute_tensor(right, mesh, theirs).requires_grad_()
        z = distribute_tensor(bias, mesh, [Replicate()]).requires_grad_()
        result = functional.softmax(x @ y + z, dim=1)
        (result * distribute_tensor(weights, mesh, [Replicate()])).sum().backward()
        close(result.full_tensor(), expected)
        for mine, other in ((x, a), (y, b), (z, c)):
            close(mine.grad.full_tensor(), other.grad)
    for placement in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(left, mesh, [placement])
        close(tensor.sum().full_tensor(), left.sum())
        close(tensor.mean(0).full_tensor(), left.mean(0))
        same_bits(tensor.max().full_tensor(), left.max())
        same_bits(tensor.amin(1).full_tensor(), left.amin(1))
        close(torch.linalg.vector_norm(tensor).full_tensor(), left.norm())
        same_bits(tensor.t().full_tensor(), left.t())


def dtensor_shards_a_module() -> None:
    # distribute_tensor scatters from rank 0: what others hold is not used.
    mesh, network = line(), Network()
    if dist.get_rank():
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.zero_()

    def shard(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            module.register_parameter(name, whole)

    compare(distribute_module(network, mesh, shard), Network())


class Tokens(nn.Module):
    """A block over sequences, and a head over a vocabulary of 10."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        return self.head(self.down(functional.gelu(self.up(hidden))))


def tokens_step(network: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    tokens, wanted = torch.randint(10, (3, 4)), torch.randint(10, (3, 4))
    optimizer.zero_grad()
    loss = functional.cross_entropy(network(tokens).flatten(0, 1), wanted.flatten())
    loss.backward()
    optimizer.step()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def compare_tokens(network: nn.Module, parallel_loss: bool = False) -> None:
    alone = Tokens()
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (network, alone)]
    for step in range(STEPS):
        expected = tokens_step(alone, optimizers[1], step)
        if parallel_loss:
            with loss_parallel():
                loss = tokens_step(network, optimizers[0], step)
        else:
            loss = tokens_step(network, optimizers[0], step)
        close(loss, expected)
    for (name, mine), theirs in zip(
        network.named_parameters(), alone.named_parameters(), strict=True
    ):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        close(whole, theirs[1], msg=lambda text, name=name: f"{name}: {text}")


def tensor_parallel_by_columns_and_rows() -> None:
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    compare_tokens(parallelize_module(Tokens(), line("tp"), plan))


def tensor_parallel_with_sequences() -> None:
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    compare_tokens(parallelize_module(Tokens(), line("tp"), plan))


def tensor_parallel_loss() -> None:
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
    }
    network = parallelize_module(Tokens(), line("tp"), plan)
    column = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(network.head, network.up.weight.device_mesh, column)
    compare_tokens(network, parallel_loss=True)


# Two ranks: pipelines.


PARTS = 4
MICROBATCHES = 4


def layers() -> nn.ModuleList:
    torch.manual_seed(11)
    return nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(PARTS))


def pipeline_alone() -> tuple[nn.ModuleList, list[torch.Tensor]]:
    """Train all layers here, microbatch by microbatch."""
    parts = layers()
    network = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for inputs, targets in batches(MICROBATCHES * 3, outputs=6):
        optimizer.zero_grad()
        chunks = zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
        step = [functional.mse_loss(network(rows), wanted) for rows, wanted in chunks]
        (torch.stack(step).mean()).backward()
        losses.append(torch.stack(step).detach())
        optimizer.step()
    return parts, losses


def check_pipeline(schedule: type, mine: list[list[int]]) -> None:
    """Train with the layers of each stage in ``mine``; a stage has one layer, or half of them."""
    rank, parts = dist.get_rank(), layers()
    stages = len(mine[0]) * 2
    width = PARTS // stages
    modules = {
        index: nn.Sequential(*parts[index * width : (index + 1) * width]) for index in mine[rank]
    }
    device = torch.device("cpu")
    staged = [PipelineStage(modules[index], index, stages, device) for index in modules]
    single = len(staged) == 1
    plan = schedule(staged[0] if single else staged, MICROBATCHES, loss_fn=functional.mse_loss)
    weights = [weight for module in modules.values() for weight in module.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    expected, losses = pipeline_alone()
    for step, (inputs, targets) in enumerate(batches(MICROBATCHES * 3, outputs=6)):
        optimizer.zero_grad()
        arguments = (inputs,) if 0 in modules else ()
        if stages - 1 in modules:
            found: list[torch.Tensor] = []
            plan.step(*arguments, target=targets, losses=found)
            close(torch.stack(found).detach(), losses[step])
        else:
            plan.step(*arguments)
        optimizer.step()
    for index, module in modules.items():
        theirs = nn.Sequential(*expected[index * width : (index + 1) * width])
        for weight, wanted in zip(module.parameters(), theirs.parameters(), strict=True):
            close(weight, wanted)


def pipeline_gpipe() -> None:
    check_pipeline(pipelines.ScheduleGPipe, [[0], [1]])


def pipeline_1f1b() -> None:
    check_pipeline(pipelines.Schedule1F1B, [[0], [1]])


def pipeline_with_a_group_per_edge() -> None:
    # One group for each direction between neighbours, made by split_group.
    import torch.distributed.config as settings

    with settings.patch(pipeline_per_edge_p2p=True):
        pipeline_1f1b()


def pipeline_interleaved_1f1b() -> None:
    check_pipeline(pipelines.ScheduleInterleaved1F1B, [[0, 2], [1, 3]])


def pipeline_interleaved_zero_bubble() -> None:
    check_pipeline(pipelines.ScheduleInterleavedZeroBubble, [[0, 2], [1, 3]])


def pipeline_zbv_zero_bubble() -> None:
    check_pipeline(pipelines.ScheduleZBVZeroBubble, [[0, 3], [1, 2]])


# Four ranks: meshes of two dimensions.


def mesh_has_groups() -> None:
    rank, mesh = dist.get_rank(), square()
    assert list(mesh.get_coordinate() or []) == [rank // 2, rank % 2]
    groups = {"outer": [rank % 2, rank % 2 + 2], "inner": [rank // 2 * 2, rank // 2 * 2 + 1]}
    for name, members in groups.items():
        group = mesh[name].get_group()
        assert dist.get_process_group_ranks(group) == members
        assert dist.get_backend(group) == dist.get_backend()
        total = torch.tensor([10.0**rank])
        dist.all_reduce(total, group=group)
        same_bits(total, torch.tensor([float(sum(10**member for member in members))]))
    flat = mesh._flatten("all")
    assert flat.size() == 4
    total = torch.tensor([10.0**rank])
    dist.all_reduce(total, group=flat.get_group())
    same_bits(total, torch.tensor([1111.0]))
    assert mesh["outer", "inner"] == mesh


def dtensor_redistributes_on_two_dimensions() -> None:
    layouts: list[list[Placement]] = [
        [Replicate(), Replicate()],
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Shard(1), Partial()],
        [Partial(), Shard(0)],
    ]
    check_redistribution(square(), layouts)


def hsdp_trains() -> None:
    rank = dist.get_rank()
    expected, losses = train_alone(4)
    network = sharded(square())
    close(torch.tensor(train(network, 4, rank)), torch.tensor(losses)[:, rank])
    compare(network, expected, close)


def hsdp_mixes_precision_and_factors() -> None:
    rank, half = dist.get_rank(), torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    network = sharded(square(), mp_policy=policy)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(8.0)
    inputs, targets = (tensor.chunk(4)[rank] for tensor in batches(4 * ROWS)[0])
    functional.mse_loss(network(inputs), targets.to(half)).backward()
    total = [torch.zeros_like(parameter) for parameter in Network().parameters()]
    for rows, wanted in zip(*(tensor.chunk(4) for tensor in batches(4 * ROWS)[0]), strict=True):
        alone = Network().to(half)
        functional.mse_loss(alone(rows.to(half)), wanted.to(half)).backward()
        for entry, parameter in zip(total, alone.parameters(), strict=True):
            entry.add_(parameter.grad.float() / 8)
    for mine, theirs in zip(network.parameters(), total, strict=True):
        close(mine.grad.full_tensor(), theirs)


def sharded_data_and_tensor_parallel() -> None:
    mesh = square()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    network = parallelize_module(Tokens(), mesh["inner"], plan)
    # Every data-parallel rank has the same rows, so that the average is what one process gets.
    compare_tokens(fully_shard(network, mesh=mesh["outer"]))
