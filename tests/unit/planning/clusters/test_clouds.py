from __future__ import annotations

import json

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.planning.clusters import clouds
from distlaunch.planning.clusters.environment_reader import IncompleteError

# Names and forms of values as each platform documents them; the values are made up.
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "8",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_IS_HETERO": "false",
    "TRAINING_JOB_NAME": "train-2026",
}
AZURE = {
    "AZUREML_NODE_COUNT": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-01-01_demo-1",
}
DSTACK = {
    "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2",
    "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_GPUS_PER_NODE": "8",
    "DSTACK_GPUS_NUM": "16",
}
PAI = {
    "MASTER_ADDR": "dlc18isgeayd-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "NPROC_PER_NODE": "8",
}
AIHC = {
    "AIHC_JOB_NAME": "demo",
    "MASTER_ADDR": "demo-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "NPROC_PER_NODE": "8",
}
VERTEX = {
    "CLUSTER_SPEC": json.dumps(
        {
            "cluster": {
                "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
                "workerpool1": [
                    "cmle-training-workerpool1-ab-0:2222",
                    "cmle-training-workerpool1-ab-1:2222",
                ],
                "workerpool2": ["cmle-training-workerpool2-ab-0:2222"],
            },
            "environment": "cloud",
            "task": {"type": "workerpool1", "index": 0},
        }
    ),
    "CLOUD_ML_JOB_ID": "123",
}
DETERMINED = {"DET_ALLOCATION_ID": "12.1", "DET_SLOT_IDS": "[0,1]", "DET_CONTAINER_ID": "x"}
RENDEZVOUS = {
    "container_addrs": ["10.0.0.1", "10.0.0.2"],
    "container_rank": 1,
    "container_slot_counts": [8, 2],
}


def find(system, environ, **more):
    return clouds.find({**environ, **more}, {}, system)


@pytest.mark.parametrize(
    ("system", "environ", "hosts", "slots", "master"),
    [
        ("sagemaker", SAGEMAKER, ["algo-1", "algo-2"], 8, ("algo-1", None)),
        ("azureml", AZURE, ["10.0.0.4", "node-1"], None, ("10.0.0.4", 6105)),
        ("skypilot", SKYPILOT, ["10.0.0.1", "10.0.0.2"], 8, ("10.0.0.1", None)),
        ("dstack", DSTACK, ["10.0.0.1", "10.0.0.2"], 8, ("10.0.0.1", None)),
        ("pai-dlc", PAI, ["dlc18isgeayd-master-0", "node-1"], 8, ("dlc18isgeayd-master-0", 23456)),
        ("baidu-aihc", AIHC, ["demo-master-0", "node-1"], 8, ("demo-master-0", 23456)),
        (
            "vertex",
            VERTEX,
            [
                "cmle-training-workerpool0-ab-0",
                "cmle-training-workerpool1-ab-0",
                "cmle-training-workerpool1-ab-1",
            ],
            None,
            ("cmle-training-workerpool0-ab-0", 2222),
        ),
    ],
)
def test_a_platform_gives_its_nodes_their_ranks(system, environ, hosts, slots, master):
    found = find(system, environ)
    assert (found.source, found.part, found.node_rank) == (system, "node", 1)
    assert [host.name for host in found.hosts] == hosts
    assert {host.slots for host in found.hosts} == {slots}
    assert (found.master_addr, found.master_port) == master
    assert all(origin.source for origin in found.origins)


@pytest.mark.parametrize(
    ("system", "environ", "unit", "known"),
    [
        ("sagemaker", SAGEMAKER, "gpus", [True, True]),
        ("skypilot", SKYPILOT, "gpus", [True, True]),
        ("dstack", DSTACK, "gpus", [True, True]),
        ("azureml", AZURE, "workers", [True, False]),
        ("pai-dlc", PAI, "workers", [True, False]),
    ],
)
def test_a_platforms_gpus_are_gpus_and_hosts_that_it_does_not_name_are_unknown(
    system, environ, unit, known
):
    found = find(system, environ)
    assert {host.unit for host in found.hosts} == {unit}
    assert [host.known for host in found.hosts] == known


def test_a_host_that_is_listed_twice_cannot_find_its_own_rank():
    with pytest.raises(ConfigError, match="SM_CURRENT_HOST='algo-2' and SM_HOSTS="):
        find("sagemaker", SAGEMAKER, SM_HOSTS='["algo-1", "algo-2", "algo-2"]')


def test_a_job_that_is_called_like_the_link_to_the_last_job_gets_another_folder():
    assert find("sagemaker", SAGEMAKER, TRAINING_JOB_NAME="latest").job_id == "latest-"


def test_a_master_that_is_not_the_first_host_is_an_error_that_quotes_both():
    with pytest.raises(
        ConfigError, match=r"DSTACK_MASTER_NODE_IP='10\.0\.0\.2' and DSTACK_NODES_IPS"
    ):
        find("dstack", DSTACK, DSTACK_MASTER_NODE_IP="10.0.0.2")


