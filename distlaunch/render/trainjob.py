"""A TrainJob of Kubeflow Trainer v2; pure.

Source: Trainer's API reference, release 2.3 (runtimePatches; before, they were
podTemplateOverrides), and JobSet's webhook (restartPolicy is OnFailure unless said, and pods' names
have an end).
"""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.render import pod
from distlaunch.render import request as names
from distlaunch.render.request import Request, duration_s
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import Noted, Value, written

_JOB = _CONTAINER = "node"
"""What Trainer's runtimes call the pods' job and their container."""

_SUFFIX = "-abcde"
"""What Kubernetes adds to a pod's name; JobSet refuses names that are too long with it."""


def render(request: Request, shape: Shape) -> str:
    """Write the TrainJob. Raises ConfigError."""
    if shape.elastic:
        raise ConfigError(
            f"{request.train.named('num_nodes')} {shape.least}:{shape.most}: a TrainJob has a "
            "fixed number of nodes",
            hint="--num-nodes N; or render kubernetes, or pytorchjob, which may be elastic",
        )
    name = names.job_name(
        request, longest=names.LONGEST_LABEL - len(f"-{_JOB}-0-{shape.most - 1}{_SUFFIX}")
    )
    job: dict[str, Value] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pod.queued(request, pod.metadata(request, name)),
        "spec": _spec(request, shape),
    }
    head = pod.head(
        request,
        name,
        "a TrainJob (Kubeflow Trainer 2.3 or later)",
        shape,
        "What follows a failure is the runtime's to say (restartPolicy, backoffLimit and "
        "podFailurePolicy, which no"
        " TrainJob may patch). One that says nothing, as Trainer's own, has containers start again "
        "up to 6 times, also"
        " after a mistake in the options. render kubernetes says it itself.",
        label="jobset.sigs.k8s.io/jobset-name",
    )
    return written(head, [job])


def _spec(request: Request, shape: Shape) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "runtimeRef": Noted(
            value={
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": names.object_name(request.more.runtime, "--runtime"),
            },
            why="A runtime for torch: it tells the pods their number and the first one's name, as "
            "PET_*.",
        )
    }
    if request.more.time is not None:
        why = "Then all pods are told to end, as when they are deleted."
        spec["activeDeadlineSeconds"] = Noted(value=duration_s(request.more.time), why=why)
    spec["trainer"] = _trainer(request, shape)
    spec["runtimePatches"] = [
        {
            "manager": "distlaunch",
            "trainingRuntimeSpec": {"template": {"spec": _patch(request, shape)}},
        }
    ]
    return spec


def _trainer(request: Request, shape: Shape) -> dict[str, Value]:
    inside = pod.container(request, shape, _CONTAINER)
    trainer: dict[str, Value] = {
        "numNodes": shape.most,
        "numProcPerNode": shape.workers,
        "image": inside["image"],
        "command": inside["command"],
    }
    if "env" in inside:
        trainer["env"] = inside["env"]
    if "resources" in inside:
        trainer["resourcesPerNode"] = inside["resources"]
    return trainer


def _patch(request: Request, shape: Shape) -> dict[str, Value]:
    """Change what a runtime says of the pods, where a TrainJob may."""
    inside: dict[str, Value] = {"name": _CONTAINER}
    if rights := pod.security(request):
        inside["securityContext"] = rights
    inside["volumeMounts"] = pod.mounts(request)
    spec: dict[str, Value] = {"terminationGracePeriodSeconds": pod.grace_period(request)}
    spec |= pod.tolerations(request, shape)
    spec |= {"containers": [inside], "volumes": pod.volumes(request)}
    template: dict[str, Value] = {"metadata": {"labels": pod.no_sidecar()}, "spec": spec}
    return {"replicatedJobs": [{"name": _JOB, "template": {"spec": {"template": template}}}]}
