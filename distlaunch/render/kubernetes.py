"""Render an Indexed Job, and a headless Service by which its pods find each other. No I/O.

Source: Kubernetes' documentation of Jobs, pod failure policies and DNS, and its Job controller. A
Job fails when more pods than backoffLimit have failed. The first matching rule for failed pods
applies; rules only see exit codes.
"""

from __future__ import annotations

import signal

from distlaunch.core.errors import EXIT_HANG, EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE
from distlaunch.planning.rendezvous import DEFAULT_PORT
from distlaunch.render import pod
from distlaunch.render import request as names
from distlaunch.render.request import RenderRequest, duration_s
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import Commented, Value, write_documents

_CONTAINER = "trainer"
_NAME = "batch.kubernetes.io/job-name"
_TERMINATED, _KILLED = 128 + signal.SIGTERM, 128 + signal.SIGKILL
_CAUSED_BY_OTHERS = (EXIT_UNAVAILABLE, _TERMINATED)
"""Exit codes of a launcher if another pod was lost or is ending."""
_LOST = (EXIT_SOFTWARE, _KILLED)
"""Exit codes of a single launcher while the others go on."""


def render(request: RenderRequest, shape: Shape) -> str:
    """Return the manifest as YAML. Raises ConfigError if an option cannot be expressed."""
    name = names.job_name(request, longest=names.LONGEST_LABEL - len(f"-{shape.max_nodes - 1}"))
    several = shape.max_nodes > 1
    documents = [_build_service(request, name)] if several else []
    notes = (
        ["Needs Kubernetes 1.31 or later, because its size may change (successPolicy)."]
        if shape.is_elastic
        else []
    )
    return write_documents(
        pod.header(request, name, "a Job", shape, *notes, label=_NAME),
        [*documents, _build_job(request, shape, name)],
    )


def _build_service(request: RenderRequest, name: str) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "clusterIP": Commented(value="None", why="Headless: each pod gets its own DNS name."),
        "publishNotReadyAddresses": Commented(
            value=True, why="Pods must find each other before they are ready."
        ),
        "selector": {_NAME: name},
        "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pod.metadata(request, name),
        "spec": spec,
    }


def _build_job(request: RenderRequest, shape: Shape, name: str) -> dict[str, Value]:
    spec: dict[str, Value] = {}
    if shape.max_nodes > 1:
        spec["completionMode"] = Commented(
            value="Indexed", why="Each pod has an index, which is its node rank."
        )
        spec["completions"] = shape.max_nodes
        spec["parallelism"] = shape.max_nodes
    if shape.is_elastic:
        spec["successPolicy"] = Commented(
            value={"rules": [{"succeededIndexes": "0"}]},
            why="Pod 0 coordinates: when it exits with 0, the job has succeeded, "
            "even if other pods never started.",
        )
    spec["backoffLimit"] = Commented(
        value=pod.replacements(request, shape), why=_backoff_comment(shape)
    )
    spec["podReplacementPolicy"] = Commented(
        value="Failed",
        why="A pod is replaced when it has ended, not while it is still saving: both "
        "have the same name.",
    )
    spec["podFailurePolicy"] = {"rules": _failure_rules(shape)}
    if request.more.time is not None:
        why = "After this time all pods are terminated, as when they are deleted."
        spec["activeDeadlineSeconds"] = Commented(value=duration_s(request.more.time), why=why)
    spec["ttlSecondsAfterFinished"] = pod.seconds_after_finished()
    spec["template"] = _pod_template(request, shape, name)
    metadata = pod.with_queue_label(request, pod.metadata(request, name))
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _backoff_comment(shape: Shape) -> str:
    lost = f"How many pods may end with {_KILLED} or {EXIT_SOFTWARE} (see below)."
    restarts = "Restarts happen inside the pods and do not count."
    if shape.is_elastic:
        more = (
            "The job goes on without them: all pods but one, and all pods once for "
            "each of --max-restarts."
        )
    else:
        more = (
            "--max-restarts times the number of pods, because each restart may "
            "have lost all of them."
        )
    return f"{lost} {restarts} {more}"


def _failure_rules(shape: Shape) -> list[Value]:
    terminated = (
        "a pod was terminated"
        if shape.is_elastic
        else "a pod was terminated, which ends all of them"
    )
    return [
        Commented(
            value={
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            why="Preempted, drained or evicted pods are replaced and do not count.",
        ),
        Commented(
            value={
                "action": "Ignore",
                "onExitCodes": {
                    "containerName": _CONTAINER,
                    "operator": "In",
                    "values": [*_CAUSED_BY_OTHERS],
                },
            },
            why=f"Nor do pods that end with {_TERMINATED} ({terminated}), {EXIT_UNAVAILABLE} (a "
            "node is missing, perhaps the coordinator's). They are restarted "
            "with a growing delay.",
        ),
        Commented(
            value={
                "action": "FailJob",
                "onExitCodes": {
                    "containerName": _CONTAINER,
                    "operator": "NotIn",
                    "values": sorted((*_CAUSED_BY_OTHERS, *_LOST)),
                },
            },
            why=f"Other exit codes end the job at once: {EXIT_USAGE} (a mistake in "
            f"the options) and, when --max-restarts are used up, {EXIT_HANG} (a "
            f"hang) and the code of the failed worker. Counted are: {_KILLED} "
            f"(killed, usually because memory ran out) and {EXIT_SOFTWARE} (an "
            "error in distlaunch).",
        ),
    ]


def _pod_template(request: RenderRequest, shape: Shape, name: str) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "restartPolicy": Commented(value="Never", why="Required by the policies above."),
        **pod.pod_spec(request, shape, pod.container(request, shape, _CONTAINER)),
    }
    if shape.max_nodes > 1:
        spec = {
            "subdomain": Commented(
                value=name,
                why=("The name of the Service: gives the pods the DNS names NAME-0, NAME-1, ..."),
            ),
            **spec,
        }
    return {"metadata": {"labels": pod.no_sidecar()}, "spec": spec}
