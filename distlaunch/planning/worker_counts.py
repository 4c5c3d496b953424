"""Compute how many workers each host runs. No I/O.

The requested sizes are met exactly, or a ConfigError says how many slots are available. A count of
None means that only a survey can tell. Each node gets consecutive ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.host_list import name_hosts
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, printable
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.hosts.include_exclude import Chosen
from distlaunch.planning.train_options import (
    DropInOptions,
    TrainOptions,
    counts_processes,
    shares_gpus,
)

Bounds = tuple[int, int] | None
"""Smallest and largest number of nodes, if the user or the source sets them."""
Counts = Sequence[int | None]


class PlannedHost(Record):
    """A host of the job, with the number of workers that fit."""

    chosen: Chosen
    here: bool
    """Whether the host is this machine."""
    room: int | None
    """The largest number of workers that fit; None if only a survey can tell."""
    found: bool = False
    """Whether the host itself reported ``room``, and no list limits it. Errors about devices are
    then more precise."""
    tasks: int | None = None
    """How many launchers a scheduler has started on the host, each for one worker."""

    @property
    def host(self) -> Host:
        """The host under the name that its source uses."""
        return self.chosen.host

    @property
    def whole(self) -> bool:
        """Whether filters left all of its slots."""
        slots = self.chosen.slots
        return not self.chosen.without and (slots is None or len(slots) == self.host.slots)


class WorkerRequest(Record):
    """The sizes that the user asked for, and the nodes."""

    allocation: Allocation
    options: TrainOptions
    bounds: Bounds

    @property
    def by_user(self) -> bool:
        """Whether the user named the hosts."""
        return self.allocation.by_user

    @property
    def total(self) -> int | None:
        """The requested number of workers of the job. None for ``auto``: all slots."""
        gpus = None if self.options.num_gpus == "auto" else self.options.num_gpus
        return gpus if self.options.num_procs is None else self.options.num_procs

    @property
    def per_node(self) -> int | None:
        """The requested number of workers on each node."""
        gpus = self.options.gpus_per_node
        return gpus if gpus is not None else self.options.procs_per_node

    @property
    def total_option(self) -> Opt:
        """The option for the total."""
        return Opt.NUM_PROCS if counts_processes(self.options) else Opt.NUM_GPUS

    @property
    def each_option(self) -> Opt:
        """The option for each node."""
        return Opt.PROCS_PER_NODE if counts_processes(self.options) else Opt.GPUS_PER_NODE


def count_workers(candidates: Sequence[PlannedHost], request: WorkerRequest) -> Counts:
    """Return the number of workers of each host; 0 if the host is not needed, None if only a survey
    can tell.

    Raises ConfigError if the slots are too few, or the sizes do not fit the hosts.
    """
    total, per_node = request.total, request.per_node
    counts: Counts
    if total is None:
        counts = [
            candidate.room
            if per_node is None
            else _check_room(per_node, candidate, request.each_option(per_node), request)
            for candidate in candidates
        ]
    elif per_node is not None:
        counts = _counts_by_total_and_each(total, per_node, candidates, request)
    elif request.bounds is not None or len(candidates) == 1:
        counts = _equal_shares(total, candidates, request)
    else:
        counts = _spread_or_pack(total, candidates, request)
    if request.allocation.part == "worker":
        _check_tasks(candidates, counts, request)
    return counts


def names_of(hosts: Sequence[Host]) -> str:
    """Return hosts for a message, with ranges folded."""
    return name_hosts(host.name for host in hosts)


class IdleHosts(Record):
    """A message on hosts that get no worker."""

    text: str
    by_mistake: bool
    """Whether the user probably wanted workers on these hosts."""


def explain_idle(
    candidates: Sequence[PlannedHost], counts: Counts, request: WorkerRequest
) -> IdleHosts:
    """Return the message on the hosts that get no worker.

    Raises ConfigError if a scheduler granted them and no option leaves them unused on purpose.
    """
    total = request.total or 0
    size = request.total_option(total)
    among = len(candidates)
    idle = [
        candidate.host for candidate, count in zip(candidates, counts, strict=True) if count == 0
    ]
    if not request.by_user and request.bounds is None:
        each = str(total // among) if total % among == 0 else "N"
        alone = f", {Opt.NUM_NODES(1)} on one alone" if Opt.NUM_NODES.exists else ""
        raise ConfigError(
            f"{size} would leave {len(idle)} of the {among} nodes idle that"
            f" {printable(request.allocation.source)} granted: {names_of(idle)}",
            hint=f"{request.each_option(each)} runs workers on every node{alone}",
        )
    # The total of another launcher's command line is meant literally.
    meant = (
        request.bounds is not None
        or request.per_node is not None
        or isinstance(request.options, DropInOptions)
    )
    if meant:
        return IdleHosts(text=f"not needed for {size}: {names_of(idle)}", by_mistake=False)
    verb = "gets" if len(idle) == 1 else "get"
    if all(candidate.room is None or candidate.room >= total for candidate in candidates):
        instead = f"{request.each_option(total)} starts {total} on each host"
    else:
        instead = f"without {request.total_option} all slots are used"
    return IdleHosts(
        text=f"{size} is for the whole job, so {names_of(idle)} {verb} no worker; {instead}",
        by_mistake=True,
    )


def pack(total: int, slots: Sequence[int]) -> list[int]:
    """Return the workers of each node if each is filled before the next. The sum of ``slots`` is at
    least ``total``."""
    left = total
    counts: list[int] = []
    for own in slots:
        counts.append(min(own, left))
        left -= counts[-1]
    return counts


def spread(total: int, slots: Sequence[int]) -> list[int]:
    """Return the workers of each node if they are dealt in turn. The sum of ``slots`` is at least
    ``total``."""
    counts = [0] * len(slots)
    left, level = total, 0
    while left > 0:
        room = [node for node, own in enumerate(slots) if own > level]
        # As many full rounds of one worker per node as possible, or a last incomplete one.
        rounds = max(1, min(min(slots[node] for node in room) - level, left // len(room)))
        for node in room[:left]:
            counts[node] += rounds
        left -= rounds * min(len(room), left)
        level += rounds
    return counts


def cross_sizes(slots: Sequence[int]) -> tuple[int, ...]:
    """Return for each local rank how many nodes have a worker with it: Horovod's CROSS_SIZE.

    Slots 3, 1, 2 give 3, 2, 1.
    """
    most = max(slots, default=0)
    ending = [0] * (most + 1)
    for own in slots:
        ending[own] += 1
    sizes: list[int] = []
    nodes = len(slots) - ending[0]
    for local_rank in range(most):
        sizes.append(nodes)
        nodes -= ending[local_rank + 1]
    return tuple(sizes)


def cross_ranks(slots: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each node the index of its workers among all with the same local rank: Horovod's
    CROSS_RANK.

    Slots 3, 1, 2 give (0, 0, 0), (1,), (2, 1): two workers have local rank 1, the one on the third
    node is the second.
    """
    before = [0] * max(slots, default=0)
    ranks: list[tuple[int, ...]] = []
    for own in slots:
        ranks.append(tuple(before[:own]))
        for local_rank in range(own):
            before[local_rank] += 1
    return ranks


