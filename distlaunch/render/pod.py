"""What all kinds of pods have in common: command, variables, resources, volumes; pure."""

from __future__ import annotations

import math
import posixpath

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.text import quoted
from distlaunch.render import request as names
from distlaunch.render.request import Request, Words, size_bytes
from distlaunch.render.shape import Shape
from distlaunch.render.yaml import Noted, Value

JOIN_TIMEOUT_S = 600
"""Pods start minutes apart: nodes are provisioned, and images pulled."""
_LEAVING_S = 5
"""What the launcher has after its own grace, before the kubelet kills it."""
_EFA_HUGE_PAGES = "5120Mi"
"""What AWS' documentation of EFA on EKS asks for."""
_KEPT_S = 7 * 24 * 3600
_INT32 = (1 << 31) - 1
_ABOUT_IMAGE = (
    "It needs distlaunch and the script, under a tag that does not move: another pod "
    "must bring the same."
)
_PLAIN_AFTER_DOLLAR = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_{ ")


def command(request: Request, shape: Shape) -> list[Value]:
    """Return the command line as a list of words, which no shell sees. Raises ConfigError."""
    added: list[str] = []
    if not request.has("num_nodes"):
        added.append(f"--num-nodes={shape.most}")
    if shape.most > 1 and not request.has("join_timeout"):
        added.append(f"--join-timeout={JOIN_TIMEOUT_S}")
    return [_literal(word) for word in _text_only(request.command(*added))]


def _text_only(words: Words) -> Words:
    """Give words as text, also those that came through an ASCII locale. Raises ConfigError for
    bytes that are none."""
    texts = []
    for word in words:
        try:
            texts.append(word.encode(errors="surrogateescape").decode())
        except UnicodeError:
            raise ConfigError(
                f"{quoted(word)} is not UTF-8, and a manifest is", hint="rename the file"
            ) from None
    return tuple(texts)


def _literal(word: str) -> str:
    """Keep kubelet from expanding ``$(NAME)`` and ``$$``, as it does in commands: there two dollars
    stand for one."""
    after = [word[at + 1 : at + 2] for at, char in enumerate(word) if char == "$"]
    if all(char == "" or char in _PLAIN_AFTER_DOLLAR for char in after):
        return word
    return word.replace("$", "$$")


def environment(request: Request) -> list[Value]:
    """Return the container's variables."""
    variables: list[Value] = []
    secret = request.more.token_secret
    if secret is not None:
        reference = {"name": names.object_name(secret, "--token-secret"), "key": "token"}
        variables.append(
            Noted(
                value={"name": "DISTLAUNCH_TOKEN", "valueFrom": {"secretKeyRef": reference}},
                why="Only launchers that know this secret may join the job.",
            )
        )
    if request.more.efa:
        variables.append(
            Noted(
                value={"name": "FI_PROVIDER", "value": "efa"},
                why="NCCL's plugin for libfabric is to use EFA, and not to fall back to TCP "
                "unsaid.",
            )
        )
    return variables


def resources(request: Request, shape: Shape) -> dict[str, Value]:
    """Return what the container asks for; empty if nothing. Raises ConfigError."""
    more = request.more
    limits: dict[str, Value] = {}
    if more.cpus is not None:
        limits["cpu"] = str(more.cpus)
    if more.memory is not None:
        memory = size_bytes(more.memory, "--memory")
        shared = 0 if more.shm is None else size_bytes(more.shm, "--shm")
        if shared >= memory:
            raise ConfigError(
                f"--shm {more.shm} leaves nothing of --memory {more.memory}, in which it counts",
                hint="give more memory, or less of it shared",
            )
        limits["memory"] = Noted(value=more.memory, why="What is in /dev/shm counts in this.")
    if shape.gpus:
        limits[names.resource_name(more.gpus_resource)] = str(shape.gpus)
    if more.efa:
        if more.memory is None:
            raise ConfigError(
                "--efa needs --memory: Kubernetes gives huge pages only beside memory"
            )
        limits["vpc.amazonaws.com/efa"] = str(more.efa)
        limits["hugepages-2Mi"] = Noted(
            value=_EFA_HUGE_PAGES, why="EFA's driver takes its buffers from huge pages."
        )
    if not limits:
        return {}
    return {
        "limits": Noted(
            value=limits, why="Kubernetes requests the same where only limits are given."
        )
    }


def security(request: Request) -> dict[str, Value]:
    """Return the container's rights beyond the usual ones; empty if there are none."""
    if not request.more.efa:
        return {}
    return {
        "capabilities": {
            "add": Noted(value=["IPC_LOCK"], why="EFA registers memory, which locks it.")
        }
    }


def volumes(request: Request) -> list[Value]:
    """Return the pod's volumes. Raises ConfigError."""
    shared: dict[str, Value] = {"medium": "Memory"}
    if request.more.shm is not None:
        size_bytes(request.more.shm, "--shm")
        shared["sizeLimit"] = request.more.shm
    found: list[Value] = [
        Noted(
            value={"name": "shm", "emptyDir": shared},
            why="NCCL and data loaders pass data through /dev/shm, and a container's own has 64 "
            "MiB.",
        )
    ]
    for number, (claim, _) in enumerate(_claims(request)):
        volume: Value = {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        several = "Pods on several nodes share it only if its access mode is ReadWriteMany."
        found.append(volume if number else Noted(value=volume, why=several))
    return found


def mounts(request: Request) -> list[Value]:
    """Return where the container sees them. Raises ConfigError."""
    claims = enumerate(_claims(request))
    own = [{"name": f"claim-{number}", "mountPath": path} for number, (_, path) in claims]
    return [{"name": "shm", "mountPath": "/dev/shm"}, *own]  # noqa: S108 - no file of ours


def _claims(request: Request) -> list[tuple[str, str]]:
    claims = [names.volume_claim(each) for each in request.more.pvc]
    paths = ["/dev/shm", *(posixpath.normpath(path) for _, path in claims)]  # noqa: S108 - no file of ours
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"--pvc: two volumes at {quoted(twice)}", hint="give each a folder of its own"
        )
    return claims


def tolerations(request: Request, shape: Shape) -> dict[str, Value]:
    """Return the part of a pod that lets it onto nodes that are kept for GPUs; empty if there is
    nothing to say."""
    if not shape.gpus:
        return {}
    domain, _, kind = names.resource_name(request.more.gpus_resource).partition("/")
    key = f"{domain}/{'gpu' if kind.startswith('mig-') else kind}"
    tolerated: Value = [{"key": key, "operator": "Exists", "effect": "NoSchedule"}]
    return {"tolerations": Noted(value=tolerated, why="GPU nodes mostly keep other pods away.")}


def no_sidecar() -> dict[str, Value]:
    """Return the label that keeps a service mesh out of the pods."""
    why = "A mesh's proxy would stand between the workers, and outlive them."
    return {"sidecar.istio.io/inject": Noted(value="false", why=why)}


def kept() -> Value:
    """Return how long what has ended is kept, in seconds."""
    return Noted(value=_KEPT_S, why="The pods' logs can be read for a week.")


def grace_period(request: Request) -> Value:
    """Return the kubelet's patience between TERM and KILL, in seconds."""
    seconds = math.ceil(request.train.grace) + _LEAVING_S
    return Noted(value=seconds, why="--grace, in which workers save, and the launcher's own end.")


def replacements(request: Request, shape: Shape) -> int:
    """Return a backoffLimit: how many pods may be lost.

    A restart may have lost all pods, so there are as many for each. An elastic job survives losses
    without a restart; one fewer than all pods, so that what ends them all at once is not repeated
    beyond --max-restarts.
    """
    most = request.train.max_restarts * shape.most + (shape.most - 1 if shape.elastic else 0)
    return min(most, _INT32)


def container(request: Request, shape: Shape, name: str) -> dict[str, Value]:
    """Make the container. Raises ConfigError."""
    parts: dict[str, Value] = {
        "name": name,
        "image": Noted(value=names.image_name(request.more.image), why=_ABOUT_IMAGE),
        "command": Noted(
            value=command(request, shape),
            why="Words, not a shell's line: the launcher is process 1, so it is told when the pod "
            "is to end.",
        ),
        "env": environment(request),
        "resources": resources(request, shape),
        "securityContext": security(request),
        "volumeMounts": mounts(request),
    }
    return {key: part for key, part in parts.items() if part}


def pod_spec(request: Request, shape: Shape, inside: dict[str, Value]) -> dict[str, Value]:
    """Make a pod around its container. Raises ConfigError."""
    spec: dict[str, Value] = {
        "enableServiceLinks": Noted(
            value=False,
            why="Else variables named after other Services appear, which could be taken for "
            "options.",
        ),
        "terminationGracePeriodSeconds": grace_period(request),
    }
    return {
        **spec,
        **tolerations(request, shape),
        "containers": [inside],
        "volumes": volumes(request),
    }


def metadata(request: Request, name: str) -> dict[str, Value]:
    """Return an object's name, and where and in whose queue it is."""
    found: dict[str, Value] = {"name": name}
    if request.more.namespace is not None:
        found["namespace"] = names.namespace(request.more.namespace)
    return found


def queued(request: Request, about: dict[str, Value]) -> dict[str, Value]:
    """Add Kueue's label to an object's metadata."""
    if request.more.queue is None:
        return about
    queue = names.object_name(request.more.queue, "--queue", longest=names.LONGEST_LABEL)
    label = Noted(value=queue, why="Kueue holds the job back until all of its pods have room.")
    return {**about, "labels": {"kueue.x-k8s.io/queue-name": label}}


def head(request: Request, name: str, kind: str, shape: Shape, *more: str, label: str) -> list[str]:
    """Say at the top of a file what it is, and how it is used; ``label``: by which its pods have
    the job's name."""
    options = "" if request.more.namespace is None else f" -n {request.more.namespace}"
    size = f"{shape.least} to {shape.most}" if shape.elastic else str(shape.most)
    each = f"{shape.gpus} GPUs" if shape.gpus else f"{shape.workers} workers on CPUs"
    lines = [
        f"{name}: {kind} with a launcher in each of {size} pods, {each} each.",
        (
            "Start it: kubectl apply -f FILE; end it, or make room for the next of its name: "
            "kubectl "
            "delete -f FILE."
        ),
        "What all pods write:",
        (
            f"  kubectl{options} logs -f --prefix --tail=-1 --max-log-requests={shape.most} -l "
            f"{label}={name}"
        ),
    ]
    secret = request.more.token_secret
    if secret is not None:
        made = f"kubectl{options} create secret generic {secret} --from-file=token=/dev/stdin"
        lines += ["The secret, once:", f"  openssl rand -hex 32 | tr -d '\\n' | {made}"]
    if not request.has("log_dir"):
        lines.append("The job's directory ends with its pods: --log-dir on a --pvc keeps it.")
    return [*lines, *more]
