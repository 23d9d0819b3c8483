"""Run under torchrun by test_frameworks: Accelerate's choice of a backend for the CPU."""

from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs

import unisono.accelerate


def refusal() -> str:
    try:
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="unisono")])
    except ValueError as error:
        return str(error)
    raise AssertionError("Accelerate takes unisono without install()")


if __name__ == "__main__":
    assert "not available, please use gloo" in refusal()
    AcceleratorState._reset_state(reset_partial_state=True)

    unisono.accelerate.install()
    unisono.accelerate.install()
    given = InitProcessGroupKwargs(backend="unisono", timeout=timedelta(seconds=77))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[given])
    assert accelerator.state.backend == dist.get_backend() == "unisono"
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == given.timeout
    rank = torch.tensor([accelerator.process_index])
    assert accelerator.gather(rank).tolist() == [0, 1]
    assert accelerator.reduce(rank, "sum").tolist() == [1]
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)

    accelerator = Accelerator(cpu=True)
    assert dist.get_backend() == "gloo", "the default stays"
    # Gloo fails where its peer leaves while it still connects.
    accelerator.wait_for_everyone()
    accelerator.end_training()
