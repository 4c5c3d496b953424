"""The facts about machine and process that planning uses. ``launch.make_plan`` reads them once."""

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
    """Facts about other nodes, this machine's names, and files that list hosts, read only if other
    nodes are likely."""

    texts: Mapping[str, str | None]
    """Contents by path of the host file and of files that variables name; None for an unreadable
    one."""
    discovered: str | None
    """Output of the --discover command."""
    identity: Identity


class Facts(Record, hide=("environ", "texts")):
    """Facts of this machine and process.

    ``paths`` has the kind of each path that an option names, ``texts`` the contents of the files
    that the plan needs, by path.
    """

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
    """Path of each program that options name, if it is on PATH."""
    surroundings: Surroundings | None = None
    """Facts about other nodes, if options or variables suggest that there are any."""
    script_file: str | None = None
    """Name of the copy of SCRIPT in the run directory, if only the launcher can read it (a pipe,
    stdin)."""
    outer: OuterLauncher | None = None
    """The launcher that has started this process as its worker, if any."""
