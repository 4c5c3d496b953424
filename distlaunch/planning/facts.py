"""Everything that planning knows of the outside world. ``launch.make_plan`` reads it once."""

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
    """Facts that only matter if other nodes may take part."""

    texts: Mapping[str, str | None]
    """Contents by path: of the host file, and of files that variables name. None for an unreadable
    file."""
    discovered: str | None
    """Output of the --discover command."""
    identity: Identity


class Facts(Record, hide=("environ", "texts")):
    """Facts of this machine and process. ``paths`` has the kind of each path that options name.
    ``texts`` has the contents of files."""

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
    """Path of each program that options name; None if PATH does not have it."""
    surroundings: Surroundings | None = None
    """None if neither an option nor a variable suggests that there are other nodes."""
    script_file: str | None = None
    """Name in the run directory of a copy of SCRIPT, if only the launcher can read it (a pipe,
    stdin)."""
    outer: OuterLauncher | None = None
    """The launcher whose worker this process is; None if there is none."""
