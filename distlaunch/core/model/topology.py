"""Records for the nodes of a job, and for the CPUs and GPUs of a node.

``planning`` makes the ``Topology``, ``core/probe`` the inventories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Literal

from distlaunch.core.model.record import Record


class NoteKind(Enum):
    """When a note about the nodes applies."""

    PLAN = "how the nodes were chosen"
    KNOWN_NODES = "what is already known about the nodes"
    """Only until the nodes have reported."""
    SETTLED_LATER = "what the nodes decide at the start"


class Note(Record):
    """A line for the user about how the nodes of a job were found."""

    text: str
    kind: NoteKind = NoteKind.PLAN


def plain_notes(texts: Iterable[str]) -> tuple[Note, ...]:
    """Return notes about how the nodes were chosen."""
    return tuple(Note(text=text) for text in texts)


class Topology(Record):
    """All nodes of a job, with notes on how they were found."""

    nodes: tuple[Node, ...]
    device: str
    """The workers' device: ``cuda``, ``cpu``, or ``auto`` if each node decides."""
    notes: tuple[Note, ...] = ()
    warnings: tuple[str, ...] = ()
    """Like ``notes``, for probable mistakes."""
    source: str = "local"
    """The source that named the nodes: ``flags``, ``slurm``, ...; ``local`` if there is none."""
    here: int | None = 0
    """Index of the node that is this machine; None if it is no node of the job."""
    cpus: int | None = None
    """Number of CPUs of this machine that a scheduler has granted, perhaps without enforcing it."""
    bounds: tuple[int, int] | None = None
    """Smallest and largest number of nodes of an elastic job."""
    spares: tuple[Node, ...] = ()
    """Hosts that replace missing nodes."""
    master_addr: str | None = None
    """Address of rank 0's node; None if unknown, or if loopback is sufficient."""
    master_port: int | None = None
    """The port for rank 0, if the source of the nodes sets one."""

    @property
    def world_size(self) -> int | None:
        """The number of workers on all nodes; None until every node has reported its number."""
        return total_slots(self.nodes)


class Node(Record, hide=("env",)):
    """One node, in topology order. ``masks`` holds the device mask of each worker."""

    host: str
    """Name or address, or a mere label if ``known`` is false."""
    slots: int | None
    """Number of workers; None if the node's devices decide."""
    known: bool = True
    user: str | None = None
    port: int | None = None
    """The SSH port. ``user`` is the user for SSH."""
    mask_variable: str | None = None
    masks: tuple[tuple[str, ...], ...] = ()
    hidden: tuple[str, ...] = ()
    """Mask variables set outside, which are -1 for workers on CPUs."""
    devices: tuple[str, ...] | None = ()
    """The selected devices in LOCAL_RANK order, for display; None until the node's survey."""
    devices_from: str = ""
    """The source of the devices (such as a variable), for display. May be empty."""
    gpus: tuple[Gpu | None, ...] = ()
    """The GPU of each of ``devices``, if known."""
    numa: tuple[int | None, ...] = ()
    """The NUMA node of each of ``devices``, if known."""
    chosen: tuple[int, ...] | None = None
    """Slots that a filter selected, on a node that finds their devices itself."""
    without: tuple[int, ...] = ()
    """Slots that a filter excluded, on a node that counts its slots itself."""
    isolated: bool = False
    """Each worker can use only its own device, as device 0."""
    env: Mapping[str, str] = {}
    """Variables of this node's workers alone."""
    argv: tuple[str, ...] | None = None
    """Command line of the node's workers if it differs from the plan's."""


def total_slots(nodes: tuple[Node, ...]) -> int | None:
    """Return the number of workers of all nodes; None until every node has reported its number."""
    total = 0
    for node in nodes:
        if node.slots is None:
            return None
        total += node.slots
    return total


class CpuInventory(Record):
    """The CPUs that a process may use, by the kernel's numbers in ascending order."""

    allowed: tuple[int, ...]
    """CPUs in the affinity mask; never empty."""
    online: int
    """Number of online CPUs of the machine."""
    quota: float | None = None
    """CPU time that the cgroups grant, in CPUs (1.5: one and a half), if limited."""
    cpuset: int | None = None
    """Number of CPUs in the cpuset of this process's cgroup, if it has one."""
    numa: tuple[tuple[int, ...], ...] = ()
    """CPUs of each NUMA node, by its number. Entries may be empty."""
    siblings: tuple[tuple[int, ...], ...] = ()
    """Groups of CPUs that share a core; empty if not probed."""


class GpuInventory(Record):
    """The GPUs, and what found them. ``problem`` says why GPUs may be missing (a broken driver)."""

    gpus: tuple[Gpu, ...] = ()
    source: Literal["nvml", "nvidia-smi", "device files", "kfd", "mask", "none"] = "none"
    problem: str | None = None


class Gpu(Record):
    """One physical GPU. ``index`` follows the PCI bus, as with CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    index: int
    uuid: str | None = None
    name: str = ""
    memory_mib: int | None = None
    vendor: Literal["nvidia", "amd"] = "nvidia"
    numa_node: int | None = None
    mig: tuple[MigDevice, ...] = ()


class MigDevice(Record):
    """A MIG slice of a GPU. ``uuid`` is its name in CUDA_VISIBLE_DEVICES (``MIG-...``)."""

    uuid: str
    profile: str
