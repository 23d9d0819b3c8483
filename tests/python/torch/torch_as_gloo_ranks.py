"""The rank functions of test_torch_as_gloo.py: programs that say gloo."""

from __future__ import annotations

import datetime
import json
import os
import pickle
import time
from typing import Any
from urllib.request import Request, urlopen

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
    # As torchft does.
    for each in (backend, chosen):
        each.options.global_ranks_in_group = list(range(world))
        each.options.group_name = "a name"
        assert each.options.global_ranks_in_group == list(range(world))
        assert each.options.group_name == "a name"

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


def beside_another() -> None:
    """Groups on gloo of other ranks than 0, beside a default group that is none."""
    dist.init_process_group("unisono", timeout=LIMIT)
    dist.new_group([1, 2], backend="gloo")
    dist.new_group([2, 0], backend="gloo")
    dist.new_group([2], backend="gloo")
    # Rank 0 has torch's store.
    dist.barrier()
    dist.destroy_process_group()


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
    rounds = rounds_of_objects(rank, world)
    dist.destroy_process_group()
    return {"wrong": wrong, "rounds": rounds}


def rounds_of_objects(rank: int, world: int) -> dict[str, int]:
    """Return how many operations of the group a small object takes, by the collective."""
    table: list[Any] = [None] * world
    calls = {
        "all_gather_object": lambda: dist.all_gather_object(table, rank),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank, "x" * 4000]),
        "gather_object": lambda: dist.gather_object(rank, None if rank else table),
        "scatter_object_list": lambda: dist.scatter_object_list([None], None if rank else table),
    }
    backend = dist.group.WORLD._get_backend(CPU)
    rounds = {}
    for name, call in calls.items():
        before = backend._get_sequence_number_for_group()
        call()
        rounds[name] = backend._get_sequence_number_for_group() - before
    return rounds


def several_devices(stand_in: str) -> dict[str, Any]:
    """A CPU backend beside another for a device that is not there, as in "cpu:gloo,cuda:nccl"."""
    from torch._C._distributed_c10d import FakeProcessGroup

    def create(opts: Any, _options: Any = None) -> Any:
        return FakeProcessGroup._create_internal(opts.group_rank, opts.group_size)

    dist.Backend.register_backend(stand_in, create, extended_api=True, devices=["cuda"])
    dist.init_process_group(f"cpu:gloo,cuda:{stand_in}", timeout=LIMIT)
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.full((5,), float(rank))
    dist.all_reduce(total)
    assert total.eq(sum(range(world))).all()
    objects: list[Any] = [None] * world
    group = dist.new_group(backend=f"cpu:gloo,cuda:{stand_in}")
    dist.all_gather_object(objects, rank, group=dist.new_group(backend="gloo"))
    assert objects == list(range(world))
    return {
        "backend": dist.get_backend(),
        "cpu": [served(dist.group.WORLD), served(group)],
        "cuda": [
            each._get_backend(torch.device("cuda")).name() for each in (dist.group.WORLD, group)
        ],
    }


def checkpoint(folder: str) -> dict[str, Any]:
    """Shards that each rank saves and loads, at once and in the background."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", timeout=LIMIT)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def state(factor: int) -> dict[str, Any]:
        whole = torch.arange(8.0 * world).reshape(-1, 4) * factor
        return {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "step": factor}

    dcp.save(state(2), checkpoint_id=f"{folder}/now")
    saving = dcp.async_save(state(3), checkpoint_id=f"{folder}/later")
    saving.result(LIMIT.total_seconds())
    for factor, name in ((2, "now"), (3, "later")):
        loaded = state(0)
        dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
        assert torch.equal(loaded["sharded"].full_tensor(), state(factor)["sharded"].full_tensor())
        assert loaded["step"] == factor
    # A file of each rank's own.
    files = sorted(os.listdir(f"{folder}/now"))  # noqa: PTH208
    assert [name for name in files if name.startswith(f"__{rank}_")], files
    found = {"served": served(dist.group.WORLD), "backend": dist.get_backend()}
    dist.destroy_process_group()
    return found


def split() -> dict[str, Any]:
    """Groups made by `split_group`, which on gloo and here are made without a creator."""
    from torch._C import _distributed_c10d as native

    dist.init_process_group("gloo", timeout=LIMIT)
    rank = dist.get_rank()
    pairs = [[0, 1], [2, 3]]
    mine = next(pair for pair in pairs if rank in pair)
    part = dist.split_group(split_ranks=pairs, group_desc="a pair")
    by_name = dist.split_group(split_ranks=pairs, backend="gloo")
    for group in (part, by_name):
        total = torch.full((3,), float(rank))
        dist.all_reduce(total, group=group)
        assert total.eq(sum(mine)).all()
    # Where torch's tools look if they are told nothing else.
    trace = pickle.loads(native._dump_fr_trace())
    worker = native._WorkerServer("127.0.0.1", 0)

    def ask(handler: str) -> Any:
        request = Request(
            f"http://127.0.0.1:{worker.port}/handler/{handler}", method="POST", data=b""
        )
        return json.loads(urlopen(request, timeout=LIMIT.total_seconds()).read())

    found = {
        "told": ask("fr_trace_json")["pg_config"][part.group_name]["ranks"],
        "ranks": trace["pg_config"][part.group_name]["ranks"],
        "served": [served(part), served(by_name)],
        "backend": [dist.get_backend(part), dist.get_backend(by_name)],
        "name": [part.name(), by_name.name()],
        "is": isinstance(part._get_backend(CPU), dist.ProcessGroupGloo),
        "recorded": [
            (entry["process_group"][1], entry["profiling_name"], entry["state"])
            for entry in trace["entries"]
        ],
    }
    # No barrier: that would be one of the calls.
    dist.distributed_c10d._abort_process_group()
    end = time.monotonic() + LIMIT.total_seconds()
    while ask("c10d_health_check")["healthy"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found | {"unhealthy": ask("c10d_health_check")["unhealthy_backends"]}
