"""Layer resolve: all of the outside world that resolving and planning may know, read once by ``launch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from distlaunch.core.model.gpus import GpuInventory
from distlaunch.core.model.node import CpuInventory
from distlaunch.core.model.record import Record

PathKind = Literal["file", "directory", "missing", "unreadable"]


class Facts(Record, hide=("environ", "texts")):
    """What was found. ``paths`` answers for each path that the options name; ``texts`` holds files that were read."""

    environ: Mapping[str, str]
    cwd: str
    hostname: str
    python: str
    """The launcher's interpreter."""
    cpus: CpuInventory
    gpus: GpuInventory
    paths: Mapping[str, PathKind]
    texts: Mapping[str, str]
    columns: int | None = None
    """Width of the user's terminal, if output goes to one."""
    programs: Mapping[str, str | None]
    """Where PATH has each program that the options name; None if nowhere."""
