"""Layer resolve: whose word counts for which nodes there are, and which of them is this machine; pure.

Loaded only where ``Facts`` have surroundings: an option or a variable that hints at other nodes.
"""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.core.model.topology import Topology
from distlaunch.resolve.allocation import Allocation, Host, Origin
from distlaunch.resolve.facts import Facts, Surroundings
from distlaunch.resolve.hostlist import fold_hosts
from distlaunch.resolve.identity import is_this_machine
from distlaunch.resolve.options import TrainOptions
from distlaunch.resolve.select import rivals, select
from distlaunch.resolve.sources import flags
from distlaunch.resolve.sources.environment import number, numbered_hosts

_USERS_OWN = frozenset({"flags", "hostfile", "discover", "local"})
"""Sources that are the user's word; all others are a system's around us."""
_CPUS = {"slurm": "SLURM_CPUS_ON_NODE"}
_SHOWN_HOSTS = 60
_ALONE = "--num-nodes 1 runs on this machine alone"


class Location(Record):
    """Where we are among which nodes."""

    allocation: Allocation
    here: int | None
    """The place of this machine among the hosts; None if it is none of them."""
    by: str
    """How that is known: the name of a variable or an option, or what names this machine."""
    cpus: int | None = None
    """CPUs that the scheduler grants here."""


def locate(options: TrainOptions, facts: Facts) -> tuple[Location | None, tuple[str, ...]]:
    """Decide who names the nodes: the user's lists first, then the innermost system; None: only this machine is there.

    Beside it, what else names nodes or ranks, each with the reason why it does not count. Raises ConfigError for what
    contradicts itself, and for hosts that cannot be told apart.
    """
    around = facts.surroundings
    if around is None:
        return None, ()
    allocation, lost = _allocation(options, facts, around)
    if allocation is None:
        allocation = _by_hand(options)
    if allocation is None and (options.include is not None or options.exclude is not None):
        allocation = _this_machine(options, facts)
    if allocation is None:
        return None, lost
    allocation = _with_node_rank(allocation, options, around)
    here, by = _here(allocation, options, around)
    cpus = _CPUS.get(allocation.source)
    granted = number(facts.environ, cpus, least=1) if cpus is not None and here is not None else None
    return Location(allocation=allocation, here=here, by=by, cpus=granted), lost


def _allocation(options: TrainOptions, facts: Facts, around: Surroundings) -> tuple[Allocation | None, tuple[str, ...]]:
    lists = {"--hosts": options.hosts, "--hostfile": options.hostfile, "--discover": options.discover}
    named = [f"{name} {quoted(value)}" for name, value in lists.items() if value is not None]
    if not named:
        nodes = options.num_nodes
        wanted = f"{nodes[0]}:{nodes[1]}" if isinstance(nodes, tuple) else None if nodes is None else str(nodes)
        return select(facts.environ, around.texts, wanted=options.source, num_nodes=wanted, node_rank=options.node_rank)
    if options.source not in {"auto", "flags"}:
        raise ConfigError(
            f"--source {quoted(options.source)} and {named[0]} both say which nodes there are", hint="give one of them"
        )
    allocation = flags.find(
        hosts=options.hosts,
        hostfile=options.hostfile,
        discover=options.discover,
        texts=around.texts,
        discovered=around.discovered,
    )
    first = next(name for name, value in lists.items() if value is not None)
    return allocation, rivals(facts.environ, f"{first} comes first")


def _by_hand(options: TrainOptions) -> Allocation | None:
    """Make the nodes of one who starts a launcher on each, as torchrun's users do: only their number is known."""
    if options.node_rank is None:
        return None
    nodes = options.num_nodes
    most = nodes[1] if isinstance(nodes, tuple) else nodes or 1
    if options.node_rank >= most:
        raise ConfigError(
            f"--node-rank {options.node_rank}: ranks of {counted(most, 'node')} go to {most - 1}",
            hint="--num-nodes says how many nodes there are" if nodes is None else None,
        )
    if most == 1:
        return None
    if options.master_addr is None:
        raise ConfigError(
            f"--node-rank {options.node_rank} of {counted(most, 'node')}, but nothing says where they meet",
            hint="give --master-addr HOST, that of node 0; or name all nodes by --hosts",
        )
    names = numbered_hosts(options.master_addr, most)
    return Allocation(
        source="flags",
        hosts=tuple(Host(name=name) for name in names),
        part="node",
        node_rank=options.node_rank,
        nodes=nodes if isinstance(nodes, tuple) else None,
        origins=(Origin(value="hosts", shown=fold_hosts(names), source="--num-nodes and --master-addr"),),
    )


