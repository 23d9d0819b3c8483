"""Let actors of Ray communicate through ray.util.collective over unisono.

    python examples/frameworks/ray_collective.py

`unisono.ray.register()` makes the backend known, in the driver and in each actor. The rest is Ray's
own interface.
"""

import os
import sys

# Read when Ray is imported: it would report its use to its makers.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from ray.util import collective
from ray.util.collective.types import ReduceOp

import unisono.ray

RANKS = 2


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, rank: int) -> None:
        unisono.ray.register()
        self.rank = rank

    def setup(self, group: str) -> None:
        collective.init_collective_group(RANKS, self.rank, "UNISONO", group)

    def run(self, group: str) -> str:
        def same(actual: np.ndarray, expected: object) -> None:
            np.testing.assert_array_equal(actual, expected)

        mine = np.full(1000, self.rank + 1.0, np.float32)
        collective.allreduce(mine, group)
        same(mine, 3.0)
        mine[:] = self.rank + 1
        collective.allreduce(mine, group, ReduceOp.PRODUCT)
        same(mine, 2.0)

        mine[:] = self.rank
        collective.reduce(mine, dst_rank=1, group_name=group, op=ReduceOp.MAX)
        same(mine, self.rank)
        collective.broadcast(mine, src_rank=1, group_name=group)
        same(mine, 1.0)

        parts = [np.empty(3, np.int64) for _ in range(RANKS)]
        collective.allgather(parts, np.full(3, self.rank), group)
        same(np.stack(parts), [[0] * 3, [1] * 3])
        block = np.empty(2)
        collective.reducescatter(block, [np.full(2, 1.0), np.full(2, 2.0)], group)
        same(block, 2.0 * (self.rank + 1))

        if self.rank == 0:
            collective.send(np.arange(5), 1, group)
        else:
            received = np.empty(5, np.int64)
            collective.recv(received, 0, group)
            same(received, np.arange(5))
        collective.barrier(group)
        return f"rank {collective.get_rank(group)} of {collective.get_collective_group_size(group)}"

    def with_torch(self, group: str) -> str:
        import torch

        tensors = [torch.full((4,), self.rank + 1.0) for _ in range(RANKS)]
        collective.allreduce(tensors[0], group)
        assert torch.equal(tensors[0], torch.full((4,), 3.0))
        block = torch.empty(4)
        collective.reducescatter(block, [torch.full((4,), float(self.rank))] * RANKS, group)
        assert torch.equal(block, torch.ones(4))
        gathered = [torch.empty(4) for _ in range(RANKS)]
        collective.allgather(gathered, torch.full((4,), float(self.rank)), group)
        assert torch.equal(gathered[1], torch.ones(4))
        collective.destroy_collective_group(group)
        return f"rank {self.rank} with torch"


def main() -> None:
    unisono.ray.register()
    # Actors find what this program finds.
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    ray.init(
        num_cpus=RANKS,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    try:
        workers = [Worker.remote(rank) for rank in range(RANKS)]
        # Once made by the actors, once declared by the driver, under a name that was used before.
        for attempt in ("declared", "made", "declared"):
            if attempt == "made":
                ray.get([worker.setup.remote(attempt) for worker in workers])
            else:
                collective.create_collective_group(
                    workers, RANKS, list(range(RANKS)), "UNISONO", attempt
                )
            for line in ray.get([worker.run.remote(attempt) for worker in workers]):
                print(f"{attempt}: {line}")
            for line in ray.get([worker.with_torch.remote(attempt) for worker in workers]):
                print(f"{attempt}: {line}")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
