"""The CPUs that a node offers to the launcher and its workers."""

from __future__ import annotations

from distlaunch.core.model.record import Record


class CpuInventory(Record):
    """What may run where. CPU numbers are the kernel's, groups are ascending."""

    allowed: tuple[int, ...]
    """CPUs in the launcher's own affinity mask, ascending; never empty."""
    online: int
    """How many CPUs the machine runs, whoever may use them."""
    quota: float | None = None
    """CPUs' worth of time that the cgroups grant (1.5: one and a half CPUs); None without a limit."""
    cpuset: int | None = None
    """How many CPUs the own cgroup may use; None where no cgroup says so."""
    numa: tuple[tuple[int, ...], ...] = ()
    """CPUs of each NUMA node, indexed by node number; a node without CPUs is empty."""
    siblings: tuple[tuple[int, ...], ...] = ()
    """Groups of CPUs that share one physical core; empty where that was not read."""
