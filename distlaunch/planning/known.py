"""The devices and workers of hosts that are known: this machine, or nodes that were surveyed; pure.

Many nodes are alike but for names and for the UUIDs of their GPUs: what one of them gets is worked out once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.gpus import Gpu
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted, printable
from distlaunch.core.model.topology import Node, Topology
from distlaunch.planning.devices import NotTheseGpusError
from distlaunch.planning.facts import Facts
from distlaunch.planning.local_topology import selection_here, workers_here
from distlaunch.planning.train_options import on_cpus, shares_gpus, use_cpus
from distlaunch.planning.worker_counts import Place, Request, names_of

_NAMED = ("GPU-", "MIG-")
_MOST_KINDS = 3


class KnownHosts:
    """Gives hosts of which there are facts their workers.

    ``surveyed``: these are the facts that the nodes told; ``several``: the job has several nodes.
    """

    def __init__(self, request: Request, known: Mapping[int, Facts], *, surveyed: bool, several: bool) -> None:
        self._request, self._known, self._surveyed, self._several = request, known, surveyed, several
        self._options = request.options
        self._by_likeness: dict[object, tuple[Topology, Facts]] = {}
        self._failed: dict[tuple[str, str | None], list[Place]] = {}
        self._notes: dict[str, list[Place]] = {}
        self._devices: dict[str, list[Place]] = {}

    def node(self, place: Place, count: int | None) -> Node | None:
        """Give a host its workers; None if it cannot have them: ``check`` raises for all of these."""
        host = place.host
        try:
            found = self._found(place, count)
        except ConfigError as exc:
            if not self._surveyed:
                raise
            self._failed.setdefault((exc.message, exc.hint), []).append(place)
            return None
        self._devices.setdefault(found.device, []).append(place)
        for note in found.notes:
            self._notes.setdefault(note, []).append(place)
        changes: dict[str, object] = {"host": host.name, "known": host.known, "user": host.user, "port": host.port}
        return replace(found.nodes[0], **changes)

    def check(self) -> None:
        """Raise ConfigError for all hosts that cannot have what they are to have, and for a mixture of devices."""
        if self._failed:
            kinds = list(self._failed.items())
            said = [f"{_names(places)}: {message}" for (message, _), places in kinds[:_MOST_KINDS]]
            if (rest := sum(len(places) for _, places in kinds[_MOST_KINDS:])) > 0:
                said.append(f"{counted(rest, 'more host')} likewise")
            raise ConfigError("; ".join(said), hint=kinds[0][0][1])
        if len(self._devices) > 1 and self._surveyed:
            without, having = self._devices["cpu"], self._devices["cuda"]
            raise ConfigError(
                f"{_names(without)} {'has' if len(without) == 1 else 'have'} no GPU that can be used, and"
                f" {_names(having)} {'has' if len(having) == 1 else 'have'} some",
                hint="--exclude leaves hosts out; --procs-per-node N starts N workers without GPUs on each",
            )

    @property
    def device(self) -> str | None:
        """What all of these compute on; None if that differs, or is not known."""
        return next(iter(self._devices)) if len(self._devices) == 1 else None

    def notes(self) -> list[str]:
        """Give what the user should hear, each once."""
        if not self._surveyed:
            return list(self._notes)
        if self.device == "cpu" and not on_cpus(self._options):
            return [f"no GPU was found: workers run on the CPU; {use_cpus(several=self._several)}"]
        return [f"{_names(places)}: {note}" for note, places in self._notes.items()]

    def _found(self, place: Place, count: int | None) -> Topology:
        facts, chosen = self._known[place.chosen.place], place.chosen
        granted, only, without = place.host.devices or (), chosen.slots, chosen.without
        key = likeness(facts), granted, only, without, count, place.host.unit, place.host.slots
        if key in self._by_likeness:
            found, model = self._by_likeness[key]
            return _with_gpus_of(found, model.gpus.gpus, facts.gpus.gpus)
        self._check_there(place, count, facts)
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

    def _check_there(self, place: Place, count: int | None, facts: Facts) -> None:
        """Refuse workers for GPUs that others say are there, and that are not to be found. Raises ConfigError."""
        request, host = self._request, place.host
        asked = request.total is not None or request.per_node is not None
        if count is None or asked or request.by_user or on_cpus(self._options) or shares_gpus(self._options):
            return
        selection = selection_here(self._options, facts, granted=host.devices or ())
        have, unit = len(selection.ids), "GPU" if host.unit == "gpus" else "worker"
        if count <= have or (unit == "worker" and not have):
            return
        why = "; ".join([selection.source, *selection.notes])
        raise NotTheseGpusError(
            f"{printable(request.allocation.source)} gives {printable(host.name)} {counted(host.slots or count, unit)},"
            f" but {f'only {have}' if have else 'no GPU'} can be used here ({why})",
            hint=(f"--gpus-per-node {have} takes what is here; " if have else "") + use_cpus(several=self._several),
        )


def likeness(facts: Facts) -> object:
    """Give what decides about devices of a host: equal for hosts that differ in their names and their GPUs' UUIDs."""
    inventory, environ = facts.gpus, tuple(sorted(facts.environ.items())) if len(facts.environ) < _FEW else None
    named = environ is None or any(word in value for _, value in environ for word in _NAMED)
    if named or any(gpu.mig for gpu in inventory.gpus):
        return id(facts)
    gpus = tuple((gpu.index, gpu.name, gpu.vendor, gpu.numa_node, gpu.uuid is None) for gpu in inventory.gpus)
    return gpus, inventory.source, inventory.problem, environ


_FEW = 32
"""A node tells a few variables; this machine's whole environment is not worth comparing."""


def _with_gpus_of(found: Topology, model: Sequence[Gpu], own: Sequence[Gpu]) -> Topology:
    """Put a node's own GPUs in the place of those of the one that is like it."""
    node = found.nodes[0]
    if not node.gpus or model is own:
        return found
    places = {id(gpu): place for place, gpu in enumerate(model)}
    gpus = tuple(None if gpu is None else own[places[id(gpu)]] for gpu in node.gpus)
    return replace(found, nodes=(replace(node, gpus=gpus),))


def _names(places: Sequence[Place]) -> str:
    return names_of([place.host for place in places])
