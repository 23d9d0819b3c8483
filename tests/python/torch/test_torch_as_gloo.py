"""Programs that ask for gloo run on unisono, when it is asked to serve them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import launching
import pytest
import seeded
import torch
from ranks import run_ranks, run_torchrun
from torch_as_gloo_ranks import (
    beside_another,
    both_kinds,
    by_call,
    by_class,
    by_name,
    checkpoint,
    objects,
    reconfigurable,
    rpc,
    several_devices,
    sharded,
    split,
)

ON = {"UNISONO_AS_GLOO": "1"}
ACTS = "unisono: in gloo's place for the process groups of this program (UNISONO_AS_GLOO=1)"
NEWER = hasattr(torch.distributed.Backend, "_ensure_backend_registered")
RECORDS = hasattr(torch.distributed.distributed_c10d, "_maybe_attach_flight_recorder")


def target(function: object) -> str:
    return f"torch_as_gloo_ranks:{function.__name__}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", [["gloo"], [], ["cpu:gloo"]])
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_by_name(backend: list[str], debug: str) -> None:
    env = {**ON, "TORCH_DISTRIBUTED_DEBUG": debug}
    results = run_ranks(2, target(by_name), *backend, env=env, torch=True)
    for result in results:
        found = result.value
        assert found["backend"] == (backend[0] if backend else "undefined")
        assert found["of group"] == "gloo"
        assert found["served"] == ["unisono", "unisono"]
        assert found["is"] or debug == "DETAIL"
        if backend == ["gloo"]:
            assert found["name"] == "gloo"
    assert [result.output.count(ACTS) for result in results] == [1, 0]


def test_gloo_stays_where_nobody_asks() -> None:
    for env in ({}, {"UNISONO_AS_GLOO": "0"}):
        results = run_ranks(2, target(by_name), "gloo", env=env, torch=True)
        for result in results:
            assert result.value["served"] == ["gloo", "gloo"]
            assert "unisono:" not in result.output


def test_a_value_that_means_nothing_is_named() -> None:
    results = run_ranks(2, target(by_name), "gloo", env={"UNISONO_AS_GLOO": "please"}, torch=True)
    for result in results:
        assert result.value["served"] == ["gloo", "gloo"]
        assert "UNISONO_AS_GLOO=please is neither 1 nor 0; gloo stays" in result.output


def test_groups_that_leave_rank_0_out_are_announced_too() -> None:
    results = run_ranks(3, target(beside_another), env=ON, torch=True)
    # Each rank is the first of one of three groups. Which of these comes first, nobody knows.
    assert sum(result.output.count(ACTS) for result in results) == 1


def test_by_class() -> None:
    results = run_ranks(2, target(by_class), env=ON, torch=True)
    assert [result.output.count(ACTS) for result in results] == [1, 0]
    for result in results:
        assert result.value["served"] == ["unisono", "unisono", "unisono", "gloo"]
        assert result.value["is"] == [True, True, True]
        assert result.value["class"]
        assert not result.value["other"]
        assert "the class Derived derives from ProcessGroupGloo and stays on gloo" in result.output
        assert "UNISONO_INTERFACE says which interface" in result.output


@pytest.mark.parametrize("asked", ["1", "0"])
def test_rpc(asked: str) -> None:
    """It hands a bare backend to an object collective, on gloo itself too."""
    results = run_ranks(2, target(rpc), env={"UNISONO_AS_GLOO": asked}, torch=True)
    assert results[0].value == [2.0, 2.0]
    assert (ACTS in results[0].output) == (asked == "1")


def test_device_mesh_and_dtensor() -> None:
    results = run_ranks(4, target(sharded), env=ON, torch=True)
    assert [result.value for result in results] == ["unisono"] * 4
    # Of the groups of the mesh, two more ranks are the first.
    assert [result.output.count(ACTS) for result in results] == [1, 0, 0, 0]


def test_beside_a_backend_for_another_device() -> None:
    stand_in = "standin"
    for result in run_ranks(2, target(several_devices), stand_in, env=ON, torch=True):
        assert result.value == {
            "backend": f"cpu:gloo,cuda:{stand_in}",
            "cpu": ["unisono"] * 2,
            "cuda": ["fake"] * 2,
        }


def test_checkpoint(tmp_path: Path) -> None:
    results = run_ranks(2, target(checkpoint), str(tmp_path), env=ON, torch=True)
    for result in results:
        assert result.value == {"served": "unisono", "backend": "gloo"}
    assert ACTS in results[0].output


@pytest.mark.skipif(not RECORDS, reason="this torch splits no groups on the CPU")
def test_groups_made_by_a_split() -> None:
    for result in run_ranks(4, target(split), env=ON, torch=True):
        found = result.value
        assert found["served"] == ["unisono"] * 2
        assert found["backend"] == ["gloo"] * 2
        assert found["name"] == ["gloo"] * 2
        assert found["is"]
        # torch's flight recorder has seen both calls end, and knows their group.
        assert len(found["recorded"]) == 2
        assert found["recorded"][0] == ("a pair", "gloo:all_reduce", "completed")
        assert found["ranks"] in ("[0, 1]", "[2, 3]")
        assert found["told"] == found["ranks"]
        assert found["unhealthy"] == ["gloo"]


def test_by_call() -> None:
    results = run_ranks(2, target(by_call), torch=True)
    for result in results:
        assert result.value == ["gloo", "unisono"]


@pytest.mark.skipif(not NEWER, reason="this torch has no enable_reconfigure")
def test_a_group_that_is_to_be_reconfigured_is_served() -> None:
    results = run_ranks(2, target(reconfigurable), env=ON, torch=True)
    assert all(result.value == "unisono" for result in results)


@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_of_both_kinds_are_told_apart(odd: int) -> None:
    """The rank `odd` alone runs on unisono, and says who does not."""
    env = [ON if rank == odd else {} for rank in range(3)]
    results = run_ranks(3, target(both_kinds), env=env.__getitem__, torch=True)
    seconds, text = results[odd].value
    other = 1 if odd == 0 else 0
    assert f"rank {other} makes this group with torch's own gloo, rank {odd} with unisono" in text
    assert "set it on every rank" in text
    assert seconds < 7


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", "run", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


NOTHING = "unisono run: no process on this host made a group on gloo, so unisono served nothing."


def test_run_takes_scripts_modules_and_commands(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['UNISONO_AS_GLOO'], *sys.argv[1:])")
    assert run(str(script), "a", "--b").stdout == "1 a --b\n"
    assert run("--", str(script), "-h").stdout == "1 -h\n"
    assert run("-m", "platform").stdout.startswith("Linux")


def test_run_ends_as_the_program_and_says_if_it_did_nothing() -> None:
    done = run("sh", "-c", "echo $UNISONO_AS_GLOO; exit 3")
    assert (done.returncode, done.stdout) == (3, "1\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(NOTHING)
    assert "torchrun" in line
    assert "`unisono launch --as-gloo -n RANKS PROGRAM`" in line
    # Once, wherever it was said, and not of a program that was interrupted.
    again = run(sys.executable, "-m", "unisono", "run", "true")
    assert (again.returncode, again.stderr.count(NOTHING)) == (0, 1)
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGSEGV):
        killed = run("sh", "-c", f"kill -{number} $$")
        assert (killed.returncode, killed.stderr) == (-number, "")


SLEEPER = """
trap 'echo got TERM; exit 5' TERM
echo ready
while :; do sleep 0.02; done
"""


# As a shell starts a job: in a process group of its own, whose leader is the shell's child.
SHELL = """
import os, sys
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    os.execv(sys.executable, [sys.executable, "-m", "unisono", "run", *sys.argv[1:]])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_run_passes_signals_on() -> None:
    with launching.started([sys.executable, "-c", SHELL, "sh", "-c", SLEEPER]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (job,) = launching.children(process.pid)
        both = [job, *launching.children(job)]
        assert len(both) == 2
        os.kill(job, signal.SIGTSTP)
        launching.until(lambda: {launching.state(pid) for pid in both} == {"T"}, "the stop")
        os.kill(job, signal.SIGCONT)
        launching.until(lambda: "T" not in map(launching.state, both), "the end of the stop")
        os.kill(job, signal.SIGTERM)
        done = launching.finish(process)
    assert (done.code, done.out) == (5, ["got TERM"])


def test_the_program_does_not_outlive_run() -> None:
    command = [sys.executable, "-m", "unisono", "run", "sh", "-c", SLEEPER]
    with launching.started(command) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (program,) = launching.children(process.pid)
        process.kill()
        launching.until(lambda: not launching.alive(program), "the end of the program")


def test_run_says_what_is_wrong() -> None:
    assert run().returncode == 2
    usage = run("--help").stdout
    assert usage.startswith("usage: unisono run")
    # Each command in it starts more than one process, or is the launcher that does.
    examples = usage.partition("Examples:\n")[2].splitlines()
    assert all("-per-node" in line or "--num_processes" in line for line in examples), examples
    absent = run("no-such-command")
    assert absent.returncode == 127
    assert absent.stderr == "unisono run: there is no command 'no-such-command'\n"
    off = run("true", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert off.returncode == 2
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from finding unisono" in off.stderr


# A job: what it prints tells that its ranks have met, and on what.
JOB = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(total)
served = dist.group.WORLD._get_backend(torch.device("cpu")).name()
world, result = dist.get_world_size(), total[0].item()
# In one piece: not every launcher keeps lines whole.
print(f"{dist.get_backend()} by {served}: {result:g} of {world}\\n", end="", flush=True)
dist.destroy_process_group()
"""
JOB_SAYS = "gloo by unisono: 3 of 2"


@pytest.mark.parametrize("door", launching.doors())
def test_launch_as_gloo(door: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = [*launching.doors()[door], "--as-gloo", "-n", "2", str(script)]
    done = launching.run(command)
    assert done.code == 0, done
    assert sorted(done.out) == [f"[{rank}] {JOB_SAYS}" for rank in range(2)]
    assert sum(ACTS in line for line in done.err) == 1, done.err


def test_run_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    torchrun = launching.find("torchrun")
    assert torchrun
    command = [sys.executable, "-m", "unisono", "run", torchrun]
    command += ["--standalone", "--nproc-per-node", "2", str(script)]
    done = launching.run(command)
    assert done.code == 0, done
    assert done.out == [JOB_SAYS] * 2
    assert sum(ACTS in line for line in done.err) == 1, done.err
    assert not any(NOTHING in line for line in done.err), done.err


def test_a_program_that_nobody_here_wrote() -> None:
    """Accelerate's own tests of its operations between processes."""
    accelerate = pytest.importorskip("accelerate.test_utils")
    scripts = Path(accelerate.__file__).parent / "scripts"
    env = {**ON, "ACCELERATE_USE_CPU": "true"}
    for script in ("test_ops.py", "test_sync.py"):
        output = run_torchrun(seeded.__file__, 2, [scripts / script], timeout=150, env=env)
        assert output.count(ACTS) == 1, output


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_objects_take_one_round(backend: str) -> None:
    env = ON if backend == "gloo" else {}
    results = run_ranks(3, target(objects), backend, env=env, torch=True)
    for result in results:
        assert set(result.value["rounds"].values()) == {1}, result.value["rounds"]
        assert "scatter_object_output_list" in result.value["wrong"]
