"""Layer resolve: systems that differ only in the names of their variables, as rows; pure.

A new one is a row in the table of a source module, a row of markers in ``select`` and a fixture in the tests.
"""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted
from distlaunch.resolve.allocation import Allocation, Host, Part
from distlaunch.resolve.sources.environment import (
    MOST_HOSTS,
    Environ,
    IncompleteError,
    Origins,
    contradiction,
    host_and_port,
    host_list,
    job_id,
    needed,
    number,
    numbered_hosts,
    same_slots,
    shown,
    text,
)

_MOST_SLOTS = 4096
_SLOTS_IN_WORDS = ("auto", "gpu", "cpu", "xpu")
"""What torchrun takes for --nproc-per-node beside a number: the node knows."""


class NodeSystem(Record):
    """A system that starts one launcher on each node and tells it, in these variables, which one it is."""

    name: str
    needs: tuple[str, ...]
    """Without all of these, it is not this system."""
    starts: tuple[str, str] | None = None
    """A variable and what its value starts with, where the names alone are anybody's."""
    without: tuple[str, ...] = ()
    """With one of these, it is another's: a worker's variables."""
    count: str | None = None
    rank: str | None = None
    """Of the node, from 0."""
    hosts: str | None = None
    """A list, in rank order."""
    me: str | None = None
    """Which of ``hosts`` this is, where no variable holds the rank."""
    master: str | None = None
    port: str | None = None
    slots: str | None = None
    """GPUs, or processes to start, of each node."""
    mixed: str | None = None
    """If this is ``1`` or ``true``, ``slots`` is this node's alone."""
    job: str | None = None


def find_node(system: NodeSystem, environ: Environ) -> Allocation | None:
    """Read a row's variables; None if it is not this system. Raises ConfigError and IncompleteError."""
    if not all(name in environ for name in system.needs) or any(name in environ for name in system.without):
        return None
    if system.starts is not None and not environ.get(system.starts[0], "").startswith(system.starts[1]):
        return None
    found = Origins(environ)
    listed = host_list(environ, system.hosts) if system.hosts else ()
    count = _node_count(system, environ, listed, found)
    rank = _node_rank(system, environ, listed, count)
    found.add("node rank", rank, system.rank or system.me or "the only node")
    address, port = host_and_port(environ, system.master) if system.master else (None, None)
    if address is not None and system.master is not None:
        found.add("master address", address, system.master)
    if system.port is not None and (own := number(environ, system.port, least=1, most=65535)) is not None:
        port = own
        found.add("master port", port, system.port)
    names = listed or numbered_hosts(address, count)
    slots = slots_of(environ, system.slots)
    hosts = same_slots(names, slots)
    if system.slots is not None and slots is not None:
        if system.mixed is not None and (text(environ, system.mixed) or "").lower() in {"1", "true"}:
            hosts = tuple(h if i == rank else Host(name=h.name) for i, h in enumerate(hosts))
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


def _node_count(system: NodeSystem, environ: Environ, listed: tuple[str, ...], found: Origins) -> int:
    count = number(environ, system.count, least=1) if system.count else None
    if count is not None and system.count is not None:
        if system.hosts is not None and listed and len(listed) != count:
            why = f"{counted(count, 'node')}, but {counted(len(listed), 'host')}"
            raise contradiction(environ, system.count, system.hosts, why)
        found.add("nodes", count, system.count)
        return count
    if not listed:
        names = " nor ".join(filter(None, (system.count, system.hosts)))
        raise IncompleteError(f"{system.needs[0]} is set, but not {names}")
    found.add("hosts", ",".join(listed), str(system.hosts))
    return len(listed)


def _node_rank(system: NodeSystem, environ: Environ, listed: tuple[str, ...], count: int) -> int:
    because = system.needs[0]
    if system.rank is not None:
        if count == 1 and text(environ, system.rank) is None:
            return 0
        rank = needed(environ, system.rank, number, because)
        if rank >= count:
            size = (system.count if system.count in environ else system.hosts) or because
            raise contradiction(environ, system.rank, str(size), f"ranks of {counted(count, 'node')} go to {count - 1}")
        return rank
    name = needed(environ, str(system.me), text, because)
    if name not in listed:
        raise contradiction(environ, str(system.me), str(system.hosts), "this node is not in the list")
    return listed.index(name)


def slots_of(environ: Environ, name: str | None) -> int | None:
    """Read workers or GPUs per node: a number, or a word (``auto``) that leaves it to the node. Raises ConfigError."""
    if name is None or (text(environ, name) or "").lower() in _SLOTS_IN_WORDS:
        return None
    return number(environ, name, most=_MOST_SLOTS) or None


class TaskSystem(Record):
    """A system that starts processes one by one and numbers them, in these variables."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | None = None
    nodes: str | None = None
    """Number of nodes; only trusted to be no less than those with processes."""
    node: str | None = None
    """Index of this node."""
    host: str | None = None
    """This node's name."""
    agrees: str | None = None
    """Another variable that holds the rank too."""
    job: str | None = None


