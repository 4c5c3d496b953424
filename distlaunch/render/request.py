"""The request to render a file, and checks of sizes and names. No I/O."""

from __future__ import annotations

import math
import os
import posixpath
import re
from typing import Literal

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.duration import read_duration
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import quoted
from distlaunch.planning.train_options import TrainOptions

Target = Literal["slurm", "kubernetes", "pytorchjob", "trainjob"]
Words = tuple[str, ...]

_SIZE = re.compile(r"([1-9][0-9]{0,8})([MGT]i?)")
_UNIT_BYTES = {"M": 10**6, "G": 10**9, "T": 10**12, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_CLOCK = re.compile(r"([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])")
_DAYS = re.compile(r"([0-9]{1,4})-([0-9]{1,2})(?::([0-5][0-9]))?(?::([0-5][0-9]))?")
_LONGEST_S = 10**9

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_RESOURCE = re.compile(
    r"[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
)
_SLURM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+@-]*")
_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?/)?"  # the registry
    rf"{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha(?:256:[0-9a-f]{{64}}|512:[0-9a-f]{{128}}))?"
)
LONGEST_LABEL = 63
_LONGEST_NAME = 253


class RenderOptions(Record):
    """Options that only ``render`` has. None: not set."""

    name: str | None = None
    out: str | None = None
    force: bool = False
    time: str | None = None
    cpus: int | None = None
    memory: str | None = None
    # Slurm
    exclusive: bool | None = None
    """Whether to request whole nodes. None: yes, unless ``cpus`` is set."""
    partition: str | None = None
    account: str | None = None
    usr1_before: float | None = None
    # Kubernetes
    namespace: str | None = None
    image: str | None = None
    gpus_resource: str = "nvidia.com/gpu"
    efa: int = 0
    shm: str | None = None
    pvc: tuple[str, ...] = ()
    token_secret: str | None = None
    queue: str | None = None
    runtime: str = "torch-distributed"


class RenderRequest(Record):
    """One ``render`` command."""

    target: Target
    train: TrainOptions
    more: RenderOptions = RenderOptions()
    words: tuple[tuple[str, Words], ...]
    """The options of ``train`` that are set: the field, and the arguments that set it."""

    def has(self, field: str) -> bool:
        """Return whether the command line or a variable sets an option of ``train``."""
        return any(name == field for name, _ in self.words)

    def command(self, *added: str) -> Words:
        """Return the command line, with ``added`` options that the target needs."""
        script = self.train.script or ""
        options = [word for _, words in self.words for word in words]
        end = ("--",) if script.startswith("-") else ()
        return ("distlaunch", "train", *options, *added, *end, script, *self.train.script_args)


def job_name(request: RenderRequest, *, longest: int) -> str:
    """Return --name, or a name made from the script's name. Raises ConfigError for an invalid
    --name."""
    given = request.more.name
    slurm = request.target == "slurm"
    if given is None:
        return _name_from_script(request, longest)
    if slurm:
        return slurm_name(given, "--name")
    if not _LABEL.fullmatch(given):
        raise ConfigError(
            f"--name {quoted(given)} is not a valid name for Kubernetes",
            hint="lower-case letters, digits and -, beginning with a letter and not ending in -",
        )
    if len(given) > longest:
        raise ConfigError(
            f"--name {quoted(given)} is too long: the pods' names are longer, and "
            f"limited to {LONGEST_LABEL} characters",
            hint=f"at most {longest} characters",
        )
    return given


def _name_from_script(request: RenderRequest, longest: int) -> str:
    script = request.train.script or ""
    stem = script if request.train.module else os.path.basename(script).removesuffix(".py")
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".rstrip("-")
    return name[:longest].rstrip("-")


def slurm_name(text: str, option: str) -> str:
    """Return ``text`` if it is a valid name for an #SBATCH line, where quotes and # are special.
    Raises ConfigError otherwise."""
    if not _SLURM.fullmatch(text):
        raise ConfigError(f"{option} takes letters, digits and _ . , + @ -, not {quoted(text)}")
    return text


def object_name(text: str, option: str, *, longest: int = _LONGEST_NAME) -> str:
    """Return ``text`` if it is a valid name of a Kubernetes object. Raises ConfigError otherwise."""
    if len(text) > longest or not _SUBDOMAIN.fullmatch(text):
        raise ConfigError(
            f"{option} {quoted(text)} is not a valid name for Kubernetes",
            hint=f"at most {longest} lower-case letters, digits, - and ., beginning and ending "
            "with a letter or digit",
        )
    return text


def namespace(text: str) -> str:
    """Return ``text`` if it is a valid namespace. Raises ConfigError otherwise."""
    if "." in text:
        raise ConfigError(
            f"--namespace {quoted(text)} is not a valid name for Kubernetes: it has a dot"
        )
    return object_name(text, "--namespace", longest=LONGEST_LABEL)


def resource_name(text: str) -> str:
    """Return ``text`` if it is a valid name of a GPU resource. Raises ConfigError otherwise."""
    if not _RESOURCE.fullmatch(text):
        raise ConfigError(f"--gpus-resource takes a name like nvidia.com/gpu, not {quoted(text)}")
    return text


def image_name(text: str | None) -> str:
    """Return ``text`` if it is a valid name of a container image. Raises ConfigError otherwise."""
    if text is None:
        raise ConfigError(
            "--image is missing: the container image of the pods",
            hint="--image NAME; it needs Python, distlaunch and the script",
        )
    if not _IMAGE.fullmatch(text):
        raise ConfigError(
            f"--image takes the name of a container image, not {quoted(text)}",
            hint="REGISTRY/NAME:TAG or NAME@sha256:..., the name in lower-case letters",
        )
    return text


def volume_claim(text: str) -> tuple[str, str]:
    """Return claim and path of ``text``, NAME:PATH. Raises ConfigError for another form."""
    claim, _, path = text.partition(":")
    if (
        not path.startswith("/")
        or posixpath.normpath(path).strip("/") == ""
        or ":" in path
        or not path.isprintable()
    ):
        raise ConfigError(
            f"--pvc takes NAME:PATH, not {quoted(text)}",
            hint="a PersistentVolumeClaim, and the folder where pods see it: --pvc data:/data",
        )
    return object_name(claim, "--pvc"), path


def size_bytes(text: str, option: str) -> int:
    """Return the bytes of an amount of memory. Raises ConfigError."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{option} takes a size like 64Gi or 500M, not {quoted(text)}")
    return int(found[1]) * _UNIT_BYTES[found[2]]


def duration_s(text: str) -> int:
    """Return the seconds of --time. Raises ConfigError.

    A number without a unit is in minutes, as for sbatch. Of sbatch's other forms ``MM:SS`` is
    refused, because many users read it as hours and minutes.
    """
    value_s = read_duration(text, unit_s=60.0)
    if found := _CLOCK.fullmatch(text) or _DAYS.fullmatch(text):
        parts = [int(part or 0) for part in found.groups()]
        days, hours, minutes, seconds = parts if len(parts) == 4 else (0, *parts)
        value_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if value_s is None or not 0 < value_s < _LONGEST_S:
        raise ConfigError(
            f"--time takes a time like 120 (minutes), 90m, 12h, 2d or 1-12:00:00, not "
            f"{quoted(text)}",
            hint="HH:MM:SS has seconds, too" if re.fullmatch("[0-9]+:[0-9]+", text) else None,
        )
    return math.ceil(value_s)
