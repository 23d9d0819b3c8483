"""The rank functions of `test_torch_operators.py`: the operators of `torch.ops.unisono`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

LAYERS = 3
WIDTH = 48
TOKENS = 11


def join(backend: str = "unisono") -> tuple[int, int, str]:
    """Make the group; this rank, the number of ranks, the group's name."""
    dist.init_process_group(backend)
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name


def refusal(call: Callable[[], object]) -> str:
    """Return the type and the text of what the call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"


def values() -> None:
    """Every operator, on tensors in order, transposed and empty, of several types."""
    rank, ranks, group = join()
    ops = torch.ops.unisono
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        rows = torch.arange(ranks * 6).reshape(ranks * 2, 3).to(dtype)
        for whole in (rows, rows.t().contiguous().t(), rows[:0]):
            mine = whole * (rank + 1)
            total = whole * (ranks * (ranks + 1) // 2)
            assert torch.equal(ops.all_reduce(mine, group), total)
            assert torch.equal(mine, whole * (rank + 1))
            assert torch.equal(ops.all_reduce(mine, group, "max"), whole * ranks)
            half = whole.shape[0] // ranks
            share = total[rank * half : (rank + 1) * half]
            assert torch.equal(ops.reduce_scatter(mine, group), share)
            gathered = torch.cat([whole * (each + 1) for each in range(ranks)])
            assert torch.equal(ops.all_gather(mine, group), gathered)
            assert torch.equal(ops.broadcast(mine, group, 1), whole * 2)
            assert torch.equal(mine, whole * (rank + 1))
            assert ops.all_reduce_(mine, group) is None
            assert torch.equal(mine, total)
            mine += rank
            ops.broadcast_(mine, group, ranks - 1)
            assert torch.equal(mine, total + ranks - 1)
    one = torch.tensor(float(rank))
    assert ops.all_gather(one, group).tolist() == list(range(ranks))
    assert ops.all_reduce(one, group, op="avg").item() == (ranks - 1) / 2
    dist.destroy_process_group()


def subgroups() -> None:
    """A group of two of the ranks, by its name."""
    rank, ranks, _ = join()
    pair = dist.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        tensor = torch.full((5,), float(rank + 1))
        torch.ops.unisono.all_reduce_(tensor, pair.group_name)
        assert tensor.tolist() == [1.0 + ranks] * 5
    # The rank that is not in the pair may not take the store away while the others meet there.
    dist.barrier()
    dist.destroy_process_group()


def refusals() -> list[str]:
    _, _, group = join()
    gloo = dist.new_group(backend="gloo").group_name
    ops = torch.ops.unisono
    tensor = torch.ones(3)
    found = [
        refusal(lambda: ops.all_reduce_(tensor, group, "mean")),
        refusal(lambda: ops.all_reduce_(tensor, gloo)),
        refusal(lambda: ops.all_reduce_(tensor, "no such group")),
        refusal(lambda: ops.broadcast_(tensor, group, 7)),
        refusal(lambda: ops.reduce_scatter(tensor, group)),
        refusal(lambda: ops.all_reduce_(tensor.clone().requires_grad_() * 1, group)),
        refusal(lambda: ops.all_reduce(tensor.clone().requires_grad_(), group, "max")),
    ]
    # None of it has cost the group anything.
    ops.all_reduce_(tensor, group)
    assert tensor.tolist() == [float(dist.get_world_size())] * 3
    dist.destroy_process_group()
    return found


def absence(dies: bool) -> str:
    """The error of rank 0 for an operator that rank 1 does not call, because it sleeps or dies."""
    dist.init_process_group("unisono", timeout=timedelta(seconds=3))
    group, tensor = dist.group.WORLD.group_name, torch.ones(3)
    torch.ops.unisono.all_reduce_(tensor, group)
    if dist.get_rank() == 1:
        time.sleep(1 if dies else 6)
        os._exit(0)
    begun = time.monotonic()
    found = refusal(lambda: torch.ops.unisono.all_reduce_(tensor, group))
    assert time.monotonic() - begun < 10
    return found


def derivatives() -> None:
    """Gradients are those of the same mathematics in one process."""
    rank, ranks, group = join()
    ops = torch.ops.unisono

    def check(call: Callable[[Tensor], Tensor], alone: Callable[[Tensor], Tensor]) -> None:
        """`alone` has the inputs of all ranks as rows, and returns the outputs of all."""
        torch.manual_seed(3)
        inputs = torch.randn(ranks, ranks * 2, 5, dtype=torch.float64, requires_grad=True)
        outputs = alone(inputs)
        weights = torch.randn_like(outputs)
        (outputs * weights).sum().backward()
        mine = inputs[rank].detach().clone().requires_grad_()
        output = call(mine)
        torch.testing.assert_close(output, outputs[rank])
        (output * weights[rank]).sum().backward()
        torch.testing.assert_close(mine.grad, inputs.grad[rank])

    def spread(tensor: Tensor) -> Tensor:
        return tensor.expand(ranks, *tensor.shape)

    check(lambda x: ops.all_reduce(x, group), lambda xs: spread(xs.sum(0)))
    check(lambda x: ops.all_reduce(x, group, "avg"), lambda xs: spread(xs.mean(0)))
    check(lambda x: ops.all_gather(x, group), lambda xs: spread(xs.flatten(0, 1)))
    check(
        lambda x: ops.reduce_scatter(x, group),
        lambda xs: xs.sum(0).unflatten(0, (ranks, 2)),
    )
    check(
        lambda x: ops.reduce_scatter(x, group, "avg"),
        lambda xs: xs.mean(0).unflatten(0, (ranks, 2)),
    )
    check(lambda x: ops.broadcast(x, group, 1), lambda xs: spread(xs[1]))

    # torch notices that a tensor saved for the backward pass has been overwritten.
    saved = torch.ones(3, requires_grad=True)
    product = saved * 2
    square = product * product
    with torch.no_grad():
        ops.all_reduce_(product, group)
    assert "modified by an inplace operation" in refusal(lambda: square.sum().backward())
    dist.destroy_process_group()


class Block(nn.Module):
    """A feed-forward block whose weights are split over the ranks: one sum on its way."""

    def __init__(self, rank: int, ranks: int, group: str, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        up, down = torch.randn(4 * WIDTH, WIDTH), torch.randn(WIDTH, 4 * WIDTH)
        self.up = nn.Parameter(up.chunk(ranks)[rank] / 7)
        self.down = nn.Parameter(down.chunk(ranks, 1)[rank] / 14)
        self.group, self.in_place = group, in_place

    def forward(self, x: Tensor) -> Tensor:
        part = torch.relu(x @ self.up.t()) @ self.down.t()
        if self.in_place:
            torch.ops.unisono.all_reduce_(part, self.group)
            return x + part
        return x + torch.ops.unisono.all_reduce(part, self.group)


def compiled(backend: str, in_place: bool) -> None:
    """A model of such blocks, compiled in one graph, gives what it gives uncompiled."""
    rank, ranks, group = join()
    model = nn.Sequential(*(Block(rank, ranks, group, in_place) for _ in range(LAYERS)))
    whole = nn.Sequential(*(Block(0, 1, group, False) for _ in range(LAYERS)))
    fast = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (TOKENS, TOKENS + 6):
        x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
        with torch.inference_mode() if in_place else torch.enable_grad():
            expected, found = model(x), fast(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        alone = x
        for block in whole:
            alone = alone + torch.relu(alone @ block.up.t()) @ block.down.t()
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    if not in_place:
        for each in (model, fast):
            each.zero_grad()
            each(x).square().sum().backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            if each is model:
                expected = gradients
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
    dist.destroy_process_group()


def shapes() -> None:
    """Tensors without memory get the shapes that others get, and nothing is sent."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    rank, ranks, group = join()
    ops = torch.ops.unisono
    if rank == 0:
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(torch.zeros(ranks * 2, 3))
            assert ops.all_gather(fake, group).shape == (ranks * ranks * 2, 3)
            assert ops.reduce_scatter(fake, group).shape == (2, 3)
            assert ops.all_reduce(fake, group).shape == (ranks * 2, 3)
            assert ops.all_reduce_(fake, group) is None
    for op, args in (
        (ops.all_reduce, (group,)),
        (ops.all_reduce_, (group,)),
        (ops.all_gather, (group,)),
        (ops.reduce_scatter, (group,)),
        (ops.broadcast, (group, 0)),
        (ops.broadcast_, (group, 0)),
    ):
        torch.library.opcheck(
            op.default,
            (torch.ones(ranks * 2, 3), *args),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
    dist.destroy_process_group()


def wrapped() -> None:
    """Call them behind the wrapper that torch has for debugging."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    values()
