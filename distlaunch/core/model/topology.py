"""The nodes of a job, and the CPUs and GPUs that a node has.

The records are pure data. ``planning`` fills in a ``Topology``; the probes of a node fill in the
inventories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Literal

from distlaunch.core.model.record import Record


class NoteKind(Enum):
    """What a note about the nodes is about."""

    PLAN = "how the nodes were chosen"
    KNOWN_NODES = "what nodes have of which that is known"
    """All nodes tell it at the start."""
    SETTLED_LATER = "what is settled at the start"


class Note(Record):
    """A line for the user about how the nodes of a job were found."""

    text: str
    kind: NoteKind = NoteKind.PLAN


def plain_notes(texts: Iterable[str]) -> tuple[Note, ...]:
    """Return notes about how the nodes were chosen."""
    return tuple(Note(text=text) for text in texts)


class Topology(Record):
    """All nodes of a job, and what the user should know about how they were found."""

    nodes: tuple[Node, ...]
    device: str
    """``cuda`` or ``cpu``: what the workers compute on; ``auto`` where the nodes decide."""
    notes: tuple[Note, ...] = ()
    warnings: tuple[str, ...] = ()
    """Like ``notes``, but the user has probably asked for something else."""
    source: str = "local"
    """Who said which nodes there are: ``flags``, ``slurm``, ...; ``local``: nobody, it is this
    machine."""
    here: int | None = 0
    """The node whose devices and CPUs the facts tell of; None if it is none of them."""
    cpus: int | None = None
    """CPUs of this machine that a scheduler grants the job, where it may not enforce them."""
    bounds: tuple[int, int] | None = None
    """Smallest and largest number of nodes, if the job is elastic."""
    spares: tuple[Node, ...] = ()
    """Hosts that stand by, and take the place of nodes that are not there."""
    master_addr: str | None = None
    """Where rank 0's node can be reached; None if that is not known yet, or needs nothing but
    loopback."""
    master_port: int | None = None
    """The port that the source names for it."""

    @property
    def world_size(self) -> int | None:
        """Number of workers over all nodes; None while one of the nodes has to say how many it
        runs."""
        return total_slots(self.nodes)


class Node(Record, hide=("env",)):
    """One node in topology order. ``masks`` has one entry per worker: what its device mask is to
    say."""

    host: str
    """Its name or address; a label where that is not ``known``."""
    slots: int | None
    """How many workers it runs; None where only the node knows, from its devices."""
    known: bool = True
    user: str | None = None
    port: int | None = None
    """Of SSH, as ``user``."""
    mask_variable: str | None = None
    masks: tuple[tuple[str, ...], ...] = ()
    hidden: tuple[str, ...] = ()
    """Further mask variables, set outside, that workers on CPUs must not follow."""
    devices: tuple[str, ...] | None = ()
    """For people: the node's selected devices, in LOCAL_RANK order; None where only the node
    knows."""
    devices_from: str = ""
    """For people: who says which devices these are, where somebody does."""
    gpus: tuple[Gpu | None, ...] = ()
    """The physical GPU behind each of ``devices``, where it is known."""
    numa: tuple[int | None, ...] = ()
    """The NUMA node of each of ``devices``, where it is known."""
    chosen: tuple[int, ...] | None = None
    """Which of its slots a filter left, where the node itself is to find the devices for them."""
    without: tuple[int, ...] = ()
    """Which of its slots a filter took away, where the node itself is to count them."""
    isolated: bool = False
    """Each worker sees one device, as LOCAL_RANK 0."""
    env: Mapping[str, str] = {}
    """Variables that only this node's workers get, or get with another value than the others."""
    argv: tuple[str, ...] | None = None
    """Its workers' command line, where that is not the plan's."""


def total_slots(nodes: tuple[Node, ...]) -> int | None:
    """Count the workers of all nodes; None if one of the nodes has to say how many it runs."""
    total = 0
    for node in nodes:
        if node.slots is None:
            return None
        total += node.slots
    return total


class CpuInventory(Record):
    """What may run where. CPU numbers are the kernel's, groups are ascending."""

    allowed: tuple[int, ...]
    """CPUs in the launcher's own affinity mask, ascending; never empty."""
    online: int
    """How many CPUs the machine runs, whoever may use them."""
    quota: float | None = None
    """CPUs' worth of time that the cgroups grant (1.5: one and a half CPUs); None without a
    limit."""
    cpuset: int | None = None
    """How many CPUs the own cgroup may use; None where no cgroup says so."""
    numa: tuple[tuple[int, ...], ...] = ()
    """CPUs of each NUMA node, indexed by node number; a node without CPUs is empty."""
    siblings: tuple[tuple[int, ...], ...] = ()
    """Groups of CPUs that share one physical core; empty where that was not read."""


class GpuInventory(Record):
    """What was found and how; ``problem`` says why there may be more than could be listed (driver
    broken)."""

    gpus: tuple[Gpu, ...] = ()
    source: Literal["nvml", "nvidia-smi", "device files", "kfd", "mask", "none"] = "none"
    problem: str | None = None


class Gpu(Record):
    """One physical GPU. ``index`` is the PCI-bus-order index that CUDA_DEVICE_ORDER=PCI_BUS_ID
    gives."""

    index: int
    uuid: str | None = None
    name: str = ""
    memory_mib: int | None = None
    vendor: Literal["nvidia", "amd"] = "nvidia"
    numa_node: int | None = None
    mig: tuple[MigDevice, ...] = ()


class MigDevice(Record):
    """One MIG slice of an NVIDIA GPU; ``uuid`` is what CUDA_VISIBLE_DEVICES takes (``MIG-...``)."""

    uuid: str
    profile: str
