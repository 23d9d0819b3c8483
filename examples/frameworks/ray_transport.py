"""Let actors of Ray read each other's tensors and arrays over unisono, without pickling them.

    python examples/frameworks/ray_transport.py

`unisono.ray.register_transports()` makes the transports known, in the driver, before methods of
actors name them. The rest is Ray's own interface.
"""

import os
import sys

# Read when Ray is imported: it would report its use to its makers.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch

import unisono.ray

unisono.ray.register_transports()


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Trainer:
    def __init__(self) -> None:
        # Memory that the other processes of the host map. Any other is read too, more slowly.
        self.weights = torch.from_numpy(unisono.empty((1000, 1000), "float32")).fill_(1)

    @ray.method(tensor_transport="UNISONO")
    def state(self) -> dict[str, object]:
        return {"step": 7, "weights": self.weights, "bias": torch.arange(3, dtype=torch.bfloat16)}

    @ray.method(tensor_transport="UNISONO_NUMPY")
    def batch(self) -> list[np.ndarray]:
        return [np.arange(1_000_000), np.empty((0, 3))]


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Server:
    def load(self, state: dict[str, object]) -> str:
        weights, bias = state["weights"], state["bias"]
        assert isinstance(weights, torch.Tensor)
        assert isinstance(bias, torch.Tensor)
        return f"step {state['step']}: {weights.sum():.0f}, bias {bias.tolist()}"

    def count(self, batch: list[np.ndarray]) -> str:
        return f"{batch[0].sum()} and {batch[1].shape}"


def main() -> None:
    # Actors find what this program finds.
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    try:
        trainer, servers = Trainer.remote(), [Server.remote() for _ in range(2)]
        state = trainer.state.remote()
        for number, line in enumerate(ray.get([server.load.remote(state) for server in servers])):
            print(f"server {number}: {line}")
        print(f"batch: {ray.get(servers[0].count.remote(trainer.batch.remote()))}")
        # The driver reads in the memory of the actor as well, and into memory of its own.
        weights = ray.get(state)["weights"]
        print(f"driver: {weights.sum():.0f}, in the heap: {weights.numpy() in unisono.heap()}")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
