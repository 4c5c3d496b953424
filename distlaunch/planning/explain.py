"""Write the text of ``--explain``: the source of each value, and the alternatives that are not used. No
I/O."""

from __future__ import annotations

from collections.abc import Iterator

from distlaunch.core.model.host_list import fold_counts, fold_hosts
from distlaunch.core.model.plan import LaunchPlan, OuterLauncher
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, printable
from distlaunch.core.model.topology import Topology
from distlaunch.planning.allocation import Allocation, Origin, ValueName
from distlaunch.planning.facts import Facts
from distlaunch.planning.master_address import MasterOrigin, planned_master
from distlaunch.planning.node_source import Location
from distlaunch.planning.train_options import TrainOptions

_LABEL = 16
_LONGEST = 400
"""Longest value in the text. Names that do not fold would fill screens; the JSON data has all."""
_OPTIONS = (
    *("num_gpus", "gpus_per_node", "num_procs", "procs_per_node", "num_nodes", "device", "gpus"),
    *("include", "exclude", "spares", "spread", "job_id", "backend"),
)
"""Fields that affect the topology and have no line of their own."""
_TOTALS = ("num_procs", "num_gpus")
_EACH = ("procs_per_node", "gpus_per_node")
_PARTS = {
    "all": "this launcher starts all nodes",
    "node": "a launcher on each node; this one starts its own node's workers",
    "worker": "a launcher for each worker; this one starts one",
}


class Explanation(Record):
    """The values with their sources.

    ``lost`` are other variables that name nodes or ranks, each with the reason why it is not used.
    """

    values: tuple[Origin, ...]
    lost: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the text, one line for each value and for each variable that is not used."""
        return [
            *_origin_lines(self.values),
            *(f"{'not used':<{_LABEL}} {each}" for each in self.lost),
        ]

    def record(self) -> dict[str, object]:
        """Return the data for JSON."""
        values = [
            {
                "value": each.value,
                "shown": each.shown,
                "source": each.source,
                "instead_of": list(each.instead_of),
            }
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
    """Return the source of each value of the plan."""
    return Explanation(
        values=tuple(_all_origins(options, facts, topology, plan, location)), lost=lost
    )


def _origin_lines(values: tuple[Origin, ...]) -> Iterator[str]:
    for each in values:
        shown = each.shown if len(each.shown) <= _LONGEST else f"{each.shown[: _LONGEST - 3]}..."
        yield f"{each.value:<{_LABEL}} {shown}  ({each.source})"
        for other in each.instead_of:
            yield f"{'':<{_LABEL}} not {other}"


def _all_origins(
    options: TrainOptions,
    facts: Facts,
    topology: Topology,
    plan: LaunchPlan,
    location: Location | None,
) -> Iterator[Origin]:
    if facts.outer is not None:
        yield from _outer_origins(facts.outer, facts, plan)
        return
    allocation = None if location is None else location.allocation
    yield _source_origin(options, location)
    if location is None or allocation is None:
        yield _printable_origin("hosts", facts.hostname, "this machine")
    else:
        yield from (origin for origin in allocation.origins if origin.value not in _BELOW)
        shown = (
            "none of the hosts" if location.here is None else allocation.hosts[location.here].name
        )
        yield _printable_origin("this machine", shown, location.by)
        if all(origin.value != "part" for origin in allocation.origins):
            yield _printable_origin("part", _PARTS[allocation.part], allocation.source)
    for field in _OPTIONS:
        if (source := options.who_set(field)) is not None:
            yield _printable_origin(
                field.replace("_", "-"), _option_text(getattr(options, field)), source
            )
    yield _printable_origin(
        "in the plan", _describe_nodes(topology), _source_of_nodes(options, allocation)
    )
    yield _workers_origin(options, topology, allocation)
    yield from _device_origins(options, topology)
    yield _master_origin(options, topology, allocation)
    yield _port_origin(options, topology, allocation)
    if options.job_id is None:
        told = allocation is not None and plan.job_id == allocation.job_id
        yield _printable_origin(
            "job-id", plan.job_id, allocation.source if told and allocation else "made for this job"
        )


def _outer_origins(outer: OuterLauncher, facts: Facts, plan: LaunchPlan) -> Iterator[Origin]:
    started = f"it started this launcher as rank {outer.rank} of {outer.world_size}"
    yield _printable_origin("source", outer.launcher, started)
    yield _printable_origin("workers", "1", f"one of the {outer.world_size} of {outer.launcher}")
    for value, name in (("master", "MASTER_ADDR"), ("master port", "MASTER_PORT")):
        if name in facts.environ:
            yield _printable_origin(value, facts.environ[name], name)
    yield _printable_origin("job-id", plan.job_id, "made for this launcher's files")


_BELOW: tuple[ValueName, ...] = ("master address", "master port")
"""The source's values for these are shown with the value that is used."""
_SLOTS: tuple[ValueName, ...] = ("slots", "slots of this node")


