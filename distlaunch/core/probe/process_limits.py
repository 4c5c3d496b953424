"""Find out why the kernel refuses to start a thread or a process."""

from __future__ import annotations

import os
from contextlib import suppress

from distlaunch.core.probe.cpus import V2, OwnCgroups
from distlaunch.core.probe.files import read_text

_STACK_BYTES = 8 << 20
"""Size of a thread's stack under ``ulimit -s unlimited``."""
_NEAR = 4
"""A limit counts as reached if so few remain: other processes may just have ended."""


def explain_refusal(root: str = "/") -> str:
    """Return a clause that names the limit that was reached, or the limits to check.

    Called after the kernel has refused a thread or a process (EAGAIN, ENOMEM).
    """
    import resource

    found = []
    cgroups = OwnCgroups(root)
    for tree in (V2, "pids"):
        for directory in cgroups.upwards(tree):
            most, current = (
                read_text(f"{directory}/pids.max"),
                read_text(f"{directory}/pids.current"),
            )
            if (
                most is not None
                and most.strip().isdecimal()
                and int(current or 0) + _NEAR > int(most)
            ):
                found.append(
                    f"the cgroup's limit of {most.strip()} processes and threads is reached "
                    "(pids.max)"
                )
    most_processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if (
        most_processes != resource.RLIM_INFINITY
        and os.getuid()
        and _threads_of_user() + _NEAR > most_processes
    ):
        found.append(
            f"the user's limit of {most_processes} processes and threads is reached (ulimit -u)"
        )
    most_memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    needed = _STACK_BYTES if stack == resource.RLIM_INFINITY else stack
    if most_memory != resource.RLIM_INFINITY and _own_memory() + needed > most_memory:
        found.append(
            f"the limit of {most_memory >> 20} MiB of address space leaves no room for a stack "
            "(ulimit -v)"
        )
    return found[0] if found else "see ulimit -u, ulimit -v, pids.max of the cgroup, and free -h"


def _threads_of_user() -> int:
    count = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += _read_number(read_text(f"/proc/{pid}/status"), "Threads")
    return count


def _own_memory() -> int:
    """Return the size of the address space in bytes."""
    return _read_number(read_text("/proc/self/status"), "VmSize") << 10


def _read_number(status: str | None, name: str) -> int:
    for line in (status or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
