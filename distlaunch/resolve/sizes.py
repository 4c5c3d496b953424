"""Layer resolve: how many workers each host of a job runs, from what was asked for and what the hosts take; pure.

Sizes are exact: what is asked for is planned, or it is an error that says what there is. None stands for a number that
only the node knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, printable
from distlaunch.resolve.allocation import Allocation, Host
from distlaunch.resolve.filters import Chosen
from distlaunch.resolve.hostlist import fold_hosts
from distlaunch.resolve.options import TrainOptions
from distlaunch.resolve.ranks import pack, spread
from distlaunch.resolve.sources.local import counts_processes, on_cpus, shares_gpus

BY_HAND = frozenset({"flags", "hostfile", "discover", "local"})
"""Sources in which the user names the hosts: what is not needed of them is left out, not wasted."""
_LONGEST = 80


class Place(Record):
    """A host that takes part."""

    chosen: Chosen
    here: bool
    """It is the machine that we run on."""
    room: int | None
    """How many workers it takes at most; None if only the node knows."""

    @property
    def host(self) -> Host:
        """What the source says of it."""
        return self.chosen.host


Bounds = tuple[int, int] | None
"""How many nodes there are to be, at least and at most; None if that was left open."""
Counts = Sequence[int | None]


def workers_of(places: Sequence[Place], allocation: Allocation, options: TrainOptions, bounds: Bounds) -> Counts:
    """Return the workers of each host, 0 for one that is not needed. Raises ConfigError if there is not enough."""
    total, per_node = total_asked(options), per_node_asked(options)
    counts: Counts
    if total is None:
        if per_node is None:
            counts = [_unasked(place, options) for place in places]
        else:
            said = _each_name(options)
            counts = [_exactly(_left_of(per_node, place), place, said, allocation, options) for place in places]
    elif per_node is not None:
        counts = _total_and_each(total, per_node, places, allocation, options, bounds)
    elif bounds is not None or len(places) == 1:
        counts = _shares(total, places, allocation, options, bounds)
    else:
        counts = _dealt(total, places, options)
    if allocation.part == "worker":
        _check_tasks(places, counts, options)
    return counts


def per_node_asked(options: TrainOptions) -> int | None:
    """Return the workers asked for on each node."""
    return options.gpus_per_node if options.gpus_per_node is not None else options.procs_per_node


def total_asked(options: TrainOptions) -> int | None:
    """Return the workers asked for in all; ``auto`` stands for all that there is room for."""
    gpus = None if options.num_gpus == "auto" else options.num_gpus
    return gpus if options.num_procs is None else options.num_procs


def names_of(hosts: Sequence[Host]) -> str:
    """Write hosts for a message, short."""
    names = fold_hosts(host.name for host in hosts)
    return names if len(names) <= _LONGEST else f"{names[:_LONGEST]}..."


def about_idle(idle: Sequence[Host], among: int, allocation: Allocation, options: TrainOptions, bounds: Bounds) -> str:
    """Say which hosts are not needed. Raises ConfigError if a scheduler granted them and nobody gave them up."""
    size = f"{_total_name(options)} {total_asked(options)}"
    if allocation.source in BY_HAND or bounds is not None:
        return f"not needed for {size}: {names_of(idle)}"
    total = total_asked(options) or 0
    each = str(total // among) if total % among == 0 else "N"
    raise ConfigError(
        f"{size} would leave {len(idle)} of the {among} nodes idle that {printable(allocation.source)} granted:"
        f" {names_of(idle)}",
        hint=f"{_each_name(options)} {each} runs workers on every node, --num-nodes 1 on one alone",
    )


def _each_name(options: TrainOptions) -> str:
    return "--procs-per-node" if counts_processes(options) else "--gpus-per-node"


def _total_name(options: TrainOptions) -> str:
    return "--num-procs" if counts_processes(options) else "--num-gpus"


def _unasked(place: Place, options: TrainOptions) -> int | None:
    """Return a host's workers where no size was asked for: all that it takes; if that is not known, one on CPUs."""
    return 1 if place.room is None and on_cpus(options) and not place.chosen.without else place.room


def _left_of(per_node: int, place: Place) -> int:
    """Return what filters left of the workers on each node: they take away from what was asked for as well."""
    slots = place.chosen.slots
    return len(slots) if slots is not None and place.host.slots == per_node else per_node


