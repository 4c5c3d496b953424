"""All of the outside world that resolving and planning may know, read once by ``planning``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from distlaunch.core.model.plan import OuterLauncher
from distlaunch.core.model.record import Record
from distlaunch.core.model.topology import CpuInventory, GpuInventory

if TYPE_CHECKING:
    from distlaunch.planning.hosts.this_host import Identity

PathKind = Literal["file", "directory", "missing", "unreadable"]


class Surroundings(Record, hide=("texts", "discovered")):
    """What only matters where other nodes may take part."""

    texts: Mapping[str, str | None]
    """By path: the host file, and files that the systems around us name; None for one that cannot
    be read."""
    discovered: str | None
    """What the command of --discover printed."""
    identity: Identity


class Facts(Record, hide=("environ", "texts")):
    """What was found. ``paths`` answers for each path that the options name; ``texts`` holds files
    that were read."""

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
    surroundings: Surroundings | None = None
    """None: nothing hints at other nodes, neither an option nor a variable."""
    script_file: str | None = None
    """The name in the run directory of a SCRIPT that only the launcher can read (a pipe, stdin);
    None: of another."""
    outer: OuterLauncher | None = None
    """The launcher whose worker we are; None: we are nobody's."""
