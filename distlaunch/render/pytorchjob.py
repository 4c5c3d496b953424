"""A PyTorchJob of Kubeflow's Training Operator (v1); pure.

Source: the operator's API reference and its controller, release 1.9. With restartPolicy ExitCode it
replaces a pod that ended with 128 or more, and any other failure ends the job; it counts these pods
only against a backoffLimit of 0.
"""

from __future__ import annotations

from distlaunch.core.errors import EXIT_HANG, EXIT_UNAVAILABLE, EXIT_USAGE
from distlaunch.render import pod
from distlaunch.render import request as names
from distlaunch.render.request import Request, duration_s
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import Noted, Value, plain, written

_CONTAINER = "pytorch"
_SIGNALLED = 128
_LIMIT = (
    "With 0 the operator ends the job when it would replace a pod; against another number it "
    "counts none."
)
_PORT = 23456
"""The operator's own default."""


def render(request: Request, shape: Shape) -> str:
    """Write the PyTorchJob. Raises ConfigError."""
    name = names.job_name(request, longest=names.LONGEST_LABEL - len(f"-worker-{shape.most}"))
    about = pod.queued(request, pod.metadata(request, name))
    job: dict[str, Value] = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": about,
        "spec": _spec(request, shape, name),
    }
    head = pod.head(
        request,
        name,
        "a PyTorchJob (Kubeflow Training Operator 1.7 or later)",
        shape,
        *_limits(request, shape),
        label="training.kubeflow.org/job-name",
    )
    return written(head, [job])


def _limits(request: Request, shape: Shape) -> list[str]:
    """Say what this kind of job cannot do, and another can."""
    said = "A pod that is evicted counts as one that failed; with render kubernetes it does not."
    if not _replaces(request, shape):
        return [said]
    until = "until its time limit" if request.more.time else "for ever, unless --time limits it"
    more = (
        "The operator does not count the pods that it replaces: if workers die of signals, the "
        f"job goes on {until}."
    )
    return [said, more]


def _replaces(request: Request, shape: Shape) -> bool:
    return request.train.max_restarts > 0 or shape.elastic


def _spec(request: Request, shape: Shape, name: str) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "nprocPerNode": Noted(
            value=str(shape.workers), why="Told to the pods as PET_NPROC_PER_NODE."
        ),
        "runPolicy": _run_policy(request, shape),
    }
    if shape.elastic:
        spec["elasticPolicy"] = Noted(
            value={
                "minReplicas": shape.least,
                "maxReplicas": shape.most,
                "rdzvBackend": "c10d",
                "rdzvHost": f"{name}-master-0",
                "rdzvPort": _PORT,
            },
            why="The pods are told the smallest and the largest number, and who coordinates. No "
            "torchrun is involved.",
        )
    replicas: dict[str, Value] = {
        "Master": Noted(
            value=_replicas(request, shape, 1),
            why="Node rank 0, which coordinates: if it ends with 0, the job is done.",
        )
    }
    if shape.most > 1:
        others = plain(_replicas(request, shape, shape.most - 1))
        replicas["Worker"] = Noted(value=others, why="The others, otherwise the same.")
    spec["pytorchReplicaSpecs"] = replicas
    return spec


def _run_policy(request: Request, shape: Shape) -> dict[str, Value]:
    policy: dict[str, Value] = {
        "backoffLimit": Noted(value=pod.replacements(request, shape), why=_LIMIT),
        "cleanPodPolicy": Noted(
            value="Running", why="When the job has ended, pods that still run are ended too."
        ),
        "ttlSecondsAfterFinished": pod.kept(),
    }
    if request.more.time is not None:
        why = "Then all pods are told to end, as when they are deleted."
        policy["activeDeadlineSeconds"] = Noted(value=duration_s(request.more.time), why=why)
    return policy


def _replicas(request: Request, shape: Shape, count: int) -> dict[str, Value]:
    if _replaces(request, shape):
        restart = Noted(
            value="ExitCode",
            why=f"A pod that ended with {_SIGNALLED} or more (killed, told to end) is replaced; "
            "any other failure ends"
            f" the job: {EXIT_USAGE} (a mistake in the options), {EXIT_UNAVAILABLE} (a node is "
            f"missing), {EXIT_HANG} (a"
            " hang), a worker's own code.",
        )
    else:
        restart = Noted(value="Never", why="No restart was asked for: --max-restarts.")
    inside = pod.container(request, shape, _CONTAINER)
    template: dict[str, Value] = {
        "metadata": {"labels": pod.no_sidecar()},
        "spec": pod.pod_spec(request, shape, inside),
    }
    return {"replicas": count, "restartPolicy": restart, "template": template}
