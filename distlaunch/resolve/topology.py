"""Layer resolve: the hosts that a source found, and the sizes asked for, become the nodes of a job; pure.

A node that the user named and that is not needed is left out, and that is said; one that a scheduler granted is never
left idle by accident. What only a node can tell (its devices, its CPUs, often its slots) stays open until it reports.
"""

from __future__ import annotations

from collections.abc import Sequence

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.core.model.topology import Node, Topology
from distlaunch.resolve.allocation import Allocation, Host
from distlaunch.resolve.devices import CUDA
from distlaunch.resolve.facts import Facts
from distlaunch.resolve.filters import Chosen, apply_filters
from distlaunch.resolve.identity import is_loopback
from distlaunch.resolve.options import TrainOptions
from distlaunch.resolve.sizes import BY_HAND, Bounds, Place, about_idle, names_of, per_node_asked, room_of, workers_of
from distlaunch.resolve.sources.local import (
    asks_for_gpus,
    check_kind,
    on_cpus,
    selection_here,
    shares_gpus,
    workers_here,
)

_UNKNOWN = "node-0"
"""How sources call a first host of which they only know that there is one."""


def build_topology(allocation: Allocation, options: TrainOptions, facts: Facts, *, here: int | None) -> Topology:
    """Decide how many workers each host runs, and on what.

    ``here`` is the index of this machine in ``allocation.hosts``: only of this one do the facts tell devices and CPUs.
    Raises ConfigError for sizes that contradict each other or what there is, and for a scheduler's node left idle.
    """
    check_kind(options)
    per_node = per_node_asked(options)
    hosts = [_at_least_bare(host, per_node) for host in allocation.hosts]
    own = None if here is None else hosts[here]
    bounds = _bounds(allocation, options)
    chosen = _first_nodes(_filtered(hosts, options), bounds, allocation, own)
    places = _places(chosen, options, facts, own)
    counts = workers_of(places, allocation, options, bounds)
    notes = list(allocation.notes)
    if idle := [place.host for place, count in zip(places, counts, strict=True) if count == 0]:
        notes.append(about_idle(idle, len(places), allocation, options, bounds))
    planned = [(place, count) for place, count in zip(places, counts, strict=True) if count != 0]
    return _Builder(allocation, options, facts, planned).topology(bounds, notes)


# --- which hosts


def _at_least_bare(host: Host, per_node: int | None) -> Host:
    """Take the size that is asked for per node as the slots of a host that was named without."""
    return replace(host, slots=per_node) if host.slots is None and per_node is not None else host


def _filtered(hosts: Sequence[Host], options: TrainOptions) -> Sequence[Chosen]:
    if options.include is None and options.exclude is None:
        slots = {host.slots: None if host.slots is None else tuple(range(host.slots)) for host in hosts}
        return [Chosen(host=host, slots=slots[host.slots]) for host in hosts]
    return apply_filters(hosts, options.include, options.exclude)


def _bounds(allocation: Allocation, options: TrainOptions) -> Bounds:
    if options.num_nodes is None:
        return allocation.nodes
    return options.num_nodes if isinstance(options.num_nodes, tuple) else (options.num_nodes, options.num_nodes)


def _first_nodes(hosts: Sequence[Chosen], bounds: Bounds, allocation: Allocation, own: Host | None) -> Sequence[Chosen]:
    """Keep as many hosts as there are to be nodes; one node of a scheduler's job is the one that we run on."""
    if bounds is None:
        return hosts
    fewest, most = bounds
    if len(hosts) < fewest:
        there = "there is only" if len(hosts) == 1 else "there are only"
        raise ConfigError(
            f"--num-nodes {fewest if fewest == most else f'{fewest}:{most}'}: {there} {counted(len(hosts), 'host')},"
            f" {names_of([each.host for each in hosts])} ({printable(allocation.source)})",
            hint="ask for fewer nodes, or name more hosts",
        )
    if most == 1 and own is not None and allocation.source not in BY_HAND:
        return [each for each in hosts if each.host is own] or hosts[:1]
    return hosts[:most]


def _places(chosen: Sequence[Chosen], options: TrainOptions, facts: Facts, own: Host | None) -> list[Place]:
    """Find out how much room each host has, and pass over one of whose GPUs filters left none. Raises ConfigError."""
    picked = _picked(options)
    limit = None if picked is None else len(picked)
    visible = None
    if own is not None and not on_cpus(options) and not shares_gpus(options):
        visible = len(selection_here(options, facts, granted=own.devices or ()).ids) or None
    places: list[Place] = []
    for each in chosen:
        here = each.host is own
        room = room_of(each, options, picked=limit, visible=visible if here else None)
        if room != 0:
            places.append(Place(chosen=each, here=here, room=room))
    if not places:
        raise ConfigError(
            f"--exclude leaves no slot of {names_of([each.host for each in chosen])}", hint="exclude fewer slots"
        )
    return places


