"""Sections of a manifest that all kinds of pods share: command, variables, resources, volumes. No
I/O."""

from __future__ import annotations

import math
import posixpath

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import quoted
from distlaunch.render import request as names
from distlaunch.render.request import RenderRequest, Words, size_bytes
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import Commented, Value

JOIN_TIMEOUT_S = 600
"""Long, because pods start minutes apart while nodes are provisioned and images pulled."""
_EXIT_MARGIN_S = 5
"""Time between the workers' grace period and the kubelet's KILL."""
_EFA_HUGE_PAGES = "5120Mi"
"""From AWS' documentation of EFA on EKS."""
_KEEP_S = 7 * 24 * 3600
_INT32 = (1 << 31) - 1
_IMAGE_COMMENT = (
    "It needs distlaunch and the script. Use a fixed tag, so that a replaced pod "
    "runs the same image."
)
_PLAIN_AFTER_DOLLAR = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_{ ")


def command(request: RenderRequest, shape: Shape) -> list[Value]:
    """Return the command as arguments, not for a shell. Raises ConfigError if one is not UTF-8."""
    added: list[str] = []
    if not request.has("num_nodes"):
        added.append(f"--num-nodes={shape.max_nodes}")
    if shape.max_nodes > 1 and not request.has("join_timeout"):
        added.append(f"--join-timeout={JOIN_TIMEOUT_S}")
    return [_escaped_dollars(argument) for argument in _decode_arguments(request.command(*added))]


def _decode_arguments(words: Words) -> Words:
    """Decode arguments even if the locale is ASCII. Raises ConfigError if one is not UTF-8."""
    texts = []
    for argument in words:
        try:
            texts.append(argument.encode(errors="surrogateescape").decode())
        except UnicodeError:
            raise ConfigError(
                f"{quoted(argument)} is not UTF-8, and a manifest is", hint="rename the file"
            ) from None
    return tuple(texts)


def _escaped_dollars(argument: str) -> str:
    """Escape dollars, because the kubelet expands ``$(NAME)`` and ``$$`` in commands."""
    after = [argument[at + 1 : at + 2] for at, char in enumerate(argument) if char == "$"]
    if all(char == "" or char in _PLAIN_AFTER_DOLLAR for char in after):
        return argument
    return argument.replace("$", "$$")


def environment(request: RenderRequest) -> list[Value]:
    """Return the container's environment variables."""
    variables: list[Value] = []
    secret = request.more.token_secret
    if secret is not None:
        reference = {"name": names.object_name(secret, "--token-secret"), "key": "token"}
        variables.append(
            Commented(
                value={"name": "DISTLAUNCH_TOKEN", "valueFrom": {"secretKeyRef": reference}},
                why="Only launchers that know this secret may join the job.",
            )
        )
    if request.more.efa:
        variables.append(
            Commented(
                value={"name": "FI_PROVIDER", "value": "efa"},
                why="NCCL's libfabric plugin must use EFA and not fall back silently to TCP.",
            )
        )
    return variables


def resources(request: RenderRequest, shape: Shape) -> dict[str, Value]:
    """Return the container's resources. Raises ConfigError for an invalid amount of memory."""
    more = request.more
    limits: dict[str, Value] = {}
    if more.cpus is not None:
        limits["cpu"] = str(more.cpus)
    if more.memory is not None:
        memory = size_bytes(more.memory, "--memory")
        shared = 0 if more.shm is None else size_bytes(more.shm, "--shm")
        if shared >= memory:
            raise ConfigError(
                f"--shm {more.shm} leaves nothing of --memory {more.memory}, of which it is a part",
                hint="increase --memory or decrease --shm",
            )
        limits["memory"] = Commented(value=more.memory, why="Includes what is in /dev/shm.")
    if shape.gpus:
        limits[names.resource_name(more.gpus_resource)] = str(shape.gpus)
    if more.efa:
        if more.memory is None:
            raise ConfigError(
                "--efa needs --memory: Kubernetes grants huge pages only together with memory"
            )
        limits["vpc.amazonaws.com/efa"] = str(more.efa)
        limits["hugepages-2Mi"] = Commented(
            value=_EFA_HUGE_PAGES, why="EFA's driver allocates its buffers from huge pages."
        )
    if not limits:
        return {}
    return {
        "limits": Commented(
            value=limits, why="Kubernetes requests the same amounts if only limits are given."
        )
    }


def security_context(request: RenderRequest) -> dict[str, Value]:
    """Return the container's security context; empty if it needs none."""
    if not request.more.efa:
        return {}
    return {
        "capabilities": {
            "add": Commented(value=["IPC_LOCK"], why="EFA locks the memory that it registers.")
        }
    }


def volumes(request: RenderRequest) -> list[Value]:
    """Return the pod's volumes. Raises ConfigError for an invalid --shm or --volume."""
    shared: dict[str, Value] = {"medium": "Memory"}
    if request.more.shm is not None:
        size_bytes(request.more.shm, "--shm")
        shared["sizeLimit"] = request.more.shm
    found: list[Value] = [
        Commented(
            value={"name": "shm", "emptyDir": shared},
            why="NCCL and data loaders use /dev/shm, whose default size in a container is 64 MiB.",
        )
    ]
    for number, (claim, _) in enumerate(_read_claims(request)):
        volume: Value = {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        several = "Pods on several nodes can share it only if its access mode is ReadWriteMany."
        found.append(volume if number else Commented(value=volume, why=several))
    return found


def volume_mounts(request: RenderRequest) -> list[Value]:
    """Return the container's volume mounts. Raises ConfigError for an invalid --volume."""
    claims = enumerate(_read_claims(request))
    own = [{"name": f"claim-{number}", "mountPath": path} for number, (_, path) in claims]
    return [{"name": "shm", "mountPath": "/dev/shm"}, *own]  # noqa: S108 - no file of ours


def _read_claims(request: RenderRequest) -> list[tuple[str, str]]:
    claims = [names.volume_claim(each) for each in request.more.pvc]
    paths = ["/dev/shm", *(posixpath.normpath(path) for _, path in claims)]  # noqa: S108 - no file of ours
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"--pvc: two volumes have the path {quoted(twice)}",
            hint="give each volume its own folder",
        )
    return claims


def tolerations(request: RenderRequest, shape: Shape) -> dict[str, Value]:
    """Return tolerations for nodes that are reserved for jobs with GPUs; empty without GPUs."""
    if not shape.gpus:
        return {}
    domain, _, kind = names.resource_name(request.more.gpus_resource).partition("/")
    key = f"{domain}/{'gpu' if kind.startswith('mig-') else kind}"
    tolerated: Value = [{"key": key, "operator": "Exists", "effect": "NoSchedule"}]
    return {"tolerations": Commented(value=tolerated, why="GPU nodes usually have this taint.")}


def no_sidecar() -> dict[str, Value]:
    """Return the label that disables a service mesh's sidecar."""
    why = (
        "The proxy of a service mesh would intercept the workers' traffic and keep "
        "the pod running after them."
    )
    return {"sidecar.istio.io/inject": Commented(value="false", why=why)}


def seconds_after_finished() -> Value:
    """Return how many seconds a finished job is stored by Kubernetes."""
    return Commented(value=_KEEP_S, why="Keeps the pods' logs for a week.")


def grace_period(request: RenderRequest) -> Value:
    """Return the time between TERM and KILL, in seconds."""
    seconds = math.ceil(request.train.grace) + _EXIT_MARGIN_S
    return Commented(
        value=seconds, why=("--grace, in which workers save, and time for the launcher to exit.")
    )


def replacements(request: RenderRequest, shape: Shape) -> int:
    """Return the backoffLimit: how many pods may fail.

    Each restart may have lost all pods. An elastic job also survives losses without a restart, of
    up to all pods but one.
    """
    pods = request.train.max_restarts * shape.max_nodes + (
        shape.max_nodes - 1 if shape.is_elastic else 0
    )
    return min(pods, _INT32)


def container(request: RenderRequest, shape: Shape, name: str) -> dict[str, Value]:
    """Return the container. Raises ConfigError."""
    parts: dict[str, Value] = {
        "name": name,
        "image": Commented(value=names.image_name(request.more.image), why=_IMAGE_COMMENT),
        "command": Commented(
            value=command(request, shape),
            why="Arguments, not a shell command: the launcher is process 1, so it "
            "gets the signal that ends the pod.",
        ),
        "env": environment(request),
        "resources": resources(request, shape),
        "securityContext": security_context(request),
        "volumeMounts": volume_mounts(request),
    }
    return {key: part for key, part in parts.items() if part}


def pod_spec(request: RenderRequest, shape: Shape, inside: dict[str, Value]) -> dict[str, Value]:
    """Return the pod spec around a container. Raises ConfigError."""
    spec: dict[str, Value] = {
        "enableServiceLinks": Commented(
            value=False,
            why="Otherwise variables of other Services are set, which could be read as options.",
        ),
        "terminationGracePeriodSeconds": grace_period(request),
    }
    return {
        **spec,
        **tolerations(request, shape),
        "containers": [inside],
        "volumes": volumes(request),
    }


def metadata(request: RenderRequest, name: str) -> dict[str, Value]:
    """Return the ``metadata`` of an object."""
    metadata: dict[str, Value] = {"name": name}
    if request.more.namespace is not None:
        metadata["namespace"] = names.namespace(request.more.namespace)
    return metadata


def with_queue_label(request: RenderRequest, about: dict[str, Value]) -> dict[str, Value]:
    """Return an object's metadata, with Kueue's label if there is --queue."""
    if request.more.queue is None:
        return about
    queue = names.object_name(request.more.queue, "--queue", longest=names.LONGEST_LABEL)
    label = Commented(value=queue, why="Kueue starts the job when all of its pods have room.")
    return {**about, "labels": {"kueue.x-k8s.io/queue-name": label}}


def header(
    request: RenderRequest, name: str, kind: str, shape: Shape, *more: str, label: str
) -> list[str]:
    """Return the comment at the top of a file: what the file is and how to use it.

    ``more`` are further lines, ``label`` is the label with the job's name on its pods.
    """
    options = "" if request.more.namespace is None else f" -n {request.more.namespace}"
    size = f"{shape.min_nodes} to {shape.max_nodes}" if shape.is_elastic else str(shape.max_nodes)
    each = f"{shape.gpus} GPUs" if shape.gpus else f"{shape.workers} workers on CPUs"
    lines = [
        f"{name}: {kind} with a launcher in each of {size} pods, {each} each.",
        (
            "Start: kubectl apply -f FILE. Stop, or remove before the next job of "
            "this name: kubectl delete -f FILE."
        ),
        "Output of all pods:",
        (
            f"  kubectl{options} logs -f --prefix --tail=-1 --max-log-requests={shape.max_nodes} -l "
            f"{label}={name}"
        ),
    ]
    secret = request.more.token_secret
    if secret is not None:
        made = f"kubectl{options} create secret generic {secret} --from-file=token=/dev/stdin"
        lines += ["Create the secret once:", f"  openssl rand -hex 32 | tr -d '\\n' | {made}"]
    if not request.has("log_dir"):
        lines.append(
            "The run directory is lost with the pods: to keep it, use --log-dir on a --pvc."
        )
    return [*lines, *more]
