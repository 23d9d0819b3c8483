"""Collectives as operators of torch's dispatcher: torch.ops.unisono."""

from __future__ import annotations

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch")


def run(ranks: int, what: str, *args: object) -> list:
    found = run_ranks(ranks, f"torch_operators_ranks:{what}", *args, torch=True, timeout=180)
    return [result.value for result in found]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operator_gives_what_the_collective_gives(ranks):
    run(ranks, "values")


def test_with_torchs_wrapper_for_debugging():
    run(2, "wrapped")


def test_the_group_is_the_one_that_is_named():
    run(3, "subgroups")


def test_what_is_refused_says_why_and_costs_nothing():
    for found in run(2, "refusals"):
        assert 'unisono: op: "mean" is none of sum, avg, product, min,' in found[0]
        assert "is served by gloo and not by unisono" in found[1]
        assert "no such group" in found[2]
        assert "rank 7 is out of range" in found[3]
        assert found[4] == "ValueError: unisono: tensor: 3 rows do not divide among 2 ranks"
        assert "use torch.ops.unisono.all_reduce, or torch.no_grad()" in found[5]
        assert '"max" has no derivative here' in found[6]


@pytest.mark.parametrize("dies", [False, True], ids=["late", "dead"])
def test_a_rank_that_does_not_come_is_named_in_time(dies):
    results = run_ranks(2, "torch_operators_ranks:absence", dies, torch=True, check=False)
    error = results[0].value
    kind, what = ("DistNetworkError", "is gone") if dies else ("DistBackendError", "after 3")
    assert error.startswith(f"{kind}: unisono: "), results[0]
    for part in ("rank 1 ", "all_reduce", what):
        assert part in error, error


def test_derivatives():
    run(3, "derivatives")


def test_tensors_without_memory_and_torchs_own_checks():
    run(2, "shapes")


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "functional"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_keeps_them_in_one_graph(backend, in_place):
    run(2, "compiled", backend, in_place)