def _printable_origin(value: str, shown: str, source: str, *instead_of: str) -> Origin:
    return Origin(
        value=value, shown=printable(shown), source=printable(source), instead_of=instead_of
    )


def _option_text(value: object) -> str:
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _source_origin(options: TrainOptions, location: Location | None) -> Origin:
    chosen = options.who_set("source")
    if location is None or (
        location.allocation.source == "local" and not options.who_set("include", "exclude")
    ):
        why = (
            f"{chosen} reads nothing from the environment"
            if chosen
            else "no option and no system names other nodes"
        )
        return _printable_origin("source", "local", why)
    by = location.who if location.allocation.by_user else chosen or "found in the environment"
    return _printable_origin("source", location.allocation.source, by)


def _describe_nodes(topology: Topology) -> str:
    elastic = (
        f", elastic {topology.bounds[0]}:{topology.bounds[1]}"
        if topology.bounds is not None
        else ""
    )
    return f"{len(topology.nodes)} ({fold_hosts(node.host for node in topology.nodes)}){elastic}"


def _source_of_nodes(options: TrainOptions, allocation: Allocation | None) -> str:
    by = [
        each
        for field in ("num_nodes", "include", "exclude")
        if (each := options.who_set(field)) is not None
    ]
    return " and ".join(by) or (
        allocation.source if allocation is not None else "this machine alone"
    )


def _workers_origin(
    options: TrainOptions, topology: Topology, allocation: Allocation | None
) -> Origin:
    """Return the number of workers, with its source: an option, the source of the nodes, or the
    devices."""
    world = topology.world_size
    counts = fold_counts(node.slots for node in topology.nodes)
    shown = (
        f"{'?' if world is None else world}, on the nodes {counts}"
        if len(topology.nodes) > 1
        else counts
    )
    by = options.who_set(*_TOTALS, *_EACH)
    told = (
        ()
        if allocation is None
        else tuple(each for each in allocation.origins if each.value in _SLOTS)
    )
    if by is not None:
        lost = tuple(f"{each.shown} from {each.source}: {by} comes first" for each in told)
        return _printable_origin("workers", shown, by, *lost)
    if told:
        return _printable_origin(
            "workers", shown, ", ".join(dict.fromkeys(each.source for each in told))
        )
    if allocation is not None and any(host.slots for host in allocation.hosts):
        return _printable_origin("workers", shown, allocation.source)
    if world is None:
        return _printable_origin("workers", shown, "only the nodes know")
    return _printable_origin(
        "workers",
        shown,
        "the GPUs here" if topology.device == "cuda" else "no GPU here: one on the CPU",
    )


def _device_origins(options: TrainOptions, topology: Topology) -> Iterator[Origin]:
    """Yield the devices of this machine, the only one whose devices are known."""
    if topology.here is None:
        return
    node = topology.nodes[topology.here]
    by = node.devices_from or options.who_set(*_TOTALS, *_EACH, "device") or "CPU workers"
    yield _printable_origin("devices here", ",".join(node.devices or ()) or "none", by)


def _master_origin(
    options: TrainOptions, topology: Topology, allocation: Allocation | None
) -> Origin:
    master = planned_master(options, topology, allocation)
    address = "not known yet" if master.address is None else master.address
    system = _origin_in_source(allocation, "master address")
    match master.address_origin:
        case MasterOrigin.OPTION:
            by = options.named("master_addr")
            return _printable_origin("master", address, by, *_overridden_origins(system, by))
        case MasterOrigin.ONE_NODE:
            return _printable_origin("master", address, "all workers are on one node")
        case MasterOrigin.SYSTEM if system is not None:
            return _printable_origin("master", address, system.source, *system.instead_of)
        case _:
            return _printable_origin(
                "master", address, f"the first of {counted(len(topology.nodes), 'node')}"
            )


def _port_origin(
    options: TrainOptions, topology: Topology, allocation: Allocation | None
) -> Origin:
    master, system = planned_master(options, topology), _origin_in_source(allocation, "master port")
    if (by := options.who_set("master_port")) is not None:
        return _printable_origin(
            "master port", str(options.master_port), by, *_overridden_origins(system, by)
        )
    if master.port is None:
        return _printable_origin("master port", "not known yet", "a free one, held at the start")
    by = (
        system.source
        if system is not None
        else allocation.source
        if allocation is not None
        else "free"
    )
    return _printable_origin(
        "master port", str(master.port), by, *(system.instead_of if system is not None else ())
    )


def _origin_in_source(allocation: Allocation | None, value: ValueName) -> Origin | None:
    return next(
        (
            each
            for each in (() if allocation is None else allocation.origins)
            if each.value == value
        ),
        None,
    )


def _overridden_origins(origin: Origin | None, by: str) -> tuple[str, ...]:
    return () if origin is None else (f"{origin.shown} from {origin.source}: {by} comes first",)
