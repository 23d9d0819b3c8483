"""What the ranks of test_as_gloo.py run: programs that say gloo."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
LIMIT = datetime.timedelta(seconds=30)


def served(group: Any) -> str:
    """Return the name of the backend that carries the CPU tensors of `group`."""
    return str(group._get_backend(CPU).name())


def by_name(*backend: str) -> dict[str, Any]:
    dist.init_process_group(*backend, timeout=LIMIT)
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.full((5,), float(rank))
    dist.all_reduce(total)
    assert total.eq(sum(range(world))).all()
    group = dist.new_group(list(range(world)), backend="gloo")
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": other} for other in range(world)]
    dist.monitored_barrier(timeout=LIMIT)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=7), group)
    found = {
        "backend": dist.get_backend(),
        "of group": dist.get_backend(group),
        "name": dist.group.WORLD.name(),
        "served": [served(dist.group.WORLD), served(group)],
        "is": isinstance(group._get_backend(CPU), dist.ProcessGroupGloo),
    }
    dist.destroy_process_group()
    return found


def by_class() -> dict[str, Any]:
    """As vLLM does: a group of one's own, with a backend that one has constructed."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0
    )
    types = dist.ProcessGroup.BackendType
    groups = []
    for number, default_first in enumerate((True, False)):
        prefixed = dist.PrefixStore(f"group {number}", store)
        group = dist.ProcessGroup(prefixed, rank, world)
        if default_first:
            group._set_default_backend(types.GLOO)
        backend = dist.ProcessGroupGloo(prefixed, rank, world, timeout=LIMIT)
        backend._set_sequence_number_for_group()
        group._register_backend(CPU, types.GLOO, backend)
        if not default_first:
            group._set_default_backend(types.GLOO)
        total = torch.ones(3)
        group.allreduce([total]).wait()
        assert total.eq(world).all()
        group.barrier().wait()
        groups.append(group)
    # torch's C++ code reads fields of gloo's class out of what it takes for it.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    model(torch.ones(1, 2)).sum().backward()

    options = dist.ProcessGroupGloo._Options()
    options._timeout = LIMIT
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    chosen = dist.ProcessGroupGloo(dist.PrefixStore("options", store), rank, world, options)
    chosen.barrier().wait()

    class Derived(dist.ProcessGroupGloo):  # type: ignore[misc]
        pass

    derived = Derived(dist.PrefixStore("derived", store), rank, world, timeout=LIMIT)
    derived.barrier().wait()
    return {
        "served": [served(group) for group in groups] + [chosen.name(), derived.name()],
        "is": [isinstance(each, dist.ProcessGroupGloo) for each in (backend, chosen, derived)],
        "class": issubclass(dist.ProcessGroupGloo, torch._C._distributed_c10d.Backend),
        "other": isinstance(groups[0], dist.ProcessGroupGloo),
    }


def rpc() -> list[float]:
    from torch.distributed import rpc as remote

    rank = int(os.environ["RANK"])
    remote.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer: list[float] = []
    if rank == 0:
        answer = remote.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist()
    remote.shutdown()
    return answer


def sharded() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", timeout=LIMIT)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    spread = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])
    assert spread.full_tensor().tolist() == list(range(8))
    name = served(mesh.get_group("b"))
    dist.destroy_process_group()
    return name


def both_kinds() -> tuple[float, str]:
    """The rank that the variable does not reach runs gloo."""
    began = time.monotonic()
    try:
        # As long as gloo takes to notice.
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
    except Exception as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, ""


def reconfigurable() -> str:
    dist.init_process_group("gloo", timeout=LIMIT, enable_reconfigure=True)
    return served(dist.group.WORLD)


def by_call() -> list[str]:
    from unisono.torch import replace_gloo

    dist.init_process_group("gloo", timeout=LIMIT)
    found = [served(dist.group.WORLD)]
    replace_gloo()
    replace_gloo()
    found.append(served(dist.new_group(backend="gloo")))
    dist.destroy_process_group()
    return found


def objects(backend: str) -> dict[str, Any]:
    """Object collectives, with objects that fit an envelope and objects that do not."""
    dist.init_process_group(backend, timeout=LIMIT)
    rank, world = dist.get_rank(), dist.get_world_size()
    last = world - 1
    for sizes in ([10] * world, [9000] * world, [10, *[70_000] * last], [5000, *[3] * last]):

        def one(number: int, sizes: list[int] = sizes) -> dict[str, Any]:
            return {"rank": number, "text": "x" * sizes[number]}

        every = [one(number) for number in range(world)]
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, one(rank))
        assert gathered == every
        for root in (0, last):
            given: list[Any] = [every[0], None, 7] if rank == root else [None] * 3
            dist.broadcast_object_list(given, src=root)
            assert given == [every[0], None, 7]
            given = [rank] if rank == root else [None]
            dist.broadcast_object_list(given, root, None, CPU)
            assert given == [root]
            collected: list[Any] | None = [None] * world if rank == root else None
            dist.gather_object(one(rank), collected, dst=root)
            assert collected == (every if rank == root else None)
            taken: list[Any] = [None]
            dist.scatter_object_list(taken, every if rank == root else None, src=root)
            assert taken == [one(rank)]
    group = dist.new_group([1, 2])
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        given = [rank] if rank == 2 else [None]
        dist.broadcast_object_list(given, src=2, group=group)
        assert given == [2]
        given = [rank] if rank == 2 else [None]
        dist.broadcast_object_list(given, group=group, group_src=1)
        assert given == [2]
    wrong = ""
    try:
        dist.scatter_object_list([], [0] * world if rank == 0 else None)
    except ValueError as error:
        wrong = str(error)
    # Whatever the objects did, the group lives on.
    dist.barrier()
    calls = dist.group.WORLD._get_backend(CPU)._get_sequence_number_for_group()
    before = calls
    dist.all_gather_object([None] * world, rank)
    calls = dist.group.WORLD._get_backend(CPU)._get_sequence_number_for_group()
    dist.destroy_process_group()
    return {"wrong": wrong, "rounds": calls - before}
