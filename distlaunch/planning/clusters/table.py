"""Read systems that differ only in the names of their variables, by a table. No I/O.

A new system is a row in the table of a module, a row in ``select``, and a fixture in the tests.
"""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import counted
from distlaunch.planning.allocation import Allocation, Part, Unit
from distlaunch.planning.clusters.environment_reader import (
    MOST_HOSTS,
    Environ,
    IncompleteError,
    Origins,
    contradiction_error,
    host_and_port,
    host_list,
    host_name,
    is_several,
    job_id,
    needed,
    number,
    numbered_hosts,
    same_slots,
    shown,
    text,
)

_MOST_SLOTS = 4096
_AMBIGUOUS = ("RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "NPROC_PER_NODE")
"""Variables that do not identify a system."""
_SLOT_WORDS = ("auto", "gpu", "cpu", "xpu")
"""Words that torchrun accepts for --nproc-per-node. The node then determines the number."""


class NodeSystem(Record):
    """A system that starts one launcher on each node and sets these variables."""

    name: str
    needs: tuple[str, ...]
    """Variables that must all be set."""
    starts: tuple[str, str] | None = None
    """A variable and the beginning of its value, if the names alone do not identify the system."""
    without: tuple[str, ...] = ()
    """With one of these variables, the process is a worker of another launcher."""
    count: str | None = None
    rank: str | None = None
    """Variable with the index of the node, from 0."""
    hosts: str | None = None
    """A list in rank order."""
    me: str | None = None
    """The name of this node in ``hosts``, if no variable has the rank."""
    master: str | None = None
    port: str | None = None
    slots: str | None = None
    unit: Unit = "workers"
    """What ``slots`` counts on each node."""
    mixed: str | None = None
    """If ``1`` or ``true``, ``slots`` is valid for this node only."""
    job: str | None = None


def find_node(system: NodeSystem, environ: Environ) -> Allocation | None:
    """Return the allocation of a row's variables; None if they are not set.

    Raises IncompleteError if some are missing, and ConfigError if they contradict each other.
    """
    if any(name in environ for name in system.without):
        return None
    if system.starts is not None and not environ.get(system.starts[0], "").startswith(
        system.starts[1]
    ):
        return None
    if missing := [name for name in system.needs if name not in environ]:
        _check_incomplete(system, environ, missing)
        return None
    found = Origins(environ)
    listed = host_list(environ, system.hosts) if system.hosts else ()
    count = _node_count(system, environ, listed, found)
    rank = _node_rank(system, environ, listed, count)
    found.add("node rank", rank, system.rank or system.me or "the only node")
    address, port = host_and_port(environ, system.master) if system.master else (None, None)
    if address is not None and system.master is not None:
        found.add("master address", address, system.master)
    if (
        system.port is not None
        and (own := number(environ, system.port, least=1, most=65535)) is not None
    ):
        port = own
        found.add("master port", port, system.port)
    if address in listed[1:]:
        why = "rank 0 runs on the first host of the list"
        raise contradiction_error(environ, str(system.master), str(system.hosts), why)
    slots = slots_of(environ, system.slots)
    if listed:
        hosts = same_slots(listed, slots, system.unit)
    else:
        hosts = numbered_hosts(address, count, slots=slots, unit=system.unit)
    if system.slots is not None and slots is not None:
        if system.mixed is not None and (text(environ, system.mixed) or "").lower() in {
            "1",
            "true",
        }:
            hosts = tuple(h if i == rank else replace(h, slots=None) for i, h in enumerate(hosts))
        found.add("slots", slots, system.slots)
    return Allocation(
        source=system.name,
        hosts=hosts,
        part="node",
        node_rank=rank,
        master_addr=address or (listed[0] if listed else None),
        master_port=port,
        job_id=job_id(text(environ, system.job)) if system.job else None,
        origins=found.all(),
    )


def _check_incomplete(system: NodeSystem, environ: Environ, missing: list[str]) -> None:
    """Raise IncompleteError for missing variables, unless this is the only node of a job."""
    listed = host_list(environ, system.hosts) if system.hosts else ()
    several = len(listed) > 1 or (system.count is not None and is_several(environ, system.count))
    only = len(listed) == 1 or (system.count is not None and text(environ, system.count) == "1")
    there = [name for name in system.needs if name in environ and name not in _AMBIGUOUS]
    if there and not (only and not several):
        why = (
            f"{shown(environ, there[0])}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set"
        )
        raise IncompleteError(why, of_several=several)


def _node_count(
    system: NodeSystem, environ: Environ, listed: tuple[str, ...], found: Origins
) -> int:
    count = number(environ, system.count, least=1) if system.count else None
    if count is not None and system.count is not None:
        if system.hosts is not None and listed and len(listed) != count:
            why = f"{counted(count, 'node')}, but {counted(len(listed), 'host')}"
            raise contradiction_error(environ, system.count, system.hosts, why)
        found.add("nodes", count, system.count)
        return count
    if not listed:
        names = " nor ".join(filter(None, (system.count, system.hosts)))
        raise IncompleteError(f"{shown(environ, system.needs[0])}, but not {names}")
    found.add("hosts", ",".join(listed), str(system.hosts))
    return len(listed)


def _node_rank(system: NodeSystem, environ: Environ, listed: tuple[str, ...], count: int) -> int:
    because = system.needs[0]
    if system.rank is not None:
        if count == 1 and text(environ, system.rank) is None:
            return 0
        rank = needed(environ, system.rank, number, because, of_several=True)
        if rank >= count:
            size = (system.count if system.count in environ else system.hosts) or because
            raise contradiction_error(
                environ,
                system.rank,
                str(size),
                f"ranks of {counted(count, 'node')} go to {count - 1}",
            )
        return rank
    name = needed(environ, str(system.me), text, because, of_several=count > 1)
    if name not in listed:
        raise contradiction_error(
            environ, str(system.me), str(system.hosts), "this node is not in the list"
        )
    if listed.count(name) > 1:
        raise contradiction_error(
            environ, str(system.me), str(system.hosts), "this node is in the list more than once"
        )
    return listed.index(name)


def slots_of(environ: Environ, name: str | None) -> int | None:
    """Return workers or GPUs per node; None for a word such as ``auto``. Raises ConfigError for
    other text."""
    if name is None or (text(environ, name) or "").lower() in _SLOT_WORDS:
        return None
    return number(environ, name, most=_MOST_SLOTS) or None


class TaskSystem(Record):
    """A system that starts and numbers processes and sets these variables."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | None = None
    nodes: str | None = None
    """Variable with the number of nodes, of which some may have no process."""
    node: str | None = None
    """Index of this node."""
    host: str | None = None
    """Name of this node."""
    agrees: str | None = None
    """Another variable with the rank."""
    job: str | None = None


def find_task(system: TaskSystem, environ: Environ) -> Allocation | None:
    """Return the allocation of a row's variables; None if they are not set.

    Raises IncompleteError if some are missing. Raises ConfigError if they contradict each other, or
    if nodes have different numbers of processes, so that the node of each process is unknown.
    """
    names = [
        system.rank,
        system.size,
        system.local_rank,
        *([system.local_size] if system.local_size else []),
    ]
    there = [name for name in names if text(environ, name) is not None]
    if not there:
        return None
    if missing := [name for name in names if name not in there]:
        several = system.rank in there and is_several(environ, system.size)
        which = f"{shown(environ, there[0])}, but not {' nor '.join(missing)}"
        raise IncompleteError(which, of_several=several)
    rank = needed(environ, system.rank, number, system.size)
    size = needed(environ, system.size, number, system.rank, least=1)
    local_rank = needed(environ, system.local_rank, number, system.rank)
    known_nodes = number(environ, system.nodes, least=1) if system.nodes else None
    local_size = _local_size(system, environ, size, known_nodes)
    size_name = system.local_size or str(system.nodes)
    if rank >= size:
        raise contradiction_error(
            environ, system.rank, system.size, f"ranks of {size:,} processes go to {size - 1}"
        )
    if local_rank >= local_size:
        raise contradiction_error(
            environ, system.local_rank, size_name, f"this node has local ranks to {local_size - 1}"
        )
    if local_size > size:
        raise contradiction_error(
            environ, size_name, system.size, "a node cannot have more processes than the job"
        )
    if system.agrees and (same := number(environ, system.agrees)) is not None and same != rank:
        raise contradiction_error(
            environ, system.rank, system.agrees, "both are this process's rank"
        )
    nodes = size // local_size
    if size % local_size or (known_nodes is not None and nodes > known_nodes):
        raise _uneven_error(
            environ, system.size, size_name, "nodes have different numbers of processes"
        )
    found = Origins(environ)
    node_rank = _task_node(system, environ, (rank, local_rank, local_size, nodes), found)
    part: Part = "node" if local_size == 1 else "worker"
    found.add(
        "part", "one launcher a node" if part == "node" else "one launcher a worker", size_name
    )
    found.add("nodes", nodes, f"{system.size} and {size_name}")
    own = text(environ, system.host) if system.host else None
    hosts = numbered_hosts(None, nodes, slots=None if part == "node" else local_size)
    if own is not None and system.host is not None:
        name = host_name(own, shown(environ, system.host))
        hosts = tuple(
            replace(h, name=name, known=True) if i == node_rank else h for i, h in enumerate(hosts)
        )
    address, port = _common_master(environ, nodes, found)
    return Allocation(
        source=system.name,
        hosts=hosts,
        part=part,
        node_rank=node_rank,
        local_rank=local_rank if part == "worker" else None,
        master_addr=address,
        master_port=port,
        job_id=job_id(text(environ, system.job)) if system.job else None,
        origins=found.all(),
    )


def _uneven_error(environ: Environ, first: str, second: str, why: str) -> ConfigError:
    return ConfigError(
        f"{shown(environ, first)} and {shown(environ, second)}: {why}, so the node of each process "
        "is not known",
        hint="start one launcher a node (mpirun -N 1, flux run --tasks-per-node=1), or as many "
        "processes on each node, "
        "numbered node by node (mpirun --map-by slot)",
    )


def _local_size(system: TaskSystem, environ: Environ, size: int, known_nodes: int | None) -> int:
    if system.local_size is not None:
        return needed(environ, system.local_size, number, system.rank, least=1, most=MOST_HOSTS)
    if known_nodes is None:
        why = f"{shown(environ, system.rank)}, but not {system.nodes}"
        raise IncompleteError(why, of_several=size > 1)
    if size % known_nodes:
        raise _uneven_error(
            environ, system.size, str(system.nodes), "nodes have different numbers of processes"
        )
    return size // known_nodes


def _task_node(
    system: TaskSystem, environ: Environ, numbers: tuple[int, int, int, int], found: Origins
) -> int:
    """Return the node's index: from its variable, or from the rank if ranks are assigned node by
    node.

    If they were assigned in turn, the index would be wrong; that is an error.
    """
    rank, local_rank, local_size, nodes = numbers
    if system.node is not None and (index := number(environ, system.node)) is not None:
        if index >= nodes:
            raise contradiction_error(
                environ, system.node, system.size, f"there are {counted(nodes, 'node')}"
            )
        found.add("node rank", index, system.node)
        return index
    if rank % local_size != local_rank:
        raise _uneven_error(
            environ, system.rank, system.local_rank, "processes are not numbered node by node"
        )
    found.add("node rank", rank // local_size, f"{system.rank} and {system.local_rank}")
    return rank // local_size


def _common_master(environ: Environ, nodes: int, found: Origins) -> tuple[str | None, int | None]:
    """Return the address and port of rank 0 that all processes have from ``mpirun -x MASTER_ADDR``
    or from Azure Batch; None for what is not set, and both None on one node."""
    if nodes == 1:
        return None, None
    for name in ("MASTER_ADDR", "AZ_BATCH_MASTER_NODE"):
        address, port = host_and_port(environ, name)
        if address is not None:
            found.add("master address", address, name)
            # The port in AZ_BATCH_MASTER_NODE is in use by Batch itself.
            own = number(environ, "MASTER_PORT", least=1, most=65535)
            port = own or (port if name == "MASTER_ADDR" else None)
            found.add_port(port, "MASTER_PORT", "MASTER_ADDR")
            return address, port
    return None, None
