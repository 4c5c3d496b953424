from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.planning.clusters import batch
from distlaunch.planning.clusters.environment_reader import IncompleteError
from tests.facts import mentions

# Forms as the manuals have them: OpenPBS and Torque, LSF, Grid Engine, flux-environment(7).
PBS = {"PBS_JOBID": "12[3].server", "PBS_NODEFILE": "/var/spool/pbs/aux/12", "PBS_O_WORKDIR": "/w"}
LSF = {
    "LSB_JOBID": "9",
    "LSB_DJOB_HOSTFILE": "/l/hosts",
    "LSB_MCPU_HOSTS": "h1 4 h2 2",
    "LSB_HOSTS": "h1 h1 h1 h1 h2 h2",
}
SGE = {"JOB_ID": "5", "PE_HOSTFILE": "/s/pe_hostfile", "NSLOTS": "6", "NHOSTS": "2", "PE": "mpi"}
FLUX = {
    "FLUX_JOB_ID": "ƒABC",
    "FLUX_JOB_SIZE": "8",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "5",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_URI": "local:///run/flux/local",
}

AWS = {
    "AWS_BATCH_JOB_ID": "ad4a2e73-6f33-4174-957b-cf8d3537ef23#1",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.5",
}


def hosts(found):
    return [(host.name, host.slots) for host in found.hosts]


def pbs(nodefile, gpufile=None, **more):
    environ = PBS | more | ({"PBS_GPUFILE": "/g"} if gpufile is not None else {})
    return batch.find(environ, {PBS["PBS_NODEFILE"]: nodefile, "/g": gpufile}, "pbs")


@pytest.mark.parametrize("system", ["pbs", "lsf", "sge", "flux", "aws-batch"])
def test_a_plain_shell_is_no_batch_job(system):
    assert batch.find({"JOB_ID": "3", "FLUX_URI": "local:///x"}, {}, system) is None


def test_a_pbs_host_has_a_slot_for_each_of_its_lines_in_their_order():
    found = pbs("n2\r\nn2\nn1\nn2\n\n")
    assert (found.source, found.part, found.node_rank, found.job_id) == (
        "pbs",
        "all",
        None,
        "12-3-.server",
    )
    assert hosts(found) == [("n2", 3), ("n1", 1)]
    assert "cores" in found.notes[0]


def test_a_pbs_host_with_one_line_leaves_its_slots_open():
    found = pbs("n1\nn2\n")
    assert (hosts(found), found.notes) == ([("n1", None), ("n2", None)], ())


def test_torques_gpus_win_over_its_cores():
    found = pbs("n1\n" * 8 + "n2\n" * 8, "n1-gpu0\nn1-gpu2\nn2-gpu1\n")
    assert hosts(found) == [("n1", 2), ("n2", 1)]
    assert found.hosts[0].devices == ("0", "2")


@pytest.mark.parametrize(
    ("gpufile", "text"), [("n1\n", "/g:1: 'n1': expected HOST-gpuN"), ("n9-gpu0\n", "n9-gpu0")]
)
def test_an_odd_gpu_file_is_an_error_with_its_line(gpufile, text):
    with pytest.raises(ConfigError) as caught:
        pbs("n1\n", gpufile)
    assert text in caught.value.message


def test_a_node_file_that_is_gone_or_empty_is_an_error():
    for content in (None, "\n\n"):
        with pytest.raises(ConfigError, match="PBS_NODEFILE"):
            pbs(content)


def test_a_node_file_is_not_believed_outside_of_a_job():
    with pytest.raises(IncompleteError, match="PBS_JOBID"):
        batch.find({"PBS_NODEFILE": "/old"}, {"/old": "n1\n"}, "pbs")


def test_a_line_that_is_no_host_is_named_by_file_and_line():
    with pytest.raises(ConfigError, match="/var/spool/pbs/aux/12:2: 'a b'"):
        pbs("n1\na b\n")


@pytest.mark.parametrize(
    "gone", [(), ("LSB_DJOB_HOSTFILE",), ("LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS")]
)
def test_lsf_has_the_same_list_in_three_variables(gone):
    environ = {name: value for name, value in LSF.items() if name not in gone}
    found = batch.find(environ, {"/l/hosts": "h1\n" * 4 + "h2\n" * 2}, "lsf")
    assert (found.source, hosts(found), found.job_id) == ("lsf", [("h1", 4), ("h2", 2)], "9")


