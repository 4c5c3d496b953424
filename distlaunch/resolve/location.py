"""Layer resolve: whose word counts for which nodes there are, and which of them is this machine; pure.

Loaded only where ``Facts`` have surroundings: an option or a variable that hints at other nodes.
"""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.gpus import GpuInventory
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.core.model.topology import Topology
from distlaunch.resolve.allocation import Allocation, Host, Origin
from distlaunch.resolve.devices import CUDA
from distlaunch.resolve.facts import Facts, Surroundings
from distlaunch.resolve.hostlist import fold_hosts
from distlaunch.resolve.identity import is_this_machine
from distlaunch.resolve.masks import MASK
from distlaunch.resolve.options import TrainOptions
from distlaunch.resolve.select import rivals, select
from distlaunch.resolve.sources import flags
from distlaunch.resolve.sources.environment import number, numbered_hosts

_USERS_OWN = frozenset({"flags", "hostfile", "discover", "local"})
"""Sources that are the user's word; all others are a system's around us."""
_CPUS = {"slurm": "SLURM_CPUS_ON_NODE"}
_SHOWN_HOSTS = 60
_ALONE = "; --num-nodes 1 runs on this machine alone"


class Location(Record):
    """Where we are among which nodes."""

    allocation: Allocation
    who: str
    """Who names the nodes, in words that people know: an option's name, or the system's."""
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
    who, allocation, lost = _allocation(options, facts, around)
    if allocation is None and (options.include is not None or options.exclude is not None):
        who, allocation = "--include" if options.include is not None else "--exclude", _this_machine(options, facts)
    if allocation is None:
        return None, lost
    allocation = _with_node_rank(allocation, options, around)
    here, by = _here(allocation, options, around)
    cpus = _CPUS.get(allocation.source)
    granted = number(facts.environ, cpus, least=1) if cpus is not None and here is not None else None
    return Location(allocation=allocation, who=who, here=here, by=by, cpus=granted), lost


def check_lists(options: TrainOptions) -> str | None:
    """Name the option that lists the hosts, if one does. Raises ConfigError for two that do, or a system beside it."""
    lists = {"--hosts": options.hosts, "--hostfile": options.hostfile, "--discover": options.discover}
    named = [f"{name} {quoted(value)}" for name, value in lists.items() if value is not None]
    if named and options.source not in {"auto", "flags"}:
        named.append(f"--source {quoted(options.source)}")
    if len(named) > 1:
        raise ConfigError(
            f"{' and '.join(named)} each say which nodes there are",
            hint="give one of them; --include and --exclude choose among its hosts",
        )
    return named[0].partition(" ")[0] if named else None


def _allocation(
    options: TrainOptions, facts: Facts, around: Surroundings
) -> tuple[str, Allocation | None, tuple[str, ...]]:
    """Ask the user's lists, else the systems around us; give who answered, the answer, and who lost."""
    who = check_lists(options)
    if who is None:
        nodes = options.num_nodes
        wanted = f"{nodes[0]}:{nodes[1]}" if isinstance(nodes, tuple) else None if nodes is None else str(nodes)
        found, lost, notes = select(
            facts.environ, around.texts, wanted=options.source, num_nodes=wanted, node_rank=options.node_rank
        )
        if found is not None:
            return found.source, replace(found, notes=(*found.notes, *notes)), lost
        found = _by_hand(options)
        if found is None and notes:
            return "this machine", replace(_this_machine(options, facts), notes=notes), lost
        return "--num-nodes", found, lost
    found = flags.find(
        hosts=options.hosts,
        hostfile=options.hostfile,
        discover=options.discover,
        texts=around.texts,
        discovered=around.discovered,
    )
    return who, found, rivals(facts.environ, f"{who} comes first")


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
    hosts = numbered_hosts(options.master_addr, most)
    names = [host.name for host in hosts]
    return Allocation(
        source="flags",
        hosts=hosts,
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
    return None, f"this machine is {printable(identity.hostname)}"


def _source_of(allocation: Allocation, value: str) -> str | None:
    return next((origin.source for origin in allocation.origins if origin.value == value), None)


def trusting(facts: Facts, location: Location) -> tuple[Facts, tuple[str, ...]]:
    """Take a device mask at its word where no GPU was found here, but who names the nodes says the same as the mask.

    Some devices have no driver that we know, and come with CUDA's mask; a plan may be made on another machine, too.
    Beside the facts, what the user should hear of it.
    """
    mask = facts.environ.get(CUDA, "").strip()
    entries = tuple(entry.strip() for entry in mask.split(","))
    if location.here is None or facts.gpus.gpus or facts.gpus.problem or not all(map(_is_device, entries)):
        return facts, ()
    host = location.allocation.hosts[location.here]
    named = location.allocation.source in _USERS_OWN and host.slots == len(entries)
    if not named and host.devices != entries:
        return facts, ()
    note = f"no GPU was found here: {CUDA}={mask} is taken at its word, as {location.who} says the same"
    return replace(facts, gpus=GpuInventory(source=MASK)), (printable(note),)


def _is_device(entry: str) -> bool:
    return entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))


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
    who = location.who
    folded = fold_hosts(node.host for node in nodes)
    listed = folded if len(folded) <= _SHOWN_HOSTS else f"{folded[:_SHOWN_HOSTS]}..."
    by_user = allocation.source in _USERS_OWN
    if allocation.part == "worker":
        tasks = f"{topology.world_size} workers" if topology.world_size else "several workers"
        raise ConfigError(
            f"{who} starts a launcher for each of {tasks} on {listed}: joining them to one job is not built yet",
            hint="start one launcher, on one node (srun -n 1, mpirun -n 1); --source flags reads nothing from the"
            " environment, and makes each launcher a job of its own on its machine",
        )
    ignore = "" if by_user else "; --source flags reads nothing from the environment"
    if len(nodes) > 1:
        alone = location.here == 0 or (location.here is not None and not by_user)
        raise ConfigError(
            f"{who} names {len(nodes):,} nodes ({listed}): starting several nodes is not built yet",
            hint=f"distlaunch plan shows what would run{_ALONE if alone else ''}{ignore}",
        )
    raise ConfigError(
        f"{who} names {listed}, and {location.by}: starting workers elsewhere is not built yet",
        hint=f"distlaunch plan shows what would run{ignore or '; to run here, name localhost or no host'}",
    )
