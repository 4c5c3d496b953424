"""Layer core.model: which nodes a job has, and what each gives it."""

from __future__ import annotations

from distlaunch.core.model.record import Record


class Node(Record):
    """One node in topology order. ``masks`` has one entry per worker: what its device mask is to say."""

    host: str
    slots: int
    mask_variable: str | None = None
    masks: tuple[tuple[str, ...], ...] = ()
    hidden: tuple[str, ...] = ()
    """Further mask variables, set outside, that workers on CPUs must not follow."""
    devices: tuple[str, ...] = ()
    """For people: the node's selected devices, in LOCAL_RANK order."""
    numa: tuple[int | None, ...] = ()
    """The NUMA node of each of ``devices``, where it is known."""
    isolated: bool = False
    """Each worker sees one device, as LOCAL_RANK 0."""


class Topology(Record):
    """All nodes of a job; ``notes`` is what the user should be told about how they were found."""

    nodes: tuple[Node, ...]
    device: str
    """``cuda`` or ``cpu``: what the workers compute on."""
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of workers over all nodes."""
        return sum(node.slots for node in self.nodes)