def _check_room(count: int, candidate: PlannedHost, problem: str, request: WorkerRequest) -> int:
    """Return ``count`` if the host has that many slots. Raises ConfigError, with ``problem``, if
    not."""
    room = candidate.room
    # The slots of a scheduler do not limit workers on CPUs. A filter of the user does.
    free = (
        counts_processes(request.options)
        and not request.by_user
        and (candidate.whole or shares_gpus(request.options))
    )
    if room is None or room >= count or free or candidate.found:
        return count
    raise ConfigError(
        f"{problem}: {printable(candidate.host.name)} has only {counted(room, 'slot')}",
        hint="ask for less, or name more slots (HOST:SLOTS)"
        if request.by_user
        else f"ask for less, or for CPU workers: {Opt.PROCS_PER_NODE('N')}",
    )


def _counts_by_total_and_each(
    total: int, per_node: int, candidates: Sequence[PlannedHost], request: WorkerRequest
) -> Counts:
    """Return the counts if both the total and the number per node are set, which determine the
    number of nodes.

    Raises ConfigError if the numbers do not fit each other or the nodes.
    """
    names = f"{request.total_option(total)} and {request.each_option(per_node)}"
    nodes, rest = divmod(total, per_node)
    if rest:
        raise ConfigError(
            f"{names}: {total} is not a multiple of {per_node}", hint="leave one of them out"
        )
    if nodes > len(candidates) or (request.bounds is not None and nodes != len(candidates)):
        problem = f"{names} make {counted(nodes, 'node')}, but there are {len(candidates)}"
        raise ConfigError(problem, hint="leave one of them out")
    each = [
        _check_room(per_node, candidate, request.each_option(per_node), request)
        for candidate in candidates[:nodes]
    ]
    return [*each, *[0] * (len(candidates) - nodes)]