def _picked(options: TrainOptions) -> tuple[str, ...] | None:
    """Return what ``--gpus`` picks, on every node."""
    return None if options.gpus is None else tuple(entry.strip() for entry in options.gpus.split(","))


# --- what they run on


class _Builder:
    """Makes the nodes of the places that have workers."""

    def __init__(
        self,
        allocation: Allocation,
        options: TrainOptions,
        facts: Facts,
        planned: Sequence[tuple[Place, int | None]],
    ) -> None:
        self._allocation, self._options, self._facts, self._planned = allocation, options, facts, planned
        self._picked = _picked(options)
        self._several = len(planned) > 1
        self._by_task = allocation.part == "worker" and any(count != 1 for _, count in planned)
        """A launcher for each of several workers of a node: what we see here is one worker's, not the node's."""
        self._isolated = self._by_task and not on_cpus(options) and len(self._seen()) == 1

    def topology(self, bounds: Bounds, notes: list[str]) -> Topology:
        """Put all together."""
        self._check_picked()
        options = self._options
        device = "cpu" if on_cpus(options) else "cuda" if asks_for_gpus(options) else "auto"
        here: int | None = None
        nodes: list[Node] = []
        for place, count in self._planned:
            if place.here and not self._by_task:
                here = len(nodes)
                found = self._here(place, count)
                notes += [note for note in found.notes if note not in notes]
                device = device if self._several else found.device
                nodes.append(found.nodes[0])
            else:
                nodes.append(self._elsewhere(place, count))
        first = self._planned[0][0]
        own_master = first.host.name == self._allocation.hosts[0].name
        return Topology(
            nodes=tuple(nodes),
            device=device,
            notes=tuple(notes),
            source=self._allocation.source,
            here=here,
            bounds=bounds if bounds is not None and bounds[0] < bounds[1] else None,
            master_addr=self._master(first) if self._several else None,
            master_port=self._allocation.master_port if self._several and own_master else None,
        )

    def _check_picked(self) -> None:
        """Refuse UUIDs where they would have to hold on several machines. Raises ConfigError."""
        odd = next((entry for entry in self._picked or () if not entry.isdecimal()), None)
        if odd is not None and self._several:
            raise ConfigError(
                f"--gpus {quoted(odd)} is a GPU of one machine, and there are {counted(len(self._planned), 'node')}",
                hint="give indices, which hold for every node, or choose by --include HOST:0,2",
            )

    def _seen(self) -> tuple[str, ...]:
        return selection_here(self._options, self._facts).ids

    def _here(self, place: Place, count: int | None) -> Topology:
        host, chosen = place.host, place.chosen
        found = workers_here(
            self._options,
            self._facts,
            count=count,
            only=chosen.slots,
            without=chosen.without,
            granted=host.devices or (),
        )
        node = replace(found.nodes[0], host=host.name, user=host.user, port=host.port)
        return replace(found, nodes=(node,))

    def _elsewhere(self, place: Place, count: int | None) -> Node:
        """Make a node of which we see nothing: it finds its devices itself, unless they are named or not wanted."""
        host, chosen = place.host, place.chosen
        on_cpu = on_cpus(self._options)
        whole = chosen.slots is None or chosen.slots == tuple(range(len(chosen.slots)))
        ids = () if on_cpu else None if shares_gpus(self._options) else self._picked or host.devices or None
        if ids and chosen.slots is not None:
            ids = tuple(ids[slot] for slot in chosen.slots if slot < len(ids))[:count]
        return Node(
            host=host.name,
            slots=count,
            user=host.user,
            port=host.port,
            mask_variable=CUDA if on_cpu else None,
            masks=((),) * (count or 0) if on_cpu else (),
            devices=ids,
            chosen=None if whole or ids is not None else chosen.slots,
            without=chosen.without,
            isolated=self._isolated or (self._options.isolate_gpus and not self._by_task and not on_cpu),
        )

    def _master(self, first: Place) -> str | None:
        """Name where rank 0's node can be reached by the others."""
        allocation, name = self._allocation, first.host.name
        if allocation.master_addr is not None and name == allocation.hosts[0].name:
            return allocation.master_addr
        if name == _UNKNOWN and not any(origin.value == "hosts" for origin in allocation.origins):
            return None
        return self._facts.hostname if first.here and is_loopback(name) else name
