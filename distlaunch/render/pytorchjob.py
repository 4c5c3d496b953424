"""Render a PyTorchJob of Kubeflow's Training Operator (v1). No I/O.

Source: the operator's API reference and its controller, release 1.9. With restartPolicy ExitCode
the operator replaces a pod whose exit code is 128 or more, and ends the job at any other failure.
It counts replaced pods only if backoffLimit is 0.
"""

from __future__ import annotations

from distlaunch.core.errors import EXIT_HANG, EXIT_UNAVAILABLE, EXIT_USAGE
from distlaunch.render import pod
from distlaunch.render import request as names
from distlaunch.render.request import RenderRequest, duration_s
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import Commented, Value, plain, write_documents

_CONTAINER = "pytorch"
_FIRST_SIGNAL_CODE = 128
_BACKOFF_COMMENT = (
    "With 0 the operator ends the job when it would replace a pod; with another "
    "number it ignores replaced pods."
)
_PORT = 23456
"""The operator's default port."""


def render(request: RenderRequest, shape: Shape) -> str:
    """Return the manifest as YAML. Raises ConfigError if an option cannot be expressed."""
    name = names.job_name(request, longest=names.LONGEST_LABEL - len(f"-worker-{shape.max_nodes}"))
    metadata = pod.with_queue_label(request, pod.metadata(request, name))
    job: dict[str, Value] = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": _job_spec(request, shape, name),
    }
    header = pod.header(
        request,
        name,
        "a PyTorchJob (Kubeflow Training Operator 1.7 or later)",
        shape,
        *_limit_notes(request, shape),
        label="training.kubeflow.org/job-name",
    )
    return write_documents(header, [job])


def _limit_notes(request: RenderRequest, shape: Shape) -> list[str]:
    evictions = "An evicted pod counts as failed; with render kubernetes it does not."
    if not _replaces_pods(request, shape):
        return [evictions]
    until = "until its time limit" if request.more.time else "forever, unless --time limits it"
    more = (
        "The operator does not count the pods that it replaces: if workers are "
        f"killed by signals, the job goes on {until}."
    )
    return [evictions, more]


def _replaces_pods(request: RenderRequest, shape: Shape) -> bool:
    return request.train.max_restarts > 0 or shape.is_elastic


def _job_spec(request: RenderRequest, shape: Shape, name: str) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "nprocPerNode": Commented(
            value=str(shape.workers), why="The pods get it as PET_NPROC_PER_NODE."
        ),
        "runPolicy": _run_policy(request, shape),
    }
    if shape.is_elastic:
        spec["elasticPolicy"] = Commented(
            value={
                "minReplicas": shape.min_nodes,
                "maxReplicas": shape.max_nodes,
                "rdzvBackend": "c10d",
                "rdzvHost": f"{name}-master-0",
                "rdzvPort": _PORT,
            },
            why="The pods get the minimum and maximum number of pods and the "
            "coordinator's name. No torchrun is involved.",
        )
    replicas: dict[str, Value] = {
        "Master": Commented(
            value=_replica_spec(request, shape, 1),
            why="Node rank 0 coordinates: when it exits with 0, the job has succeeded.",
        )
    }
    if shape.max_nodes > 1:
        others = plain(_replica_spec(request, shape, shape.max_nodes - 1))
        replicas["Worker"] = Commented(value=others, why="The other nodes, with the same pods.")
    spec["pytorchReplicaSpecs"] = replicas
    return spec


def _run_policy(request: RenderRequest, shape: Shape) -> dict[str, Value]:
    policy: dict[str, Value] = {
        "backoffLimit": Commented(value=pod.replacements(request, shape), why=_BACKOFF_COMMENT),
        "cleanPodPolicy": Commented(
            value="Running", why="When the job has ended, pods that still run are deleted."
        ),
        "ttlSecondsAfterFinished": pod.seconds_after_finished(),
    }
    if request.more.time is not None:
        why = "After this time all pods are terminated, as when they are deleted."
        policy["activeDeadlineSeconds"] = Commented(value=duration_s(request.more.time), why=why)
    return policy


def _replica_spec(request: RenderRequest, shape: Shape, count: int) -> dict[str, Value]:
    if _replaces_pods(request, shape):
        restart = Commented(
            value="ExitCode",
            why=f"A pod that ended with {_FIRST_SIGNAL_CODE} or more (killed, terminated) is "
            f"replaced; any other failure ends the job: {EXIT_USAGE} (a mistake "
            f"in the options), {EXIT_UNAVAILABLE} (a node is missing), "
            f"{EXIT_HANG} (a hang), the code of the failed worker.",
        )
    else:
        restart = Commented(value="Never", why="No restarts: --max-restarts is 0.")
    inside = pod.container(request, shape, _CONTAINER)
    template: dict[str, Value] = {
        "metadata": {"labels": pod.no_sidecar()},
        "spec": pod.pod_spec(request, shape, inside),
    }
    return {"replicas": count, "restartPolicy": restart, "template": template}
