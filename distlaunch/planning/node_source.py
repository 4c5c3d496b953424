"""Decide which source names the nodes of a job, and which of the nodes is this machine. No I/O.

Sources are the options, and systems such as Slurm. The module is loaded only if some option or
variable suggests that there are other nodes. Only then does ``launch.make_plan`` read
``Facts.surroundings``.
"""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.planning.allocation import Allocation, Host, Origin, ValueName
from distlaunch.planning.clusters.select import select, unused_systems
from distlaunch.planning.facts import Facts, Surroundings
from distlaunch.planning.hosts.this_host import Identity, is_loopback, is_this_machine
from distlaunch.planning.master_address import first_host_of_options, rendezvous_endpoint
from distlaunch.planning.train_options import TrainOptions


class Location(Record):
    """The nodes of the job, and the index of this machine among them."""

    allocation: Allocation
    who: str
    """The source of the nodes in messages: an option's or the system's name."""
    here: int | None
    """Index of this machine in the hosts; None if it is not in the list."""
    by: str
    """How ``here`` was determined: by a variable, an option, or this machine's name."""
    name: str
    """The name of this machine."""
    ranked: bool = True
    """Whether the rank of this launcher is known. If not, the coordinator assigns it, and ``here``
    is provisional."""


def locate(options: TrainOptions, facts: Facts) -> tuple[Location | None, tuple[str, ...]]:
    """Return the nodes of the job; None if this machine is the only one.

    The user's lists come before systems, among which ``select`` chooses. The second value lists the
    other variables that name nodes or ranks, each with the reason why it is not used. Raises
    ConfigError for options or variables that contradict each other, and if two hosts are the same
    machine.
    """
    around = facts.surroundings
    if around is None:
        return None, ()
    who, allocation, lost = _find_allocation(options, facts, around)
    if allocation is None and (options.include is not None or options.exclude is not None):
        who, allocation = (
            options.who_set("include", "exclude") or "",
            _allocation_of_this_machine(options, facts, around.identity),
        )
    if allocation is None:
        return None, lost
    allocation = _with_node_rank(allocation, options, around)
    here, by = _find_this_machine(allocation, options, around)
    ranked = allocation.part == "all" or allocation.node_rank is not None or bool(here)
    if here is None and allocation.part == "node":
        here, ranked = min(1, len(allocation.hosts) - 1), False
    name = around.identity.hostname
    return Location(
        allocation=allocation, who=who, here=here, by=by, name=name, ranked=ranked
    ), lost


def option_of_host_list(options: TrainOptions) -> str | None:
    """Return the name of the option that lists the hosts, if one is set.

    Raises ConfigError if two such options are set, or one together with --source (``flags`` aside).
    """
    lists = {"hosts": options.hosts, "hostfile": options.hostfile, "discover": options.discover}
    who = next((options.named(field) for field, value in lists.items() if value is not None), None)
    named = [
        _shown_option(options.named(field), value)
        for field, value in lists.items()
        if value is not None
    ]
    if named and options.source not in {"auto", "flags"}:
        named.append(_shown_option(options.named("source"), options.source))
    if len(named) > 1:
        raise ConfigError(
            f"{' and '.join(named)} each say which nodes there are",
            hint=f"use one of them; {Opt.INCLUDE} and {Opt.EXCLUDE} choose among its hosts",
        )
    return who


def _shown_option(who: str, value: str) -> str:
    """Return an option with its value for a message, without a variable's command, which may
    contain secrets."""
    return f"{who} {quoted(value)}" if who.startswith("-") else who


def _find_allocation(
    options: TrainOptions, facts: Facts, around: Surroundings
) -> tuple[str, Allocation | None, tuple[str, ...]]:
    """Return who names the nodes, the nodes, and the sources that are not used."""
    who = option_of_host_list(options)
    if who is None:
        nodes = options.num_nodes
        wanted = (
            f"{nodes[0]}:{nodes[1]}"
            if isinstance(nodes, tuple)
            else None
            if nodes is None
            else str(nodes)
        )
        found, lost, notes = select(
            facts.environ,
            around.texts,
            wanted=options.source,
            num_nodes=wanted,
            node_rank=options.node_rank,
        )
        if found is not None:
            return found.source, replace(found, notes=(*found.notes, *notes)), lost
        found = _allocation_by_hand(options)
        if found is None and notes:
            return (
                "this machine",
                replace(_allocation_of_this_machine(options, facts, around.identity), notes=notes),
                lost,
            )
        return options.who_set("num_nodes") or "", found, lost
    from distlaunch.planning.hosts import from_options

    found = from_options.find(
        hosts=options.hosts,
        hostfile=options.hostfile,
        discover=options.discover,
        texts=around.texts,
        discovered=around.discovered,
        who=who,
    )
    return who, found, unused_systems(facts.environ, f"{who} comes first")


