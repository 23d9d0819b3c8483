"""Under Slurm itself: `srun` and the batch scripts of `examples/slurm`, on two nodes.

Skipped where Slurm is not installed. `test_engines.py` then still has the variables that `srun`
sets, recorded from here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT
from slurm_cluster import Slurm, cluster, missing

TROUBLE = missing()
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"Slurm: {TROUBLE}")

EXAMPLES = ROOT / "examples"
SUM = """
import socket
import numpy as np, unisono
comm = unisono.init()
array = np.full(1000, comm.rank + 1.0)
comm.all_reduce(array)
print(f"rank {comm.rank} of {comm.size} on {socket.gethostname()} has {array[0]:.0f}\\n", end="")
"""


# As `sbatch --wait`, which asks less and less often.
SUBMIT = """
job=$(sbatch --parsable "$@") || exit
while squeue --noheader --jobs "$job" | grep -q .; do sleep 0.2; done
scontrol show job "$job"
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with cluster() as started:
        yield started


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(SUM)
    return path


@pytest.mark.parametrize(
    "options,nodes",
    [
        (["-N2", "-n4", "--ntasks-per-node=2"], "1122"),
        (["-N2", "-n4", "--ntasks-per-node=2", "--distribution=cyclic"], "1212"),
        # Other numbers of tasks on the nodes.
        (["-N2", "-n3"], "112"),
        # Rank 0 is on the second node, and both ranks on one.
        (["-n2", "--nodelist=node2"], "22"),
        # MPICH's variables are there too, but not its launcher.
        (["-N2", "-n4", "--ntasks-per-node=2", "--mpi=pmi2"], "1122"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else part,
)
def test_srun_needs_nothing_else(slurm, options, nodes, script, tmp_path):
    done = slurm.run("srun", *options, sys.executable, str(script), cwd=tmp_path)
    check(done.code, done.out, nodes, done)


def test_rank_0_on_a_later_node_is_found_by_master_addr(slurm, script, tmp_path):
    """An arbitrary order of nodes, which the node list does not tell."""
    hostfile = tmp_path / "nodes"
    hostfile.write_text("node2\nnode1\nnode2\nnode1\n")
    options = ["-n4", "--distribution=arbitrary"]
    env = {"SLURM_HOSTFILE": str(hostfile), "MASTER_ADDR": "node2"}
    done = slurm.run("srun", *options, sys.executable, str(script), cwd=tmp_path, env=env)
    check(done.code, done.out, "2121", done)


def test_a_step_takes_a_part_of_its_job(slurm, script, tmp_path):
    """The node list of the step counts, not that of the job: rank 0 is not on the job's first."""
    step = ["srun", "--nodes=1", "--ntasks=2", "--nodelist=node2", sys.executable, str(script)]
    options = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2"]
    done = slurm.run(*options, *step, cwd=tmp_path)
    check(done.code, done.out, "22", done)


def test_two_jobs_on_the_same_nodes_do_not_mix(slurm, script, tmp_path):
    program = f"{sys.executable} {script}"
    steps = f"srun -N2 -n2 {program} & first=$!; srun -N2 -n2 {program} & wait $first && wait $!"
    done = slurm.run("bash", "-c", steps, cwd=tmp_path)
    assert done.code == 0, done
    expected = ["rank 0 of 2 on node1 has 3", "rank 1 of 2 on node2 has 3"]
    assert sorted(done.out) == sorted(expected * 2), done


def test_a_task_that_dies_is_named(slurm, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(SUM + "import os\nif comm.rank == 3: os._exit(7)\ncomm.barrier()\n")
    options = ["-N2", "-n4", "--ntasks-per-node=2"]
    done = slurm.run("srun", *options, sys.executable, str(path), cwd=tmp_path)
    assert done.code == 7, done
    assert any("PeerLostError" in line and "rank 3 (" in line for line in done.err), done.err


def check(code: int, out: list[str], nodes: str, said: object) -> None:
    """Rank r ran on the node whose number is at r in `nodes`, and has the sum of all."""
    world = len(nodes)
    total = world * (world + 1) // 2
    assert code == 0, said
    assert sorted(out) == [
        f"rank {rank} of {world} on node{node} has {total}" for rank, node in enumerate(nodes)
    ], said


@pytest.mark.parametrize(
    "batch,program,line",
    [
        ("numpy.sh", "numpy/average.py", r"the average is \[1\.5, 1\.75, 2\.0, 2\.25, 2\.5\]"),
        ("ddp.sh", "torch/ddp_toy.py", r"loss .*, averaged gradients, equal parameters"),
        ("torchrun.sh", "torch/ddp_toy.py", r"loss .*, averaged gradients, equal parameters"),
    ],
)
def test_batch_scripts(slurm, batch, program, line, tmp_path):
    if program.startswith("torch"):
        pytest.importorskip("torch")
    # An environment to activate: the Python that runs this test.
    activate = tmp_path / "venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n")
    done = slurm.run(
        *("bash", "-c", SUBMIT, "bash", str(EXAMPLES / "slurm" / batch), str(EXAMPLES / program)),
        cwd=tmp_path,
        env={"VENV": str(tmp_path / "venv")},
        timeout=150,
    )
    [output] = tmp_path.glob("*.out")
    assert re.fullmatch(r"unisono-[a-z]+-\d+\.out", output.name)
    text = output.read_text()
    assert any("JobState=COMPLETED" in line for line in done.out), f"{done}\n{text}"
    for rank in range(4):
        assert re.search(rf"(?m)^\d: rank {rank}: {line}$", text), text
