"""Names of variables, once.

Sources: what torchrun 2.13 sets and reads, Open MPI's, MPICH's and Horovod's worker variables,
TF_CONFIG.
"""

from __future__ import annotations

from collections.abc import Mapping

PROGRESS_FD = "DISTLAUNCH_PROGRESS_FD"
"""Names the descriptor on which a worker may report its progress, a line of JSON at a time."""
BACKEND_OPTIONS = "DISTLAUNCH_BACKEND_OPTIONS"
"""The backend's options that were chosen, as JSON, for the toolkit."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
TENSORPIPE_INTERFACE = "TP_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
FLIGHT_RECORDER = (
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
)
"""Where NCCL's flight recorder writes, from torch 2.8 on and before, and pipes that have it write:
how names begin."""
STACKS_FD = "DISTLAUNCH_STACKS_FD"
"""Names the descriptor on which our bootstrap has a worker show its stacks; not left in its
environment."""

RANKS = ("RANK", "HOROVOD_RANK")
"""One of these is set for every worker of a launcher around us."""

SET_FOR_WORKERS = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE", "DISTLAUNCH_JOB_ID", "DISTLAUNCH_ATTEMPT", "DISTLAUNCH_BACKEND", "DISTLAUNCH_RUN_DIR",
    "DISTLAUNCH_COOKIE", BACKEND_OPTIONS, PROGRESS_FD, STACKS_FD, "DISTLAUNCH_BOOT", "DISTLAUNCH_WARM_FD",
})  # fmt: skip
"""Always ours: --env may not name them."""

DEVICE_MASKS = frozenset(
    {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"}
)
"""Which devices a process sees, by vendor."""

SET_FOR_NODES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""By which interface a node's workers reach the others: set where it is needed, and the user has
not done it."""

OF_OUTER_LAUNCHERS = SET_FOR_WORKERS | {
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TF_CONFIG",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "CROSS_RANK",
    "CROSS_SIZE",
    "LOCAL_SIZE",
    "NNODES",
    "NPROC_PER_NODE",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_HOSTNAME",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_ELASTIC",
}
"""What launchers set for their workers, and the prefixes of further names."""
_PREFIXES_OF_OUTER_LAUNCHERS = (
    "PET_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "JSM_NAMESPACE_",
    "MV2_COMM_WORLD_",
    "PALS_",
    "DISTLAUNCH_",
)


def without_outer_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Drop what a launcher around us set for its own worker, and our own options: none of it is
    meant for ours."""
    return {
        name: value
        for name, value in environ.items()
        if name not in OF_OUTER_LAUNCHERS and not name.startswith(_PREFIXES_OF_OUTER_LAUNCHERS)
    }