def _this_machine(options: TrainOptions, facts: Facts) -> Allocation:
    """Give the filters this machine alone to choose from, under the name by which they call it."""
    text = f"{options.include or ''}@{options.exclude or ''}"
    name = "localhost" if "localhost" in text else facts.hostname
    return Allocation(source="local", hosts=(Host(name=name),))


def _with_node_rank(allocation: Allocation, options: TrainOptions, around: Surroundings) -> Allocation:
    """Take --node-rank as what this launcher is: one of several, each started on its node. Raises ConfigError."""
    rank, hosts = options.node_rank, allocation.hosts
    if rank is None or rank == allocation.node_rank:
        return allocation
    if allocation.node_rank is not None:
        source = _source_of(allocation, "node rank") or allocation.source
        raise ConfigError(
            f"--node-rank {rank} and {source} contradict each other: that says {allocation.node_rank}",
            hint="leave --node-rank out",
        )
    if rank >= len(hosts):
        raise ConfigError(f"--node-rank {rank}: ranks of {counted(len(hosts), 'node')} go to {len(hosts) - 1}")
    ours = [host.name for host in hosts if is_this_machine(host.name, around.identity)]
    if ours and hosts[rank].name not in ours:
        raise ConfigError(
            f"--node-rank {rank} is {printable(hosts[rank].name)}, but this machine is {printable(ours[0])}",
            hint="leave --node-rank out where the hosts' names say it",
        )
    return replace(allocation, node_rank=rank, part="node")


def _here(allocation: Allocation, options: TrainOptions, around: Surroundings) -> tuple[int | None, str]:
    """Find this machine by its rank where that is told, else by names and addresses."""
    if allocation.node_rank is not None:
        by = "--node-rank" if allocation.node_rank == options.node_rank else _source_of(allocation, "node rank")
        return allocation.node_rank, by or allocation.source
    identity = around.identity
    ours = [place for place, host in enumerate(allocation.hosts) if is_this_machine(host.name, identity)]
    if len(ours) > 1 and allocation.source in _USERS_OWN:
        one, other = (quoted(allocation.hosts[place].name) for place in ours[:2])
        raise ConfigError(f"{one} and {other} are both this machine", hint="name it once, with all its slots")
    if ours:
        return ours[0], "the names and addresses of this machine"
    return None, f"none of them is a name or an address of this machine, {printable(identity.hostname)}"


def _source_of(allocation: Allocation, value: str) -> str | None:
    return next((origin.source for origin in allocation.origins if origin.value == value), None)


def is_alone(location: Location, topology: Topology) -> bool:
    """Tell whether all of the job is this launcher's: the only node is this machine, and every worker on it its own."""
    if len(topology.nodes) != 1 or topology.here != 0:
        return False
    return location.allocation.part != "worker" or topology.world_size == 1


def refuse_others(location: Location, topology: Topology) -> None:
    """Refuse to start what is not this launcher's alone. Raises ConfigError that says what was found."""
    if is_alone(location, topology):
        return
    allocation, nodes = location.allocation, topology.nodes
    names = [node.host for node in nodes]
    folded = fold_hosts(names)
    listed = folded if len(folded) <= _SHOWN_HOSTS else f"{folded[:_SHOWN_HOSTS]}..."
    system = "" if allocation.source in _USERS_OWN else "; --source flags reads nothing from the environment"
    shows = "distlaunch plan shows what would run"
    if allocation.part == "worker":
        slots = [host.slots for host in allocation.hosts]
        several = counted(sum(each or 1 for each in slots), "worker") if all(slots) else "several workers"
        raise ConfigError(
            f"{allocation.source} starts a launcher for each of {several} on {listed}: "
            "joining them to one job is not built yet",
            hint=f"start one launcher (srun -n 1, mpirun -n 1) on one node{system}, which makes each a job of its own",
        )
    if len(nodes) > 1:
        alone = location.here == 0 or (location.here is not None and system)
        here = f"; {_ALONE}" if alone else ""
        raise ConfigError(
            f"{allocation.source} names {counted(len(nodes), 'node')} ({listed}): "
            "starting several nodes is not built yet",
            hint=f"{shows}{here}{system}",
        )
    raise ConfigError(
        f"{allocation.source} names {listed}, which is not this machine: {location.by}; "
        "starting workers elsewhere is not built yet",
        hint=f"{shows}; to run here, name localhost or leave the hosts out{system}",
    )
