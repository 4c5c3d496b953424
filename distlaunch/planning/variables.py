"""The environment that every worker gets, whatever its backend (design, section 4)."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.model.topology import Node, Topology
from distlaunch.core.model.variables import BACKEND_OPTIONS
from distlaunch.planning.backend import PlannedBackend

_LEAST_COLUMNS = 20


def job_variables(
    topology: Topology,
    *,
    job_id: str,
    run_id: str,
    role: str,
    max_restarts: int,
    run_dir: str,
    backend: PlannedBackend,
) -> dict[str, str]:
    """Give what is the same for all workers and all attempts; what is settled at the start is missing until then."""
    world = topology.world_size
    sizes = {} if world is None else {"WORLD_SIZE": str(world), "ROLE_WORLD_SIZE": str(world)}
    ids = {"TORCHELASTIC_RUN_ID": run_id, "DISTLAUNCH_JOB_ID": job_id, "DISTLAUNCH_RUN_DIR": run_dir}
    if backend.chosen:
        import json

        ids[BACKEND_OPTIONS] = json.dumps(dict(backend.chosen), separators=(",", ":"))
    return {
        **sizes,
        "GROUP_WORLD_SIZE": str(len(topology.nodes)),
        "ROLE_NAME": role,
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "DISTLAUNCH_BACKEND": backend.name,
        **{name: value for name, value in ids.items() if value},
    }


DEFAULTS: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""Set only where nobody else does. PYTHONUNBUFFERED: else the lines before a crash are lost."""


def terminal_variables(topology: Topology, columns: int | None, *, in_front: int | None = None) -> dict[str, str]:
    """Tell workers, whose output is a pipe, how wide the terminal at its end is, less what stands in front.

    ``in_front``: how wide that is; None for a rank in brackets.
    """
    if columns is None:
        return {}
    return {"COLUMNS": str(_room(topology, columns, in_front))}


def bar_variables(topology: Topology, columns: int | None, *, in_front: int | None = None) -> dict[str, str]:
    """Return the variables by which rank 0 draws progress bars as on a terminal; see ``terminal_variables``.

    rich reads TTY_COMPATIBLE and TTY_INTERACTIVE, tqdm reads TQDM_NCOLS and would leave the last column free, too.
    """
    if columns is None:
        return {}
    room = _room(topology, columns, in_front)
    return {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "TQDM_NCOLS": str(room - 1)}


def _room(topology: Topology, columns: int, in_front: int | None) -> int:
    if in_front is None:
        in_front = len(f"[{(topology.world_size or 1) - 1}] ")
    return max(_LEAST_COLUMNS, columns - in_front)


def attempt_variables(*, attempt: int, master_addr: str | None, master_port: int | None) -> dict[str, str]:
    """Give what changes from attempt to attempt; address and port are missing until they are settled."""
    variables = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "DISTLAUNCH_ATTEMPT": str(attempt)}
    if master_addr is not None:
        variables["MASTER_ADDR"] = master_addr
    if master_port is not None:
        variables["MASTER_PORT"] = str(master_port)
    return variables


def node_variables(topology: Topology, node_rank: int) -> dict[str, str]:
    """Give what is the same for all workers of a node."""
    node = topology.nodes[node_rank]
    variables = {"LOCAL_WORLD_SIZE": str(node.slots), "NODE_RANK": str(node_rank), "GROUP_RANK": str(node_rank)}
    variables.update(dict.fromkeys(node.hidden, "-1"))  # an empty one counts as unset in ROCm
    return variables


def worker_variables(node: Node, local_rank: int, rank: int) -> dict[str, str]:
    """Give what only this worker has."""
    number = str(rank)
    variables = {"RANK": number, "ROLE_RANK": number, "LOCAL_RANK": "0" if node.isolated else str(local_rank)}
    if node.mask_variable is not None:
        variables[node.mask_variable] = ",".join(node.masks[local_rank])
    return variables
