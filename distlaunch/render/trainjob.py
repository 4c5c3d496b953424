"""Render a TrainJob of Kubeflow Trainer v2. No I/O.

Source: Trainer's API reference, release 2.3 (older releases call runtimePatches
podTemplateOverrides), and JobSet's webhook (the default restartPolicy is OnFailure, and names of
pods are limited).
"""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.render import pod
from distlaunch.render import request as names
from distlaunch.render.request import RenderRequest, duration_s
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import Commented, Value, write_documents

_JOB = _CONTAINER = "node"
"""The names of the pods' job and of their container in Trainer's runtimes."""

_SUFFIX = "-abcde"
"""A text as long as Kubernetes' suffix of pod names. JobSet refuses names that are too long with
it."""


def render(request: RenderRequest, shape: Shape) -> str:
    """Return the manifest as YAML. Raises ConfigError if an option cannot be expressed."""
    if shape.is_elastic:
        raise ConfigError(
            f"{request.train.named('num_nodes')} {shape.min_nodes}:{shape.max_nodes}: a TrainJob has a "
            "fixed number of nodes",
            hint="use --num-nodes N, or render kubernetes or pytorchjob, which may be elastic",
        )
    name = names.job_name(
        request, longest=names.LONGEST_LABEL - len(f"-{_JOB}-0-{shape.max_nodes - 1}{_SUFFIX}")
    )
    job: dict[str, Value] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pod.with_queue_label(request, pod.metadata(request, name)),
        "spec": _job_spec(request, shape),
    }
    header = pod.header(
        request,
        name,
        "a TrainJob (Kubeflow Trainer 2.3 or later)",
        shape,
        "The runtime decides what happens after a failure (restartPolicy, "
        "backoffLimit and podFailurePolicy, which a TrainJob cannot change). If it "
        "sets none of them, as Trainer's own, containers are restarted up to 6 "
        "times, even after a mistake in the options. render kubernetes sets them.",
        label="jobset.sigs.k8s.io/jobset-name",
    )
    return write_documents(header, [job])


def _job_spec(request: RenderRequest, shape: Shape) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "runtimeRef": Commented(
            value={
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": names.object_name(request.more.runtime, "--runtime"),
            },
            why="A runtime for torch: it sets the number of pods and the name of the "
            "first one in PET_*.",
        )
    }
    if request.more.time is not None:
        why = "After this time all pods are terminated, as when they are deleted."
        spec["activeDeadlineSeconds"] = Commented(value=duration_s(request.more.time), why=why)
    spec["trainer"] = _trainer_spec(request, shape)
    spec["runtimePatches"] = [
        {
            "manager": "distlaunch",
            "trainingRuntimeSpec": {"template": {"spec": _pod_patch(request, shape)}},
        }
    ]
    return spec


def _trainer_spec(request: RenderRequest, shape: Shape) -> dict[str, Value]:
    inside = pod.container(request, shape, _CONTAINER)
    trainer: dict[str, Value] = {
        "numNodes": shape.max_nodes,
        "numProcPerNode": shape.workers,
        "image": inside["image"],
        "command": inside["command"],
    }
    if "env" in inside:
        trainer["env"] = inside["env"]
    if "resources" in inside:
        trainer["resourcesPerNode"] = inside["resources"]
    return trainer


def _pod_patch(request: RenderRequest, shape: Shape) -> dict[str, Value]:
    inside: dict[str, Value] = {"name": _CONTAINER}
    if rights := pod.security_context(request):
        inside["securityContext"] = rights
    inside["volumeMounts"] = pod.volume_mounts(request)
    spec: dict[str, Value] = {"terminationGracePeriodSeconds": pod.grace_period(request)}
    spec |= pod.tolerations(request, shape)
    spec |= {"containers": [inside], "volumes": pod.volumes(request)}
    template: dict[str, Value] = {"metadata": {"labels": pod.no_sidecar()}, "spec": spec}
    return {"replicatedJobs": [{"name": _JOB, "template": {"spec": {"template": template}}}]}
