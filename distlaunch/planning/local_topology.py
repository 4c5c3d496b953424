"""Choose the workers of this machine from the requested sizes and its devices. No I/O.

``local_topology`` is for ``train``, ``torchrun_topology`` for ``distlaunch torchrun``, which, as
torchrun, does not change a device mask: every worker sees the launcher's devices. A worker gets a
mask of its own if it can use only one device (MIG) or is to see only one (--virtual-local-rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted, format_ranks, printable
from distlaunch.core.model.topology import Node, Topology, plain_notes
from distlaunch.planning.devices import (
    CUDA,
    HIP,
    ROCR,
    ZE,
    DeviceSelection,
    NotTheseGpusError,
    first_devices,
    select_devices,
    split_devices,
)
from distlaunch.planning.facts import Facts
from distlaunch.planning.train_options import (
    TorchrunOptions,
    TrainOptions,
    advice_on_cpu_workers,
    asks_for_gpus,
    check_kind,
    on_cpus,
    shares_gpus,
    use_cpus,
)

if TYPE_CHECKING:
    from distlaunch.planning.allocation import Allocation

_FLAG = "--nproc-per-node"


def local_topology(options: TrainOptions, facts: Facts) -> Topology:
    """Return how many workers this machine runs, and on which devices.

    Raises ConfigError if the job needs other nodes, or more GPUs than this machine has.
    """
    fewest = (
        options.num_nodes[0] if isinstance(options.num_nodes, tuple) else options.num_nodes or 1
    )
    if fewest > 1:
        raise ConfigError(
            f"{Opt.NUM_NODES(fewest)}: only this machine is known",
            hint=f"name all nodes with {Opt.HOSTS} or {Opt.HOSTFILE}, or start a launcher on each "
            "node with "
            f"{Opt.RENDEZVOUS('HOST:PORT')} and {Opt.NODE_RANK} N",
        )
    processes = _agreed_size(
        options.num_procs, options.procs_per_node, str(Opt.NUM_PROCS), str(Opt.PROCS_PER_NODE)
    )
    gpus = _agreed_size(
        options.num_gpus, options.gpus_per_node, str(Opt.NUM_GPUS), str(Opt.GPUS_PER_NODE)
    )
    check_kind(options)
    asked = processes if gpus is None else gpus
    topology = workers_here(
        options, facts, count=None if asked is None or asked == "auto" else int(asked)
    )
    notes = []
    if isinstance(options.num_nodes, tuple) and options.num_nodes[1] > 1:
        notes.append(
            f"{Opt.NUM_NODES(f'{fewest}:{options.num_nodes[1]}')}: only this machine is known, so "
            "the job "
            "has one node"
        )
    if options.spread:
        notes.append(f"{Opt.SPREAD} has no effect: there is one node")
    return replace(topology, notes=(*topology.notes, *plain_notes(notes))) if notes else topology


def workers_here(
    options: TrainOptions,
    facts: Facts,
    *,
    count: int | None,
    only: Sequence[int] | None = None,
    without: Sequence[int] = (),
    granted: Sequence[str] = (),
    several: bool = False,
) -> Topology:
    """Return this machine with ``count`` workers. By default one worker per GPU, or one on the CPU
    without GPUs.

    ``only`` and ``without`` choose among the visible GPUs by index. ``granted`` chooses by id if no
    mask does. ``several``: the job has several nodes, for hints. Raises ConfigError if more GPUs
    are requested than there are.
    """
    if on_cpus(options):
        return _cpu_workers(_cpu_worker_count(count, without), facts, "", ())
    selection = selection_here(options, facts, granted=granted, several=several)
    if not selection.ids:
        number = options.whole_gpus or count
        return _workers_without_gpus(
            asks_for_gpus(options), number, without, facts, selection, several=several
        )
    shared = shares_gpus(options)
    selection = _apply_slots(selection, only, without, facts, shared=shared)
    if options.whole_gpus is not None:
        selection = first_devices(selection, options.whole_gpus, several=several)
        if selection.mig and options.whole_gpus > 1:
            raise ConfigError(
                f"{counted(options.whole_gpus, 'GPU')} for one worker: there are MIG slices among "
                "them"
                f" ({selection.source}), and CUDA uses one slice a process",
                hint="ask for one, or for a worker on each slice",
            )
    if shared:
        return _gpu_workers(count or len(selection.ids), selection, facts, options, shared=True)
    wanted = len(selection.ids) if count is None else count
    return _gpu_workers(
        wanted, first_devices(selection, wanted, several=several), facts, options, shared=False
    )


def selection_here(
    options: TrainOptions, facts: Facts, *, granted: Sequence[str] = (), several: bool = False
) -> DeviceSelection:
    """Return the GPUs that workers may use: those in the device mask, in --gpus, and in ``granted``
    if all of these are there. Raises ConfigError."""
    selection = select_devices(facts.gpus, facts.environ, requested=options.gpus, several=several)
    if granted and len(granted) < len(selection.ids) and set(granted) <= set(selection.ids):
        indices = [index for index, each in enumerate(selection.ids) if each in granted]
        return _with_devices(selection, indices, f"{selection.source}; {','.join(granted)} granted")
    return selection


def torchrun_topology(options: TorchrunOptions, facts: Facts) -> Topology:
    """Return how many workers ``distlaunch torchrun`` runs on this machine.

    Raises ConfigError if the options ask for missing GPUs.
    """
    picked = options.gpus is not None
    selection = select_devices(facts.gpus, facts.environ, requested=options.gpus)
    count, notes = _torchrun_worker_count(options, facts, selection)
    isolated = options.isolate_gpus or (selection.mig and options.needs_gpus)
    shares = (isolated or picked) and bool(selection.ids)
    if isolated and selection.ids:
        selection = first_devices(selection, count)
    near = selection.gpus[:count]
    node = Node(
        host=facts.hostname,
        slots=count,
        mask_variable=selection.mask_variable if shares else None,
        masks=split_devices(selection, count, isolate=isolated) if shares else (),
        devices=selection.ids if facts.gpus.gpus else (),
        isolated=isolated,
        numa=tuple(gpu.numa_node if gpu else None for gpu in near),
    )
    return Topology(
        nodes=(node,),
        device="cuda" if node.devices else "cpu",
        notes=plain_notes((*selection.notes, *notes)),
    )


def add_other_nodes(topology: Topology, allocation: Allocation, *, here: int) -> Topology:
    """Return the topology of the whole job, in which this machine is node ``here``.

    Other nodes report their numbers of workers when the job starts. Node 0 of ``topology`` is this
    machine.
    """
    nodes = [
        Node(host=host.name, known=host.known, slots=None, devices=None)
        for host in allocation.hosts
    ]
    nodes[here] = replace(topology.nodes[0], host=nodes[here].host, known=nodes[here].known)
    bounds = (
        allocation.nodes
        if allocation.nodes is not None and allocation.nodes[0] < allocation.nodes[1]
        else None
    )
    return replace(topology, nodes=tuple(nodes), here=here, bounds=bounds, source=allocation.source)


def _agreed_size(
    total: int | str | None, per_node: int | None, name: str, per_node_name: str
) -> int | str | None:
    if total is not None and per_node is not None and total != per_node:
        raise ConfigError(
            f"{name} {total} and {per_node_name} {per_node} contradict each other on one node"
        )
    return per_node if total is None else total


def _cpu_workers(count: int, facts: Facts, source: str, notes: tuple[str, ...]) -> Topology:
    if not count:
        raise _none_left_error(facts)
    hidden = tuple(name for name in (HIP, ROCR) if name in facts.environ)
    masks = ((),) * count
    node = Node(
        host=facts.hostname,
        slots=count,
        mask_variable=CUDA,
        masks=masks,
        hidden=hidden,
        devices_from=source,
    )
    return Topology(nodes=(node,), device="cpu", notes=plain_notes(notes))


def _none_left_error(facts: Facts) -> ConfigError:
    return ConfigError(
        f"{Opt.EXCLUDE} leaves no slot of {printable(facts.hostname)}",
        hint="leave the host out as a whole",
    )


def _cpu_worker_count(count: int | None, without: Sequence[int]) -> int:
    """Return the number of CPU workers: one by default, none if a filter excludes slot 0."""
    return count if count is not None else 0 if 0 in without else 1


def _workers_without_gpus(
    asked: bool,  # noqa: FBT001 - private
    count: int | None,
    without: Sequence[int],
    facts: Facts,
    selection: DeviceSelection,
    *,
    several: bool,
) -> Topology:
    """Return this machine with workers on CPUs because it has no GPU. Raise ConfigError if that is
    not what was asked for, or the GPUs are broken."""
    if facts.gpus.problem is not None:
        raise NotTheseGpusError(
            f"the GPUs here cannot be used: {facts.gpus.problem}", hint=use_cpus(several=several)
        )
    if asked:
        first_devices(selection, count or 1, several=several)
    number = _cpu_worker_count(count, without)
    workers = "one CPU worker" if number == 1 else counted(number, "CPU worker")
    note = f"{selection.source}: {workers}{advice_on_cpu_workers(several=several)}"
    return _cpu_workers(number, facts, selection.source, (note,))


def _apply_slots(
    selection: DeviceSelection,
    only: Sequence[int] | None,
    without: Sequence[int],
    facts: Facts,
    *,
    shared: bool,
) -> DeviceSelection:
    """Return the devices of the slots in ``only`` (None: all) that are not in ``without``.

    ``shared``: workers share devices. Otherwise the caller limits the devices to the number of
    workers, and applies a filter for the first slots. Raises ConfigError for a slot that does not
    exist, and if no slot remains.
    """
    have = range(len(selection.ids))
    if (
        only is not None
        and list(only) == list(range(len(only)))
        and not (shared and len(only) < len(have))
    ):
        # No filter, or one for the first slots. first_devices checks the number.
        return selection
    beyond = next((index for index in (*(only or ()), *without) if index not in have), None)
    if beyond is not None:
        raise ConfigError(
            f"{printable(facts.hostname)} has no GPU {beyond} to include or exclude "
            f"({selection.source})",
            hint=f"it has {format_ranks(have)}, counted from 0 within what is visible",
        )
    left = [index for index in (have if only is None else only) if index not in without]
    if not left:
        raise _none_left_error(facts)
    return (
        selection
        if len(left) == len(selection.ids)
        else _with_devices(selection, left, selection.source)
    )


def _with_devices(
    selection: DeviceSelection, indices: Sequence[int], source: str
) -> DeviceSelection:
    ids, gpus = tuple(selection.ids[p] for p in indices), tuple(selection.gpus[p] for p in indices)
    return replace(selection, ids=ids, gpus=gpus, source=source)


def _gpu_workers(
    count: int, selection: DeviceSelection, facts: Facts, options: TrainOptions, *, shared: bool
) -> Topology:
    """Return this machine with workers on GPUs, a device each; with ``shared``, devices are
    assigned in turn."""
    isolate = options.isolate_gpus or selection.mig
    whole = options.whole_nodes and not isolate
    indices = (
        list(range(len(selection.ids)))
        if whole
        else [index % len(selection.ids) for index in range(count)]
    )
    node = Node(
        host=facts.hostname,
        slots=count,
        mask_variable=selection.mask_variable,
        masks=split_devices(selection, count, isolate=isolate),
        devices=tuple(selection.ids[index] for index in indices) if shared else selection.ids,
        gpus=tuple(selection.gpus[index] for index in indices),
        devices_from=selection.source,
        isolated=isolate,
        numa=()
        if whole
        else tuple(gpu.numa_node if (gpu := selection.gpus[index]) else None for index in indices),
    )
    return Topology(nodes=(node,), device="cuda", notes=plain_notes(selection.notes))


def _torchrun_worker_count(
    options: TorchrunOptions, facts: Facts, selection: DeviceSelection
) -> tuple[int, tuple[str, ...]]:
    """Return the number of workers that --nproc-per-node means here, and notes. Raise ConfigError
    for missing devices."""
    match options.workers:
        case int() as number:
            return number, ()
        case "cpu":
            return _usable_cpus(facts), ()
        case "xpu":
            entries = {entry.strip() for entry in facts.environ.get(ZE, "").split(",")} - {""}
            if not entries:
                raise ConfigError(
                    f"{_FLAG} xpu: XPUs are counted by {ZE} only", hint=f"give a number: {_FLAG} N"
                )
            return len(entries), ()
        case "gpu":
            if not selection.ids:
                why = f": {facts.gpus.problem}" if facts.gpus.problem else f" ({selection.source})"
                raise ConfigError(
                    f"{_FLAG} gpu: there is no GPU to use here{why}",
                    hint=f"{_FLAG} cpu, or a number",
                )
            return len(selection.ids), ()
        case _:
            if selection.ids:
                return len(selection.ids), ()
            cpus = _usable_cpus(facts)
            return cpus, (
                f"{_FLAG} auto: {counted(cpus, 'worker')}, one for each CPU ({selection.source})",
            )


def _usable_cpus(facts: Facts) -> int:
    """Return how many CPUs can run at once: the CPUs of the affinity, limited by the container's
    quota."""
    allowed = len(facts.cpus.allowed)
    return max(1, min(allowed, int(facts.cpus.quota)) if facts.cpus.quota else allowed)
