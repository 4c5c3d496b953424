from __future__ import annotations

import subprocess
import sys

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.planning.clusters import select as module
from distlaunch.planning.clusters.environment_reader import IncompleteError
from distlaunch.planning.clusters.select import NAMES, SYSTEMS, files, select
from tests.facts import mentions

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}
STEP = SLURM | {
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "0",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "web-abc"}
INDEXED = POD | {"HOSTNAME": "train-1", "JOB_COMPLETION_INDEX": "1"}


def source_of(environ, **more):
    found, _, _ = select(environ, {}, **more)
    return found.source if found else None


def test_a_plain_shell_has_no_source_and_nothing_to_explain():
    assert select({"PATH": "/bin", "HOME": "/root"}, {}) == (None, (), ())
    assert files({"PATH": "/bin"}) == ()


def test_a_plain_shell_imports_no_source():
    code = (
        "import sys; from distlaunch.planning.clusters.select import select, files\n"
        "files({'PATH': '/bin'}); select({'PATH': '/bin', 'RANK': '3', 'TF_CONFIG': '{}'}, {})\n"
        "print(*(n for n in sys.modules if n.startswith('distlaunch.planning.clusters.') and not n.endswith('.select') or n in {'json', 'distlaunch.planning.allocation'}))"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {_root()!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == []


def _root():
    return module.__file__.partition("/distlaunch/planning/")[0]


@pytest.mark.parametrize(
    "stale",
    [
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"},
        {
            "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        },
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"SLURM_JOB_ID": "42"},
        {"PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "0"},
        {"PBS_NODEFILE": "/gone"},
        {"NPROC_PER_NODE": "8", "WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"},
        {"CLUSTER_SPEC": "{}"},
        {"CLUSTER_SPEC": "/etc/cluster.yaml"},
    ],
)
def test_leftover_variables_in_a_shell_are_ignored_and_explained(stale):
    found, lost, _ = select(stale, {})
    assert found is None
    assert any(name in line for line in lost for name in stale)


HALVES = [
    {name: value for name, value in STEP.items() if name != "SLURM_LOCALID"},
    {name: value for name, value in STEP.items() if name != "SLURM_NODEID"},
    {name: value for name, value in STEP.items() if name != "SLURM_STEP_TASKS_PER_NODE"},
    {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "2", "SLURM_NTASKS": "4"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    {"PMI_RANK": "1", "PMI_SIZE": "4"},
    {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"},
    {"AZUREML_NODE_COUNT": "4"},
    {"SM_HOSTS": '["algo-1", "algo-2"]'},
    {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"},
    {"DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2", "DSTACK_NODES_NUM": "2"},
    {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "1"},
    {"LWS_GROUP_SIZE": "4"},
    {"VC_TASK_INDEX": "1"},
    {"VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "a,b", "VC_PS_HOSTS": "c"},
    {"PET_NODE_RANK": "1"},
    {"PBS_JOBID": "1", "PBS_NUM_NODES": "4"},
    POD
    | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0"},  # PyTorchJob before PET_*
]


@pytest.mark.parametrize("environ", HALVES)
def test_one_launcher_of_several_that_does_not_know_which_is_an_error(environ):
    with pytest.raises(IncompleteError) as caught:
        select(environ, {})
    assert caught.value.of_several
    assert caught.value.hint
    assert select(environ, {}, num_nodes="1")[0] is None
    assert select(environ, {}, wanted="flags")[0] is None


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"SLURM_JOB_ID": "42"},
        {"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "1"},
        {"VC_TASK_INDEX": "0"},
        {"PET_NODE_RANK": "0"},
        {"PBS_JOBID": "1"},
        {"LSB_JOBID": "1", "LSB_DJOB_NUMPROC": "8"},
        {"DET_ALLOCATION_ID": "a.1"},
        {"AIHC_JOB_NAME": "a"},
        {"K_MPI_JOB_ROLE": "worker"},
        {"CLUSTER_SPEC": "{}"},
    ],
)
def test_a_system_with_too_few_variables_is_always_reported(environ):
    found, _, notes = select(environ, {})
    assert found is None
    assert len(notes) == 1
    assert next(iter(environ)) in notes[0]


@pytest.mark.parametrize(
    "environ",
    [
        {"AZUREML_NODE_COUNT": "1"},
        {"SM_HOSTS": '["algo-1"]'},
        {"SKYPILOT_NODE_IPS": "10.0.0.1"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        POD | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        POD | {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_the_only_node_of_a_job_and_common_hostnames_are_not_shown(environ):
    assert select(environ, {})[::2] == (None, ())


def test_half_of_one_systems_variables_do_not_matter_if_another_is_complete():
    found, lost, notes = select(STEP | {"PMI_RANK": "1", "PMI_SIZE": "2"}, {})  # srun --mpi=pmi2
    assert (found.part, notes) == ("node", ())
    assert "MPI_LOCALRANKID" in lost[0]
    with pytest.raises(IncompleteError, match=r"^mpich"):
        select(SLURM | {"PMI_RANK": "1", "PMI_SIZE": "2"}, {})  # each would start the whole job


def test_mpirun_within_a_slurm_job_decides():
    found, lost, _ = select(SLURM | OPENMPI, {})
    assert found.source == "openmpi"
    assert len(lost) == 1
    assert mentions(lost, "SLURM_JOB_ID='42'", "slurm", "openmpi")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (STEP | {"PMI_RANK": "0", "PMI_SIZE": "2"}, "slurm"),  # srun --mpi=pmi2
        (SLURM | POD, "slurm"),  # Slurm in Kubernetes
        (
            SLURM | {"PBS_JOBID": "1", "PBS_NODEFILE": "/n"},
            "slurm",
        ),  # slurm-wlm-torque's generate_pbs_nodefile
        (SLURM | {"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "slurm"),
        (POD | {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"}, "skypilot"),
        (POD, None),
    ],
)
def test_the_innermost_launcher_decides(environ, expected):
    assert source_of(environ) == expected


def test_a_loser_is_not_even_read():
    assert source_of(SLURM | {"PET_NNODES": "rubbish"}) == "slurm"


def test_two_mpis_that_agree_are_fine_and_two_that_do_not_are_an_error_that_quotes_both():
    found, lost, _ = select(OPENMPI | HYDRA, {})
    assert (found.source, len(lost)) == ("openmpi", 1)
    assert mentions(lost, "PMI_RANK='1'", "openmpi")
    with pytest.raises(ConfigError) as caught:
        select(OPENMPI | HYDRA | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, {})
    assert "OMPI_COMM_WORLD_RANK='1'" in caught.value.message
    assert "PMI_RANK='0'" in caught.value.message
    assert (
        source_of(OPENMPI | HYDRA | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, wanted="mpich")
        == "mpich"
    )


def test_variables_that_mean_anything_are_named_where_the_source_does_not_read_them():
    _, lost, _ = select(SLURM | {"RANK": "5", "MASTER_ADDR": "n1"}, {})
    assert lost == ("RANK='5': slurm decides", "MASTER_ADDR='n1': slurm decides")
    _, lost, _ = select(OPENMPI | {"RANK": "1"}, {})
    assert lost == ("RANK='1': openmpi decides",)


def test_a_port_that_is_used_is_not_called_unused():
    found, lost, _ = select(
        OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29501"}, {}
    )
    assert (found.master_addr, found.master_port, lost) == ("n1", 29501, ())


def test_a_source_can_be_forced():
    assert source_of(SLURM | OPENMPI, wanted="slurm") == "slurm"
    assert select(SLURM | OPENMPI, {}, wanted="flags") == (None, (), ())


@pytest.mark.parametrize("name", [name for name, _, _ in SYSTEMS])
def test_a_forced_source_that_does_not_apply_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError) as caught:
        select({"PATH": "/bin"}, {}, wanted=name)
    assert caught.value.message.startswith(f"--source {name} ")
    assert caught.value.hint


def test_a_forced_source_with_half_its_variables_names_the_missing_ones():
    with pytest.raises(ConfigError, match=r"--source openmpi .* OMPI_COMM_WORLD_SIZE='4'"):
        select({"OMPI_COMM_WORLD_SIZE": "4"}, {}, wanted="openmpi")
    with pytest.raises(ConfigError, match=r"--source kubernetes .* KUBERNETES_SERVICE_HOST"):
        select(POD, {}, wanted="kubernetes")


def test_an_unknown_source_names_what_there_is():
    for ask in (select, files):
        with pytest.raises(ConfigError) as caught:
            ask({}, *([{}] if ask is select else []), wanted="slrum\n")
        assert r"slrum\n" in caught.value.message
        assert all(name in caught.value.hint for name in NAMES)


def test_options_fill_in_the_facts_that_an_indexed_job_lacks():
    found, _, _ = select(INDEXED, {}, num_nodes="4")
    assert (found.node_rank, len(found.hosts)) == (1, 4)
    found, _, _ = select(INDEXED, {}, num_nodes="2:4", node_rank=3)
    assert (found.node_rank, len(found.hosts)) == (3, 4)
    assert select(INDEXED, {}, num_nodes="1")[0] is None
    with pytest.raises(ConfigError, match="JOB_COMPLETION_INDEX='1'"):
        select(
            INDEXED | {"DISTLAUNCH_NUM_NODES": "4"}, {}
        )  # of an option, and the options are handed over
    with pytest.raises(ConfigError, match=r"--node-rank='0' .* JOB_COMPLETION_INDEX='1'"):
        select(INDEXED, {}, num_nodes="4", node_rank=0)


def test_the_files_of_all_that_may_apply_are_asked_for():
    assert files(INDEXED) == ("/etc/hosts",)
    assert files({"PBS_JOBID": "1", "PBS_NODEFILE": "/n", "PBS_GPUFILE": "/g"}) == ("/n", "/g")
    assert files(SLURM) == ()
