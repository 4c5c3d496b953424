"""Make the nodes of a job from the hosts of a source and the requested sizes. No I/O.

A host that the user named but that is not needed is left out, with a note. A host that a scheduler
granted is never left idle without an error. Values that only a node knows (its devices, its CPUs,
often its slots) stay open until its survey. Most nodes differ only in names and UUIDs of GPUs, so
their devices are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.core.model.topology import Gpu, Node, Note, NoteKind, Topology, plain_notes
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.devices import CUDA, DeviceSelection, NotTheseGpusError
from distlaunch.planning.facts import Facts
from distlaunch.planning.hosts.include_exclude import Chosen, apply_filters
from distlaunch.planning.hosts.this_host import is_loopback
from distlaunch.planning.local_topology import selection_here, workers_here
from distlaunch.planning.master_address import MasterAddress, master_note, master_of_allocation
from distlaunch.planning.train_options import (
    TrainOptions,
    advice_on_cpu_workers,
    asks_for_gpus,
    check_kind,
    on_cpus,
    shares_gpus,
    use_cpus,
)
from distlaunch.planning.worker_counts import (
    PlannedHost,
    WorkerRequest,
    count_workers,
    explain_idle,
    names_of,
)

_NAMED = ("GPU-", "MIG-")
_MOST_KINDS = 3
_FEW = 32
"""Larger environments are not compared. A survey returns only a few variables; this machine's whole
environment is larger."""


def build_topology(
    allocation: Allocation,
    options: TrainOptions,
    facts: Facts,
    *,
    here: int | None,
    present: int | None = None,
) -> Topology:
    """Return how many workers each host runs, and on which devices.

    ``here`` is the index of this machine in ``allocation.hosts``; ``facts`` describe only that
    host. With ``present``, only the first ``present`` hosts are available, but filters may name the
    others. Raises ConfigError for sizes that contradict each other or exceed the slots, and for an
    idle node that a scheduler granted.
    """
    check_kind(options)
    bounds = bounds_of(allocation, options)
    request = WorkerRequest(allocation=allocation, options=options, bounds=bounds)
    known = {} if here is None else {here: facts}
    slots = _Slots(request, known, here)
    chosen = _filtered_hosts(
        [slots.numbered(index) for index in range(len(allocation.hosts))], options
    )
    chosen = [each for each in chosen if present is None or each.index < present]
    kept, spares = _first_nodes(chosen, request, here)
    notes = [*plain_notes(allocation.notes)]
    if len(kept) + len(spares) < len(chosen):
        ranks = {each.index for each in (*kept, *spares)}
        said = (
            "the number of nodes"
            if options.num_nodes is None
            else Opt.NUM_NODES(_bounds_text(bounds))
        )
        left = names_of([each.host for each in chosen if each.index not in ranks])
        notes.append(Note(text=f"not needed for {said}: {left}"))
    if options.spread and (
        request.total is None or request.per_node is not None or bounds is not None
    ):
        text = (
            f"{Opt.SPREAD} has no effect: it only applies to a total ({Opt.NUM_GPUS}, "
            f"{Opt.NUM_PROCS}) without "
            "a size per node"
        )
        notes.append(Note(text=text))
    warnings: list[str] = []
    planned = _assign_workers([slots.room(each) for each in kept], request, notes, warnings)
    topology = _Builder(request, known, facts.hostname, planned, surveyed=False).topology(
        notes, warnings
    )
    return (
        replace(topology, spares=tuple(spare_node(each.host) for each in spares))
        if spares
        else topology
    )


def surveyed_topology(
    allocation: Allocation,
    options: TrainOptions,
    known: Mapping[int, Facts],
    indices: Sequence[int],
    *,
    here: int | None,
) -> Topology:
    """Return the topology of surveyed hosts.

    ``indices`` are indices of ``allocation.hosts``, in the order of ranks. ``known`` has the facts
    of these hosts by index, ``here`` is the index of this machine, if it is a node of the job.
    Raises ConfigError that names the hosts with fewer GPUs or slots than the options ask for.
    """
    bounds = None if bounds_of(allocation, options) is None else (len(indices), len(indices))
    request = WorkerRequest(allocation=allocation, options=options, bounds=bounds)
    slots = _Slots(request, known, here, surveyed=True)
    numbered = [slots.numbered(index) for index in range(len(allocation.hosts))]
    chosen = {each.index: each for each in _filtered_hosts(numbered, options)}
    notes: list[Note] = []
    warnings: list[str] = []
    planned = _assign_workers(
        [slots.room(chosen[index]) for index in indices if index in chosen],
        request,
        notes,
        warnings,
    )
    return _Builder(request, known, known[indices[0]].hostname, planned, surveyed=True).topology(
        notes, warnings
    )


def filtered_hosts(
    allocation: Allocation, options: TrainOptions, facts: Facts, *, here: int | None
) -> tuple[int, ...]:
    """Return the indices of the hosts that remain after ``--include`` and ``--exclude``.

    ``here`` is the index of this machine, if it is a host of the job. Raises ConfigError for an
    invalid filter, or if no host remains.
    """
    bounds = bounds_of(allocation, options)
    slots = _Slots(
        WorkerRequest(allocation=allocation, options=options, bounds=bounds),
        {} if here is None else {here: facts},
        here,
    )
    chosen = _filtered_hosts(
        [slots.numbered(index) for index in range(len(allocation.hosts))], options
    )
    return tuple(each.index for each in chosen)


def bounds_of(allocation: Allocation, options: TrainOptions) -> tuple[int, int] | None:
    """Return the smallest and the largest number of nodes, if the user or the source sets them;
    both are the same for a fixed number."""
    if options.num_nodes is None:
        return allocation.nodes
    return (
        options.num_nodes
        if isinstance(options.num_nodes, tuple)
        else (options.num_nodes, options.num_nodes)
    )


def spare_node(host: Host) -> Node:
    """Return the node for a host that is not used yet."""
    return Node(
        host=host.name, known=host.known, slots=None, user=host.user, port=host.port, devices=None
    )


def _read_gpus_option(options: TrainOptions) -> tuple[str, ...] | None:
    return (
        None if options.gpus is None else tuple(entry.strip() for entry in options.gpus.split(","))
    )


class _DeviceAssigner:
    """Assigns devices to the workers of hosts whose facts are known.

    ``surveyed``: the facts are from surveys. ``several``: the job has several nodes.
    """

    def __init__(
        self, request: WorkerRequest, known: Mapping[int, Facts], *, surveyed: bool, several: bool
    ) -> None:
        self._request, self._known, self._surveyed, self._several = (
            request,
            known,
            surveyed,
            several,
        )
        self._options = request.options
        self._by_likeness: dict[object, tuple[Topology, Facts]] = {}
        self._failed: dict[tuple[str, str | None], list[PlannedHost]] = {}
        self._notes: dict[str, list[PlannedHost]] = {}
        self._devices: dict[str, list[PlannedHost]] = {}

    def node(self, candidate: PlannedHost, count: int | None) -> Node | None:
        """Return the node for a host, with devices.

        If a surveyed host has too few devices, return None: ``check`` raises one error for all such
        hosts. Raises ConfigError if this machine has too few.
        """
        host = candidate.host
        try:
            found = self._find_devices(candidate, count)
        except ConfigError as exc:
            if not self._surveyed:
                raise
            self._failed.setdefault((exc.message, exc.hint), []).append(candidate)
            return None
        self._devices.setdefault(found.device, []).append(candidate)
        for note in found.notes:
            self._notes.setdefault(note.text, []).append(candidate)
        changes: dict[str, object] = {
            "host": host.name,
            "known": host.known,
            "user": host.user,
            "port": host.port,
        }
        return replace(found.nodes[0], **changes)

    def check(self) -> None:
        """Raise ConfigError if a host has too little, or if only some hosts have GPUs."""
        if self._failed:
            kinds = list(self._failed.items())
            said = [
                f"{_host_names(candidates)}: {message}"
                for (message, _), candidates in kinds[:_MOST_KINDS]
            ]
            if (rest := sum(len(candidates) for _, candidates in kinds[_MOST_KINDS:])) > 0:
                said.append(f"{counted(rest, 'more host')} likewise")
            raise ConfigError("; ".join(said), hint=kinds[0][0][1])
        if len(self._devices) > 1 and self._surveyed:
            without, having = self._devices["cpu"], self._devices["cuda"]
            raise ConfigError(
                f"{_host_names(without)} {'has' if len(without) == 1 else 'have'} no GPU that can be "
                "used, and"
                f" {_host_names(having)} {'has' if len(having) == 1 else 'have'} some",
                hint=f"{Opt.EXCLUDE} leaves hosts out; {use_cpus(several=True)}",
            )

    @property
    def device(self) -> str | None:
        """The device type of all these nodes, if it is the same."""
        return next(iter(self._devices)) if len(self._devices) == 1 else None

    def notes(self) -> list[str]:
        """Return the notes for the user, each once."""
        if not self._surveyed:
            return list(self._notes)
        if self.device == "cpu" and not on_cpus(self._options):
            advice = advice_on_cpu_workers(several=self._several)
            return [f"no GPU was found: workers run on the CPU{advice}"]
        return [f"{_host_names(candidates)}: {note}" for note, candidates in self._notes.items()]

    def _find_devices(self, candidate: PlannedHost, count: int | None) -> Topology:
        facts, chosen = self._known[candidate.chosen.index], candidate.chosen
        granted, only, without = candidate.host.devices or (), chosen.slots, chosen.without
        key = (
            _hardware_key(facts),
            granted,
            only,
            without,
            count,
            candidate.host.unit,
            candidate.host.slots,
        )
        if key in self._by_likeness:
            found, model = self._by_likeness[key]
            return _with_gpus_of(found, model.gpus.gpus, facts.gpus.gpus)
        self._check_granted_gpus(candidate, count, facts)
        found = workers_here(
            self._options,
            facts,
            count=count,
            only=only,
            without=without,
            granted=granted,
            several=self._several,
        )
        self._by_likeness[key] = found, facts
        return found

    def _check_granted_gpus(self, candidate: PlannedHost, count: int | None, facts: Facts) -> None:
        """Raise ConfigError if the source lists GPUs that the host does not have."""
        request, host = self._request, candidate.host
        asked = request.total is not None or request.per_node is not None
        if (
            count is None
            or asked
            or request.by_user
            or on_cpus(self._options)
            or shares_gpus(self._options)
        ):
            return
        selection = selection_here(self._options, facts, granted=host.devices or ())
        have, unit = len(selection.ids), "GPU" if host.unit == "gpus" else "worker"
        if count <= have or (unit == "worker" and not have):
            return
        why = "; ".join([selection.source, *selection.notes])
        raise NotTheseGpusError(
            f"{printable(request.allocation.source)} gives {printable(host.name)} "
            f"{counted(host.slots or count, unit)},"
            f" but {f'only {have}' if have else 'no GPU'} can be used here ({why})",
            hint=(f"{Opt.GPUS_PER_NODE(have)} takes what is here; " if have else "")
            + use_cpus(several=self._several),
        )


def _hardware_key(facts: Facts) -> object:
    """Return a key that is equal for hosts that differ only in names and UUIDs of GPUs."""
    inventory, environ = (
        facts.gpus,
        tuple(sorted(facts.environ.items())) if len(facts.environ) < _FEW else None,
    )
    named = environ is None or any(word in value for _, value in environ for word in _NAMED)
    if named or any(gpu.mig for gpu in inventory.gpus):
        return id(facts)
    gpus = tuple(
        (gpu.index, gpu.name, gpu.vendor, gpu.numa_node, gpu.uuid is None) for gpu in inventory.gpus
    )
    return gpus, inventory.source, inventory.problem, environ


class _Slots:
    """Counts the slots of hosts, for filters and as limit of the workers.

    ``known`` has facts by the index of the host. ``here`` is the index of this machine.
    """

    def __init__(
        self,
        request: WorkerRequest,
        known: Mapping[int, Facts],
        here: int | None,
        *,
        surveyed: bool = False,
    ) -> None:
        self._surveyed = surveyed
        self._request, self._known, self._here, options = request, known, here, request.options
        self._by_task = request.allocation.part == "worker"
        self._on_cpus = on_cpus(options)
        self._counts: dict[object, int] = {}
        picked = _read_gpus_option(options)
        self._picked = None if picked is None else len(picked)

    def _count_seen(self, index: int) -> int | None:
        """Return the number of devices that workers may use, if known and relevant."""
        facts = self._known.get(index)
        host = self._request.allocation.hosts[index]
        # A launcher of one of several workers sees the worker's devices, not the node's.
        if facts is None or self._on_cpus or (self._by_task and host.slots != 1):
            return None
        key = _hardware_key(facts), host.devices
        if key not in self._counts:
            try:
                self._counts[key] = len(self._select_devices(facts, host).ids)
            except ConfigError:
                if not self._surveyed:
                    raise
                # The same error comes again when the workers get their devices, and then names all
                # hosts.
                return None
        return self._counts[key]

    def _select_devices(self, facts: Facts, host: Host) -> DeviceSelection:
        several = len(self._request.allocation.hosts) > 1
        return selection_here(
            self._request.options, facts, granted=host.devices or (), several=several
        )

    def numbered(self, index: int) -> Host:
        """Return a host with as many slots as filters can number: its devices, or its workers on
        CPUs."""
        host = self._request.allocation.hosts[index]
        slots = self._count_numbered(host, self._count_seen(index))
        if slots == host.slots:
            return host
        return replace(host, slots=slots, unit="workers" if host.slots is None else host.unit)

    def _count_numbered(self, host: Host, seen: int | None) -> int | None:
        request, options = self._request, self._request.options
        if on_cpus(options) or (
            seen == 0 and not asks_for_gpus(options) and not (host.unit == "gpus" and host.slots)
        ):
            slots = host.tasks if host.unit == "gpus" else host.slots
            if request.per_node is not None and (slots is None or not request.by_user):
                return request.per_node
            return 1 if slots is None and request.total is None else slots
        of_workers = shares_gpus(options) and not options.whole_nodes and host.unit != "gpus"
        named = None if host.unit == "cores" or of_workers else host.slots
        if named is None and host.devices:
            named = len(host.devices)
        there = (
            seen
            if seen is not None and (self._picked is not None or named is None)
            else self._picked
        )
        return min(named or there, there) if there else named

    def room(self, chosen: Chosen) -> PlannedHost:
        """Return a chosen host with the number of workers that fit.

        Raises ConfigError if --exclude removes slots from a host of unknown size.
        """
        host, options = self._request.allocation.hosts[chosen.index], self._request.options
        if chosen.without and on_cpus(options):
            raise ConfigError(
                f"{Opt.EXCLUDE} takes slots of {printable(host.name)} away, but how many it has "
                "is not "
                "known here",
                hint=f"use HOST:SLOTS, or {Opt.PROCS_PER_NODE} N",
            )
        room = None if chosen.slots is None else len(chosen.slots)
        if shares_gpus(options):  # slots are then GPUs, for any number of workers
            room = None if host.unit == "gpus" else host.slots
        whole = not chosen.without and (
            chosen.slots is None or len(chosen.slots) == chosen.host.slots
        )
        return PlannedHost(
            chosen=chosen,
            here=chosen.index == self._here,
            room=room,
            found=self._surveyed and host.slots is None and whole,
            tasks=host.slots if self._by_task else None,
        )


def _filtered_hosts(hosts: Sequence[Host], options: TrainOptions) -> Sequence[Chosen]:
    if options.include is None and options.exclude is None:
        slots = {
            host.slots: None if host.slots is None else tuple(range(host.slots)) for host in hosts
        }
        return [
            Chosen(host=host, index=index, slots=slots[host.slots])
            for index, host in enumerate(hosts)
        ]
    return apply_filters(hosts, options.include, options.exclude)


def _first_nodes(
    hosts: Sequence[Chosen], request: WorkerRequest, here: int | None
) -> tuple[Sequence[Chosen], Sequence[Chosen]]:
    """Return the hosts that become nodes, and the spares.

    If a scheduler granted several hosts and the job has one node, it is this machine. Raises
    ConfigError if there are too few hosts.
    """
    bounds, spares = request.bounds, request.options.spares
    fewest, most = bounds or (1, len(hosts))
    if len(hosts) < fewest + spares:
        there = "there is only" if len(hosts) == 1 else "there are only"
        said = [Opt.NUM_NODES(_bounds_text(bounds))] * (bounds is not None) + [
            f"{Opt.SPARES(spares)}"
        ] * (spares > 0)
        raise ConfigError(
            f"{' and '.join(said)}: {there} {counted(len(hosts), 'host')},"
            f" {names_of([each.host for each in hosts])} ({printable(request.allocation.source)})",
            hint="ask for fewer nodes, or name more hosts"
            if bounds
            else "ask for fewer, or name more hosts",
        )
    if bounds is not None and most == 1 and not request.by_user:
        first = next((index for index, each in enumerate(hosts) if each.index == here), 0)
        hosts = [hosts[first], *hosts[:first], *hosts[first + 1 :]]
    nodes = min(most, len(hosts) - spares)
    return hosts[:nodes], hosts[nodes : nodes + spares]


def _bounds_text(bounds: tuple[int, int] | None) -> str:
    fewest, most = bounds or (1, 1)
    return str(most) if fewest == most else f"{fewest}:{most}"


def _assign_workers(
    candidates: Sequence[PlannedHost],
    request: WorkerRequest,
    notes: list[Note],
    warnings: list[str],
) -> list[tuple[PlannedHost, int | None]]:
    """Return the hosts with workers, each with their number. Raises ConfigError if the sizes do not
    fit."""
    counts = count_workers(candidates, request)
    if 0 in counts:
        idle = explain_idle(candidates, counts, request)
        if idle.by_mistake:
            warnings.append(idle.text)
        else:
            notes.append(Note(text=idle.text))
    return [
        (candidate, count)
        for candidate, count in zip(candidates, counts, strict=True)
        if count != 0
    ]


class _Builder:
    """Makes the nodes of the hosts with workers, with devices if facts are ``known``."""

    def __init__(
        self,
        request: WorkerRequest,
        known: Mapping[int, Facts],
        hostname: str,
        planned: Sequence[tuple[PlannedHost, int | None]],
        *,
        surveyed: bool,
    ) -> None:
        self._surveyed = surveyed
        self._request, self._hostname, self._planned = request, hostname, planned
        self._allocation, self._options = request.allocation, request.options
        self._picked = _read_gpus_option(request.options)
        self._several = len(planned) > 1
        self._by_task = request.allocation.part == "worker" and any(
            count != 1 for _, count in planned
        )
        # A launcher of one of several workers sees the worker's devices, not the node's.
        seen = {
            index: len(selection_here(request.options, facts).ids)
            for index, facts in known.items()
            if self._by_task and not on_cpus(request.options)
        }
        self._isolated = list(seen.values()) == [1]
        self._without = {index: known[index] for index, devices in seen.items() if not devices}
        self._known = {} if self._by_task else known

    def topology(self, notes: list[Note], warnings: Sequence[str]) -> Topology:
        """Return the topology, with ``notes`` and ``warnings`` first in its lists."""
        self._check_picked()
        options = self._options
        on_gpus = asks_for_gpus(options) or all(
            p.host.unit == "gpus" and p.host.slots for p, _ in self._planned
        )
        device = "cpu" if on_cpus(options) else "cuda" if on_gpus else "auto"
        finder = _DeviceAssigner(
            self._request, self._known, surveyed=self._surveyed, several=self._several
        )
        here: int | None = None
        nodes: list[Node] = []
        for candidate, count in self._planned:
            if candidate.chosen.index not in self._known:
                nodes.append(self._node_without_facts(candidate, count))
                continue
            if candidate.here:
                here = len(nodes)
            if (node := finder.node(candidate, count)) is not None:
                nodes.append(node)
        finder.check()
        notes += [
            Note(text=text, kind=NoteKind.KNOWN_NODES)
            for text in (*finder.notes(), *self._cpu_task_notes())
        ]
        if all(candidate.chosen.index in self._known for candidate, _ in self._planned):
            device = finder.device or device
        first, bounds = self._planned[0][0], self._request.bounds
        master = self._planned_master(first, notes) if self._several else None
        return Topology(
            nodes=tuple(nodes),
            device=device,
            notes=tuple(notes),
            warnings=tuple(warnings),
            source=self._allocation.source,
            here=here,
            bounds=bounds if bounds is not None and bounds[0] < bounds[1] else None,
            master_addr=None if master is None else master.address,
            master_port=None if master is None else master.port,
        )

    def _cpu_task_notes(self) -> list[str]:
        """Return a note if each worker has its own launcher and runs on the CPU. Raises ConfigError
        if GPUs were requested."""
        counts = {candidate.chosen.index: count for candidate, count in self._planned}
        for index, facts in self._without.items():
            workers_here(self._options, facts, count=counts.get(index), several=self._several)
        if not self._without or self._allocation.local_rank:
            return []  # of several launchers on a node, the first shows the note
        return [f"no GPU was found: workers run on the CPU; {Opt.DEVICE('cpu')} asks for that"]

    def _check_picked(self) -> None:
        """Raise ConfigError for a UUID in --gpus with several nodes, and for GPUs that were not
        granted."""
        odd = next((entry for entry in self._picked or () if not entry.isdecimal()), None)
        if odd is not None and self._several:
            raise ConfigError(
                f"{Opt.GPUS(quoted(odd))} is a GPU of one machine, and there are "
                f"{counted(len(self._planned), 'node')}",
                hint="give indices, which hold for every node, or choose by "
                f"{Opt.INCLUDE('HOST:0,2')}",
            )
        for candidate, _ in self._planned if self._picked else ():
            granted = candidate.host.devices or ()
            other = next((entry for entry in self._picked or () if entry not in granted), None)
            if (
                other is not None
                and granted
                and all(each.isdecimal() for each in (other, *granted))
            ):
                raise ConfigError(
                    f"{Opt.GPUS(other)}: {printable(self._allocation.source)} grants "
                    f"{printable(candidate.host.name)}"
                    f" {printable(','.join(granted))} only",
                    hint="choose by their index: "
                    f"{Opt.INCLUDE(f'{printable(candidate.host.name)}:0')}",
                )

    def _node_without_facts(self, candidate: PlannedHost, count: int | None) -> Node:
        """Return a node without facts. The node finds its devices itself, unless they are set or
        workers use none."""
        host, chosen = candidate.host, candidate.chosen
        on_cpu, shared = on_cpus(self._options), shares_gpus(self._options)
        first = chosen.slots is None or chosen.slots == tuple(range(len(chosen.slots)))
        ids = () if on_cpu else None if shared else self._picked or host.devices or None
        if ids and chosen.slots is not None:
            ids = tuple(ids[slot] for slot in chosen.slots)[:count]
        whole = candidate.whole if shared else first
        return Node(
            host=host.name,
            known=host.known,
            slots=count,
            user=host.user,
            port=host.port,
            mask_variable=CUDA if on_cpu else None,
            masks=((),) * (count or 0) if on_cpu else (),
            devices=ids,
            chosen=None if whole or ids is not None else chosen.slots,
            without=chosen.without,
            isolated=self._isolated
            or (self._options.isolate_gpus and not self._by_task and not on_cpu),
        )

    def _planned_master(self, first: PlannedHost, notes: list[Note]) -> MasterAddress:
        """Return the planned address of rank 0's node, and add a note about it.

        Raises ConfigError if another node has a loopback name, which would lead each machine to
        itself.
        """
        for candidate, _ in self._planned:
            if not candidate.here and is_loopback(candidate.host.name):
                raise ConfigError(
                    f"{printable(candidate.host.name)} is one of several nodes, but leads every "
                    "machine to itself",
                    hint="use a name or an address that the other nodes can reach",
                )
        master = master_of_allocation(
            self._options,
            self._allocation,
            index=first.chosen.index,
            hostname=self._hostname if first.here else None,
        )
        if (text := master_note(master, self._options)) is not None:
            notes.append(Note(text=text))
        return master


def _host_names(candidates: Sequence[PlannedHost]) -> str:
    return names_of([candidate.host for candidate in candidates])


def _with_gpus_of(found: Topology, model: Sequence[Gpu], own: Sequence[Gpu]) -> Topology:
    """Return the topology ``found``, computed with the GPUs ``model``, for a node with the GPUs
    ``own``."""
    node = found.nodes[0]
    if not node.gpus or model is own:
        return found
    indices = {id(gpu): index for index, gpu in enumerate(model)}
    gpus = tuple(None if gpu is None else own[indices[id(gpu)]] for gpu in node.gpus)
    return replace(found, nodes=(replace(node, gpus=gpus),))