def _exactly(count: int, place: Place, said: str, allocation: Allocation, options: TrainOptions) -> int:
    """Return the number, if the host takes so many. Raises ConfigError."""
    room = place.room
    by_hand = allocation.source in BY_HAND
    # A scheduler counts GPUs, tasks or cores: none of these limits workers on CPUs.
    if room is None or room >= count or (counts_processes(options) and not by_hand):
        return count
    raise ConfigError(
        f"{said} {count}: {printable(place.host.name)} has only {counted(room, 'slot')}",
        hint="ask for less, or name more slots (HOST:SLOTS)"
        if by_hand
        else "ask for less, or for CPU workers: --procs-per-node N",
    )


def _total_and_each(
    total: int,
    per_node: int,
    places: Sequence[Place],
    allocation: Allocation,
    options: TrainOptions,
    bounds: Bounds,
) -> Counts:
    """Take total and size per node together: they say the number of nodes."""
    names = f"{_total_name(options)} {total} and {_each_name(options)} {per_node}"
    nodes, rest = divmod(total, per_node)
    if rest:
        raise ConfigError(f"{names}: {total} is no multiple of {per_node}", hint="give one of the two")
    if nodes > len(places) or (bounds is not None and nodes != len(places)):
        said = f"{names} make {counted(nodes, 'node')}, but there are {len(places)}"
        raise ConfigError(said, hint="give one of the two")
    each = [_exactly(per_node, place, _each_name(options), allocation, options) for place in places[:nodes]]
    return [*each, *[0] * (len(places) - nodes)]


def _shares(
    total: int, places: Sequence[Place], allocation: Allocation, options: TrainOptions, bounds: Bounds
) -> Counts:
    """Divide the total evenly among a number of nodes that is fixed."""
    name, each_name = _total_name(options), _each_name(options)
    if bounds is not None and bounds[0] < bounds[1]:
        raise ConfigError(
            f"{name} {total} is a total, but there may be {bounds[0]} to {bounds[1]} nodes",
            hint=f"say how many each node has: {each_name} N",
        )
    each, rest = divmod(total, len(places))
    if rest:
        raise ConfigError(
            f"{name} {total} cannot be divided evenly among {counted(len(places), 'node')}",
            hint=f"give a multiple of {len(places)}, or leave --num-nodes out",
        )
    said = f"{name} {total}, and so {each_name}" if len(places) > 1 else name
    return [_exactly(each, place, said, allocation, options) for place in places]


def _dealt(total: int, places: Sequence[Place], options: TrainOptions) -> Counts:
    """Pack the total onto the hosts, or spread it over them."""
    name, each_name = _total_name(options), _each_name(options)
    rooms = [place.room for place in places]
    enough = _enough(rooms, total)
    unknown = next((place for place in places if place.room is None), None)
    if unknown is not None and (options.spread or not enough):
        each = "N" if total % len(places) else str(total // len(places))
        raise ConfigError(
            f"{name} {total}: how many workers {printable(unknown.host.name)} takes is not known here",
            hint=f"say how many each node has: {each_name} {each}, or HOST:SLOTS",
        )
    known = [room or 0 for room in rooms]
    if not enough:
        hosts = [place.host for place in places]
        raise ConfigError(
            f"{name} {total}: there are only {counted(sum(known), 'slot')} on {counted(len(hosts), 'host')},"
            f" {names_of(hosts)}",
            hint=f"ask for less, or leave {name} out to use all",
        )
    return spread(total, known) if options.spread else pack(total, known)


def _enough(rooms: Counts, total: int) -> bool:
    """Tell whether there is room for the total before the first host of which that is not known."""
    left = total
    for room in rooms:
        if left <= 0 or room is None:
            break
        left -= room
    return left <= 0


def _check_tasks(places: Sequence[Place], counts: Counts, options: TrainOptions) -> None:
    """Hold the request against the tasks that a scheduler has started already. Raises ConfigError."""
    for place, count in zip(places, counts, strict=True):
        tasks = place.host.slots
        if tasks is not None and count is not None and count != tasks:
            size = _total_name(options) if total_asked(options) is not None else _each_name(options)
            raise ConfigError(
                f"{size} gives {printable(place.host.name)} {counted(count, 'worker')}, but {counted(tasks, 'task')}"
                " run there already, each with a launcher of its own",
                hint="leave the size out, or start one launcher a node (srun --ntasks-per-node=1, mpirun -N 1)",
            )


def room_of(chosen: Chosen, options: TrainOptions, *, picked: int | None, visible: int | None) -> int | None:
    """Return how many workers a host takes at most: the slots that filters left, no more than ``--gpus`` picks.

    ``visible``: how many GPUs it has, where that is known.
    """
    limit = None if shares_gpus(options) else picked
    if chosen.slots is not None:
        return len(chosen.slots) if limit is None else min(len(chosen.slots), limit)
    found = visible if limit is None else limit
    return None if found is None else max(0, found - len(chosen.without))
