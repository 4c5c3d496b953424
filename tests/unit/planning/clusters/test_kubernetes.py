from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.planning.clusters import kubernetes
from distlaunch.planning.clusters.environment_reader import IncompleteError
from distlaunch.planning.clusters.select import select
from tests.facts import mentions

POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "HOSTNAME": "web-6d4cf56db6-x2x9k",
}
# Kubeflow Trainer 2.3: what its torch plugin sets, and nothing else.
TRAINER_V2 = POD | {
    "HOSTNAME": "demo-node-0-1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "demo-node-0-0.demo",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}
# Training Operator 1.9: RANK is the pod's index, WORLD_SIZE is replicas x nproc.
PYTORCHJOB = POD | {
    "HOSTNAME": "demo-worker-0",
    "MASTER_ADDR": "demo-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "24",
    "RANK": "1",
    "PET_MASTER_ADDR": "demo-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "8",
    "PYTHONUNBUFFERED": "1",
}
ELASTIC = POD | {
    "HOSTNAME": "demo-worker-2",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "demo-worker-0:23456",
    "PET_RDZV_ID": "demo",
    "PET_NNODES": "2:4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "2",
    "RANK": "2",
    "WORLD_SIZE": "32",
}
# Kubernetes' documentation of Indexed Jobs; kubelet's /etc/hosts for a pod with a subdomain.
INDEXED = POD | {"HOSTNAME": "train-2", "JOB_COMPLETION_INDEX": "2", "--num-nodes": "4"}
HOSTS = (
    "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"
    "10.244.0.7\t{pod}.{service}.default.svc.cluster.local\t{pod}\n"
)
LWS = POD | {
    "LWS_LEADER_ADDRESS": "vllm-0.vllm.default",
    "LWS_GROUP_SIZE": "3",
    "LWS_WORKER_INDEX": "2",
}
# Volcano's documentation of its plugins env and svc, and its plugin pytorch.
VOLCANO = POD | {
    "HOSTNAME": "demo-worker-1",
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_MASTER_HOSTS": "demo-master-0.demo",
    "VC_MASTER_NUM": "1",
    "VC_WORKER_HOSTS": "demo-worker-0.demo,demo-worker-1.demo",
    "VC_WORKER_NUM": "2",
}


def find(environ, texts=None, **more):
    return kubernetes.find({**environ, **more}, texts or {})


def indexed(pod, service, **more):
    return find(
        INDEXED, {"/etc/hosts": HOSTS.format(pod=pod, service=service)}, HOSTNAME=pod, **more
    )


def names(found):
    return [host.name for host in found.hosts]


def test_a_pod_that_stands_alone_is_no_job():
    assert find(POD) is None
    assert find(POD, HOSTNAME="db-0") is None


def test_trainer_v2_is_known_by_its_pet_variables_alone():
    found = find(TRAINER_V2)
    assert (found.source, found.part, found.node_rank) == ("kubernetes", "node", 1)
    assert names(found) == ["demo-node-0-0.demo", "demo-node-0-1.demo", "demo-node-0-2.demo"]
    assert (found.master_addr, found.master_port) == ("demo-node-0-0.demo", 29500)
    assert {host.slots for host in found.hosts} == {None}


def test_pytorchjobs_rank_is_the_pods():
    found = find(PYTORCHJOB)
    assert (found.node_rank, found.local_rank, found.part) == (1, None, "node")
    assert names(found) == ["demo-master-0", "demo-worker-0", "demo-worker-1"]
    assert {host.slots for host in found.hosts} == {8}
    rank = next(origin for origin in found.origins if origin.value == "node rank")
    assert rank.source == "PET_NODE_RANK"
    assert len(rank.instead_of) == 1
    assert mentions(rank.instead_of, "RANK='1'")


@pytest.mark.parametrize("world", ["3", "24"])
def test_pytorchjobs_world_size_counts_pods_or_processes_by_release(world):
    assert len(find(PYTORCHJOB, WORLD_SIZE=world).hosts) == 3


def test_an_elastic_pytorchjob_has_a_range_of_nodes():
    found = find(ELASTIC)
    assert (found.nodes, len(found.hosts), found.node_rank) == ((2, 4), 4, 2)
    assert (found.master_addr, found.master_port, found.job_id) == ("demo-worker-0", 23456, "demo")
    assert names(found)[1] == "demo-worker-1"


def test_an_elastic_job_needs_no_rank():
    environ = {name: value for name, value in ELASTIC.items() if name != "PET_NODE_RANK"}
    assert find(environ).node_rank is None


def test_pet_variables_count_without_kubernetes():
    found = find(
        {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "0",
            "PET_MASTER_ADDR": "10.0.0.1",
            "PET_NPROC_PER_NODE": "gpu",
        }
    )
    assert (names(found), found.node_rank) == (["10.0.0.1", "node-1"], 0)


def test_the_jobs_index_stands_in_for_a_missing_node_rank():
    environ = {name: value for name, value in TRAINER_V2.items() if name != "PET_NODE_RANK"}
    assert find(environ).node_rank == 1
    del environ["JOB_COMPLETION_INDEX"]
    assert find(environ, **{"--node-rank": "2"}).node_rank == 2


def test_several_nodes_without_a_rank_are_not_trained_on_alone():
    with pytest.raises(ConfigError, match=r"PET_NNODES='2', .* PET_NODE_RANK") as caught:
        select({"PET_NNODES": "2"}, {})
    assert "--node-rank" in caught.value.hint


def test_an_indexed_jobs_pods_are_named_after_this_one():
    found = indexed("train-2", "svc")
    assert (found.node_rank, found.part) == (2, "node")
    assert names(found) == [f"train-{index}.svc.default.svc.cluster.local" for index in range(4)]
    assert found.master_addr == names(found)[0]
    assert kubernetes.files(INDEXED) == ("/etc/hosts",)


def test_an_indexed_job_does_not_give_its_number_of_pods():
    environ = {name: value for name, value in INDEXED.items() if name != "--num-nodes"}
    with pytest.raises(ConfigError) as caught:
        find(environ)
    assert "JOB_COMPLETION_INDEX='2'" in caught.value.message
    assert "--num-nodes" in caught.value.hint


def test_each_pod_of_an_indexed_job_may_train_alone():
    assert find(INDEXED, **{"--num-nodes": "1"}) is None


def test_without_a_subdomain_pods_cannot_find_each_other_and_that_is_reported():
    found = find(INDEXED, {"/etc/hosts": "10.244.0.7\ttrain-2\n"})
    assert (names(found)[0], found.master_addr) == ("train-0", None)
    assert "subdomain" in found.notes[0]
    assert not any(host.known for host in found.hosts)


def test_a_master_address_in_the_pod_template_is_taken():
    found = find(INDEXED, MASTER_ADDR="train-0.svc", MASTER_PORT="29501")
    assert (found.master_addr, found.master_port, found.notes) == ("train-0.svc", 29501, ())


def test_a_jobsets_pods_are_those_of_an_indexed_job():
    """Names and subdomain as JobSet makes them: JOBSET-REPLICATEDJOB-JOB-POD in the subdomain
    JOBSET."""
    found = indexed("demo-workers-0-2", "demo")
    assert names(found)[3] == "demo-workers-0-3.demo.default.svc.cluster.local"
    assert found.node_rank == 2


def test_the_second_replica_of_a_jobset_cannot_number_itself():
    with pytest.raises(ConfigError, match=r"replica 1 .* JobSet's"):
        indexed("demo-workers-1-2", "demo")
    assert indexed("demo-workers-1-2", "demo", **{"--node-rank": "3"}).node_rank == 3


def test_a_statefulsets_pods_are_numbered_by_their_names():
    texts = {"/etc/hosts": HOSTS.format(pod="db-1", service="db")}
    found = find(POD, texts, HOSTNAME="db-1", **{"--num-nodes": "2"})
    assert (found.node_rank, names(found)[0]) == (1, "db-0.db.default.svc.cluster.local")
    assert find(POD, {}, HOSTNAME="db-1", **{"--num-nodes": "2"}) is None


def test_a_leader_worker_sets_group_is_named_after_its_leader():
    found = find(LWS)
    assert names(found) == ["vllm-0.vllm.default", "vllm-0-1.vllm.default", "vllm-0-2.vllm.default"]
    assert (found.node_rank, found.master_addr) == (2, "vllm-0.vllm.default")


def test_volcanos_pytorch_plugin_ranks_pods():
    found = find(
        VOLCANO, RANK="2", WORLD_SIZE="3", MASTER_ADDR="demo-master-0.demo", MASTER_PORT="23456"
    )
    assert (found.node_rank, found.master_port) == (2, 23456)
    assert names(found) == ["demo-master-0.demo", "demo-worker-0.demo", "demo-worker-1.demo"]


def test_without_the_plugin_volcanos_pods_find_themselves_by_name():
    found = find(VOLCANO)
    assert (found.node_rank, found.master_addr) == (2, "demo-master-0.demo")


def test_a_volcano_job_of_one_task_is_numbered_by_its_index():
    environ = {name: value for name, value in VOLCANO.items() if "MASTER" not in name}
    assert find(environ, HOSTNAME="unknown").node_rank == 1


def test_volcano_tasks_that_may_not_train_are_not_guessed_at():
    with pytest.raises(IncompleteError, match="VC_"):
        find(VOLCANO, VC_PS_HOSTS="demo-ps-0.demo", VC_PS_NUM="1")
    with pytest.raises(IncompleteError, match="plugin svc"):
        find(POD, VC_TASK_INDEX="0")


def test_an_mpijobs_launcher_has_all_hosts_in_a_file():
    """mpi-operator v2beta1: the host file of Open MPI."""
    environ = POD | {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    }
    assert kubernetes.files(environ) == ("/etc/mpi/hostfile",)
    hostfile = "demo-worker-0.demo.default.svc slots=2\ndemo-worker-1.demo.default.svc slots=2\n"
    found = find(environ, {"/etc/mpi/hostfile": hostfile})
    assert (found.part, [host.slots for host in found.hosts], found.node_rank) == (
        "all",
        [2, 2],
        None,
    )
    with pytest.raises(ConfigError, match="/etc/mpi/hostfile"):
        find(environ, {"/etc/mpi/hostfile": None})


def test_an_mpijobs_worker_is_started_from_its_launcher():
    with pytest.raises(IncompleteError):
        find(POD, K_MPI_JOB_ROLE="worker")


@pytest.mark.parametrize(
    ("environ", "both"),
    [
        (TRAINER_V2 | {"PET_NODE_RANK": "3"}, ("PET_NODE_RANK='3'", "PET_NNODES='3'")),
        (PYTORCHJOB | {"RANK": "0"}, ("RANK='0'", "PET_NODE_RANK='1'")),
        (PYTORCHJOB | {"WORLD_SIZE": "5"}, ("WORLD_SIZE='5'", "PET_NNODES='3'")),
        (LWS | {"LWS_WORKER_INDEX": "3"}, ("LWS_WORKER_INDEX='3'", "LWS_GROUP_SIZE='3'")),
        (INDEXED | {"JOB_COMPLETION_INDEX": "4"}, ("JOB_COMPLETION_INDEX='4'", "--num-nodes='4'")),
        (VOLCANO | {"VC_WORKER_NUM": "3"}, ("VC_WORKER_HOSTS=", "VC_WORKER_NUM='3'")),
        (VOLCANO | {"RANK": "3", "WORLD_SIZE": "3"}, ("RANK='3'", "WORLD_SIZE='3'")),
    ],
)
def test_a_contradiction_quotes_both_variables(environ, both):
    with pytest.raises(ConfigError) as caught:
        find(environ)
    assert all(each in caught.value.message for each in both)


def test_an_index_within_one_of_several_jobs_may_be_lower_than_the_rank_and_never_higher():
    found = kubernetes.find(TRAINER_V2 | {"PET_NODE_RANK": "2"}, {})
    assert found.node_rank == 2
    lost = [line for origin in found.origins for line in origin.instead_of]
    assert mentions(lost, "JOB_COMPLETION_INDEX='1'", "Job")
    with pytest.raises(ConfigError, match="PET_NODE_RANK='1' and JOB_COMPLETION_INDEX='2'"):
        kubernetes.find(TRAINER_V2 | {"JOB_COMPLETION_INDEX": "2"}, {})


def test_other_controllers_are_named_as_losers_and_a_larger_group_is_a_contradiction():
    found = kubernetes.find(LWS | {"PET_NNODES": "3", "PET_NODE_RANK": "2"}, {})
    lost = [line for origin in found.origins for line in origin.instead_of]
    assert sum(line.startswith("LWS_") for line in lost) == 2
    assert mentions(lost, "LWS_GROUP_SIZE='3'", "PET_NNODES")
    assert mentions(lost, "LWS_WORKER_INDEX='2'", "PET_NNODES")
    with pytest.raises(ConfigError, match="PET_NNODES='1' and LWS_GROUP_SIZE='3'"):
        kubernetes.find(LWS | {"PET_NNODES": "1"}, {})


def test_a_master_that_is_another_pod_than_rank_0_is_an_error():
    ranks = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "VC_TASK_INDEX": "0",
        "VC_MASTER_HOSTS": "a.j",
        "VC_WORKER_HOSTS": "b.j",
    }
    assert kubernetes.find(POD | ranks | {"MASTER_ADDR": "a.j"}, {}).master_addr == "a.j"
    with pytest.raises(
        ConfigError, match=r"MASTER_ADDR='b\.j' and VC_WORKER_HOSTS='b\.j' contradict"
    ):
        kubernetes.find(POD | ranks | {"MASTER_ADDR": "b.j"}, {})
    with pytest.raises(ConfigError, match=r"MASTER_ADDR='train-2' .* JOB_COMPLETION_INDEX='2'"):
        kubernetes.find(INDEXED | {"MASTER_ADDR": "train-2"}, {})


def test_a_torchrun_worker_in_the_pod_does_not_contradict_it():
    inside = {"RANK": "13", "LOCAL_RANK": "5", "WORLD_SIZE": "24", "TORCHELASTIC_RUN_ID": "none"}
    assert find(PYTORCHJOB | inside).node_rank == 1


@pytest.mark.parametrize("value", ["0", "4:2", "a", ":", "2:", "1:2:3", "999999999"])
def test_a_number_of_nodes_that_is_none_is_an_error(value):
    with pytest.raises(ConfigError, match="PET_NNODES"):
        find(TRAINER_V2, PET_NNODES=value)
