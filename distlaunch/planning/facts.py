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
    """Facts about other nodes, this machine's names, and files that list hosts.

    Read only if an option or a variable suggests that there are other nodes.
    """

    texts: Mapping[str, str | None]
    """Contents by path of the host file and of files that variables name. None for an unreadable
    file."""
    discovered: str | None
    """Output of the --discover command."""
    identity: Identity


class Facts(Record, hide=("environ", "texts")):
    """Facts of this machine and process.

    ``paths`` has the kind of each path that an option names. ``texts`` has the contents of the
    files that are needed for the plan, by path.
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
    """Width of the user's terminal; None if output does not go to a terminal."""
    programs: Mapping[str, str | None]
    """Path of each program that options name; None if it is not on PATH."""
    surroundings: Surroundings | None = None
    """Facts about other nodes. None if neither an option nor a variable suggests that there are
    other nodes."""
    script_file: str | None = None
    """Name of the copy of SCRIPT in the run directory, if only the launcher can read SCRIPT (a
    pipe, stdin); otherwise None."""
    outer: OuterLauncher | None = None
    """The launcher that has started this process as its worker; None if there is none."""
