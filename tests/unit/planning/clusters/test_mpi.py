from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.planning.clusters import mpi
from distlaunch.planning.clusters.environment_reader import IncompleteError


def openmpi(rank, size, local_rank, local_size, nodes, **more):
    """Return the variables that ``mpirun -n 2 env`` of Open MPI 4.1.4 prints for a process."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "OMPI_UNIVERSE_SIZE": str(size),
        "OMPI_MCA_orte_num_nodes": str(nodes),
        "PMIX_RANK": str(rank),
        "PMIX_HOSTNAME": "vm",
    } | more


def hydra(rank, size, local_rank, local_size, host="a"):
    """Return the variables that ``mpiexec.hydra -hosts a,b env`` of MPICH 4.0.2 prints for a
    process."""
    return {
        "HYDI_CONTROL_FD": "7",
        "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": host,
        "MPI_LOCALNRANKS": str(local_size),
        "MPI_LOCALRANKID": str(local_rank),
        "PMI_FD": "6",
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
    }


def test_processes_of_one_node_are_its_workers():
    found = mpi.find(openmpi(1, 2, 1, 2, 1), {}, "openmpi")
    assert (found.source, found.part, found.node_rank, found.local_rank) == (
        "openmpi",
        "worker",
        0,
        1,
    )
    assert [(host.name, host.slots) for host in found.hosts] == [("vm", 2)]
    assert (found.master_addr, found.notes) == (None, ())


def test_one_process_a_node_is_a_launcher_of_the_node():
    found = mpi.find(openmpi(2, 4, 0, 1, 4), {}, "openmpi")
    assert (found.part, found.node_rank, found.local_rank, len(found.hosts)) == ("node", 2, None, 4)
    assert {host.slots for host in found.hosts} == {None}
    assert [(host.name, host.known) for host in found.hosts[2:]] == [
        ("vm", True),
        ("node-3", False),
    ]


def test_the_rank_within_the_node_is_not_taken_for_the_nodes():
    """Open MPI's NODE_RANK counts processes on the node."""
    found = mpi.find(openmpi(5, 8, 1, 4, 2), {}, "openmpi")
    assert (found.node_rank, found.local_rank, len(found.hosts), found.hosts[0].slots) == (
        1,
        1,
        2,
        4,
    )


def test_hydras_processes_are_known_by_pmi_and_local_ids():
    found = mpi.find(hydra(3, 4, 1, 2, host="b"), {}, "mpich")
    assert (found.source, found.part, found.node_rank, found.local_rank) == (
        "mpich",
        "worker",
        1,
        1,
    )
    assert [host.name for host in found.hosts] == ["node-0", "b"]


