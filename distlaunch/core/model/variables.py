"""Names of environment variables that several packages use.

Sources: torchrun 2.13, the worker variables of Open MPI, MPICH and Horovod, and TF_CONFIG.
"""

from __future__ import annotations

from collections.abc import Mapping

PROGRESS_FD = "DISTLAUNCH_PROGRESS_FD"
"""Descriptor on which a worker may report progress, as lines of JSON."""
BACKEND_OPTIONS = "DISTLAUNCH_BACKEND_OPTIONS"
"""The backend's options as JSON, for the toolkit."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
TENSORPIPE_INTERFACE = "TP_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
FLIGHT_RECORDER = (
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
)
"""Variables with beginnings of paths. NCCL's flight recorder writes to the first (since torch 2.8)
or second (before), triggered by a write to the pipe of the third."""
STACKS_FD = "DISTLAUNCH_STACKS_FD"
"""Descriptor to which a worker writes its stacks. The bootstrap removes the variable."""

RANKS = ("RANK", "HOROVOD_RANK")
"""Every worker of an outer launcher has one of these."""

SET_FOR_WORKERS = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE", "DISTLAUNCH_JOB_ID", "DISTLAUNCH_ATTEMPT", "DISTLAUNCH_BACKEND", "DISTLAUNCH_RUN_DIR",
    "DISTLAUNCH_COOKIE", BACKEND_OPTIONS, PROGRESS_FD, STACKS_FD, "DISTLAUNCH_BOOT", "DISTLAUNCH_WARM_FD",
})  # fmt: skip
"""Variables that distlaunch sets for every worker. --env may not set them."""

DEVICE_MASKS = frozenset(
    {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"}
)
"""Variables that restrict the devices of a process, by vendor."""

SET_FOR_NODES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables with the network interface to other nodes, set if needed unless the user has set
them."""

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
"""Variables that launchers set for their workers, beside the prefixes below."""
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
    """Return the environment without variables of an outer launcher and without distlaunch's own
    options.

    They describe this process as a worker of that launcher, and do not apply to this job's workers.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in OF_OUTER_LAUNCHERS and not name.startswith(_PREFIXES_OF_OUTER_LAUNCHERS)
    }