def test_lsfs_launch_host_runs_no_workers():
    found = batch.find(LSF, {"/l/hosts": "batch5\n" + "a01n01\n" * 42 + "a01n02\n" * 42}, "lsf")
    assert hosts(found) == [("a01n01", 42), ("a01n02", 42)]
    assert mentions(found.notes, "batch5")


@pytest.mark.parametrize(
    "pairs",
    [
        "batch01 1 batch02 1",  # a cluster that calls its nodes so
        "batch01 1 batch02 4",
        "login1 1 n1 1",
        "n1 1 n2 4",
        "batch01 2 n2 4",
        "batch01 1",
    ],
)
def test_a_host_that_may_be_one_of_the_nodes_is_kept(pairs):
    found = batch.find({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": pairs}, {}, "lsf")
    assert [host.name for host in found.hosts] == pairs.split()[::2]


def test_slots_are_cores_and_gpus_are_gpus():
    assert {host.unit for host in pbs("n1\nn1\n").hosts} == {"cores"}
    assert {host.unit for host in pbs("n1\nn1\n", "n1-gpu0\n").hosts} == {"gpus"}
    lsf = batch.find({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "n1 4"}, {}, "lsf")
    assert {host.unit for host in lsf.hosts} == {"cores"}


def test_cpus_are_known_if_the_system_gives_those_of_one_node():
    assert pbs("n1\nn2\n", NCPUS="8", PBS_NUM_PPN="4").cpus == 8
    assert pbs("n1\nn2\n", "n1-gpu0\n", PBS_NUM_PPN="4").cpus == 4
    assert pbs("n1\nn1\n").cpus is None
    assert batch.find({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "n1 4"}, {}, "lsf").cpus == 4
    assert batch.find({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "n1 4 n2 4"}, {}, "lsf").cpus is None


def test_lsf_without_hosts_is_not_used():
    with pytest.raises(IncompleteError):
        batch.find({"LSB_JOBID": "9"}, {}, "lsf")


@pytest.mark.parametrize("value", ["h1", "h1 x", "h1 0", "h1 -1"])
def test_lsfs_pairs_must_be_pairs(value):
    with pytest.raises(ConfigError, match="LSB_MCPU_HOSTS"):
        batch.find({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": value}, {}, "lsf")


def test_sges_hosts_add_over_queues():
    content = "h1 2 all.q@h1 UNDEFINED\nh2 2 all.q@h2 UNDEFINED\nh1 2 gpu.q@h1 UNDEFINED\n"
    found = batch.find(SGE, {"/s/pe_hostfile": content}, "sge")
    assert (hosts(found), found.job_id) == ([("h1", 4), ("h2", 2)], "5")


def test_sges_file_and_its_number_of_hosts_must_agree():
    with pytest.raises(ConfigError) as caught:
        batch.find(SGE, {"/s/pe_hostfile": "h1 2 q U\n"}, "sge")
    assert "NHOSTS='2'" in caught.value.message
    assert "PE_HOSTFILE='/s/pe_hostfile'" in caught.value.message


def test_an_sge_line_without_slots_is_an_error():
    with pytest.raises(ConfigError, match="/s/pe_hostfile:1"):
        batch.find(SGE, {"/s/pe_hostfile": "h1\n"}, "sge")


def test_flux_numbers_tasks_node_by_node():
    found = batch.find(FLUX, {}, "flux")
    assert (found.source, found.part, found.node_rank, found.local_rank) == ("flux", "worker", 1, 1)
    assert [host.slots for host in found.hosts] == [4, 4]
    assert found.job_id == "ABC"


def test_a_flux_task_on_each_node_is_a_launcher_of_the_node():
    one = FLUX | {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": "0"}
    assert (batch.find(one, {}, "flux").part, batch.find(one, {}, "flux").node_rank) == ("node", 1)


def test_uneven_or_cyclic_flux_tasks_are_refused():
    for name, value in (("FLUX_JOB_SIZE", "7"), ("FLUX_TASK_RANK", "4")):
        with pytest.raises(ConfigError, match=f"{name}='{value}'"):
            batch.find(FLUX | {name: value}, {}, "flux")


def test_half_of_flux_is_not_used():
    with pytest.raises(IncompleteError):
        batch.find({"FLUX_JOB_SIZE": "7"}, {}, "flux")


def aws(**more):
    """Return the allocation of a node of AWS Batch. None leaves a variable out."""
    environ = AWS | {f"AWS_BATCH_JOB_{name}": value for name, value in more.items()}
    return batch.find(
        {name: value for name, value in environ.items() if value is not None}, {}, "aws-batch"
    )


def test_a_node_of_aws_batch_gets_the_address_of_the_main_node():
    found = aws()
    assert (found.source, found.part, found.node_rank) == ("aws-batch", "node", 1)
    assert [(host.name, host.known) for host in found.hosts] == [
        ("10.0.0.5", True),
        ("index-1", False),
        ("index-2", False),
    ]
    hosts = aws(NODE_INDEX="0", MAIN_NODE_INDEX="1").hosts
    assert [host.name for host in hosts] == ["10.0.0.5", "index-0", "index-2"]
    assert (found.master_addr, found.master_port) == ("10.0.0.5", None)
    assert all(origin.source for origin in found.origins)


@pytest.mark.parametrize("main", ["0", "1", "2"])
def test_the_main_node_of_aws_batch_has_rank_0_and_the_ranks_have_no_gap(main):
    ranks = {}
    for index in ("0", "1", "2"):
        address = None if index == main else "10.0.0.5"
        found = aws(NODE_INDEX=index, MAIN_NODE_INDEX=main, MAIN_NODE_PRIVATE_IPV4_ADDRESS=address)
        ranks[index] = found.node_rank
    assert ranks[main] == 0
    assert sorted(ranks.values()) == [0, 1, 2]
    others = [ranks[index] for index in ranks if index != main]
    assert others == sorted(others)


def test_the_main_node_of_aws_batch_has_no_address_but_its_own():
    found = aws(NODE_INDEX="0", MAIN_NODE_PRIVATE_IPV4_ADDRESS=None)
    assert (found.node_rank, found.master_addr) == (0, None)
    assert (found.hosts[0].name, found.hosts[0].known) == ("localhost", True)


def test_all_nodes_of_aws_batch_have_one_id_for_their_job():
    ids = {aws(NODE_INDEX=index, ID=f"ad4a2e73#{index}").job_id for index in ("1", "2")}
    assert ids == {"ad4a2e73"}


@pytest.mark.parametrize(
    "gone", ["NODE_INDEX", "MAIN_NODE_INDEX", "MAIN_NODE_PRIVATE_IPV4_ADDRESS"]
)
def test_a_node_of_aws_batch_with_too_few_variables_is_one_of_several(gone):
    with pytest.raises(IncompleteError, match=f"AWS_BATCH_JOB_{gone}") as caught:
        aws(**{gone: None})
    assert caught.value.of_several


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"NODE_INDEX": "3"},
            "AWS_BATCH_JOB_NODE_INDEX='3' and AWS_BATCH_JOB_NUM_NODES='3' contradict",
        ),
        (
            {"MAIN_NODE_INDEX": "3"},
            "AWS_BATCH_JOB_MAIN_NODE_INDEX='3' and AWS_BATCH_JOB_NUM_NODES='3' contradict",
        ),
        ({"NUM_NODES": "x"}, "AWS_BATCH_JOB_NUM_NODES='x': expected a number from 1"),
        ({"MAIN_NODE_PRIVATE_IPV4_ADDRESS": "a b"}, "'a b' is not a host name or address"),
    ],
    ids=str,
)
def test_variables_of_aws_batch_that_cannot_be_right_are_quoted(more, text):
    with pytest.raises(ConfigError) as caught:
        aws(**more)
    assert text in caught.value.message


def test_an_array_job_of_aws_batch_is_no_job_of_several_nodes():
    environ = {
        "AWS_BATCH_JOB_ID": "a:3",
        "AWS_BATCH_JOB_ARRAY_INDEX": "3",
        "AWS_BATCH_JOB_ARRAY_SIZE": "10",
    }
    assert batch.find(environ, {}, "aws-batch") is None