@pytest.mark.parametrize(
    ("system", "environ"),
    [
        # MVAPICH2's user guide
        (
            "mvapich",
            {
                "MV2_COMM_WORLD_RANK": "3",
                "MV2_COMM_WORLD_SIZE": "4",
                "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
        ),
        # jsrun, as PyTorch Lightning's LSFEnvironment documents it
        (
            "jsm",
            {
                "JSM_NAMESPACE_RANK": "3",
                "JSM_NAMESPACE_SIZE": "4",
                "JSM_NAMESPACE_LOCAL_RANK": "1",
                "JSM_NAMESPACE_LOCAL_SIZE": "2",
                "LSB_JOBID": "7",
            },
        ),
        # mpiexec of HPE's PALS, as job scripts for Aurora use it: the size comes from PMI
        (
            "pals",
            {
                "PALS_RANKID": "3",
                "PALS_LOCAL_RANKID": "1",
                "PALS_LOCAL_SIZE": "2",
                "PALS_NODEID": "1",
                "PALS_APID": "ab-12",
                "PMI_RANK": "3",
                "PMI_SIZE": "4",
            },
        ),
    ],
)
def test_others_are_rows_of_the_same_table(system, environ):
    found = mpi.find(environ, {}, system)
    assert (found.source, found.part, found.node_rank, found.local_rank) == (system, "worker", 1, 1)
    assert [host.slots for host in found.hosts] == [2, 2]


def test_a_given_node_number_is_used_in_any_order_of_ranks():
    cyclic = {
        "PALS_RANKID": "2",
        "PALS_LOCAL_RANKID": "1",
        "PALS_LOCAL_SIZE": "2",
        "PALS_NODEID": "0",
        "PMI_SIZE": "4",
    }
    assert mpi.find(cyclic, {}, "pals").node_rank == 0


def test_the_master_address_is_the_one_that_all_processes_were_handed():
    """``mpirun -x MASTER_ADDR``; Azure ML's batch nodes have a variable of their own (its
    documentation)."""
    handed = openmpi(5, 8, 1, 4, 2, MASTER_ADDR="gpu-1", MASTER_PORT="29501")
    found = mpi.find(handed, {}, "openmpi")
    assert (found.master_addr, found.master_port, found.notes) == ("gpu-1", 29501, ())
    azure = openmpi(5, 8, 1, 4, 2, AZ_BATCH_MASTER_NODE="10.0.0.4:6000")
    found = mpi.find(azure, {}, "openmpi")
    assert (found.master_addr, found.master_port) == ("10.0.0.4", None)  # 6000 is Batch's own
    found = mpi.find(azure | {"MASTER_PORT": "6105"}, {}, "openmpi")
    assert (found.master_addr, found.master_port) == ("10.0.0.4", 6105)


@pytest.mark.parametrize("name", ["-oProxyCommand", "a b", "n\u00e4", "a;b"])
def test_a_host_name_that_is_none_is_an_error_that_names_the_variable(name):
    with pytest.raises(ConfigError, match="PMIX_HOSTNAME"):
        mpi.find(openmpi(0, 2, 0, 1, 2, PMIX_HOSTNAME=name), {}, "openmpi")


@pytest.mark.parametrize(
    "gone", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"]
)
def test_half_a_set_of_variables_is_no_process_of_mpirun(gone):
    environ = openmpi(0, 2, 0, 2, 1)
    del environ[gone]
    with pytest.raises(IncompleteError, match=f"not {gone}"):
        mpi.find(environ, {}, "openmpi")


def test_pmi_alone_is_srun_or_flux_and_not_hydra():
    with pytest.raises(IncompleteError, match="MPI_LOCALRANKID"):
        mpi.find({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "3"}, {}, "mpich")


@pytest.mark.parametrize(
    ("environ", "both"),
    [
        (openmpi(4, 4, 0, 2, 2), ("OMPI_COMM_WORLD_RANK='4'", "OMPI_COMM_WORLD_SIZE='4'")),
        (
            openmpi(0, 4, 2, 2, 2),
            ("OMPI_COMM_WORLD_LOCAL_RANK='2'", "OMPI_COMM_WORLD_LOCAL_SIZE='2'"),
        ),
        (openmpi(0, 2, 0, 4, 1), ("OMPI_COMM_WORLD_LOCAL_SIZE='4'", "OMPI_COMM_WORLD_SIZE='2'")),
        (openmpi(1, 2, 1, 2, 1, PMIX_RANK="0"), ("OMPI_COMM_WORLD_RANK='1'", "PMIX_RANK='0'")),
    ],
)
def test_a_contradiction_quotes_both_variables(environ, both):
    with pytest.raises(ConfigError) as caught:
        mpi.find(environ, {}, "openmpi")
    assert all(each in caught.value.message for each in both)


def refusal(environ):
    """Return the hint with which this process is refused, if it is."""
    try:
        mpi.find(environ, {}, "openmpi")
    except ConfigError as error:
        return error.hint
    return None


@pytest.mark.parametrize("layout", [[3, 1], [2, 1, 1], [1, 2, 1], [3, 2, 1]])
def test_uneven_nodes_are_refused_by_at_least_one_process(layout):
    places = [
        (node, local_rank)
        for node, local_size in enumerate(layout)
        for local_rank in range(local_size)
    ]
    hints = [
        refusal(openmpi(rank, sum(layout), local_rank, layout[node], len(layout)))
        for rank, (node, local_rank) in enumerate(places)
    ]
    assert any(hints)
    assert all("mpirun -N 1" in hint for hint in hints if hint)


def test_ranks_dealt_out_in_turn_are_refused_by_at_least_one_process():
    """``--map-by node``: some of the processes look as if they were numbered node by node."""
    hints = [refusal(openmpi(rank, 6, rank // 3, 2, 3)) for rank in range(6)]
    assert any(hints)
    assert not all(hints)
    assert all("--map-by slot" in hint for hint in hints if hint)
