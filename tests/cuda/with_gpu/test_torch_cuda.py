"""torch.distributed on CUDA tensors, on a real GPU: run by ``make test-cuda``.

All ranks share one GPU, and where there are several they take them in turn as well. A function
whose name begins with ``rank_`` runs on every rank. The scenarios of ``cuda_scenarios`` run over
the emulated driver too, in ``tests/cuda/without_gpu/test_torch_emulated_cuda.py``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no GPU here (torch.cuda.is_available())"
)

# After the torch that is asked for above.
from cuda_scenarios import FLOATS, INTEGERS, NARROW, OTHERS, check, data, summed, wide  # noqa: E402
from real_cuda_device import own_device, start  # noqa: E402

# torch 2.14 and newer.
TIMES = hasattr(dist.Backend, "_ensure_backend_registered")
WORLDS = [1, 2, 4, 8]
COUNTS = [0, 1, 3, 1000, 100_003, 3_000_001]
# Long enough that the host is far ahead of the device: about 50 ms.
CYCLES = 100_000_000


# Collectives


@pytest.mark.parametrize("world", WORLDS)
def test_carries_collectives(run: Any, world: int) -> None:
    types = [*FLOATS, *NARROW, *INTEGERS, *OTHERS]
    target = "cuda_scenarios:carries_collectives"
    run(world, target, types, COUNTS, torch=True, timeout=240)


@pytest.mark.parametrize("world", WORLDS)
def test_reduces(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_reduces", torch=True, timeout=240)


def rank_reduces() -> None:
    rank, world = start()
    for dtype in (torch.float32, torch.int32, torch.uint8):
        everything = torch.stack([wide(data(r, 1000, dtype)) for r in range(world)])
        for op, expected in (
            (dist.ReduceOp.MAX, everything.amax(0)),
            (dist.ReduceOp.MIN, everything.amin(0)),
            (dist.ReduceOp.PRODUCT, everything.prod(0)),
        ):
            reduced = data(rank, 1000, dtype)
            dist.all_reduce(reduced, op)
            check(reduced, expected.remainder(256 if dtype == torch.uint8 else 2**62).to(dtype), op)
    for dtype in (torch.float32, torch.bfloat16):
        averaged = data(rank, 1000, dtype) * world
        dist.all_reduce(averaged, dist.ReduceOp.AVG)
        check(averaged, summed(world, 1000, dtype), "avg")
    reduces_bits(rank, world)
    for dtype in (torch.float32, torch.bfloat16):
        scaled = data(rank, 1000, dtype)
        dist.all_reduce(scaled, scale(0.5 * (rank + 1)))
        check(scaled, scaled_sum(world).to(dtype), "premul_sum")


def scale(factor: Any) -> Any:
    make = getattr(dist, "_make_premul_sum", None) or dist._make_nccl_premul_sum
    return make(factor)


def scaled_sum(world: int) -> torch.Tensor:
    return sum(wide(data(r, 1000)) * 0.5 * (r + 1) for r in range(world))


@pytest.mark.parametrize("world", WORLDS)
def test_scales_in_a_graph(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_scales_in_a_graph", torch=True, timeout=120)


def rank_scales_in_a_graph() -> None:
    rank, world = start()
    for dtype in (torch.float32, torch.bfloat16):
        # A factor that the host does not know.
        factor = torch.zeros((), device="cuda")
        scaled, result = data(rank, 1000, dtype), data(rank, 1000, dtype)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result.copy_(scaled)
            dist.all_reduce(result, scale(factor))
        for number in (1, 2):
            factor.fill_(number * 0.5 * (rank + 1))
            graph.replay()
            expected = (number * scaled_sum(world)).to(dtype)
            check(result, expected, "premul_sum by the device")


def reduces_bits(rank: int, world: int) -> None:
    for (op, fold), dtype in itertools.product(
        (
            (dist.ReduceOp.BAND, torch.bitwise_and),
            (dist.ReduceOp.BOR, torch.bitwise_or),
            (dist.ReduceOp.BXOR, torch.bitwise_xor),
        ),
        (*INTEGERS, torch.bool),
    ):
        reduced = data(rank, 1000, dtype)
        dist.all_reduce(reduced, op)
        check(reduced, functools.reduce(fold, (data(r, 1000, dtype) for r in range(world))), op)


@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_on_every_rank(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_reduces_to_the_same_bits", torch=True, timeout=120)


def rank_reduces_to_the_same_bits() -> None:
    rank, world = start()
    for dtype, count in itertools.product(FLOATS, (1000, 3_000_001)):
        torch.manual_seed(rank)
        reduced = torch.randn(count, device="cuda").to(dtype)
        dist.all_reduce(reduced)
        gathered = torch.empty(world * count, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(gathered, reduced)
        for peer in range(world):
            assert torch.equal(gathered[peer * count :][:count], reduced), (dtype, count, peer)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_exchanges_messages(run: Any, world: int) -> None:
    run(world, "cuda_scenarios:exchanges_messages", torch=True, timeout=120)


# Streams


@pytest.mark.parametrize("world", WORLDS)
def test_orders_streams(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_orders_streams", torch=True, timeout=120)


def rank_orders_streams() -> None:
    """Late producers, two streams, and many rounds: a missing edge shows as a wrong value."""
    rank, world = start()
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    for round_number in range(20):
        count = [1000, 300_000][round_number % 2]
        tensor = torch.full((count,), -1.0, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(producer):
            torch.cuda._sleep(CYCLES // 10)
            tensor.copy_(data(rank + round_number, count))
            if round_number % 3 == 0:
                dist.all_reduce(tensor)
                work = None
            else:
                work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(consumer):
            if work is None:
                consumer.wait_stream(producer)
            elif round_number % 3 == 1:
                work.wait()
            else:
                work.get_future().wait()
            seen = tensor.clone()
        consumer.synchronize()
        expected = sum(data(r + round_number, count) for r in range(world))
        check(seen, expected, round_number)


def test_reduces_more_elements_than_2_to_the_31(run: Any) -> None:
    run(2, f"{__name__}:rank_reduces_very_many", torch=True, timeout=240)


def rank_reduces_very_many() -> None:
    """Counts and offsets do not fit 32 bits."""
    rank, _ = start()
    count = 2**31 + 3
    if torch.cuda.mem_get_info()[0] < 4 * count:
        pytest.skip("the device has too little memory")
    reduced = torch.full((count,), rank + 1, dtype=torch.uint8, device="cuda")
    dist.all_reduce(reduced)
    assert [int(reduced.min()), int(reduced.max())] == [3, 3]


def test_the_host_goes_on(run: Any) -> None:
    run(2, f"{__name__}:rank_goes_on", torch=True)


def rank_goes_on() -> None:
    rank, world = start()
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    reduced = data(rank, 1000)
    torch.cuda._sleep(CYCLES)
    dist.all_reduce(reduced)
    work = dist.all_reduce(again := data(rank, 1000), async_op=True)
    assert not work.is_completed()
    work.wait()
    assert not torch.cuda.current_stream().query()
    dist.barrier()
    assert torch.cuda.current_stream().query()
    assert work.is_completed()
    check(reduced, summed(world, 1000))
    check(again, summed(world, 1000))


def test_keeps_memory(run: Any) -> None:
    run(2, f"{__name__}:rank_keeps_memory", torch=True)


def rank_keeps_memory() -> None:
    """The allocator gives a dropped tensor's memory to the next one that is asked for."""
    rank, world = start()
    count = 500_000
    gathered = torch.empty(world * count, device="cuda")
    for round_number in range(30):
        torch.cuda._sleep(CYCLES // 50)
        work = dist.all_gather_into_tensor(
            gathered, data(rank + round_number, count), async_op=True
        )
        junk = [torch.full((count,), float("nan"), device="cuda") for _ in range(4)]
        if round_number % 2:
            work.wait()
        del work, junk
        junk = [torch.full((count,), float("nan"), device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        del junk
        expected = torch.cat([data(r + round_number, count) for r in range(world)])
        check(gathered, expected, round_number)


@pytest.mark.parametrize("world", WORLDS)
def test_is_captured_into_a_graph(run: Any, world: int) -> None:
    counts = 100_003, 3_000_001
    run(world, "cuda_scenarios:is_captured", *counts, torch=True, timeout=120)


@pytest.mark.parametrize("world", [2, 4])
def test_captures_messages(run: Any, world: int) -> None:
    run(world, "cuda_scenarios:captures_messages", 20_000_001, torch=True, timeout=120)


@pytest.mark.skipif(not TIMES, reason="torch 2.11 has no durations of plugins")
def test_tells_durations(run: Any) -> None:
    run(2, "cuda_scenarios:tells_durations", torch=True)


# Groups, and what is refused


def test_mixes_devices(run: Any) -> None:
    run(2, "cuda_scenarios:mixes_devices", torch=True)


def test_refuses_sparse_tensors(run: Any) -> None:
    run(2, f"{__name__}:rank_refuses_sparse_tensors", torch=True)


def rank_refuses_sparse_tensors() -> None:
    rank, world = start()
    sparse = torch.eye(3, device=own_device()).to_sparse()
    with pytest.raises(ValueError, match="sparse tensors are reduced on the CPU"):
        dist.all_reduce(sparse)
    check_lives(rank, world)


def check_lives(rank: int, world: int, group: Any = None) -> None:
    reduced = data(rank, 1000)
    dist.all_reduce(reduced, group=group)
    check(reduced, summed(world, 1000))


# The most hardware queues, and so few that streams which wait hold each other up.
QUEUES = ["32", "1"]


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("world", [2, 4])
def test_makes_groups_of_a_bound_device(run: Any, world: int, queues: str) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    run(world, "cuda_scenarios:makes_groups", torch=True, env=env, timeout=120)


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("world", [2, 4])
def test_splits_groups(run: Any, world: int, queues: str) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    run(world, "cuda_scenarios:splits_groups", torch=True, env=env, timeout=120)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_makes_a_mesh(run: Any, world: int, bound: bool) -> None:
    run(world, "cuda_scenarios:makes_a_mesh", bound, torch=True, timeout=120)


def test_a_peer_that_dies_leaves_no_stream_waiting(run: Any) -> None:
    results = run(3, "cuda_scenarios:loses_a_peer", torch=True, check=False)
    for result in results[:2]:
        assert result.ok, result.report()
        assert "rank 2" in result.value, result.value


# Training


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)]
    layers += [torch.nn.ReLU(), torch.nn.Linear(256, 10)]
    return torch.nn.Sequential(*layers).cuda()


def losses(
    network: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor, group_size: int = 1
) -> list[float]:
    """The loss before each of some steps, over the whole batch."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(inputs), labels)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if group_size > 1:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        seen.append(total.item())
    return seen


def batch(world: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(16 * world, 64).cuda(), torch.randint(10, (16 * world,)).cuda()


@pytest.mark.parametrize("world", WORLDS)
def test_ddp_trains_like_one_process(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_trains_with_ddp", torch=True, timeout=180)


def rank_trains_with_ddp() -> None:
    rank, world = start()
    torch.use_deterministic_algorithms(False)
    inputs, labels = batch(world)
    alone = losses(model(), inputs, labels)
    for options in ({}, {"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True}):
        network = torch.nn.parallel.DistributedDataParallel(
            model(), device_ids=[own_device().index], **options
        )
        together = losses(network, inputs[rank::world], labels[rank::world], world)
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_fsdp_trains_like_one_process(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_trains_with_fsdp", torch=True, timeout=180)


def rank_trains_with_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    rank, world = start()
    mesh = init_device_mesh("cuda", (world,))
    inputs, labels = batch(world)
    alone = losses(model(), inputs, labels)
    for in_place in (False, True):
        network = model()
        for layer in network:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(network, mesh=mesh)
        for part in network.modules():
            if in_place and isinstance(part, FSDPModule):
                part.set_allocate_memory_from_process_group_for_comm(True)
        together = losses(network, inputs[rank::world], labels[rank::world], world)
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [world for world in WORLDS if world > 1])
def test_reads_in_place(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_reads_in_place", torch=True, timeout=180)


def rank_reads_in_place() -> None:
    """Tensors of unisono's pool, of some ranks or all: the values are what they are elsewhere."""
    from unisono.torch import mem_pool

    rank, world = start()
    count = (40 << 20) + 40  # ranks that share a device do so from 128 MiB on
    for among in (2**world - 1, 2**world - 1, 2**world - 1, 0b0110, 0b0001, 2**world - 1):
        with torch.cuda.use_mem_pool(mem_pool()) if among >> rank & 1 else contextlib.nullcontext():
            buffer = torch.empty(count, device="cuda")
            block = torch.empty(count // world // 8 * 8, device="cuda")
        for turn in range(2):
            tensor = buffer[: count - turn]
            tensor.fill_(rank + 1 + turn)
            dist.all_reduce(tensor)
            want = sum(range(1, world + 1)) + world * turn
            assert bool((tensor == want).all()), ("all_reduce", among, turn)
            whole = buffer[: world * block.numel()]
            block.fill_(rank - turn)
            dist.all_gather_into_tensor(whole, block)
            got = whole.view(world, -1)
            for peer in range(world):
                assert bool((got[peer] == peer - turn).all()), ("all_gather", among, turn)
            for peer in range(world):
                got[peer].fill_(rank * 10 + peer)
            dist.reduce_scatter_tensor(block, whole)
            want = sum(range(world)) * 10 + world * rank
            assert bool((block == want).all()), ("reduce_scatter", among, turn)
            dist.broadcast(whole, turn)
            for peer in range(world):
                assert bool((got[peer] == turn * 10 + peer).all()), ("broadcast", among, turn)
        del buffer, tensor, whole, block, got
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    assert backend.supports_tensor_alloc(torch.device("cuda", 0))
    allocated = backend.allocate_tensor(
        1 << 20, dtype=torch.bfloat16, device=torch.device("cuda", 0)
    )
    assert (allocated.dtype, allocated.numel()) == (torch.bfloat16, 1 << 20)
    torch.cuda.synchronize()


@pytest.mark.parametrize("world", [2, 4])
def test_dtensor(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_redistributes", torch=True, timeout=120)


def rank_redistributes() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    rank, world = start()
    mesh = init_device_mesh("cuda", (world,))
    whole = data(0, 37 * 5).reshape(37, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    check(rows.redistribute(placements=[Replicate()]).to_local(), whole, "gathered")
    columns = rows.redistribute(placements=[Shard(1)])
    check(columns.full_tensor(), whole, "columns")
    partial = DTensor.from_local(data(rank, 100), mesh, [Partial()])
    check(partial.full_tensor(), summed(world, 100), "partial")
    scattered = partial.redistribute(placements=[Shard(0)])
    check(scattered.full_tensor(), summed(world, 100), "reduce_scatter")


def test_reads_and_writes_one_sided(run: Any) -> None:
    pytest.importorskip("torch.distributed._transport", reason="this torch has no transports")
    run(2, "cuda_scenarios:reads_and_writes_one_sided", torch=True)


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "new_window"), reason="this torch has no windows: 2.15 has"
)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_makes_windows(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_makes_windows", torch=True)


def rank_makes_windows() -> None:
    """A put comes after what the current stream does to its tensor; kernels see what was put."""
    rank, world = start()
    left, right = (rank - 1) % world, (rank + 1) % world
    exposed = torch.full((100_003,), rank, dtype=torch.bfloat16, device="cuda")[3:]
    window = dist.group.WORLD.new_window(exposed)
    for turn in range(5):
        sent = torch.empty(70_000, dtype=torch.bfloat16, device="cuda")
        torch.cuda._sleep(CYCLES // 10)
        sent.fill_(10 * turn + rank)
        window.put(sent if turn % 2 else sent.cpu(), right, 1000, async_op=False)
        window.signal(right, async_op=False)
        window.wait_signal(left, async_op=False)
        assert bool((exposed[1000:71_000] == 10 * turn + left).all()), turn
        assert bool((exposed[:1000] == rank).all()), turn
        window.signal(left, async_op=False)
        window.wait_signal(right, async_op=False)
    if world > 1:
        theirs = window.map_remote_tensor(left)
        assert (theirs.device.type, theirs.shape) == ("cuda", exposed.shape)
        assert bool((theirs[:1000] + 1 == left + 1).all())
        torch.cuda.synchronize()
        del theirs
    window.tensor_deregister()
    dist.destroy_process_group()
