"""Layer resolve: a topology of this one machine, from the sizes asked for and the devices it has."""

from __future__ import annotations

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from distlaunch.resolve.devices import CUDA, HIP, ROCR, DeviceSelection, first_devices, select_devices, split_devices
from distlaunch.resolve.facts import Facts
from distlaunch.resolve.options import TrainOptions

_USE_CPUS = "--num-procs N starts N workers without GPUs"


def local_topology(options: TrainOptions, facts: Facts) -> Topology:
    """Decide how many workers this machine runs, and on what. Raises ConfigError; nothing is guessed silently."""
    fewest = options.num_nodes[0] if isinstance(options.num_nodes, tuple) else options.num_nodes or 1
    if fewest > 1:
        raise ConfigError(
            f"--num-nodes {fewest}: only this machine is known",
            hint="name the nodes with --hosts or --hostfile; or leave --num-nodes out, or give --num-nodes 1",
        )
    processes = _one_of(options.num_procs, options.procs_per_node, "--num-procs", "--procs-per-node")
    gpus = _one_of(options.num_gpus, options.gpus_per_node, "--num-gpus", "--gpus-per-node")
    if processes is not None and gpus is not None:
        raise ConfigError(
            "GPUs and CPU workers are asked for together", hint="give --num-gpus or --num-procs, not both"
        )
    if processes is not None and options.gpus is not None and options.device != "cuda":
        raise ConfigError("--gpus is given for CPU workers", hint="--device cuda lets them share these GPUs")
    if options.device == "cpu" and (gpus is not None or options.gpus is not None):
        raise ConfigError("--device cpu and a choice of GPUs contradict each other", hint=_USE_CPUS)
    if (processes is not None and options.device != "cuda") or options.device == "cpu":
        return _cpu_workers(1 if processes is None else processes, facts, ())
    selection = select_devices(facts.gpus, facts.environ, requested=options.gpus)
    if not selection.ids:
        asked = gpus is not None or options.device == "cuda" or options.gpus is not None
        return _without_gpus(asked, gpus if isinstance(gpus, int) else 1, facts, selection)
    if processes is not None:
        return _gpu_workers(int(processes), selection, facts, options, shared=True)
    wanted = len(selection.ids) if gpus is None or gpus == "auto" else int(gpus)
    return _gpu_workers(wanted, first_devices(selection, wanted), facts, options, shared=False)


def _one_of(total: int | str | None, per_node: int | None, name: str, per_node_name: str) -> int | str | None:
    if total is not None and per_node is not None and total != per_node:
        raise ConfigError(f"{name} {total} and {per_node_name} {per_node} contradict each other on one node")
    return per_node if total is None else total


def _without_gpus(asked: bool, count: int, facts: Facts, selection: DeviceSelection) -> Topology:  # noqa: FBT001 - private
    if facts.gpus.problem is not None:
        raise ConfigError(f"the GPUs here cannot be used: {facts.gpus.problem}", hint=_USE_CPUS)
    if asked:
        first_devices(selection, count)
    return _cpu_workers(1, facts, (f"{selection.source}: one CPU worker; {_USE_CPUS}",))


def _cpu_workers(count: int | str, facts: Facts, notes: tuple[str, ...]) -> Topology:
    number = int(count)
    hidden = tuple(name for name in (HIP, ROCR) if name in facts.environ)
    node = Node(host=facts.hostname, slots=number, mask_variable=CUDA, masks=((),) * number, hidden=hidden)
    return Topology(nodes=(node,), device="cpu", notes=notes)


def _gpu_workers(
    count: int, selection: DeviceSelection, facts: Facts, options: TrainOptions, *, shared: bool
) -> Topology:
    """Give each worker a device of its own, or with ``shared`` (more CPU-sized workers than GPUs) one in turn."""
    isolate = options.isolate_gpus or selection.mig
    places = [index % len(selection.ids) for index in range(count)]
    node = Node(
        host=facts.hostname,
        slots=count,
        mask_variable=selection.mask_variable,
        masks=split_devices(selection, count, isolate=isolate),
        devices=tuple(selection.ids[place] for place in places) if shared else selection.ids,
        isolated=isolate,
        numa=tuple(gpu.numa_node if (gpu := selection.gpus[place]) else None for place in places),
    )
    return Topology(nodes=(node,), device="cuda", notes=selection.notes)
