"""Pods that Kubernetes and Kubeflow's controllers make of a manifest: hostname, variables, files
and command.

Sources: the documentation of Indexed Jobs, and the code of Training Operator 1.9 and Trainer 2.3
(see ``tests/unit/planning/clusters/test_kubernetes.py``). A Service gives pods names only through
their subdomain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HOSTS = "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n10.244.0.{ip}\t{names}\n"
NAMESPACE = "default.svc.cluster.local"

SECRET = "0123456789abcdef" * 4
"""A value like the output of ``openssl rand -hex 32``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod, as its launcher sees it."""

    environ: dict[str, str]
    argv: list[str]
    files: dict[str, str]
    spec: dict[str, Any]
    """Return the pod as sent to the API server."""


def expanded(word: str, environ: dict[str, str]) -> str:
    """Expand ``$(NAME)`` and ``$$`` as the kubelet does, byte for byte."""
    data, out, at = word.encode(), [], 0
    while at < len(data):
        if data[at : at + 1] != b"$" or at + 1 == len(data):
            out.append(data[at : at + 1].decode("utf-8", "surrogateescape"))
            at += 1
            continue
        after = data[at + 1 : at + 2]
        if after == b"$":
            out.append("$")
            at += 2
        elif after == b"(" and b")" in data[at:]:
            end = data.index(b")", at)
            name = data[at + 2 : end].decode()
            out.append(environ.get(name, f"$({name})"))
            at = end + 1
        else:
            out.append("$" + after.decode("latin-1"))  # kubelet makes one character of this byte
            at += 2
    return "".join(out).encode("utf-8", "surrogateescape").decode()


def started(
    template: dict, container: dict, hostname: str, number: int, set_by_controller: dict[str, str]
) -> Pod:
    """Return a pod's container as the kubelet starts it."""
    labels = template.get("metadata", {}).get("labels", {})
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": hostname}
    environ |= set_by_controller
    for each in container.get("env", []):
        source = each.get("valueFrom", {})
        if "secretKeyRef" in source:
            environ[each["name"]] = SECRET
        else:
            environ[each["name"]] = expanded(each["value"], environ)
    subdomain = template["spec"].get("subdomain")
    names = f"{hostname}.{subdomain}.{NAMESPACE}\t{hostname}" if subdomain else hostname
    argv = [expanded(word, environ) for word in container["command"]]
    spec = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": hostname, "labels": labels},
        "spec": template["spec"],
    }
    return Pod(
        environ=environ,
        argv=argv,
        files={"/etc/hosts": HOSTS.format(ip=number + 7, names=names)},
        spec=spec,
    )


def pods_of(documents: list[dict]) -> list[Pod]:
    """Return the pods of a manifest, in order of their indexes."""
    job = documents[-1]
    return {"Job": _indexed, "PyTorchJob": _pytorchjob, "TrainJob": _trainjob}[job["kind"]](
        documents
    )


def _indexed(documents: list[dict]) -> list[Pod]:
    job, name = documents[-1]["spec"], documents[-1]["metadata"]["name"]
    template = job["template"]
    (container,) = template["spec"]["containers"]
    if job.get("completionMode") != "Indexed":
        return [started(template, container, f"{name}-x7f2q", 0, {})]
    (service,) = (each for each in documents if each["kind"] == "Service")
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    return [
        started(template, container, f"{name}-{index}", index, {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(job["completions"])
    ]


def _pytorchjob(documents: list[dict]) -> list[Pod]:
    (job,) = documents
    spec, name = job["spec"], job["metadata"]["name"]
    slots, elastic = spec["nprocPerNode"], spec.get("elasticPolicy")
    replicas = spec["pytorchReplicaSpecs"]
    total = sum(each["replicas"] for each in replicas.values())
    shared = {"PET_NPROC_PER_NODE": slots, "PYTHONUNBUFFERED": "1"}
    master = f"{name}-master-0"
    shared |= {
        "MASTER_ADDR": master,
        "PET_MASTER_ADDR": master,
        "MASTER_PORT": "23456",
        "PET_MASTER_PORT": "23456",
    }
    shared |= {"PET_NNODES": str(total), "WORLD_SIZE": str(total * int(slots))}
    if elastic:
        assert elastic["maxReplicas"] == total
        shared["PET_NNODES"] = f"{elastic['minReplicas']}:{elastic['maxReplicas']}"
        shared["PET_RDZV_BACKEND"] = elastic["rdzvBackend"]
        shared["PET_RDZV_ENDPOINT"] = f"{elastic['rdzvHost']}:{elastic['rdzvPort']}"
    pods = []
    for kind in ("Master", "Worker"):
        for index in range(replicas.get(kind, {}).get("replicas", 0)):
            template = replicas[kind]["template"]
            labels = {
                "training.kubeflow.org/replica-index": str(index),
                **template["metadata"]["labels"],
            }
            (container,) = template["spec"]["containers"]
            assert container["name"] == "pytorch"
            rank = {"RANK": str(len(pods)), "PET_NODE_RANK": str(len(pods))}
            made = {**template, "metadata": {"labels": labels}}
            pods.append(
                started(made, container, f"{name}-{kind.lower()}-{index}", len(pods), shared | rank)
            )
    return pods


def _trainjob(documents: list[dict]) -> list[Pod]:
    (job,) = documents
    spec, name, trainer = job["spec"], job["metadata"]["name"], job["spec"]["trainer"]
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = node["template"]["spec"]["template"]
    (patched,) = template["spec"]["containers"]
    assert (node["name"], patched["name"]) == ("node", "node")
    container = {**patched, "image": trainer["image"], "command": trainer["command"]}
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    shared = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    pods = []
    for index in range(trainer["numNodes"]):
        own = {
            **template["spec"],
            "subdomain": name,
            "restartPolicy": "Never",
            "containers": [container],
        }
        numbers = {"PET_NODE_RANK": str(index), "JOB_COMPLETION_INDEX": str(index)}
        run = {**container, "env": trainer.get("env", [])}
        pods.append(
            started(
                {**template, "spec": own}, run, f"{name}-node-0-{index}", index, shared | numbers
            )
        )
    return pods
