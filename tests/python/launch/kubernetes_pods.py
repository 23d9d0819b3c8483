"""The pods that Kubernetes and Kubeflow's operators make of a file of `examples/kubernetes`.

The values they set are taken from their documents and their sources: the Job controller and the
kubelet of Kubernetes, the Training Operator 1.9 (`pkg/controller.v1/pytorch/envvar.go`) and the
Trainer 2.3 (`pkg/runtime/framework/plugins/torch/torch.go`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

NAMESPACE = "default"
ZONE = f"{NAMESPACE}.svc.cluster.local"


@dataclass(frozen=True)
class Pod:
    """One pod: its command and variables, and by which names it is known.

    `own_names` are those that the kubelet writes into the pod's own /etc/hosts; `dns_names` are
    those that the cluster's DNS gives to the others, sooner or later.
    """

    command: list[str]
    env: dict[str, str]
    own_names: list[str]
    dns_names: list[str]


def pods_of(documents: list[dict]) -> list[Pod]:
    """The pods of a file with a Service and an indexed Job, a PyTorchJob or a TrainJob."""
    kinds = {"Job": _of_job, "PyTorchJob": _of_pytorchjob, "TrainJob": _of_trainjob}
    *services, workload = documents
    return kinds[workload["kind"]](workload, services)


def template_of(documents: list[dict]) -> dict:
    """The specification of the pods of a Job."""
    return documents[-1]["spec"]["template"]["spec"]


def _of_job(job: dict, services: list[dict]) -> list[Pod]:
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"], "all ranks run at the same time"
    # The name in DNS exists only where a headless Service of the subdomain's name selects the pod.
    labels = {"batch.kubernetes.io/job-name": name}
    [service] = [one for one in services if one["metadata"]["name"] == pod["subdomain"]]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == labels

    def at(index: int) -> Pod:
        engine = {"JOB_COMPLETION_INDEX": str(index)}
        host, domain = f"{name}-{index}", f"{pod['subdomain']}.{ZONE}"
        return _pod(container, engine, host, domain)

    return [at(index) for index in range(spec["completions"])]


def _of_pytorchjob(job: dict, _services: list[dict]) -> list[Pod]:
    name, spec = job["metadata"]["name"], job["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    pods = [("master", replicas["Master"], 0)]
    workers = replicas.get("Worker", {"replicas": 0})
    pods += [("worker", workers, index) for index in range(workers["replicas"])]
    per_pod = spec.get("nprocPerNode", "auto")
    ranks = int(per_pod) if per_pod.isdigit() else 1

    def at(rank: int) -> Pod:
        kind, replica, index = pods[rank]
        engine = {
            "PYTHONUNBUFFERED": "1",
            "MASTER_PORT": "23456",
            "PET_MASTER_PORT": "23456",
            "MASTER_ADDR": f"{name}-master-0",
            "PET_MASTER_ADDR": f"{name}-master-0",
            # The number of ranks, but the number of the pod: torchrun replaces both.
            "WORLD_SIZE": str(len(pods) * ranks),
            "RANK": str(rank),
            "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": per_pod,
            "PET_NNODES": str(len(pods)),
        }
        [container] = replica["template"]["spec"]["containers"]
        return _pod(container, engine, f"{name}-{kind}-{index}", None)

    return [at(rank) for rank in range(len(pods))]


def _of_trainjob(job: dict, _services: list[dict]) -> list[Pod]:
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]

    def at(index: int) -> Pod:
        engine = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
            # The pods are those of an indexed Job.
            "JOB_COMPLETION_INDEX": str(index),
        }
        return _pod(trainer, engine, f"{name}-node-0-{index}", f"{name}.{ZONE}")

    return [at(index) for index in range(trainer["numNodes"])]


def _pod(container: dict, engine: Mapping[str, str], host: str, domain: str | None) -> Pod:
    env: dict[str, str] = {}
    fields = {"metadata.namespace": NAMESPACE}
    for entry in container.get("env", ()):
        if "valueFrom" in entry:
            env[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            env[entry["name"]] = _expand(entry["value"], env)
    assert not env.keys() & engine.keys(), "what the engine sets is not set in the file"
    env |= engine
    names = [host] if domain is None else [f"{host}.{domain}", host]
    # Within the namespace the search list completes a name.
    short = [host] if domain is None else [f"{host}.{domain}", f"{host}.{domain.split('.')[0]}"]
    command = [_expand(word, env) for word in container["command"]]
    return Pod(command, env, own_names=names, dns_names=short)


def _expand(text: str, env: Mapping[str, str]) -> str:
    """The kubelet's value of `$(NAME)`: the variable, or the same text where there is none."""
    return re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), text)


def lay_secret(folder: Path, pod: dict, text: str) -> Path:
    """Lay the one secret of a pod's volumes into `folder` as the kubelet does. Takes root.

    The file belongs to root and has the volume's mode. Where the pod has an `fsGroup`, it also
    belongs to that group, which may read it: a secret is mounted read-only, so that 0440 is added.
    """
    [source] = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    [mount] = pod["containers"][0]["volumeMounts"]
    asked = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    path = Path(asked["UNISONO_SECRET_FILE"])
    assert path.parent == Path(mount["mountPath"])
    version = folder / "..2026_01_01"
    version.mkdir()
    file = version / path.name
    file.write_text(text)
    mode, group = source.get("defaultMode", 0o644), pod.get("securityContext", {}).get("fsGroup")
    if group is not None:
        os.chown(file, 0, group)
        mode |= 0o440
    file.chmod(mode)
    (folder / "..data").symlink_to(version.name)
    (folder / path.name).symlink_to(f"..data/{path.name}")
    return folder / path.name


def names_seen_by(
    pods: Iterable[Pod], me: int, addresses: list[str], *, is_early: bool = False
) -> dict[str, str]:
    """The addresses that the names of pods stand for in pod `me`.

    Its own are in its /etc/hosts, and DNS has those of all; that of a pod that `is_early` does not
    have the pod itself yet.
    """
    seen: dict[str, str] = {}
    for index, pod in enumerate(pods):
        names = pod.own_names if index == me else []
        if index != me or not is_early:
            names = [*names, *pod.dns_names]
        seen |= dict.fromkeys(names, addresses[index])
    return seen
