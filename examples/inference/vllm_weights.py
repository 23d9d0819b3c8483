"""Give servers of vLLM the weights of a model in this process, as a trainer does after its steps.

    export VLLM_SERVER_DEV_MODE=1
    vllm serve MODEL --weight-transfer-config '{"backend": "unisono"}'
    python examples/inference/vllm_weights.py TRAINED --servers http://127.0.0.1:8000

MODEL and TRAINED are two checkpoints of one architecture, as Hugging Face has them. The servers
read the weights in the memory of this process: in one copy on this host, over TCP from others.
"""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

from unisono.vllm_weights import TrainerInitInfo, move_to_heap


class Servers:
    """Several servers, each called at the same time as the others."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.clients = [HTTPVLLMWeightSyncClient(url) for url in urls]

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            with ThreadPoolExecutor(len(self.clients)) as threads:
                list(threads.map(lambda client: getattr(client, name)(*args), self.clients))

        return call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--servers", nargs="+", required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    # Before an optimizer steps: servers on this host read the weights there faster.
    move_to_heap(model)
    trainer = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0), client=Servers(args.servers), source=ModuleSource(model)
    )
    # After each step of the training, or as often as the servers are to know:
    began = time.perf_counter()
    trainer.send_weights()
    size = sum(each.nbytes for each in model.parameters()) / 1e6
    print(f"{size:.1f} MB to {len(args.servers)} server(s), {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
