"""What a source of topology finds: which hosts there are, and what this launcher is among them.

A source never guesses. What it does not know stays None and is settled later: by the user's flags,
or by the node.
"""

from __future__ import annotations

from typing import Literal

from distlaunch.core.model.record import Record

Part = Literal["all", "node", "worker"]
"""What this launcher is to start: all nodes of the job; only the workers of its own node, where the
scheduler starts one launcher a node; or a single worker, where it starts one launcher a task."""


Unit = Literal["workers", "gpus", "cores"]
"""What slots count: workers (of the user, or tasks that a scheduler was asked for), GPUs granted,
or CPU cores."""


class Host(Record):
    """One host, as its source names it."""

    name: str
    """Host name or address, without user, port and brackets; where it is not ``known`` only a label
    (``node-1``)."""
    known: bool = True
    """The source told the name. Else nobody can be reached by it, and no filter can name it."""
    slots: int | None = None
    """How many ``unit`` it has; None if only the node knows."""
    unit: Unit = "workers"
    """GPUs that are granted must be there; cores say nothing of workers on GPUs, nor GPUs of
    workers on CPUs."""
    tasks: int | None = None
    """How many tasks a scheduler was asked for there, beside GPUs: workers that use none go by this
    number."""
    user: str | None = None
    port: int | None = None
    """Of SSH."""
    devices: tuple[str, ...] | None = None
    """Device ids (as a device mask has them) that were granted there; None if only the node
    knows."""


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
"""What a source can say, as ``--explain`` names it."""


class Origin(Record):
    """Where one value came from, for ``--explain``."""

    value: str
    """A ``ValueName``, or what else ``--explain`` tells of: ``workers``, ``job-id``, ..."""
    shown: str
    """The value as text."""
    source: str
    """``SLURM_STEP_NODELIST``, ``hosts.txt:3``, ``--gpus-per-node``, ..."""
    instead_of: tuple[str, ...] = ()
    """What else was there, and why it lost: ``SLURM_JOB_NODELIST (the whole job, this step has
    less)``."""


class Allocation(Record):
    """Everything that one source says."""

    source: str
    """For people and for ``--source``: ``slurm``, ``kubernetes``, ``hostfile``, ``openmpi``, ..."""
    hosts: tuple[Host, ...]
    """In rank order, at least one. Where a source knows only their number, the others are not
    ``known``."""
    by_user: bool = False
    """The user named the hosts: what is not needed of them is left out; what a scheduler granted
    would be wasted."""
    part: Part = "all"
    node_rank: int | None = None
    """Which of the hosts this machine is, if the source says so."""
    local_rank: int | None = None
    """With part ``worker``: which worker of the node."""
    nodes: tuple[int, int] | None = None
    """Smallest and largest number of nodes of an elastic job, if the source says so."""
    master_addr: str | None = None
    master_port: int | None = None
    cpus: int | None = None
    """CPUs that it grants on the node that we run on, where it may not enforce them."""
    job_id: str | None = None
    number: int | None = None
    """Of the job, as no other of this system has it: launchers choose their port by it."""
    origins: tuple[Origin, ...] = ()
    notes: tuple[str, ...] = ()
    """What the user should hear even without ``--explain``."""
