"""Read the ranks that mpirun or a similar program gave to the processes it started. No I/O.

Sources: recorded environments of Open MPI 4.1.4 and MPICH 4.0.2, the documentation of Open MPI 5
and MVAPICH2, IBM's job step manager as read by PyTorch Lightning's LSFEnvironment, HPE's PALS as
sites use it (it sets no size, its PMI does).
"""

from __future__ import annotations

from distlaunch.planning.allocation import Allocation
from distlaunch.planning.clusters.environment_reader import Environ, Texts
from distlaunch.planning.clusters.table import TaskSystem, find_task

SYSTEMS = {
    system.name: system
    for system in (
        # OMPI_COMM_WORLD_NODE_RANK is not the index of the node: it numbers the processes of all
        # jobs on a node.
        TaskSystem(
            name="openmpi",
            rank="OMPI_COMM_WORLD_RANK",
            size="OMPI_COMM_WORLD_SIZE",
            local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
            local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
            nodes="OMPI_MCA_orte_num_nodes",
            host="PMIX_HOSTNAME",
            agrees="PMIX_RANK",
        ),
        TaskSystem(
            name="mvapich",
            rank="MV2_COMM_WORLD_RANK",
            size="MV2_COMM_WORLD_SIZE",
            local_rank="MV2_COMM_WORLD_LOCAL_RANK",
            local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        ),
        TaskSystem(
            name="jsm",
            rank="JSM_NAMESPACE_RANK",
            size="JSM_NAMESPACE_SIZE",
            local_rank="JSM_NAMESPACE_LOCAL_RANK",
            local_size="JSM_NAMESPACE_LOCAL_SIZE",
            job="LSB_JOBID",
        ),
        TaskSystem(
            name="pals",
            rank="PALS_RANKID",
            size="PMI_SIZE",
            local_rank="PALS_LOCAL_RANKID",
            local_size="PALS_LOCAL_SIZE",
            node="PALS_NODEID",
            agrees="PMI_RANK",
            job="PALS_APID",
        ),
        # Hydra: MPICH and Intel MPI.
        TaskSystem(
            name="mpich",
            rank="PMI_RANK",
            size="PMI_SIZE",
            local_rank="MPI_LOCALRANKID",
            local_size="MPI_LOCALNRANKS",
            host="MPIR_CVAR_CH3_INTERFACE_HOSTNAME",
        ),
    )
}


def files(environ: Environ, system: str) -> tuple[str, ...]:  # noqa: ARG001 - all sources share the signature
    """Return no path: these systems need no files."""
    return ()


def find(environ: Environ, texts: Texts, system: str) -> Allocation | None:  # noqa: ARG001 - all sources share the signature
    """Return the processes and the rank of this one; None if ``system`` did not start it.

    Raises IncompleteError if some variables are missing, and ConfigError if they contradict each
    other.
    """
    return find_task(SYSTEMS[system], environ)
