"""torch.distributed on CUDA tensors, on a real GPU: run by ``make test-cuda``.

All ranks share one GPU, and where there are several they take them in turn as well. A function
whose name begins with ``rank_`` runs on every rank. The tests that need no GPU use the emulated
driver, in ``tests/cuda/without_gpu/test_torch_emulated_cuda.py``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no GPU here (torch.cuda.is_available())"
)

# torch 2.14 and newer.
TIMES = hasattr(dist.Backend, "_ensure_backend_registered")
WORLDS = [1, 2, 4, 8]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
OTHERS = [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128]
COUNTS = [0, 1, 3, 1000, 100_003, 3_000_001]
# Long enough that the host is far ahead of the device: about 50 ms.
CYCLES = 100_000_000


def start(*, bound: bool = False, **options: Any) -> tuple[int, int, torch.device]:
    import unisono.torch

    device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # By itself torch finds what is installed, and this may be a checkout.
    unisono.torch.register()
    if bound:
        options["device_id"] = device
    dist.init_process_group("unisono", timeout=timedelta(seconds=60), **options)
    return dist.get_rank(), dist.get_world_size(), device


def data(rank: int, count: int, dtype: torch.dtype = torch.float32, first: int = 0) -> torch.Tensor:
    """Small numbers that every type holds, different on every rank, on the GPU.

    With ``first`` those from there on, of the same longer tensor.
    """
    places = torch.arange(first, first + count, device="cuda")
    return ((places * 3 + rank * 5) % 7).to(dtype)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def check(actual: torch.Tensor, expected: torch.Tensor, *context: object) -> None:
    assert actual.dtype == expected.dtype, context
    assert torch.equal(wide(actual), wide(expected)), (actual, expected, context)


def summed(
    world: int, count: int, dtype: torch.dtype = torch.float32, first: int = 0
) -> torch.Tensor:
    return sum(wide(data(rank, count, dtype, first)) for rank in range(world)).to(dtype)


# Collectives


@pytest.mark.parametrize("world", WORLDS)
def test_reduces(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_reduces", torch=True, timeout=240)


def rank_reduces() -> None:
    rank, world, _ = start()
    for dtype, count in itertools.product([*FLOATS, *NARROW, *INTEGERS, *OTHERS], COUNTS):
        reduced = data(rank, count, dtype)
        dist.all_reduce(reduced)
        check(reduced, summed(world, count, dtype), "all_reduce", count)
        root = count % world
        mine = data(rank, count, dtype)
        dist.reduce(mine, root)
        if rank == root:
            check(mine, summed(world, count, dtype), "reduce", count)
        block = torch.empty(count, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(block, data(rank, world * count, dtype))
        check(block, summed(world, count, dtype, rank * count), "reduce_scatter", count)
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
    rank, world, _ = start()
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
    rank, world, device = start()
    for dtype, count in itertools.product(FLOATS, (1000, 3_000_001)):
        torch.manual_seed(rank)
        reduced = torch.randn(count, device=device).to(dtype)
        dist.all_reduce(reduced)
        gathered = torch.empty(world * count, dtype=dtype, device=device)
        dist.all_gather_into_tensor(gathered, reduced)
        for peer in range(world):
            assert torch.equal(gathered[peer * count :][:count], reduced), (dtype, count, peer)


@pytest.mark.parametrize("world", WORLDS)
def test_moves(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_moves", torch=True, timeout=240)


def rank_moves() -> None:
    rank, world, device = start()
    for dtype, count in itertools.product([*FLOATS, *NARROW, *INTEGERS, *OTHERS], COUNTS):
        where = (dtype, count)
        root = count % world
        moved = data(rank, count, dtype)
        dist.broadcast(moved, root)
        check(moved, data(root, count, dtype), "broadcast", *where)
        # In a wide type, since torch cannot put tensors of some types together.
        everything = torch.cat([wide(data(peer, count, dtype)) for peer in range(world)]).to(dtype)
        gathered = torch.empty(world * count, dtype=dtype, device=device)
        dist.all_gather_into_tensor(gathered, data(rank, count, dtype))
        check(gathered, everything, "all_gather_into_tensor", *where)
        exchanged = torch.empty(world * count, dtype=dtype, device=device)
        dist.all_to_all_single(exchanged, data(rank, world * count, dtype))
        parts = [wide(data(peer, count, dtype, rank * count)) for peer in range(world)]
        expected = torch.cat(parts).to(dtype)
        check(exchanged, expected, "all_to_all_single", *where)
        blocks = [torch.empty(count, dtype=dtype, device=device) for _ in range(world)]
        dist.gather(data(rank, count, dtype), blocks if rank == root else None, root)
        for peer, block in enumerate(blocks if rank == root else []):
            check(block, data(peer, count, dtype), "gather", *where)
        given = [data(peer, count, dtype) for peer in range(world)]
        part = torch.empty(count, dtype=dtype, device=device)
        dist.scatter(part, given if rank == root else None, root)
        check(part, data(rank, count, dtype), "scatter", *where)
    uneven = [torch.empty(1 + peer, device=device) for peer in range(world)]
    dist.all_gather(uneven, data(rank, 1 + rank))
    for peer, block in enumerate(uneven):
        check(block, data(peer, 1 + peer), "uneven all_gather")
    turned = data(rank, 12).reshape(3, 4)
    dist.all_reduce(turned.t(), async_op=True).wait()
    check(turned, summed(world, 12).reshape(3, 4), "transposed")


@pytest.mark.parametrize("world", [2, 4, 8])
def test_exchanges_messages(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_exchanges_messages", torch=True, timeout=120)


def rank_exchanges_messages() -> None:
    rank, world, device = start()
    right, left = (rank + 1) % world, (rank - 1) % world
    for count in (1, 1000, 3_000_001):
        got = torch.empty(count, device=device)
        batch = [
            dist.P2POp(dist.irecv, got, left),
            dist.P2POp(dist.isend, data(rank, count), right),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        check(got, data(left, count), "batch", count)
        receiving = dist.irecv(got := torch.empty(count, device=device), left)
        dist.isend(data(rank, count), right).wait()
        receiving.wait()
        check(got, data(left, count), "irecv, isend", count)
    if rank == 0:
        for _ in range(world - 1):
            sender = dist.recv(got := torch.empty(10, device=device))
            check(got, data(sender, 10), "from any rank")
    else:
        dist.send(data(rank, 10), 0)


# Streams


@pytest.mark.parametrize("world", WORLDS)
def test_orders_streams(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_orders_streams", torch=True, timeout=120)


def rank_orders_streams() -> None:
    """Late producers, two streams, and many rounds: a missing edge shows as a wrong value."""
    rank, world, device = start()
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    for round_number in range(20):
        count = [1000, 300_000][round_number % 2]
        tensor = torch.full((count,), -1.0, device=device)
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
    rank, _, device = start()
    count = 2**31 + 3
    if torch.cuda.mem_get_info(device)[0] < 4 * count:
        pytest.skip("the device has too little memory")
    reduced = torch.full((count,), rank + 1, dtype=torch.uint8, device=device)
    dist.all_reduce(reduced)
    assert [int(reduced.min()), int(reduced.max())] == [3, 3]


def test_the_host_goes_on(run: Any) -> None:
    run(2, f"{__name__}:rank_goes_on", torch=True)


def rank_goes_on() -> None:
    rank, world, device = start()
    dist.all_reduce(torch.ones(1, device=device))
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
    rank, world, device = start()
    count = 500_000
    gathered = torch.empty(world * count, device=device)
    for round_number in range(30):
        torch.cuda._sleep(CYCLES // 50)
        work = dist.all_gather_into_tensor(
            gathered, data(rank + round_number, count), async_op=True
        )
        junk = [torch.full((count,), float("nan"), device=device) for _ in range(4)]
        if round_number % 2:
            work.wait()
        del work, junk
        junk = [torch.full((count,), float("nan"), device=device) for _ in range(4)]
        torch.cuda.synchronize()
        del junk
        expected = torch.cat([data(r + round_number, count) for r in range(world)])
        check(gathered, expected, round_number)


@pytest.mark.parametrize("world", WORLDS)
def test_is_captured_into_a_graph(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_is_captured", torch=True, timeout=120)


def rank_is_captured() -> None:
    rank, world, device = start()
    reduced = torch.zeros(100_003, device=device)
    source, gathered = (torch.zeros(n, device=device) for n in (1000, world * 1000))
    beside = torch.zeros(3_000_001, device=device)
    for tensor in (reduced, beside):
        dist.all_reduce(tensor)
    dist.all_gather_into_tensor(gathered, source)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = dist.all_reduce(beside, async_op=True)
        dist.all_reduce(reduced)
        dist.all_gather_into_tensor(gathered, source)
        work.wait()
        dist.all_reduce(reduced)
        doubled = beside * 2
    for round_number in range(5):
        reduced.copy_(data(rank + round_number, reduced.numel()))
        beside.copy_(data(rank - round_number, beside.numel()))
        source.copy_(data(rank * round_number, 1000))
        graph.replay()
        twice = world * sum(data(r + round_number, reduced.numel()) for r in range(world))
        check(reduced, twice, "twice", round_number)
        expected = sum(data(r - round_number, beside.numel()) for r in range(world))
        check(doubled, 2 * expected, "asynchronous", round_number)
        everything = torch.cat([data(r * round_number, 1000) for r in range(world)])
        check(gathered, everything, "all_gather", round_number)
        between = data(rank, 1000)
        dist.all_reduce(between)
        check(between, summed(world, 1000), "between replays", round_number)


@pytest.mark.parametrize("world", [2, 4])
def test_captures_messages(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_captures_messages", torch=True, timeout=120)


def rank_captures_messages() -> None:
    rank, world, device = start()
    right, left = (rank + 1) % world, (rank - 1) % world
    own, got = (torch.zeros(20_000_001, device=device) for _ in range(2))
    token, seen = (torch.zeros(3, device=device) for _ in range(2))
    dist.all_reduce(own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, own, right)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        dist.all_reduce(got)
        sending = dist.isend(token, right, tag=5)
        dist.recv(seen, left, tag=5)
        sending.wait()
    for number in range(3):
        own.copy_(data(rank + number, own.numel()))
        token.copy_(data(rank - number, 3))
        graph.replay()
        everything = sum(data(r + number, got.numel()) for r in range(world))
        check(got, everything, "exchanged and summed", number)
        check(seen, data(left - number, 3), "received", number)
        sending = dist.isend(data(rank, 10), right)
        dist.recv(more := torch.zeros(10, device=device), left)
        sending.wait()
        check(more, data(left, 10), "between replays", number)


@pytest.mark.skipif(not TIMES, reason="torch 2.11 has no durations of plugins")
def test_tells_durations(run: Any) -> None:
    run(2, f"{__name__}:rank_tells_durations", torch=True)


def rank_tells_durations() -> None:
    rank, _, device = start()
    dist.group.WORLD._get_backend(device)._enable_collectives_timing()
    work = dist.all_reduce(data(rank, 3_000_001), async_op=True)
    work.wait()
    torch.cuda.synchronize()
    assert 0 < work._get_duration() < 10_000


# Groups, and what is refused


def test_mixes_devices(run: Any) -> None:
    run(2, f"{__name__}:rank_mixes_devices", torch=True)


def rank_mixes_devices() -> None:
    rank, world, device = start()
    assert dist.get_backend_config() == "cpu:unisono,cuda:unisono"
    for _ in range(10):
        on_host, on_device = data(rank, 1000).cpu(), data(rank, 1000)
        works = [dist.all_reduce(t, async_op=True) for t in (on_host, on_device)]
        for work in works:
            work.wait()
        check(on_host, summed(world, 1000).cpu())
        check(on_device, summed(world, 1000))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert [entry["rank"] for entry in objects] == list(range(world))
    backend = dist.group.WORLD._get_backend(device)
    listed = [torch.empty(10) for _ in range(world)]
    with pytest.raises(ValueError, match="must be on one device"):
        backend.allgather([listed], [data(rank, 10)]).wait()
    sparse = torch.eye(3, device=device).to_sparse()
    with pytest.raises(ValueError, match="sparse tensors are reduced on the CPU"):
        dist.all_reduce(sparse)
    with pytest.raises(ValueError, match="elements"):
        dist.all_gather_into_tensor(torch.empty(7, device=device), data(rank, 4))
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
    run(world, f"{__name__}:rank_makes_groups", torch=True, env=env, timeout=120)


def rank_makes_groups() -> None:
    rank, world, device = start(bound=True)
    pairs = [list(range(world))[i : i + 2] for i in range(0, world, 2)]
    mine = next(pair for pair in pairs if rank in pair)
    for pair in pairs:
        made = dist.new_group(pair)
        if rank in pair:
            check_group(made, rank, mine)
    dist.barrier()
    dist.barrier(device_ids=[device.index])
    check_lives(rank, world)


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("world", [2, 4])
def test_splits_groups(run: Any, world: int, queues: str) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    run(world, f"{__name__}:rank_splits_groups", torch=True, env=env, timeout=120)


def rank_splits_groups() -> None:
    rank, world, _ = start(bound=True)
    pairs = [list(range(world))[i : i + 2] for i in range(0, world, 2)]
    part = dist.split_group(split_ranks=pairs)
    check_group(part, rank, next(pair for pair in pairs if rank in pair))
    dist.barrier(part)
    check_lives(rank, world)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_makes_a_mesh(run: Any, world: int, bound: bool) -> None:
    run(world, f"{__name__}:rank_makes_a_mesh", bound, torch=True, timeout=120)


def rank_makes_a_mesh(bound: bool) -> None:
    """Of two dimensions, which torch makes by splitting where the group has a device."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, world, _ = start(bound=bound)
    mesh = init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("outer", "inner"))
    check_group(mesh["inner"].get_group(), rank, [rank // 2 * 2, rank // 2 * 2 + 1])
    check_group(mesh["outer"].get_group(), rank, list(range(rank % 2, world, 2)))
    check_lives(rank, world)


def check_group(group: dist.ProcessGroup, rank: int, members: list[int]) -> None:
    assert dist.get_process_group_ranks(group) == members
    reduced = data(rank, 1000)
    dist.all_reduce(reduced, group=group)
    check(reduced, sum(data(member, 1000) for member in members), members)


def test_a_peer_that_dies_leaves_no_stream_waiting(run: Any) -> None:
    target = f"{__name__}:rank_loses_a_peer"
    results = run(3, target, torch=True, check=False)
    for result in results[:2]:
        assert result.ok, result.report()
        assert "rank 2" in result.value, result.value


def rank_loses_a_peer() -> str:
    rank, world, _ = start()
    check_lives(rank, world)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 2:
        # A call of the others that comes after its end may raise.
        store.wait([f"rank {other} has called" for other in range(2)])
        os._exit(0)
    work = dist.all_reduce(data(rank, 1000), async_op=True)
    store.set(f"rank {rank} has called", "")
    torch.cuda.synchronize()
    deadline = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(dist.DistNetworkError) as raised:
        work.wait()
    with pytest.raises(dist.DistNetworkError):
        dist.all_reduce(data(rank, 1000))
    return str(raised.value)


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
    rank, world, device = start()
    torch.use_deterministic_algorithms(False)
    inputs, labels = batch(world)
    alone = losses(model(), inputs, labels)
    for options in ({}, {"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True}):
        network = torch.nn.parallel.DistributedDataParallel(
            model(), device_ids=[device.index], **options
        )
        together = losses(network, inputs[rank::world], labels[rank::world], world)
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_fsdp_trains_like_one_process(run: Any, world: int) -> None:
    run(world, f"{__name__}:rank_trains_with_fsdp", torch=True, timeout=180)


def rank_trains_with_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    rank, world, _ = start()
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

    rank, world, _ = start()
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

    rank, world, _ = start()
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
