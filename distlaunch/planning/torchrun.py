"""A topology as ``distlaunch torchrun`` asks for it: a number of workers on this machine.

As under torchrun, a device mask is left as it is and every worker sees what the launcher sees. Where a worker can use
one device only (MIG), or is to see only one (--virtual-local-rank), each gets its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import counted
from distlaunch.core.model.topology import Node, Topology
from distlaunch.planning.devices import ZE, DeviceSelection, first_devices, select_devices, split_devices
from distlaunch.planning.facts import Facts
from distlaunch.planning.train_options import TorchrunOptions

if TYPE_CHECKING:
    from distlaunch.planning.allocation import Allocation

_FLAG = "--nproc-per-node"


def torchrun_topology(options: TorchrunOptions, facts: Facts) -> Topology:
    """Count the workers, and share the devices where that is asked for. Raises ConfigError; nothing is guessed."""
    picked = options.gpus is not None
    selection = select_devices(facts.gpus, facts.environ, requested=options.gpus)
    count, notes = _count(options, facts, selection)
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
    return Topology(nodes=(node,), device="cuda" if node.devices else "cpu", notes=(*selection.notes, *notes))


def among_others(topology: Topology, allocation: Allocation, *, here: int) -> Topology:
    """Place this machine among the nodes of a job, of which the others tell at the start how many workers they run."""
    nodes = [Node(host=host.name, known=host.known, slots=None, devices=None) for host in allocation.hosts]
    nodes[here] = replace(topology.nodes[0], host=nodes[here].host, known=nodes[here].known)
    bounds = allocation.nodes if allocation.nodes is not None and allocation.nodes[0] < allocation.nodes[1] else None
    return replace(topology, nodes=tuple(nodes), here=here, bounds=bounds, source=allocation.source)


def _count(options: TorchrunOptions, facts: Facts, selection: DeviceSelection) -> tuple[int, tuple[str, ...]]:
    match options.workers:
        case int() as number:
            return number, ()
        case "cpu":
            return _cpus(facts), ()
        case "xpu":
            entries = {entry.strip() for entry in facts.environ.get(ZE, "").split(",")} - {""}
            if not entries:
                raise ConfigError(f"{_FLAG} xpu: XPUs are counted by {ZE} only", hint=f"give a number: {_FLAG} N")
            return len(entries), ()
        case "gpu":
            if not selection.ids:
                why = f": {facts.gpus.problem}" if facts.gpus.problem else f" ({selection.source})"
                raise ConfigError(f"{_FLAG} gpu: there is no GPU to use here{why}", hint=f"{_FLAG} cpu, or a number")
            return len(selection.ids), ()
        case _:
            if selection.ids:
                return len(selection.ids), ()
            cpus = _cpus(facts)
            return cpus, (f"{_FLAG} auto: {counted(cpus, 'worker')}, one for each CPU ({selection.source})",)


def _cpus(facts: Facts) -> int:
    """Count the CPUs that may really run at once: those of the affinity, and no more than the container's quota."""
    allowed = len(facts.cpus.allowed)
    return max(1, min(allowed, int(facts.cpus.quota)) if facts.cpus.quota else allowed)
