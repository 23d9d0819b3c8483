"""The ranks of ``test_torch_profiler``: each kind of call under torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

# The elements of a tensor.
COUNT = 1000


def step(model: torch.nn.Module) -> None:
    model(torch.ones(4, 8)).sum().backward()


def calls_each(folder: str) -> list[dict[str, Any]]:
    """Write a trace of the profiler, and return the spans of collectives in it."""
    dist.init_process_group("unisono")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4, bias=False))
    swapped = dist.new_group([world - 1 - one for one in range(world)], sort_ranks=False)
    step(model)
    one, all_of_them = torch.ones(COUNT), torch.ones(world * COUNT)
    lists = [torch.empty(COUNT) for _ in range(world)]
    name = dist.group.WORLD.group_name
    ours = torch.ops.unisono
    path = Path(folder) / f"rank{rank}.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        # Steps, which readers of traces ask for.
        schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(3):
            step(model)
            dist.all_reduce(one)
            dist.broadcast(one, 1)
            dist.reduce(one, 1)
            dist.all_gather(lists, one)
            dist.all_gather_into_tensor(all_of_them, one)
            dist.reduce_scatter_tensor(one, all_of_them)
            dist.gather(one, lists if rank == 0 else None, 0)
            dist.scatter(one, lists if rank == 0 else None, 0)
            dist.all_to_all_single(all_of_them.clone(), all_of_them)
            # Rank 0 gets 200 from each, rank 1 the rest.
            splits = [200, 2 * COUNT - 200]
            got = [splits[rank]] * world
            dist.all_to_all_single(torch.empty(sum(got)), all_of_them, got, splits)
            dist.barrier()
            dist.all_reduce(one, group=swapped)
            if rank == 0:
                dist.send(one, 1)
            else:
                dist.recv(one, 0)
            ours.all_reduce_(one, name, "sum")
            ours.all_reduce(one, name, "sum")
            ours.all_gather(one, name)
            ours.reduce_scatter(all_of_them, name, "sum")
            ours.broadcast_(one, name, 1)
            ours.all_reduce_int8_(one, name, "sum")
            profiler.step()
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["name"] == "record_param_comms"]
