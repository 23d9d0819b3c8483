"""Parts of c10d::Backend beside collectives: windows of calls, groups from groups, hooks."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from test_torch_collectives import check, dist, start, torch

CPU = torch.device("cpu")
# torch 2.14 and newer ask a backend what it can do; older ones know the names of those that can.
ASKS = hasattr(dist.Backend, "_ensure_backend_registered")


def backend(group: object = None) -> object:
    return (group or dist.group.WORLD)._get_backend(CPU)


def test_windows_of_calls() -> None:
    run_ranks(3, f"{__name__}:rank_opens_windows", torch=True)


def rank_opens_windows() -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    rank, world = start()
    before, after = (rank - 1) % world, (rank + 1) % world

    # Far more than any buffer holds, all sends first.
    outgoing = [torch.full((300_000,), rank + 10.0 * i) for i in range(3)]
    incoming = [torch.empty(300_000) for _ in range(3)]
    calls = [dist.P2POp(dist.isend, tensor, after) for tensor in outgoing]
    calls += [dist.P2POp(dist.irecv, tensor, before) for tensor in incoming]
    works = dist.batch_isend_irecv(calls)
    for work in works:
        work.wait()
    for i, tensor in enumerate(incoming):
        check(tensor, torch.full((300_000,), before + 10.0 * i))

    # To oneself, and the send comes first.
    own, echo = torch.arange(7.0), torch.empty(7)
    calls = [dist.P2POp(dist.isend, own, rank), dist.P2POp(dist.irecv, echo, rank)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    check(echo, own)

    # Blocking calls inside a window are waited for at its end.
    tensors = [torch.full((5,), float(rank + i)) for i in range(4)]
    with _coalescing_manager(device=CPU, async_ops=True) as manager:
        for i, tensor in enumerate(tensors):
            dist.broadcast(tensor, i % world)
    manager.wait()
    for i, tensor in enumerate(tensors):
        check(tensor, torch.full((5,), float(i % world + i)))
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    check(tensors[1], torch.full((5,), 2.0 * world))

    # An exception closes the window, and blocking calls are carried out again.
    calls = [dist.P2POp(dist.irecv, torch.zeros(3), before, tag=-3)]
    with pytest.raises(ValueError, match="-3 is negative"):
        dist.batch_isend_irecv(calls)
    with pytest.raises(LookupError), _coalescing_manager(device=CPU):
        dist.broadcast(tensors[0], 0)
        raise LookupError
    tensor = torch.full((3,), float(rank))
    dist.broadcast(tensor, 1)
    check(tensor, torch.ones(3))

    # Another thread's calls are not part of it.
    group = dist.group.WORLD
    group._start_coalescing(CPU)
    beside = threading.Thread(target=dist.broadcast, args=(tensor, 2))
    tensor.fill_(rank)
    beside.start()
    beside.join()
    check(tensor, torch.full((3,), 2.0))
    work = dist.all_reduce(tensors[0], async_op=True)
    joint = group._end_coalescing(CPU)
    assert joint.get_future().wait()[0] is not None
    assert work.is_completed()
    assert joint.is_completed()
    with pytest.raises(RuntimeError, match="endCoalescing without startCoalescing"):
        group._end_coalescing(CPU)


def test_an_error_inside_a_window_ends_the_batch() -> None:
    run_ranks(2, f"{__name__}:rank_fails_in_a_window", torch=True)


def rank_fails_in_a_window() -> None:
    rank, _ = start(timeout=2)
    if rank == 0:
        calls = [dist.P2POp(dist.irecv, torch.empty(3), 1)]
        with pytest.raises(dist.DistBackendError, match="Timed out"):
            [work.wait() for work in dist.batch_isend_irecv(calls)]
    else:
        time.sleep(3)


@pytest.mark.skipif(not ASKS, reason="torch 2.11 splits the groups of accelerators alone")
def test_groups_split_off_a_group() -> None:
    run_ranks(4, f"{__name__}:rank_splits", torch=True, timeout=90)


def rank_splits() -> None:
    rank, _ = start(device_id=torch.device("cpu:0"))
    for _ in range(2):
        # The order within a part is kept.
        part = dist.split_group(split_ranks=[[2, 0], [1, 3]])
        assert dist.get_rank(part) == {2: 0, 0: 1, 1: 0, 3: 1}[rank]
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == (2 if rank % 2 == 0 else 4)
        # Ranks that are in no part have nothing to do.
        few = dist.split_group(split_ranks=[[1, 2]], timeout=timedelta(seconds=7))
        assert (few is dist.GroupMember.NON_GROUP_MEMBER) == (rank in (0, 3))
        if rank in (1, 2):
            assert backend(few).options._timeout == timedelta(seconds=7)
            dist.barrier(group=few)
    # With a device bound, torch makes subgroups by splitting too, and asks non-members to help.
    pair = dist.new_group([0, 3])
    if rank in (0, 3):
        dist.barrier(group=pair)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=mesh.get_group("inner"))
    assert tensor.item() == (1 if rank < 2 else 5)
    # Rank 0 has the store, which the others need until their groups are made.
    dist.barrier()


def test_groups_are_merged() -> None:
    run_ranks(2, f"{__name__}:rank_merges", torch=True)


def rank_merges() -> None:
    rank, world = start()
    alone = dist.new_group([rank], use_local_synchronization=True)
    merged = []
    for name in ("both", "again"):
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        merged.append(
            alone.merge_remote_group(store, world, timedelta(seconds=20), name, "two in one")
        )
    # A limit of what was merged is not that of its parts.
    assert not ASKS or backend(alone).options._timeout == backend().options._timeout
    # In turn: neither is the other.
    for group in merged + merged:
        tensor = torch.tensor([rank + 1.0])
        group.allreduce([tensor]).wait()
        check(tensor, torch.tensor([3.0]))
    dist.barrier()


@pytest.mark.skipif(not ASKS, reason="torch 2.11 has no such hooks")
def test_hooks_and_measurements() -> None:
    run_ranks(2, f"{__name__}:rank_is_observed", torch=True)


def rank_is_observed() -> None:
    from torch.distributed.distributed_c10d import _time_estimator

    rank, _ = start()
    group, own = dist.group.WORLD, backend()
    infos = []
    group._register_on_completion_hook(infos.append)
    with pytest.raises(RuntimeError, match="already"):
        group._register_on_completion_hook(infos.append)
    tensor = torch.ones(1 << 16)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    dist.all_reduce(tensor)
    group._wait_for_pending_works()
    assert [info.seq for info in infos] == [1, 2]
    assert all(info.active_duration > timedelta(0) for info in infos)
    assert work._get_duration() > 0
    assert work.get_future_result().wait() == 0

    # torch's flight recorder has seen them end, and how long they took.
    trace = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(backend="unisono"))
    names = [entry["profiling_name"] for entry in trace["entries"]]
    assert names.count("unisono:all_reduce") == 2, names
    assert {entry["state"] for entry in trace["entries"]} == {"completed"}

    stats = own.memory_stats()
    assert stats["links"] == 1
    assert stats["link_bytes"] > 0

    # The longer vector is estimated to take longer, and nothing is touched.
    estimates = []
    for elements in (1 << 10, 1 << 22):
        tensor = torch.full((elements,), 3.0)
        with _time_estimator(device=CPU) as estimate:
            dist.all_reduce(tensor)
            dist.isend(tensor, 1 - rank).wait()
        estimates.append(estimate.estimated_time)
        assert (tensor == 3).all()
    assert 0 < estimates[0] < estimates[1]


@pytest.mark.skipif(not ASKS, reason="torch 2.11 has no such limits")
def test_extra_time_for_the_next_operations() -> None:
    run_ranks(2, f"{__name__}:rank_gets_extra_time", torch=True)


def rank_gets_extra_time() -> None:
    rank, _ = start(timeout=2)
    dist.barrier()
    aborted = []
    backend().register_abort_hook(7, lambda: aborted.append(1))
    backend()._add_ephemeral_timeout(timedelta(seconds=30))
    if rank == 1:
        time.sleep(4)
    dist.barrier()
    assert not aborted
    # It ended with the first operation after it.
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="Timed out"):
            dist.barrier()
        # The hooks run beside.
        until(lambda: aborted)
    else:
        time.sleep(4)


def until(condition: Callable[[], object], limit: float = 20) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


WAITS = {
    "call": dist.all_reduce,
    "wait": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
    "future": lambda tensor: dist.all_reduce(tensor, async_op=True).get_future().wait(),
}


@pytest.mark.skipif(not ASKS, reason="torch 2.11 has no such hooks")
@pytest.mark.parametrize("how", WAITS)
def test_waits_end_before_abort_hooks(how: str) -> None:
    results = run_ranks(
        3, f"{__name__}:rank_loses_a_peer", how, torch=True, timeout=120, check=False
    )
    for result in results[:-1]:
        assert result.ok, result.report()


def rank_loses_a_peer(how: str) -> None:
    rank, world = start()
    dist.barrier()
    if rank == world - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    raised = threading.Event()
    seen = []
    # It sees the error raised only if the wait ends without it.
    backend().register_abort_hook(7, lambda: seen.append(raised.wait(20)))
    with pytest.raises(RuntimeError, match=f"rank {world - 1} "):
        WAITS[how](torch.ones(1000))
    raised.set()
    # The next call knows what happened, and does not have the hooks run again.
    with pytest.raises(RuntimeError, match=f"rank {world - 1} "):
        dist.barrier()
    dist.destroy_process_group()
    until(lambda: seen)
    assert seen == [True]


@pytest.mark.skipif(not ASKS, reason="torch 2.11 has no such hooks")
def test_nobody_waits_for_abort_hooks() -> None:
    run_ranks(2, f"{__name__}:rank_has_slow_hooks", torch=True, timeout=90)


def rank_has_slow_hooks() -> None:
    rank, _ = start()
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    dist.barrier()
    if rank == 1:
        for each, name in ((group, "one"), (None, "all")):
            with pytest.raises(dist.DistBackendError, match="rank 0 aborted"):
                dist.all_reduce(torch.ones(3), group=each)
            store.set(f"heard of {name}", "")
        return

    # The first hook returns only when the others have been called, the call that aborts or destroys
    # has returned, and the other rank has heard; so it does not if any of these comes after it.
    order: list[int] = []
    seen: list[bool] = []
    returned = threading.Event()

    def first(name: str) -> None:
        order.append(1)
        seen.append(returned.wait(20))
        store.wait([f"heard of {name}"], timedelta(seconds=20))
        until(lambda: order == [1, 3, 9])
        seen.append(True)

    def see(own: Any, name: str) -> None:
        own.register_abort_hook(9, lambda: order.append(9))
        own.register_abort_hook(3, lambda: order.append(3))
        own.register_abort_hook(1, lambda: first(name))

    see(backend(group), "one")
    backend(group).abort()
    dist.destroy_process_group(group)
    returned.set()
    until(lambda: len(seen) == 2)
    assert (seen, order) == ([True, True], [1, 3, 9])

    order.clear(), seen.clear(), returned.clear()
    see(backend(), "all")
    dist.distributed_c10d._abort_process_group()
    returned.set()
    until(lambda: len(seen) == 2)
    assert (seen, order) == ([True, True], [1, 3, 9])


@pytest.mark.skipif(not ASKS, reason="torch 2.11 records only backends of its own")
def test_a_process_ends_after_its_flight_recorder_has_written(tmp_path: Path) -> None:
    # The recorder takes a second and more: the last rank has begun to end long before.
    env = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_")}
    results = run_ranks(
        2, f"{__name__}:rank_fails_and_ends", torch=True, env=env, timeout=120, check=False
    )
    assert results[0].ok, results[0].report()
    trace = pickle.loads((tmp_path / "trace_0").read_bytes())
    failed = trace["entries"][-1]
    assert failed["profiling_name"] == "unisono:all_reduce"
    assert failed["state"] == "scheduled"
    assert any(frame["name"] == "rank_fails_and_ends" for frame in failed["frames"])


def rank_fails_and_ends() -> None:
    rank, _ = start()
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1 "):
        dist.all_reduce(torch.ones(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about devices that are not there")
def test_a_barrier_names_a_device_that_is_not_there() -> None:
    run_ranks(2, f"{__name__}:rank_has_no_device", torch=True)


def rank_has_no_device() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    start()
    dist.barrier(device_ids=[0])
    # From now on torch has a guard for CUDA, which counts eight devices and does nothing.
    with FakeTensorMode():
        fake = torch.empty(3, device="cuda")
    for devices in ([0], [7], [0, 1, 200], None):
        dist.barrier(device_ids=devices)
    # Not through the dispatcher, where torch itself takes care of fake tensors. The device is not
    # remembered as one that the group has used.
    with pytest.raises(ValueError, match="CUDA"):
        backend().allreduce([fake])
    dist.barrier()
    dist.barrier(device_ids=[0])


def test_options() -> None:
    run_ranks(2, f"{__name__}:rank_has_options", torch=True)


def rank_has_options() -> None:
    import unisono
    import unisono.torch

    rank, _ = start(pg_options=unisono.torch.Options(timeout=17, ring_bytes="64K"))
    dist.barrier()
    # torch 2.11 does not show a backend's options.
    assert not ASKS or backend().options._timeout == timedelta(seconds=17)
    for options in (unisono.Options(transport="tcp"), {"transport": "tcp"}):
        group = dist.new_group([0, 1], pg_options=options)
        dist.barrier(group=group)
    with pytest.raises(unisono.InvalidArgumentError, match="transport"):
        unisono.torch.Options(transprot="tcp")
    with pytest.raises(dist.DistBackendError, match="ring_bytes"):
        dist.new_group([0, 1], pg_options={"ring_bytes": "4K" if rank else "8K"})
    # torch 2.11 allows this to gloo and nccl, by name.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
    assert not ASKS or backend().options._timeout == timedelta(seconds=5)
    # Rank 0 has the store, which the other needs to hear why its group was not made.
    dist.barrier()
