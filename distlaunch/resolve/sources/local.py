"""Layer resolve: a topology of this one machine, from the sizes asked for and the devices it has."""

from __future__ import annotations


from distlaunch.core.model.record import replace
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from distlaunch.resolve.devices import CUDA, DeviceSelection, select_devices, split_devices
from distlaunch.resolve.facts import Facts
from distlaunch.resolve.options import TrainOptions

_USE_CPUS = "--num-procs N starts N workers without GPUs"


def local_topology(options: TrainOptions, facts: Facts) -> Topology:
    """Decide how many workers this machine runs, and on what. Raises ConfigError; nothing is guessed silently."""
    if (options.num_nodes or 1) > 1:
        raise ConfigError(
            f"--num-nodes {options.num_nodes}: only this machine is known",
            hint="leave --num-nodes out, or give --num-nodes 1",
        )
    processes = _one_of(options.num_procs, options.procs_per_node, "--num-procs", "--procs-per-node")
    gpus = _one_of(options.num_gpus, options.gpus_per_node, "--num-gpus", "--gpus-per-node")
    if processes is not None and gpus is not None:
        raise ConfigError("GPUs and CPU workers are asked for together", hint="give --num-gpus or --num-procs, not both")
    if options.device == "cpu" and (gpus is not None or options.gpus is not None):
        raise ConfigError("--device cpu and a choice of GPUs contradict each other", hint=_USE_CPUS)
    if (processes is not None and options.device != "cuda") or options.device == "cpu":
        return _cpu_workers(1 if processes is None else processes, facts, ())
    selection = select_devices(facts.gpus, facts.environ, requested=options.gpus)
    if not selection.ids:
        return _without_gpus(options, facts, gpus, selection)
    if processes is not None:
        return _gpu_workers(processes, selection, facts, options, shared=True)
    wanted = len(selection.ids) if gpus is None or gpus == "auto" else int(gpus)
    if wanted > len(selection.ids):
        raise ConfigError(
            f"{wanted} GPUs asked for, {_count(len(selection.ids))} here ({selection.source})",
            hint=_USE_CPUS if options.gpus is None else "widen --gpus, or ask for fewer",
        )
    return _gpu_workers(wanted, selection, facts, options, shared=False)


def _one_of(total: int | str | None, per_node: int | None, name: str, per_node_name: str) -> int | str | None:
    if total is not None and per_node is not None and total != per_node:
        raise ConfigError(f"{name} {total} and {per_node_name} {per_node} contradict each other on one node")
    return per_node if total is None else total


def _count(number: int) -> str:
    return "there is 1" if number == 1 else f"there are {number}"


def _without_gpus(
    options: TrainOptions, facts: Facts, gpus: int | str | None, selection: DeviceSelection
) -> Topology:
    problem = facts.gpus.problem
    if gpus is not None or options.device == "cuda" or options.gpus is not None:
        asked = "GPUs are asked for" if gpus in (None, "auto") else f"{gpus} GPU{'s' if gpus != 1 else ''} asked for"
        found = problem or f"none found here ({selection.source})"
        raise ConfigError(f"{asked}, {found}", hint=_USE_CPUS)
    note = f"no GPU here ({problem or selection.source}): one CPU worker; {_USE_CPUS}"
    return _cpu_workers(1, facts, (note,))


def _cpu_workers(count: int | str, facts: Facts, notes: tuple[str, ...]) -> Topology:
    number = int(count)
    node = Node(host=facts.hostname, slots=number, mask_variable=CUDA, masks=((),) * number)  # GPUs hidden
    return Topology(nodes=(node,), device="cpu", notes=notes)


def _gpu_workers(
    count: int | str, selection: DeviceSelection, facts: Facts, options: TrainOptions, *, shared: bool
) -> Topology:
    number = int(count)
    isolate = options.isolate_gpus or selection.mig
    if shared:
        devices = tuple(selection.ids[index % len(selection.ids)] for index in range(number))
        masks = tuple((device,) for device in devices) if isolate else (selection.ids,) * number
    else:
        chosen = replace(selection, ids=selection.ids[:number], gpus=selection.gpus[:number])
        devices, masks = chosen.ids, split_devices(chosen, number, isolate=isolate)
    node = Node(
        host=facts.hostname, slots=number, mask_variable=selection.mask_variable, masks=masks, devices=devices,
        isolated=isolate, numa=tuple(gpu.numa_node if gpu else None for gpu in selection.gpus[:number]),
    )  # fmt: skip
    return Topology(nodes=(node,), device="cuda", notes=selection.notes)