def _equal_shares(total: int, candidates: Sequence[PlannedHost], request: WorkerRequest) -> Counts:
    size, bounds = request.total_option(total), request.bounds
    if bounds is not None and bounds[0] < bounds[1]:
        raise ConfigError(
            f"{size} is a total, but there may be {bounds[0]} to {bounds[1]} nodes",
            hint=f"use {request.each_option('N')}, the number for each node",
        )
    each, rest = divmod(total, len(candidates))
    if rest:
        raise ConfigError(
            f"{size} cannot be divided evenly among {counted(len(candidates), 'node')}",
            hint=f"use a multiple of {len(candidates)}, or leave {Opt.NUM_NODES} out",
        )
    problem = f"{size}, and so {request.each_option(each)}" if len(candidates) > 1 else size
    return [_check_room(each, candidate, problem, request) for candidate in candidates]


def _spread_or_pack(
    total: int, candidates: Sequence[PlannedHost], request: WorkerRequest
) -> Counts:
    size = request.total_option(total)
    rooms = [candidate.room for candidate in candidates]
    enough = _has_enough(rooms, total)
    unknown = next((candidate for candidate in candidates if candidate.room is None), None)
    if unknown is not None and (request.options.spread or not enough):
        each = "N" if total % len(candidates) else str(total // len(candidates))
        raise ConfigError(
            f"{size}: how many workers {printable(unknown.host.name)} takes is not known here",
            hint=f"use {request.each_option(each)}, or HOST:SLOTS",
        )
    known = [room or 0 for room in rooms]
    if not enough:
        hosts = [candidate.host for candidate in candidates]
        raise ConfigError(
            f"{size}: there are only {counted(sum(known), 'slot')} on "
            f"{counted(len(hosts), 'host')},"
            f" {names_of(hosts)}",
            hint=f"ask for less, or leave {request.total_option} out to use all",
        )
    return spread(total, known) if request.options.spread else pack(total, known)


def _has_enough(rooms: Counts, total: int) -> bool:
    """Return whether the hosts before the first one of unknown size have at least ``total``
    slots."""
    left = total
    for room in rooms:
        if left <= 0 or room is None:
            break
        left -= room
    return left <= 0


def _check_tasks(candidates: Sequence[PlannedHost], counts: Counts, request: WorkerRequest) -> None:
    """Raise ConfigError if the counts differ from the tasks that a scheduler has already
    started."""
    for candidate, count in zip(candidates, counts, strict=True):
        tasks = candidate.tasks
        if tasks is not None and count is not None and count != tasks:
            size = request.total_option if request.total is not None else request.each_option
            raise ConfigError(
                f"{size} gives {printable(candidate.host.name)} {counted(count, 'worker')}, but "
                f"{counted(tasks, 'task')}"
                " run there already, each with a launcher of its own",
                hint="leave the size out, or start one launcher a node (srun --ntasks-per-node=1, "
                "mpirun -N 1)",
            )
