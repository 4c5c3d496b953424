"""Layer resolve: the text of ``--explain``: for each value, who said it, and what else was there and lost; pure."""

from __future__ import annotations

from collections.abc import Iterator

from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, printable
from distlaunch.core.model.topology import Topology
from distlaunch.resolve.allocation import Allocation, Origin
from distlaunch.resolve.devices import select_devices
from distlaunch.resolve.facts import Facts
from distlaunch.resolve.hostlist import fold_counts, fold_hosts
from distlaunch.resolve.location import Location
from distlaunch.resolve.options import TrainOptions
from distlaunch.resolve.sources.local import on_cpus

_LABEL = 16
_OPTIONS = (
    *("num_gpus", "gpus_per_node", "num_procs", "procs_per_node", "num_nodes", "device", "gpus"),
    *("include", "exclude", "spread", "job_id", "backend"),
)
"""Fields that say something of the topology and have no line of their own."""
_VARIABLES = {"job_id": "DISTLAUNCH_TRAIN_JOB_ID", "backend": "DISTLAUNCH_TRAIN_BACKEND"}
_TOTALS = ("num_procs", "num_gpus")
_EACH = ("procs_per_node", "gpus_per_node")
_PARTS = {
    "all": "this launcher starts all nodes",
    "node": "a launcher on each node; this one starts its own node's workers",
    "worker": "a launcher for each worker; this one starts one",
}


class Explanation(Record):
    """What was decided and why; ``lost`` is what else names nodes or ranks, each with why it does not count."""

    values: tuple[Origin, ...]
    lost: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Write it for people, a line for each value and each loser."""
        return [*_lines(self.values), *(f"{'not used':<{_LABEL}} {each}" for each in self.lost)]

    def record(self) -> dict[str, object]:
        """Give it as data."""
        values = [
            {"value": each.value, "shown": each.shown, "source": each.source, "instead_of": list(each.instead_of)}
            for each in self.values
        ]
        return {"values": values, "lost": list(self.lost)}


def explain(
    options: TrainOptions,
    facts: Facts,
    topology: Topology,
    plan: LaunchPlan,
    *,
    location: Location | None,
    lost: tuple[str, ...],
) -> Explanation:
    """Say of each value of the plan where it comes from."""
    return Explanation(values=tuple(_values(options, facts, topology, plan, location)), lost=lost)


def _lines(values: tuple[Origin, ...]) -> Iterator[str]:
    for each in values:
        yield f"{each.value:<{_LABEL}} {each.shown}  ({each.source})"
        for other in each.instead_of:
            yield f"{'':<{_LABEL}} not {other}"


def _values(
    options: TrainOptions, facts: Facts, topology: Topology, plan: LaunchPlan, location: Location | None
) -> Iterator[Origin]:
    allocation = None if location is None else location.allocation
    yield _source(options, facts, allocation)
    if location is None or allocation is None:
        yield _value("hosts", facts.hostname, "this machine")
    else:
        yield from (origin for origin in allocation.origins if not _is_told_below(origin))
        shown = "none of the hosts" if location.here is None else allocation.hosts[location.here].name
        yield _value("this machine", shown, location.by)
        if all(origin.value != "part" for origin in allocation.origins):
            yield _value("part", _PARTS[allocation.part], allocation.source)
    for field in _OPTIONS:
        if (source := option_source(options, facts, field)) is not None:
            yield _value(field.replace("_", "-"), _shown(getattr(options, field)), source)
    yield _value("in the plan", _nodes(topology), _of_nodes(options, facts, allocation))
    yield _workers(options, facts, topology, allocation)
    yield from _devices(options, facts, topology)
    yield _master(options, facts, topology, plan, allocation)
    if options.job_id is None:
        told = allocation is not None and plan.job_id == allocation.job_id
        yield _value("job-id", plan.job_id, allocation.source if told and allocation else "made for this job")


def option_source(options: TrainOptions, facts: Facts, field: str) -> str | None:
    """Name the option, or the variable, that set a field; None if nobody did."""
    value = getattr(options, field)
    if value == TrainOptions._defaults[field]:  # noqa: SLF001 - a record's own table
        return None
    variable = _VARIABLES.get(field, f"DISTLAUNCH_{field.upper()}")
    told = facts.environ.get(variable, "")
    if told.lstrip("0") == _shown(value) or (value is True and told):
        return variable
    return f"--{field.replace('_', '-')}"


def _first(options: TrainOptions, facts: Facts, fields: tuple[str, ...]) -> str | None:
    """Name who set the first of these fields that anybody set."""
    named = (option_source(options, facts, field) for field in fields)
    return next((each for each in named if each is not None), None)


def _is_told_below(origin: Origin) -> bool:
    return origin.value in {"master address", "master port"}


def _value(value: str, shown: str, source: str, *instead_of: str) -> Origin:
    return Origin(value=value, shown=printable(shown), source=printable(source), instead_of=instead_of)


def _shown(value: object) -> str:
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _source(options: TrainOptions, facts: Facts, allocation: Allocation | None) -> Origin:
    chosen = option_source(options, facts, "source")
    if allocation is None:
        why = f"{chosen} reads nothing from the environment" if chosen else "no option and no system names other nodes"
        return _value("source", "local", why)
    by = _first(options, facts, ("hosts", "hostfile", "discover")) or chosen
    if by is None and option_source(options, facts, "node_rank") and allocation.source == "flags":
        by = "--node-rank"
    return _value("source", allocation.source, by or "found in the environment")


def _nodes(topology: Topology) -> str:
    elastic = f", elastic {topology.bounds[0]}:{topology.bounds[1]}" if topology.bounds is not None else ""
    return f"{len(topology.nodes)} ({fold_hosts(node.host for node in topology.nodes)}){elastic}"


def _of_nodes(options: TrainOptions, facts: Facts, allocation: Allocation | None) -> str:
    fields = ("num_nodes", "include", "exclude")
    by = [each for field in fields if (each := option_source(options, facts, field)) is not None]
    return " and ".join(by) or (allocation.source if allocation is not None else "this machine alone")


def _workers(options: TrainOptions, facts: Facts, topology: Topology, allocation: Allocation | None) -> Origin:
    """Say how many workers there are and whose number that is: the option's, the source's, or the devices'."""
    world = topology.world_size
    counts = fold_counts(node.slots for node in topology.nodes)
    shown = f"{'?' if world is None else world}, on the nodes {counts}" if len(topology.nodes) > 1 else counts
    by = _first(options, facts, (*_TOTALS, *_EACH))
    told = () if allocation is None else tuple(each for each in allocation.origins if each.value.startswith("slots"))
    if by is not None:
        lost = tuple(f"{each.shown} from {each.source}: {by} comes first" for each in told)
        return _value("workers", shown, by, *lost)
    if told:
        return _value("workers", shown, ", ".join(dict.fromkeys(each.source for each in told)))
    if allocation is not None and any(host.slots for host in allocation.hosts):
        return _value("workers", shown, allocation.source)
    if world is None:
        return _value("workers", shown, "only the nodes know")
    return _value("workers", shown, "the GPUs here" if topology.device == "cuda" else "no GPU here: one on the CPU")


