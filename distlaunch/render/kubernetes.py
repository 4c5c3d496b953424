"""An Indexed Job, and the headless Service by which its pods find each other; pure.

Source: Kubernetes' documentation of Jobs, pod failure policies and DNS for Services and pods, and
its Job controller (a Job fails when more pods than backoffLimit have; the first rule that fits
counts, and rules see exit codes alone).
"""

from __future__ import annotations

import signal

from distlaunch.core.errors import EXIT_HANG, EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE
from distlaunch.planning.rendezvous import DEFAULT_PORT
from distlaunch.render import pod
from distlaunch.render import request as names
from distlaunch.render.request import Request, duration_s
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import Noted, Value, written

_CONTAINER = "trainer"
_NAME = "batch.kubernetes.io/job-name"
_TOLD, _KILLED = 128 + signal.SIGTERM, 128 + signal.SIGKILL
_OF_OTHERS = (EXIT_UNAVAILABLE, _TOLD)
"""How launchers end since another pod was lost, or is to end: TERM at one ends all, unless the job
is elastic."""
_LOST = (EXIT_SOFTWARE, _KILLED)
"""How a single launcher ends beside others that go on."""


def render(request: Request, shape: Shape) -> str:
    """Write Service and Job. Raises ConfigError."""
    name = names.job_name(request, longest=names.LONGEST_LABEL - len(f"-{shape.most - 1}"))
    several = shape.most > 1
    documents = [_service(request, name)] if several else []
    notes = (
        ["Needs Kubernetes 1.31, as its size may change (successPolicy)."] if shape.elastic else []
    )
    return written(
        pod.head(request, name, "a Job", shape, *notes, label=_NAME),
        [*documents, _job(request, shape, name)],
    )


def _service(request: Request, name: str) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "clusterIP": Noted(value="None", why="Headless: each pod has a name of its own."),
        "publishNotReadyAddresses": Noted(
            value=True, why="Pods find each other before they are ready."
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


def _job(request: Request, shape: Shape, name: str) -> dict[str, Value]:
    spec: dict[str, Value] = {}
    if shape.most > 1:
        spec["completionMode"] = Noted(
            value="Indexed", why="Each pod has a number, which is its node rank."
        )
        spec["completions"] = shape.most
        spec["parallelism"] = shape.most
    if shape.elastic:
        spec["successPolicy"] = Noted(
            value={"rules": [{"succeededIndexes": "0"}]},
            why="Pod 0 coordinates: if it ends with 0 the job is done, also for pods that never "
            "got room.",
        )
    spec["backoffLimit"] = Noted(value=pod.replacements(request, shape), why=_why_so_many(shape))
    spec["podReplacementPolicy"] = Noted(
        value="Failed",
        why="A pod is replaced when it has ended, not while it still saves: both have the same "
        "name.",
    )
    spec["podFailurePolicy"] = {"rules": _rules(shape)}
    if request.more.time is not None:
        why = "Then all pods are told to end, as when they are deleted."
        spec["activeDeadlineSeconds"] = Noted(value=duration_s(request.more.time), why=why)
    spec["ttlSecondsAfterFinished"] = pod.kept()
    spec["template"] = _template(request, shape, name)
    about = pod.queued(request, pod.metadata(request, name))
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec}


def _why_so_many(shape: Shape) -> str:
    lost = f"How many pods may be lost by {_KILLED} or {EXIT_SOFTWARE} (below)."
    restarts = "Restarts take place inside the pods, and cost nothing here."
    if shape.elastic:
        more = (
            "The others go on without them: all pods but one, and all once more for each of "
            "--max-restarts."
        )
    else:
        more = "--max-restarts times the pods, as a restart may have lost them all."
    return f"{lost} {restarts} {more}"


def _rules(shape: Shape) -> list[Value]:
    told = "a pod was told to end" if shape.elastic else "a pod was told to end, and so all were"
    return [
        Noted(
            value={
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            why="Preempted, drained or evicted: replaced, and not counted.",
        ),
        Noted(
            value={
                "action": "Ignore",
                "onExitCodes": {
                    "containerName": _CONTAINER,
                    "operator": "In",
                    "values": [*_OF_OTHERS],
                },
            },
            why=f"Nor are these: {_TOLD} ({told}), {EXIT_UNAVAILABLE} (a node is missing, perhaps "
            "the coordinator's)."
            " They begin again, later each time.",
        ),
        Noted(
            value={
                "action": "FailJob",
                "onExitCodes": {
                    "containerName": _CONTAINER,
                    "operator": "NotIn",
                    "values": sorted((*_OF_OTHERS, *_LOST)),
                },
            },
            why=f"What distlaunch has judged ends the job at once: {EXIT_USAGE} (a mistake in the "
            "options), and when"
            f" --max-restarts are used up {EXIT_HANG} (a hang) and a worker's own code. What is "
            "left is counted:"
            f" {_KILLED} (killed, mostly for want of memory) and {EXIT_SOFTWARE} (a fault of "
            "distlaunch).",
        ),
    ]


def _template(request: Request, shape: Shape, name: str) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "restartPolicy": Noted(value="Never", why="The policies above decide, which need this."),
        **pod.pod_spec(request, shape, pod.container(request, shape, _CONTAINER)),
    }
    if shape.most > 1:
        spec = {
            "subdomain": Noted(
                value=name, why="The Service: makes NAME-0, NAME-1, ... names in DNS."
            ),
            **spec,
        }
    return {"metadata": {"labels": pod.no_sidecar()}, "spec": spec}
