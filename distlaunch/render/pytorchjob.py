"""Layer render: a PyTorchJob of Kubeflow's Training Operator (v1); pure.

Source: the operator's API reference and behaviour, release 1.9.
"""

from __future__ import annotations

from distlaunch.render import names, pod
from distlaunch.render.request import Request, duration_s
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import Noted, Value, plain, written

_CONTAINER = "pytorch"
_LONGEST_LABEL = 63
_KEPT_S = 7 * 24 * 3600


def render(request: Request, shape: Shape) -> str:
    """Write the PyTorchJob. Raises ConfigError."""
    name = names.job_name(request, longest=_LONGEST_LABEL - len(f"-worker-{shape.most}"))
    about = pod.queued(request, pod.metadata(request, name))
    job: dict[str, Value] = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": about,
        "spec": _spec(request, shape),
    }
    head = pod.head(
        request,
        name,
        "a PyTorchJob (Kubeflow Training Operator 1.7 or later)",
        shape,
        "A pod that is evicted counts as one that failed; with render kubernetes it does not.",
    )
    return written(head, [job])


def _spec(request: Request, shape: Shape) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "nprocPerNode": Noted(value=str(shape.workers), why="Told to the pods as PET_NPROC_PER_NODE."),
        "runPolicy": _run_policy(request, shape),
    }
    if shape.elastic:
        spec["elasticPolicy"] = Noted(
            value={"minReplicas": shape.least, "maxReplicas": shape.most, "rdzvBackend": "c10d"},
            why="The pods are told the smallest and the largest number; worker 0 coordinates. No torchrun is involved.",
        )
        spec["pytorchReplicaSpecs"] = {"Worker": _replicas(request, shape, shape.most)}
        return spec
    replicas: dict[str, Value] = {
        "Master": Noted(value=_replicas(request, shape, 1), why="Node rank 0, which coordinates.")
    }
    if shape.most > 1:
        others = plain(_replicas(request, shape, shape.most - 1))
        replicas["Worker"] = Noted(value=others, why="The others, otherwise the same.")
    spec["pytorchReplicaSpecs"] = replicas
    return spec


def _run_policy(request: Request, shape: Shape) -> dict[str, Value]:
    policy: dict[str, Value] = {
        "backoffLimit": Noted(
            value=request.train.max_restarts * shape.most,
            why="How many pods may be replaced: --max-restarts times the pods, as a restart may have lost them all.",
        ),
        "cleanPodPolicy": Noted(value="Running", why="When the job has ended, pods that still run are ended too."),
        "ttlSecondsAfterFinished": Noted(value=_KEPT_S, why="The pods' logs can be read for a week."),
    }
    if request.more.time is not None:
        policy["activeDeadlineSeconds"] = duration_s(request.more.time)
    return policy


def _replicas(request: Request, shape: Shape, count: int) -> dict[str, Value]:
    if request.train.max_restarts:
        restart = Noted(
            value="ExitCode",
            why="A pod that was killed (code 128 and above) is replaced; any other failure, 2 for a mistake in the"
            " options and what restarts have not cured among them, ends the job.",
        )
    else:
        restart = Noted(value="Never", why="No restart was asked for: --max-restarts.")
    inside = pod.container(request, shape, _CONTAINER, _own_rank() if shape.elastic else ())
    label = Noted(value="false", why="A mesh's proxy would stand between the workers, and outlive them.")
    template: dict[str, Value] = {
        "metadata": {"labels": {"sidecar.istio.io/inject": label}},
        "spec": pod.pod_spec(request, shape, inside),
    }
    return {"replicas": count, "restartPolicy": restart, "template": template}


def _own_rank() -> list[Value]:
    field = "metadata.labels['training.kubeflow.org/replica-index']"
    return [
        Noted(
            value={"name": "DISTLAUNCH_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": field}}},
            why="The pods of an elastic job are not told their number otherwise.",
        )
    ]