def _devices(options: TrainOptions, facts: Facts, topology: Topology) -> Iterator[Origin]:
    """Name the devices of this machine, the only one whose devices are known."""
    if topology.here is None:
        return
    devices = topology.nodes[topology.here].devices or ()
    if devices:
        yield _value(
            "devices here",
            ",".join(devices),
            select_devices(facts.gpus, facts.environ, requested=options.gpus).source,
        )
    elif on_cpus(options):
        by = _first(options, facts, (*_TOTALS, *_EACH, "device"))
        yield _value("devices here", "none", by or "CPU workers")
    else:
        yield _value("devices here", "none", select_devices(facts.gpus, facts.environ).source)


def _master(
    options: TrainOptions, facts: Facts, topology: Topology, plan: LaunchPlan, allocation: Allocation | None
) -> Origin:
    """Say where workers meet, and why there."""
    port = "a free port, held at the start" if plan.master_port is None else f"port {plan.master_port}"
    address = plan.master_addr if plan.master_addr is not None else "not known yet"
    told = () if allocation is None else allocation.origins
    system = next((each for each in told if each.value == "master address"), None)
    if (by := option_source(options, facts, "master_addr")) is not None:
        lost = () if system is None else (f"{system.shown} from {system.source}: {by} comes first",)
        return _value("master", f"{address}, {port}", by, *lost)
    if len(topology.nodes) == 1:
        return _value("master", f"{address}, {port}", "on one node workers meet on it")
    if system is not None and system.shown == address:
        return _value("master", f"{address}, {port}", system.source, *system.instead_of)
    return _value("master", f"{address}, {port}", f"the first of {counted(len(topology.nodes), 'node')}")
