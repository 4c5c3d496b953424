"""What the user asked to be rendered, and the sizes in it; pure."""

from __future__ import annotations

import re
from typing import Literal

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import quoted
from distlaunch.planning.train_options import TrainOptions

Target = Literal["slurm", "kubernetes", "pytorchjob", "trainjob"]
Words = tuple[str, ...]

_SIZE = re.compile(r"([1-9][0-9]{0,8})([MGT]i?)")
_UNIT_BYTES = {"M": 10**6, "G": 10**9, "T": 10**12, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_CLOCK = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])")


class RenderOptions(Record):
    """What ``render`` asks beside the options of ``train``; None is not given."""

    name: str | None = None
    out: str | None = None
    time: str | None = None
    cpus: int | None = None
    memory: str | None = None
    # Slurm
    exclusive: bool | None = None
    """Ask for whole nodes; None: unless ``cpus`` says how many CPUs."""
    partition: str | None = None
    account: str | None = None
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


class Request(Record):
    """One ``render`` command."""

    target: Target
    train: TrainOptions
    more: RenderOptions = RenderOptions()
    words: tuple[tuple[str, Words], ...]
    """The options of ``train`` as they are typed, in order: the field, and the words that set it."""

    def has(self, field: str) -> bool:
        """Tell whether an option of ``train`` was given, on the command line or by a variable."""
        return any(name == field for name, _ in self.words)

    def command(self, *added: str) -> Words:
        """Give the whole command line; ``added``: options that the target needs beside the user's."""
        script = self.train.script or ""
        options = [word for _, words in self.words for word in words]
        end = ("--",) if script.startswith("-") else ()
        return ("distlaunch", "train", *options, *added, *end, script, *self.train.script_args)


def size_bytes(text: str, option: str) -> int:
    """Read an amount of memory. Raises ConfigError."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{option} takes a size like 64Gi or 500M, not {quoted(text)}")
    return int(found[1]) * _UNIT_BYTES[found[2]]


def duration_s(text: str) -> int:
    """Read --time: ``90m``, ``12h``, ``2d``, or as Slurm writes it, ``[DAYS-]HH:MM:SS``. Raises ConfigError.

    A bare number is seconds to ``train`` and minutes to Slurm, so it is none.
    """
    value_s = 0
    if found := _DURATION.fullmatch(text):
        value_s = int(found[1]) * _UNITS_S[found[2]]
    elif found := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        value_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < value_s < 10**9:
        raise ConfigError(f"--time takes a time like 90m, 12h, 2d or 1-12:00:00, not {quoted(text)}")
    return value_s
