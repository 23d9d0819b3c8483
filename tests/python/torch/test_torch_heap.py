"""torch's communication buffers lie in the shared heap, and training is none the wiser."""

from __future__ import annotations

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch")

PARAMETERS = 300 * 700 + 700 + 700 * 200 + 200
GONE = {"blocks": 0, "segments": 0, "maps": 0}
MIB = 1 << 20


def run(what: str, *args: object, **env: str) -> list:
    results = run_ranks(2, f"torch_heap_ranks:{what}", *args, torch=True, timeout=90, env=env)
    return [result.value for result in results]


@pytest.fixture(scope="module")
def without_heap() -> list:
    return run("ddp", True, UNISONO_HEAP_BYTES="0")


def check_weights(values: list, expected: list) -> None:
    for value in values:
        torch.testing.assert_close(value["weights"], expected[0]["weights"], rtol=0, atol=0)


def test_the_heap_can_be_turned_off(without_heap):
    for value in without_heap:
        assert value["in_use"] == 0
        assert value["gradients"] == [False] * 4
    check_weights(without_heap, without_heap)


@pytest.mark.parametrize("view", [False, True], ids=["copied", "views"])
def test_buckets_of_ddp_lie_in_the_heap(view, without_heap):
    values = run("ddp", view)
    for value in values:
        assert value["gradients"] == [view] * 4
        assert value["in_use"] >= 4 * PARAMETERS
        assert value["left"] == GONE
    check_weights(values, without_heap)


def test_torch_can_be_set_not_to_ask(without_heap):
    values = run("ddp", True, DDP_DISABLE_COMM_MEM="1")
    for value in values:
        assert value["in_use"] == 0
    check_weights(values, without_heap)


def test_buckets_that_do_not_fit_are_private(without_heap):
    values = run("ddp", True, UNISONO_HEAP_BYTES="1M")
    for value in values:
        assert 0 < value["in_use"] <= MIB
        assert sorted(set(value["gradients"])) == [False, True]
        assert value["left"] == GONE
    check_weights(values, without_heap)


def test_buffers_of_fsdp_lie_in_the_heap_when_asked_for():
    usual = run("fsdp", False)
    asked = run("fsdp", True)
    for value in usual:
        assert value["peak"] == 0
    for value in asked:
        # The weights of a layer, gathered, and more.
        assert value["peak"] >= 4 * 300 * 700
        assert value["left"] == GONE
    check_weights(asked, usual)


def test_buffers_are_of_every_type():
    for seen in run("types"):
        assert set(seen["kinds"]) == {(True, (6,), 0)}


def test_a_tensor_of_the_heap_is_a_tensor():
    for seen in run("tensors"):
        assert seen["supported"]
        assert not seen["cuda"]
        assert seen["kind"] == ((1000,), "torch.bfloat16", "cpu")
        assert seen["in_heap"]
        assert seen["stats"] > 0
        assert seen["freed"] == 1
        assert seen["again"]
        assert seen["grown"] == (True, 2000.0)
        assert seen["none"] == 0
        assert seen["fake"]
        assert seen["child"] == 0
        assert seen["outlives"] == 40.0
        assert seen["blocks"] == 0
