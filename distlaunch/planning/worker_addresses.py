"""Choose the addresses at which the workers of an attempt listen. No I/O.

For backends whose workers get a list of all workers by rank, such as TensorFlow with TF_CONFIG.
Each node reserves the ports of its workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted, host_and_port
from distlaunch.planning.backend import PlannedBackend
from distlaunch.planning.environment import byte_length, check_length

if TYPE_CHECKING:
    from distlaunch.planning.master_address import MasterChoice

_SHORTEST_ADDRESS = "::1"
"""The shortest possible address of a node. Only the first node can have a name."""
_LOWEST_PORT = 1024
"""Lower limit for a port that the kernel chooses; ip_local_port_range begins at 32,768 by
default."""


def cluster_of(
    plan: LaunchPlan, ports: Sequence[int], master: MasterChoice | None
) -> tuple[str, ...]:
    """Return ``HOST:PORT`` for each port of workers, by rank.

    ``ports`` are by rank, ``plan.worker_ports`` for each worker. ``master`` has the addresses of
    the nodes; None for a job on one node.
    """
    each = plan.worker_ports
    hosts = (plan.master_addr or "",) if master is None else master.addresses
    by_port = (
        host
        for host, node in zip(hosts, plan.nodes, strict=True)
        for _ in range(each * (node.slots or 0))
    )
    return tuple(host_and_port(host, port) for host, port in zip(by_port, ports, strict=True))


def cluster_names(backend: PlannedBackend, workers: int) -> set[str]:
    """Return the names of the variables that list the workers."""
    cluster = ("127.0.0.1:1",) * (backend.worker_ports * workers)
    return {*backend.cluster_variables(cluster), *backend.task_variables(workers, 0)}


def with_cluster(plan: LaunchPlan, cluster: tuple[str, ...], backend: PlannedBackend) -> LaunchPlan:
    """Return the plan with the variables that list all workers; the same plan if ``cluster`` is
    empty.

    Raises ConfigError if the variables would be too long for a program to start.
    """
    if not cluster:
        return plan
    count = len(cluster) // plan.worker_ports
    starts = backend.cluster_variables(cluster)
    tasks = [backend.task_variables(count, worker.rank) for worker in plan.workers]
    _check_lengths(starts, tasks, f"of {counted(count, 'worker')}", backend)
    workers = tuple(
        replace(worker, env={**worker.env, **task})
        for worker, task in zip(plan.workers, tasks, strict=True)
    )
    return replace(plan, cluster=cluster, env_starts=starts, workers=workers)


def check_cluster(plan: LaunchPlan, backend: PlannedBackend) -> None:
    """Raise ConfigError if the job has too many workers to list, even with the shortest
    addresses."""
    count = plan.world_size or 0
    on_first = plan.nodes[0].slots or 0
    shortest = host_and_port(_SHORTEST_ADDRESS, _LOWEST_PORT)
    named = min(
        shortest, host_and_port(plan.master_addr or _SHORTEST_ADDRESS, _LOWEST_PORT), key=len
    )
    cluster = (named,) * (plan.worker_ports * on_first) + (shortest,) * (
        plan.worker_ports * (count - on_first)
    )
    tasks = [backend.task_variables(count, count - 1)]
    whose = f"of {counted(count, 'worker')}, even with the shortest addresses"
    _check_lengths(backend.cluster_variables(cluster), tasks, whose, backend)


def _check_lengths(
    starts: Mapping[str, str],
    tasks: Sequence[Mapping[str, str]],
    whose: str,
    backend: PlannedBackend,
) -> None:
    for name in sorted({*starts, *(name for task in tasks for name in task)}):
        longest = max((task.get(name, "") for task in tasks), key=byte_length, default="")
        check_length(
            name, starts.get(name, "") + longest, f"{name} {whose}", hint=backend.fewer_workers()
        )
