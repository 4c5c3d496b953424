"""Read the CPUs that this process may use, and the number of out-of-memory kills.

Cgroups of version 1, 2 or both are read. ``/proc/self/cgroup`` names this process's directory
relative to the root of the tree, ``/proc/self/mountinfo`` where the tree is mounted. A container
usually mounts only a subtree (cgroups(7), "/proc files").
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from distlaunch.core.model.topology import CpuInventory
from distlaunch.core.probe.files import parse_cpu_list, parse_int, read_int, read_text, under


def probe_cpus(
    root: str = "/", *, affinity: Iterable[int] | None = None, topology: bool = True
) -> CpuInventory:
    """Return the CPUs by affinity and cgroup limits and, with ``topology``, NUMA nodes and cores.

    The topology needs one small file per core and node, and only binding needs it. ``affinity``
    replaces the kernel's mask of this process.
    """
    allowed = tuple(sorted(os.sched_getaffinity(0) if affinity is None else affinity))
    cgroups = OwnCgroups(root)
    online = parse_cpu_list(read_text(under(root, "/sys/devices/system/cpu/online")) or "")
    return CpuInventory(
        allowed=allowed,
        online=max(len(online), len(allowed)),
        quota=_quota(cgroups),
        cpuset=_cpuset_size(cgroups),
        numa=_numa_cpus(root) if topology else (),
        siblings=_core_cpus(root, allowed) if topology else (),
    )


def count_oom_kills(root: str = "/") -> int | None:
    """Return the kernel's number of out-of-memory kills, if known. Only differences are meaningful.

    The number is that of this process's cgroup, or of the machine if the cgroup has no counter.
    """
    cgroups = OwnCgroups(root)
    for text in (
        cgroups.nearest(V2, "memory.events"),
        cgroups.nearest("memory", "memory.oom_control"),
    ):
        kills = _read_field(text, "oom_kill")
        if kills is not None:
            return kills
    return _read_field(read_text(under(root, "/proc/vmstat")), "oom_kill")


def _read_field(text: str | None, name: str) -> int | None:
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return parse_int(value)
    return None


def _quota(cgroups: OwnCgroups) -> float | None:
    """Return the lowest CPU limit of the cgroup and its parents; None if there is none."""
    limits: list[float] = []
    for directory in cgroups.upwards(V2):
        quota, _, period = (read_text(f"{directory}/cpu.max") or "").strip().partition(" ")
        limits += _limit(parse_int(quota), parse_int(period))
    for directory in cgroups.upwards("cpu"):
        limits += _limit(
            read_int(f"{directory}/cpu.cfs_quota_us"), read_int(f"{directory}/cpu.cfs_period_us")
        )
    return min(limits, default=None)


def _limit(quota_us: int | None, period_us: int | None) -> list[float]:
    """Return the limit in CPUs as a list of at most one number: none without a limit.

    Version 1 writes -1 for no limit, version 2 ``max``.
    """
    return (
        [quota_us / period_us] if quota_us and period_us and quota_us > 0 and period_us > 0 else []
    )


def _cpuset_size(cgroups: OwnCgroups) -> int | None:
    for controller, name in (
        (V2, "cpuset.cpus.effective"),
        ("cpuset", "cpuset.effective_cpus"),
        ("cpuset", "cpuset.cpus"),
    ):
        cpus = parse_cpu_list(cgroups.nearest(controller, name) or "")
        if cpus:
            return len(cpus)
    return None


def _numa_cpus(root: str) -> tuple[tuple[int, ...], ...]:
    base = under(root, "/sys/devices/system/node")
    try:
        names = os.listdir(base)
    except OSError:
        return ()
    nodes: dict[int, tuple[int, ...]] = {}
    for name in names:
        number = parse_int(name[4:]) if name.startswith("node") else None
        if number is not None:
            nodes[number] = parse_cpu_list(read_text(f"{base}/{name}/cpulist") or "")
    return tuple(nodes.get(number, ()) for number in range(max(nodes, default=-1) + 1))


def _core_cpus(root: str, allowed: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    base = under(root, "/sys/devices/system/cpu")
    seen: set[int] = set()
    groups: list[tuple[int, ...]] = []
    for cpu in allowed:
        if cpu not in seen:
            group = parse_cpu_list(
                read_text(f"{base}/cpu{cpu}/topology/thread_siblings_list") or ""
            ) or (cpu,)
            seen.update(group)
            groups.append(group)
    return tuple(groups)


V2 = ""
"""Key of the version 2 tree, whose controller name is empty in ``/proc/self/cgroup``."""


class OwnCgroups:
    """The cgroup directories of this process."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._paths = _own_paths(read_text(under(root, "/proc/self/cgroup")) or "")
        self._mounts = _find_mounts(read_text(under(root, "/proc/self/mountinfo")) or "")

    def upwards(self, controller: str) -> list[str]:
        """Return this process's directory in a controller's tree and its parents, nearest first."""
        path, mount = self._paths.get(controller), self._mounts.get(controller)
        if path is None or mount is None:
            return []
        top, mounted_at = mount
        inside = _relative(path, top)
        parts = [part for part in inside.split("/") if part]
        return [
            under(self._root, "/".join([mounted_at.rstrip("/"), *parts[:n]]))
            for n in range(len(parts), -1, -1)
        ]

    def nearest(self, controller: str, name: str) -> str | None:
        """Return the content of the file ``name`` from the nearest directory that has it; None if
        none has it."""
        for directory in self.upwards(controller):
            text = read_text(f"{directory}/{name}")
            if text is not None:
                return text
        return None


def _own_paths(text: str) -> dict[str, str]:
    paths: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                paths[controller] = fields[2]
    return paths


def _find_mounts(text: str) -> dict[str, tuple[str, str]]:
    """Return controller -> (mounted subtree, mount point), of the first mount."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        before, found, after = line.partition(" - cgroup")
        if not found:
            continue
        left, right = before.split(), after.split()
        top, mounted_at = left[3], left[4]
        if right[0] == "2":
            mounts.setdefault(V2, (top, mounted_at))
        else:
            for controller in right[-1].split(","):
                mounts.setdefault(controller, (top, mounted_at))
    return mounts


def _relative(path: str, top: str) -> str:
    """Return ``path`` relative to the mounted subtree ``top``; empty if it is outside
    (``/../x``)."""
    if top == "/":
        return "" if path.startswith("/..") else path
    if path == top or path.startswith(top + "/"):
        return path[len(top) :]
    return ""