def _allocation_by_hand(options: TrainOptions) -> Allocation | None:
    """Return the nodes if the user starts a launcher on each node, as with torchrun; None if not,
    or for a single node.

    Only their number is known, and perhaps the host of node 0. Raises ConfigError if the options do
    not say enough.
    """
    rank, nodes = options.node_rank, options.num_nodes
    most = nodes[1] if isinstance(nodes, tuple) else nodes or 1
    if nodes is None and options.rendezvous is not None:
        raise ConfigError(
            f"{options.named('rendezvous')} is for one launcher of several, but the number of "
            "nodes is not set",
            hint=f"add {Opt.NUM_NODES} N; with {Opt.NUM_NODES(1)} this machine trains alone",
        )
    if rank is None and (options.rendezvous is None or most == 1):
        return None
    from distlaunch.planning.clusters.environment_reader import MOST_HOSTS, numbered_hosts

    if rank is not None and rank >= most:
        raise ConfigError(
            f"{Opt.NODE_RANK(rank)}: ranks of {counted(most, 'node')} go to {most - 1}",
            hint=f"{Opt.NUM_NODES} says how many nodes there are" if nodes is None else None,
        )
    if most == 1:
        return None
    if most > MOST_HOSTS:
        raise ConfigError(
            f"{options.named('num_nodes')} {most:,}: there may be {MOST_HOSTS:,} nodes at most"
        )
    first, field = first_host_of_options(options)
    if first is None:
        raise ConfigError(
            f"{Opt.NODE_RANK(rank)} of {counted(most, 'node')}, but the address of node 0 is not "
            "set",
            hint=f"add {Opt.RENDEZVOUS('HOST:PORT')} with the host of node 0, or name all nodes "
            f"by {Opt.HOSTS}",
        )
    from distlaunch.core.model.host_list import fold_hosts

    hosts = numbered_hosts(None if field == "rendezvous" and is_loopback(first) else first, most)
    names = [host.name for host in hosts]
    said = f"{options.named('num_nodes')} and {options.named(field)}"
    return Allocation(
        source="flags",
        by_user=True,
        hosts=hosts,
        part="node",
        node_rank=rank,
        nodes=nodes if isinstance(nodes, tuple) else None,
        origins=(Origin(value="hosts", shown=fold_hosts(names), source=said),),
    )


def _allocation_of_this_machine(
    options: TrainOptions, facts: Facts, identity: Identity
) -> Allocation:
    """Return an allocation of this machine alone, by the name that --include or --exclude has for
    it."""
    words = f"{options.include or ''}@{options.exclude or ''}".split("@")
    called = [
        word[1:].partition("]")[0] if word[:1] == "[" else word.partition(":")[0].strip()
        for word in words
    ]
    name = next((each for each in called if is_this_machine(each, identity)), facts.hostname)
    return Allocation(source="local", by_user=True, hosts=(Host(name=name),))


def _with_node_rank(
    allocation: Allocation, options: TrainOptions, around: Surroundings
) -> Allocation:
    """Return the allocation with the rank of --node-rank, if set. The option means that each node
    has a launcher.

    Raises ConfigError if the rank contradicts the source of the nodes, or is not one of the job.
    """
    rank, hosts = options.node_rank, allocation.hosts
    if rank is None or rank == allocation.node_rank:
        return allocation
    if allocation.node_rank is not None:
        source = _source_of(allocation, "node rank") or allocation.source
        raise ConfigError(
            f"{Opt.NODE_RANK(rank)} and {source} contradict each other: that says "
            f"{allocation.node_rank}",
            hint=f"leave {Opt.NODE_RANK} out",
        )
    if rank >= len(hosts):
        raise ConfigError(
            f"{Opt.NODE_RANK(rank)}: ranks of {counted(len(hosts), 'node')} go to {len(hosts) - 1}"
        )
    ours = [host.name for host in hosts if is_this_machine(host.name, around.identity)]
    if ours and hosts[rank].name not in ours:
        raise ConfigError(
            f"{Opt.NODE_RANK(rank)} is {printable(hosts[rank].name)}, but this machine is "
            f"{printable(ours[0])}",
            hint=f"leave {Opt.NODE_RANK} out: the name of this machine gives its rank",
        )
    return replace(allocation, node_rank=rank, part="node")


def _find_this_machine(
    allocation: Allocation, options: TrainOptions, around: Surroundings
) -> tuple[int | None, str]:
    """Return the index of this machine among the hosts, and how it was determined: by rank,
    --rendezvous, or names and addresses.

    The index is None if it is none of them. Raises ConfigError if the user named it twice.
    """
    if allocation.node_rank is not None:
        source = _source_of(allocation, "node rank")
        by = options.who_set("node_rank") if allocation.node_rank == options.node_rank else source
        return allocation.node_rank, by or allocation.source
    identity = around.identity
    if allocation.part == "node" and options.rendezvous is not None:
        rendezvous_host = rendezvous_endpoint(options)[0]
        if rendezvous_host is not None and is_this_machine(rendezvous_host, identity):
            return 0, options.named("rendezvous")
    ours = [
        index for index, host in enumerate(allocation.hosts) if is_this_machine(host.name, identity)
    ]
    if len(ours) > 1 and allocation.by_user:
        one, other = (quoted(allocation.hosts[index].name) for index in ours[:2])
        raise ConfigError(
            f"{one} and {other} are both this machine", hint="name it once, with all its slots"
        )
    if ours:
        return ours[0], "the names and addresses of this machine"
    return None, f"this machine is {printable(identity.hostname)}"


def _source_of(allocation: Allocation, value: ValueName) -> str | None:
    return next((origin.source for origin in allocation.origins if origin.value == value), None)
