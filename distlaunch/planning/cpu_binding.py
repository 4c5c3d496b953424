"""Choose the CPUs of each worker of a node, and its number of threads. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from distlaunch.core.model.topology import CpuInventory
from distlaunch.planning.train_options import Bind

Cores = list[tuple[int, ...]]


def bind_cpus(
    cpus: CpuInventory, workers: int, *, mode: Bind, gpu_numa: Sequence[int | None] = ()
) -> tuple[tuple[int, ...] | None, ...]:
    """Return the CPUs of each worker by local rank, ascending; None for a worker that keeps the
    launcher's CPUs.

    ``cores`` splits the allowed cores evenly, without overlap, near each worker's GPU if
    ``gpu_numa`` (NUMA node of its GPU by local rank; may be short) is known. A physical core is
    split only if there are more workers than cores; with more workers than CPUs, workers share CPUs
    in turn. ``numa`` gives each worker all allowed CPUs of its GPU's NUMA node, or of the NUMA
    nodes in turn.
    """
    if mode == "none":
        return (None,) * workers
    nodes = _cores_by_node(cpus)
    known = {
        worker: node
        for worker, node in enumerate(gpu_numa[:workers])
        if node is not None and node in nodes
    }
    if mode == "numa":
        node_of_worker = _numa_node_of_workers(nodes, workers, known, crowded=True)
        return tuple(_cpus_of(nodes[node]) for node in node_of_worker)
    if not known:
        return tuple(
            _split_cores([core for number in sorted(nodes) for core in nodes[number]], workers)
        )
    node_of_worker = _numa_node_of_workers(
        nodes, workers, known, crowded=workers > sum(map(len, nodes.values()))
    )
    shares = {
        node: iter(_split_cores(nodes[node], node_of_worker.count(node)))
        for node in set(node_of_worker)
    }
    return tuple(next(shares[node]) for node in node_of_worker)


def threads_per_worker(
    cpus: CpuInventory,
    workers: int,
    *,
    bound: tuple[int, ...] | None = None,
    granted: int | None = None,
) -> int:
    """Return how many threads a worker should compute with (OMP_NUM_THREADS).

    The lowest of affinity, cgroup quota and ``granted`` (the scheduler's CPUs for all workers of
    this node) is divided by ``workers``. The result is at least 1, and at most the number of CPUs
    in ``bound``, to which the worker is bound.
    """
    limits: list[float] = [len(cpus.allowed)]
    limits += [cpus.quota] if cpus.quota else []
    limits += [granted] if granted else []
    share = int(min(limits) / max(workers, 1))
    return max(1, share if bound is None else min(share, len(bound)))


def pinned_note(cpus: CpuInventory, who: str = "the launcher itself") -> str | None:
    """Return a note if the process ``who`` may use at most a quarter of the CPUs of its cpuset.

    The cause is usually ``taskset`` or ``mpirun --bind-to core``, which every worker inherits. A
    scheduler or a container sets a cpuset on purpose.
    """
    have, could = len(cpus.allowed), min(cpus.online, cpus.cpuset or cpus.online)
    if have * 4 > could:
        return None
    which = f"{have} of {could} CPUs, and all its workers share {'it' if have == 1 else 'them'}"
    return f"{who} is pinned to {which}"


def _cores_by_node(cpus: CpuInventory) -> dict[int, Cores]:
    """Return the allowed cores by NUMA node. CPUs without one belong to the lowest node with
    allowed CPUs."""
    rest = set(cpus.allowed)
    nodes: dict[int, set[int]] = {}
    for number, node in enumerate(cpus.numa):
        if own := rest.intersection(node):
            nodes[number] = own
            rest -= own
    if rest:
        nodes.setdefault(min(nodes, default=0), set()).update(rest)
    return {number: _group_by_core(cpus, among) for number, among in nodes.items()}


def _group_by_core(cpus: CpuInventory, rest: set[int]) -> Cores:
    """Group CPUs by physical core. A CPU of an unknown core is a group of its own."""
    groups: Cores = []
    for group in cpus.siblings:
        own = rest.intersection(group)
        if own:
            groups.append(tuple(sorted(own)))
            rest = rest - own
    return sorted([*groups, *((cpu,) for cpu in rest)])


def _cpus_of(cores: Cores) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))


def _numa_node_of_workers(
    nodes: dict[int, Cores], workers: int, known: dict[int, int], *, crowded: bool
) -> list[int]:
    """Return the NUMA node of each worker.

    A worker gets its GPU's, if ``known``. The others are assigned in contiguous runs, in proportion
    to cores. Unless ``crowded``, a NUMA node gets no more workers than cores; the rest go to idle
    cores.
    """
    load = dict.fromkeys(nodes, 0)
    node_of_worker: dict[int, int] = {}
    for worker, node in known.items():
        if crowded or load[node] < len(nodes[node]):
            node_of_worker[worker] = node
            load[node] += 1
    assigned: list[int] = []
    for _ in range(workers - len(node_of_worker)):
        best = min(nodes, key=lambda node: ((load[node] + 1) / len(nodes[node]), node))
        load[best] += 1
        assigned.append(best)
    free = iter(sorted(assigned))
    return [
        node_of_worker[worker] if worker in node_of_worker else next(free)
        for worker in range(workers)
    ]


def _split_cores(cores: Cores, workers: int) -> list[tuple[int, ...]]:
    """Split cores into contiguous shares whose sizes differ by at most one.

    With more workers than cores, CPUs are split instead; with more workers than CPUs, workers share
    them in turn.
    """
    if workers > len(cores):
        cores = [(cpu,) for core in cores for cpu in core]
    if workers > len(cores):
        return [cores[worker % len(cores)] for worker in range(workers)]
    bounds = [len(cores) * worker // workers for worker in range(workers + 1)]
    return [_cpus_of(cores[start:end]) for start, end in itertools.pairwise(bounds)]
