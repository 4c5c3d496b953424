"""Layer resolve: the environment that every worker gets, whatever its backend (design, section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from distlaunch.core.model.topology import Topology

_LEAST_COLUMNS = 20


class BackendVariables(Protocol):
    """What planning needs of a backend: the variables that it adds."""

    @property
    def name(self) -> str:
        """The backend's name on the command line."""

    def job_variables(self, topology: Topology) -> Mapping[str, str]:
        """Give the same values for all workers."""

    def default_variables(self, topology: Topology) -> Mapping[str, str]:
        """Give values for all workers that are set only where neither environment nor user sets them."""


def job_variables(
    topology: Topology, *, job_id: str, run_id: str, role: str, max_restarts: int, run_dir: str, backend: str
) -> dict[str, str]:
    """Give what is the same for all workers and all attempts."""
    world = str(topology.world_size)
    return {
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(len(topology.nodes)),
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": role,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "DISTLAUNCH_JOB_ID": job_id,
        "DISTLAUNCH_BACKEND": backend,
        "DISTLAUNCH_RUN_DIR": run_dir,
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
    if in_front is None:
        in_front = len(f"[{topology.world_size - 1}] ")
    return {"COLUMNS": str(max(_LEAST_COLUMNS, columns - in_front))}


def attempt_variables(*, attempt: int, master_addr: str, master_port: int | None) -> dict[str, str]:
    """Give what changes from attempt to attempt; the port is missing until it is settled."""
    variables = {
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "DISTLAUNCH_ATTEMPT": str(attempt),
        "MASTER_ADDR": master_addr,
    }
    if master_port is not None:
        variables["MASTER_PORT"] = str(master_port)
    return variables


def worker_variables(topology: Topology, node_rank: int, local_rank: int, rank: int) -> dict[str, str]:
    """Give what only this worker has."""
    node = topology.nodes[node_rank]
    variables = {
        "RANK": str(rank),
        "ROLE_RANK": str(rank),
        "LOCAL_RANK": "0" if node.isolated else str(local_rank),
        "LOCAL_WORLD_SIZE": str(node.slots),
        "NODE_RANK": str(node_rank),
        "GROUP_RANK": str(node_rank),
    }
    variables.update(dict.fromkeys(node.hidden, "-1"))  # an empty one counts as unset in ROCm
    if node.mask_variable is not None:
        variables[node.mask_variable] = ",".join(node.masks[local_rank])
    return variables
