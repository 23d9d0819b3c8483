"""Run by test_vllm: both engines of unisono's weight transfer, made by vLLM's own factories.

The trainer and the worker are in one process here, and what goes through vLLM's call between them
is JSON, as over HTTP.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import (
    ModuleSource,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

import unisono
from unisono import _offers
from unisono.vllm_weights import TrainerInitInfo, move_to_heap


class Model:
    """A worker's model, which keeps its weights as they come."""

    def __init__(self) -> None:
        self.parts: list[dict[str, torch.Tensor]] = []

    def load_weights(self, weights: Any) -> None:
        self.parts.append(dict(weights))


class Client:
    """vLLM's calls, without a vLLM."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.calls: list[str] = []
        self.runs: list[int] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        self.runs.append(len(update_info["regions"]))
        self.update = json.loads(json.dumps(update_info))
        self.engine.update_weights(self.update)

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


def main() -> None:
    config = SimpleNamespace(parallel_config=None, model_config=None)
    worker = Model()
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="unisono"), config, torch.device("cpu"), worker
    )
    client = Client(engine)
    module = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Linear(20, 5).bfloat16())
    move_to_heap(module)
    assert all(p.detach().view(torch.uint8).numpy() in unisono.heap() for p in module.parameters())
    # One with gaps, which is not offered where it lies.
    module[1].weight = torch.nn.Parameter(torch.randn(20, 5).bfloat16().t())

    def trainer(rank: int) -> Any:
        info = TrainerInitInfo(rank=rank, part_bytes=900)
        return WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=ModuleSource(module)
        )

    trainer(1).send_weights()
    assert not client.calls, "rank 1 does not send"
    sender = trainer(0)
    for _ in range(2):
        worker.parts.clear()
        client.calls.clear()
        sender.send_weights()
        assert client.calls == ["start", "update", "update", "finish"], client.calls
        assert [list(part) for part in worker.parts] == [
            ["0.weight", "0.bias"],
            ["1.weight", "1.bias"],
        ]
        for name, found in {**worker.parts[0], **worker.parts[1]}.items():
            expected = module.get_parameter(name).detach()
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        with torch.no_grad():
            module[0].weight.add_(1)
    # The first part lies in one run, and of the second the weight was copied.
    assert client.runs == [1, 2] * 2
    assert not _offers._process.own().regions._counted
    with pytest.raises(unisono.InvalidArgumentError, match="no such memory registered"):
        engine.update_weights(client.update)


if __name__ == "__main__":
    main()