def find_task(system: TaskSystem, environ: Environ) -> Allocation | None:
    """Read a row's variables; None if it is not this system.

    Raises IncompleteError if only some are there (better no worker than half a one), and ConfigError if they contradict
    each other, or if nodes have different numbers of processes: who is where is then unknown.
    """
    names = [system.rank, system.size, system.local_rank, *([system.local_size] if system.local_size else [])]
    there = [name for name in names if text(environ, name) is not None]
    if not there:
        return None
    if missing := [name for name in names if name not in there]:
        raise IncompleteError(f"{there[0]} is set, but not {' nor '.join(missing)}: nothing of {system.name} is used")
    rank = needed(environ, system.rank, number, system.size)
    size = needed(environ, system.size, number, system.rank, least=1)
    local_rank = needed(environ, system.local_rank, number, system.rank)
    known_nodes = number(environ, system.nodes, least=1) if system.nodes else None
    local_size = _local_size(system, environ, size, known_nodes)
    size_name = system.local_size or str(system.nodes)
    if rank >= size:
        raise contradiction(environ, system.rank, system.size, f"ranks of {size:,} processes go to {size - 1}")
    if local_rank >= local_size:
        raise contradiction(environ, system.local_rank, size_name, f"this node has local ranks to {local_size - 1}")
    if local_size > size:
        raise contradiction(environ, size_name, system.size, "a node cannot have more processes than the job")
    if system.agrees and (same := number(environ, system.agrees)) is not None and same != rank:
        raise contradiction(environ, system.rank, system.agrees, "both are this process's rank")
    nodes = size // local_size
    if size % local_size or (known_nodes is not None and nodes > known_nodes):
        raise _uneven(environ, system.size, size_name, "nodes have different numbers of processes")
    found = Origins(environ)
    node_rank = _task_node(system, environ, (rank, local_rank, local_size, nodes), found)
    part: Part = "node" if local_size == 1 else "worker"
    found.add("part", "one launcher a node" if part == "node" else "one launcher a worker", size_name)
    found.add("nodes", nodes, f"{system.size} and {size_name}")
    own = text(environ, system.host) if system.host else None
    hosts = numbered_hosts(None, nodes)
    if own is not None and all(char.isalnum() or char in "._-" for char in own) and own not in hosts:
        hosts = tuple(own if index == node_rank else name for index, name in enumerate(hosts))
    address, port = _master(environ, nodes, found)
    notes = () if address or nodes == 1 else (f"{system.name} does not tell which host has rank 0: give --master-addr",)
    return Allocation(
        source=system.name,
        hosts=same_slots(hosts, None if part == "node" else local_size),
        part=part,
        node_rank=node_rank,
        local_rank=local_rank if part == "worker" else None,
        master_addr=address,
        master_port=port,
        job_id=job_id(text(environ, system.job)) if system.job else None,
        origins=found.all(),
        notes=notes,
    )


def _uneven(environ: Environ, first: str, second: str, why: str) -> ConfigError:
    return ConfigError(
        f"{shown(environ, first)} and {shown(environ, second)}: {why}, so who is where is not known",
        hint="start one launcher a node (mpirun -N 1, flux run --tasks-per-node=1), or as many processes on each node, "
        "numbered node by node (mpirun --map-by slot)",
    )


def _local_size(system: TaskSystem, environ: Environ, size: int, known_nodes: int | None) -> int:
    if system.local_size is not None:
        return needed(environ, system.local_size, number, system.rank, least=1, most=MOST_HOSTS)
    if known_nodes is None:
        raise IncompleteError(f"{system.rank} is set, but not {system.nodes}: nothing of {system.name} is used")
    if size % known_nodes:
        raise _uneven(environ, system.size, str(system.nodes), "nodes have different numbers of processes")
    return size // known_nodes


def _task_node(system: TaskSystem, environ: Environ, place: tuple[int, int, int, int], found: Origins) -> int:
    """Find the node's index: told, or from the rank where processes are numbered node by node.

    Numbered in turn over the nodes, a few processes would look as if they were not, so that is refused.
    """
    rank, local_rank, local_size, nodes = place
    if system.node is not None and (told := number(environ, system.node)) is not None:
        if told >= nodes:
            raise contradiction(environ, system.node, system.size, f"there are {counted(nodes, 'node')}")
        found.add("node rank", told, system.node)
        return told
    if rank % local_size != local_rank:
        raise _uneven(environ, system.rank, system.local_rank, "processes are not numbered node by node")
    found.add("node rank", rank // local_size, f"{system.rank} and {system.local_rank}")
    return rank // local_size


def _master(environ: Environ, nodes: int, found: Origins) -> tuple[str | None, int | None]:
    """Take the address that all processes were handed (``mpirun -x MASTER_ADDR``), or that Azure's batch nodes have."""
    if nodes == 1:
        return None, None
    for name, port_name in (("MASTER_ADDR", "MASTER_PORT"), ("AZ_BATCH_MASTER_NODE", None)):
        address, port = host_and_port(environ, name)
        if address is not None:
            if port_name is not None and (own := number(environ, port_name, least=1, most=65535)) is not None:
                port = own
            found.add("master address", address, name)
            return address, port
    return None, None