@pytest.mark.parametrize("system", [*clouds.SYSTEMS, "vertex", "determined"])
def test_a_shell_elsewhere_is_no_platform(system):
    assert (
        find(system, {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "PATH": "/bin"}) is None
    )


def test_a_mixed_cluster_gives_each_node_only_its_own_gpus():
    found = find("sagemaker", SAGEMAKER, SM_IS_HETERO="true")
    assert [host.slots for host in found.hosts] == [None, 8]


def test_no_gpus_leave_the_slots_open():
    assert {
        host.slots for host in find("skypilot", SKYPILOT, SKYPILOT_NUM_GPUS_PER_NODE="0").hosts
    } == {None}


def test_addresses_may_be_separated_by_spaces_or_commas():
    for value in ("10.0.0.1 10.0.0.2", "10.0.0.1,10.0.0.2"):
        assert len(find("dstack", DSTACK, DSTACK_NODES_IPS=value).hosts) == 2


def test_a_torch_worker_in_a_platforms_pod_is_not_taken_for_a_node():
    assert find("pai-dlc", PAI, LOCAL_RANK="0") is None
    assert find("pai-dlc", PAI, MASTER_ADDR="my-host") is None


def test_azures_processes_are_workers_if_there_are_several_a_node():
    several = AZURE | {"WORLD_SIZE": "8", "RANK": "6", "LOCAL_RANK": "2"}
    found = find("azureml", several)
    assert (found.part, found.node_rank, found.local_rank, found.hosts[0].slots) == (
        "worker",
        1,
        2,
        4,
    )


@pytest.mark.parametrize(
    ("system", "environ", "both"),
    [
        (
            "sagemaker",
            SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"},
            ("SM_CURRENT_HOST='algo-3'", "SM_HOSTS="),
        ),
        ("azureml", AZURE | {"NODE_RANK": "2"}, ("NODE_RANK='2'", "AZUREML_NODE_COUNT='2'")),
        ("azureml", AZURE | {"WORLD_SIZE": "3"}, ("WORLD_SIZE='3'", "AZUREML_NODE_COUNT='2'")),
        ("azureml", AZURE | {"WORLD_SIZE": "8", "RANK": "1"}, ("RANK='1'", "NODE_RANK='1'")),
        (
            "skypilot",
            SKYPILOT | {"SKYPILOT_NUM_NODES": "3"},
            ("SKYPILOT_NUM_NODES='3'", "SKYPILOT_NODE_IPS="),
        ),
        (
            "dstack",
            DSTACK | {"DSTACK_NODE_RANK": "2"},
            ("DSTACK_NODE_RANK='2'", "DSTACK_NODES_NUM='2'"),
        ),
        ("pai-dlc", PAI | {"RANK": "2"}, ("RANK='2'", "WORLD_SIZE='2'")),
    ],
)
def test_a_contradiction_quotes_both_variables(system, environ, both):
    with pytest.raises(ConfigError) as caught:
        find(system, environ)
    assert all(each in caught.value.message for each in both)


@pytest.mark.parametrize(
    "spec",
    [
        "{",
        "[" * 100_000,
        "[]",
        '{"cluster": {"workerpool0": 3}, "task": {"type": "workerpool0", "index": 0}}',
        '{"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool2", "index": 0}}',
        '{"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0", "index": 1}}',
        '{"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0", "index": true}}',
        '{"cluster": {"workerpool0": ["-oProxyCommand=x"]}, "task": {"type": "workerpool0", "index": 0}}',
        '{"cluster": {"workerpool0": [""]}, "task": {"type": "workerpool0", "index": 0}}',
        '{"cluster": {"workerpool0": ["a:1"]}, "task": {"type": [], "index": 0}}',
    ],
)
def test_a_cluster_spec_that_makes_no_sense_is_an_error(spec):
    with pytest.raises(ConfigError) as caught:
        find("vertex", {"CLUSTER_SPEC": spec})
    assert "CLUSTER_SPEC" in caught.value.message


def test_determined_hands_over_a_file():
    assert clouds.files(DETERMINED, "determined") == (clouds.DETERMINED_FILE,)
    found = clouds.find(DETERMINED, {clouds.DETERMINED_FILE: json.dumps(RENDEZVOUS)}, "determined")
    assert [(host.name, host.slots) for host in found.hosts] == [("10.0.0.1", 8), ("10.0.0.2", 2)]
    assert (found.node_rank, found.master_addr, found.job_id) == (1, "10.0.0.1", "12.1")


def test_determined_without_counts_knows_its_own_slots():
    info = {"container_addrs": ["10.0.0.1", "10.0.0.2"], "container_rank": 1}
    found = clouds.find(DETERMINED, {clouds.DETERMINED_FILE: json.dumps(info)}, "determined")
    assert [host.slots for host in found.hosts] == [None, 2]


def test_determined_without_its_file_is_not_used():
    with pytest.raises(IncompleteError):
        clouds.find(DETERMINED, {clouds.DETERMINED_FILE: None}, "determined")
