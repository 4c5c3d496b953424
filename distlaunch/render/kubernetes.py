"""Layer render: an Indexed Job, and the headless Service by which its pods find each other; pure.

Source: Kubernetes' documentation of Jobs, pod failure policies and DNS for Services and pods.
"""

from __future__ import annotations

from distlaunch.core.errors import EXIT_HANG, EXIT_SOFTWARE, EXIT_UNAVAILABLE
from distlaunch.render import names, pod
from distlaunch.render.request import Request, duration_s
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import Noted, Value, written

_CONTAINER = "trainer"
_LONGEST_LABEL = 63
_KEPT_S = 7 * 24 * 3600
_RENDEZVOUS_PORT = 29400
_SIGNALLED = 128
_MAY_GO_ON = sorted((EXIT_UNAVAILABLE, EXIT_SOFTWARE, EXIT_HANG, *(_SIGNALLED + each for each in (1, 2, 9, 15))))
"""Ends that another pod may put right: nodes that were missing, a hang, a launcher that was killed or told to stop."""


def render(request: Request, shape: Shape) -> str:
    """Write Service and Job. Raises ConfigError."""
    name = names.job_name(request, longest=_LONGEST_LABEL - len(f"-{shape.most - 1}"))
    several = shape.most > 1
    documents = [_service(request, name)] if several else []
    notes = ["Needs Kubernetes 1.31, as its size may change (successPolicy)."] if shape.elastic else []
    return written(
        pod.head(request, name, "a Job", shape, *notes),
        [*documents, _job(request, shape, name)],
    )


def _service(request: Request, name: str) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "clusterIP": Noted(value="None", why="Headless: each pod has a name of its own."),
        "publishNotReadyAddresses": Noted(value=True, why="Pods find each other before they are ready."),
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": _RENDEZVOUS_PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": pod.metadata(request, name), "spec": spec}


def _job(request: Request, shape: Shape, name: str) -> dict[str, Value]:
    restarts = request.train.max_restarts
    spec: dict[str, Value] = {}
    if shape.most > 1:
        spec["completionMode"] = Noted(value="Indexed", why="Each pod has a number, which is its node rank.")
        spec["completions"] = shape.most
        spec["parallelism"] = shape.most
    if shape.elastic:
        spec["successPolicy"] = Noted(
            value={"rules": [{"succeededIndexes": "0"}]},
            why="Pod 0 coordinates: if it ends with 0 the job is done, also for pods that never got room.",
        )
    spec["backoffLimit"] = Noted(
        value=restarts * shape.most,
        why="How many pods may be replaced: --max-restarts times the pods, as a restart may have lost them all."
        " A restart for which no pod was lost takes place inside the pods and costs nothing here.",
    )
    spec["podReplacementPolicy"] = Noted(
        value="Failed", why="A pod is replaced when it has ended, not while it still saves: both have the same name."
    )
    spec["podFailurePolicy"] = {"rules": _rules()}
    if request.more.time is not None:
        spec["activeDeadlineSeconds"] = duration_s(request.more.time)
    spec["ttlSecondsAfterFinished"] = Noted(value=_KEPT_S, why="The pods' logs can be read for a week.")
    spec["template"] = _template(request, shape, name)
    about = pod.queued(request, pod.metadata(request, name))
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec}


def _rules() -> list[Value]:
    return [
        Noted(
            value={"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            why="Preempted, drained or evicted: replaced, and not counted.",
        ),
        Noted(
            value={
                "action": "FailJob",
                "onExitCodes": {
                    "containerName": _CONTAINER,
                    "operator": "NotIn",
                    "values": [*_MAY_GO_ON],
                },
            },
            why="An end that would repeat fails the job at once: 2 (a mistake in the options), and the code of a worker"
            f" that failed although restarted. Not so {EXIT_UNAVAILABLE} (nodes missing), {EXIT_SOFTWARE} (a fault of"
            f" distlaunch), {EXIT_HANG} (a hang) and launchers that were killed or told to stop.",
        ),
    ]


def _template(request: Request, shape: Shape, name: str) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "restartPolicy": Noted(value="Never", why="The policies above decide, which need this."),
        **pod.pod_spec(request, shape, pod.container(request, shape, _CONTAINER)),
    }
    if shape.most > 1:
        spec = {"subdomain": Noted(value=name, why="The Service: makes NAME-0, NAME-1, ... names in DNS."), **spec}
    label = Noted(value="false", why="A mesh's proxy would stand between the workers, and outlive them.")
    return {"metadata": {"labels": {"sidecar.istio.io/inject": label}}, "spec": spec}
