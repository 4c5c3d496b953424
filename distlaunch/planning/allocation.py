"""The result of a source of nodes, such as Slurm or a host file: the hosts, and this launcher's
position among them.

A source does not guess. An unknown value is None; options or nodes provide it later.
"""

from __future__ import annotations

from typing import Literal

from distlaunch.core.model.record import Record

Part = Literal["all", "node", "worker"]
"""The workers that this launcher starts: ``all``; those of its ``node`` (one launcher per node); or
a single ``worker`` (one launcher per task)."""


Unit = Literal["workers", "gpus", "cores"]
"""What a slot is: a worker (set by the user, or a task requested from a scheduler), a GPU, or a CPU
core."""


class Host(Record):
    """One host, by the name that its source uses."""

    name: str
    """Name or address, without user, port and brackets. If not ``known``, a label such as
    ``node-1``."""
    known: bool = True
    """Whether the source gave the name. Otherwise no connection is possible, and no filter can name
    the host."""
    slots: int | None = None
    """How many ``unit`` the host has; None if only a survey can tell."""
    unit: Unit = "workers"
    """Granted GPUs are required. Cores do not limit workers on GPUs, nor GPUs workers on CPUs."""
    tasks: int | None = None
    """How many tasks were requested beside GPUs: the number of workers that use no GPU."""
    user: str | None = None
    port: int | None = None
    """SSH port."""
    devices: tuple[str, ...] | None = None
    """Ids of the granted devices, as in a device mask; None if only a survey can tell."""


ValueName = Literal[
    "hosts",
    "nodes",
    "slots",
    "slots of this node",
    "node rank",
    "part",
    "master address",
    "master port",
]
"""Values that a source can determine, by their names in ``--explain``."""


class Origin(Record):
    """The source of one value, for ``--explain``."""

    value: str
    """A ``ValueName``, or another name in ``--explain``: ``workers``, ``job-id``, ..."""
    shown: str
    """The value as text."""
    source: str
    """``SLURM_STEP_NODELIST``, ``hosts.txt:3``, ``--gpus-per-node``, ..."""
    instead_of: tuple[str, ...] = ()
    """The alternatives, each with the reason why it is not used: ``SLURM_JOB_NODELIST (the whole
    job, this step has less)``."""


class Allocation(Record):
    """All values that one source determines."""

    source: str
    """For people and for ``--source``: ``slurm``, ``kubernetes``, ``hostfile``, ``openmpi``, ..."""
    hosts: tuple[Host, ...]
    """At least one host, in rank order. Hosts of which only the number is known are not
    ``known``."""
    by_user: bool = False
    """Whether the user named the hosts. Such a host may be left unused, with a note; one that a
    scheduler granted may not."""
    part: Part = "all"
    node_rank: int | None = None
    """Index of this machine in ``hosts``, if the source determines it."""
    local_rank: int | None = None
    """If ``part`` is ``worker``: the local rank of this launcher's worker."""
    nodes: tuple[int, int] | None = None
    """Smallest and largest number of nodes of an elastic job, if the source determines them."""
    master_addr: str | None = None
    master_port: int | None = None
    cpus: int | None = None
    """How many CPUs are granted on this node, perhaps without enforcing it."""
    job_id: str | None = None
    number: int | None = None
    """A number that is unique among the jobs of this system, from which the launchers derive their
    port."""
    origins: tuple[Origin, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes for the user even without ``--explain``."""
