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
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

import unisono
from unisono import _offers
from unisono.vllm_weights import TrainerInitInfo, _Runs, _UpdateInfo, move_to_heap


class Model(torch.nn.Sequential):
    """A worker's model, which keeps the parts of its weights as they come, and loads them."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(10, 20), torch.nn.Linear(20, 5).bfloat16())
        self.parts: list[dict[str, torch.Tensor]] = []

    def load_weights(self, weights: Any) -> None:
        self.parts.append(dict(weights))
        own = dict(self.named_parameters())
        for name, weight in self.parts[-1].items():
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], weight)

    def values(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in self.named_parameters()}


class Client:
    """vLLM's calls, without a vLLM: a worker's update ends with `finish` or an error."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.calls: list[str] = []
        self.runs: list[int] = []
        self.is_active = False
        # The number of the update that fails, for its lengths are wrong.
        self.failing = -1

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.calls.append("start")
        assert not self.is_active, "amid an update"
        self.engine.start_weight_update()
        self.is_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        assert self.is_active
        self.runs.append(len(update_info["regions"]))
        self.update = json.loads(json.dumps(update_info))
        if self.calls.count("update") == self.failing:
            self.update["lengths"][0] += 1
        try:
            self.engine.update_weights(self.update)
        except BaseException:
            self.is_active = False
            raise

    def finish_weight_update(self) -> None:
        self.calls.append("finish")
        assert self.is_active
        self.engine.finish_weight_update()
        self.is_active = False


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def main() -> None:
    config = SimpleNamespace(parallel_config=None, model_config=None)
    worker = Model()
    record_metadata_for_reloading(worker)
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="unisono"), config, torch.device("cpu"), worker
    )
    client = Client(engine)
    module = Model()
    move_to_heap(module)
    assert all(p.detach().view(torch.uint8).numpy() in unisono.heap() for p in module.parameters())
    # One with gaps, which is not offered where it lies.
    module[1].weight = torch.nn.Parameter(torch.randn(20, 5).bfloat16().t())

    def trainer(rank: int, part_bytes: int = 900) -> Any:
        info = TrainerInitInfo(rank=rank, part_bytes=part_bytes)
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
        check_equal({**worker.parts[0], **worker.parts[1]}, module.values())
        check_equal(worker.values(), module.values())
        change(module)
    # The first part lies in one run, and of the second the weight was copied.
    assert client.runs == [1, 2] * 2
    assert not _offers._process.own().regions._counted
    with pytest.raises(unisono.InvalidArgumentError, match="no such memory registered"):
        engine.update_weights(client.update)
    errors(client, worker, module, trainer)
    empty_tensors()


def change(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)


def errors(client: Client, worker: Model, module: Model, trainer: Any) -> None:
    """An update fails, as it does where the trainer dies, and the next one is whole."""
    # With 700 bytes the first layer is cut into two parts, and its bias does not come.
    for part_bytes, failing in ((900, 1), (900, 2), (700, 2)):
        old, new = worker.values(), module.values()
        sender = trainer(0, part_bytes)
        client.calls.clear()
        client.failing = failing
        with pytest.raises(ValueError, match=r"an array of \d+ bytes for an offer of"):
            sender.send_weights()
        assert client.calls == ["start", *["update"] * failing, "finish"], client.calls
        assert not _offers._process.own().regions._counted
        found = worker.values()
        if part_bytes == 900:
            # Layers have all of their new weights, or the old ones.
            come = [name for name in new if failing == 2 and name.startswith("0.")]
            check_equal(found, {**old, **{name: new[name] for name in come}})
        client.failing = -1
        sender.send_weights()
        check_equal(worker.values(), new)
        change(module)
    # A trainer that dies between two parts leaves a worker amid an update.
    client.start_weight_update()
    with pytest.raises(AssertionError, match="amid an update"):
        sender.send_weights()
    sender.send_weights()
    check_equal(worker.values(), module.values())


def empty_tensors() -> None:
    """Tensors of no elements have no address, and are a part of others' storage all the same."""
    whole = torch.arange(40.0)
    weights = {"a": whole[:10], "b": whole[10:10], "c": whole[10:40], "d": torch.empty(0, 3)}
    runs = _Runs(weights.values())
    offered = _offers.offer_all(runs.blocks)
    check_equal(_UpdateInfo.of(weights, runs, offered.offers).read(), weights)
    offered.withdraw()
    assert runs.places == [[0, 0], [0, 40], [0, 40], [1, 0]], runs.places


if __name__ == "__main__":
    main()
