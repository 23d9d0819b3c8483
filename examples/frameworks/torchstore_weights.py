"""Give weights from a trainer to two generators through torchstore, over unisono.

    python examples/frameworks/torchstore_weights.py

`unisono.torchstore.install()` has the puts and gets of a process go over unisono. The rest is
torchstore's and Monarch's own interface.
"""

import asyncio

import torch
import torchstore as ts
from monarch.actor import Actor, endpoint, this_host

import unisono.torchstore


def weights(step: float) -> dict[str, torch.Tensor]:
    return {"layer.weight": torch.full((1000, 1000), step), "layer.bias": torch.arange(3) + step}


class Trainer(Actor):
    @endpoint
    async def publish(self, step: float) -> None:
        unisono.torchstore.install()
        await ts.put_state_dict(weights(step), "policy")


class Generator(Actor):
    @endpoint
    async def load(self) -> str:
        unisono.torchstore.install()
        state = await ts.get_state_dict("policy")
        weight = state["layer.weight"]
        in_heap = weight.numpy() in unisono.heap()
        return f"{weight.sum():.0f}, {state['layer.bias'].tolist()}, in the heap: {in_heap}"


async def main() -> None:
    host = this_host()
    await ts.initialize()
    trainer = host.spawn_procs(per_host={"gpus": 1}).spawn("trainer", Trainer)
    generators = host.spawn_procs(per_host={"gpus": 2}).spawn("generators", Generator)
    for step in (1.0, 2.0):
        await trainer.publish.call_one(step)
        for point, line in await generators.load.call():
            print(f"step {step:.0f}, generator {point.rank}: {line}")
    await ts.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
