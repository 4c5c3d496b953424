"""Layer resolve: where each worker of an attempt listens, for backends whose workers are told of one another; pure.

A worker's node holds its ports; all workers are told the same list, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.resolve.backend import PlannedBackend
from distlaunch.resolve.meeting import Meeting


def cluster_of(plan: LaunchPlan, ports: Sequence[int], meeting: Meeting | None) -> tuple[str, ...]:
    """Give ``HOST:PORT`` for each of the ports, which are as many for each worker, by rank.

    ``meeting``: how the nodes reach each other; None where there is one, and its workers need nobody else.
    """
    each = plan.worker_ports
    hosts = (plan.master_addr or "",) if meeting is None else meeting.addresses
    by_port = (host for host, node in zip(hosts, plan.nodes, strict=True) for _ in range(each * (node.slots or 0)))
    return tuple(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in zip(by_port, ports, strict=True)
    )


def cluster_names(backend: PlannedBackend, workers: int) -> set[str]:
    """Name the variables that are to tell so many workers where all listen."""
    places = ("127.0.0.1:1",) * (backend.worker_ports * workers)
    return {*backend.cluster_variables(places), *backend.task_variables(workers, 0)}


def with_cluster(plan: LaunchPlan, cluster: tuple[str, ...], backend: PlannedBackend) -> LaunchPlan:
    """Tell each worker of the plan where all of them listen, in the words of the backend."""
    if not cluster:
        return plan
    count = len(cluster) // plan.worker_ports
    workers = tuple(
        replace(worker, env={**worker.env, **backend.task_variables(count, worker.rank)}) for worker in plan.workers
    )
    return replace(plan, cluster=cluster, env_starts=backend.cluster_variables(cluster), workers=workers)
