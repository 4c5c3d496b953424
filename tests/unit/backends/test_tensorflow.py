from __future__ import annotations

import json

import pytest

from distlaunch.backends.backend_options import chosen_options
from distlaunch.backends.tensorflow import TensorFlow
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import (
    CpuInventory,
    Gpu,
    GpuInventory,
    MigDevice,
    Node,
    Topology,
)
from distlaunch.planning.facts import Facts
from distlaunch.planning.local_topology import local_topology
from distlaunch.planning.train_options import TrainOptions

CLUSTER = ("10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:3", "[fd00::2]:4")


def backend(*words: str) -> TensorFlow:
    return TensorFlow(chosen_options(words, TensorFlow.options(), "tensorflow"), {})


def configs(*words: str, cluster: tuple[str, ...] = CLUSTER) -> list[dict]:
    """Return TF_CONFIG of each worker, by rank."""
    made = backend(*words)
    reported = made.cluster_variables(cluster)
    found = [made.task_variables(len(cluster), rank) for rank in range(len(cluster))]
    assert all(list(each) == ["TF_CONFIG"] for each in (reported, *found))
    return [json.loads(reported["TF_CONFIG"] + each["TF_CONFIG"]) for each in found]


def tasks(found: list[dict]) -> list[tuple[str, int]]:
    return [(each["task"]["type"], each["task"]["index"]) for each in found]


def topology_of(there: int, *words: str, mig: tuple[MigDevice, ...] = (), **options) -> Topology:
    each = tuple(
        Gpu(index=index, uuid=f"GPU-{index}", name="H100", numa_node=index // 2, mig=mig)
        for index in range(there)
    )
    facts = Facts(
        environ={},
        cwd="/w",
        hostname="a",
        python="/python",
        cpus=CpuInventory(allowed=(0,), online=1),
        gpus=GpuInventory(gpus=each, source="nvml"),
        paths={},
        texts={},
        programs={},
    )
    return local_topology(backend(*words).sized(TrainOptions(**options)), facts)


# --- the cluster


def test_all_are_workers_and_the_cluster_is_the_same_for_all():
    found = configs()
    assert {json.dumps(each["cluster"]) for each in found} == {
        json.dumps({"worker": list(CLUSTER)})
    }
    assert tasks(found) == [("worker", rank) for rank in range(4)]


def test_a_chief_is_rank_0_and_workers_are_counted_after_it():
    found = configs("chief=on")
    assert [each["cluster"] for each in found] == [
        {"chief": [CLUSTER[0]], "worker": list(CLUSTER[1:])}
    ] * 4
    assert tasks(found) == [("chief", 0), ("worker", 0), ("worker", 1), ("worker", 2)]


def test_an_evaluator_is_the_last_rank_and_not_in_the_cluster():
    found = configs("evaluator")
    assert [each["cluster"] for each in found] == [{"worker": list(CLUSTER[:3])}] * 4
    assert tasks(found) == [("worker", 0), ("worker", 1), ("worker", 2), ("evaluator", 0)]


def test_a_chief_and_an_evaluator_leave_no_worker_of_two():
    found = configs("evaluator", "chief", cluster=CLUSTER[:2])
    assert [each["cluster"] for each in found] == [{"chief": [CLUSTER[0]]}] * 2
    assert tasks(found) == [("chief", 0), ("evaluator", 0)]


def test_one_worker_is_not_to_evaluate_alone():
    alone, two = (Topology(nodes=(Node(host="a", slots=slots),), device="cpu") for slots in (1, 2))
    with pytest.raises(ConfigError, match="-o evaluator"):
        backend("evaluator").check(alone)
    backend("evaluator").check(two)
    backend("evaluator=off").check(alone)


# --- sizes


@pytest.mark.parametrize("words", [(), ("per=gpu",)])
def test_each_worker_sees_its_own_gpu_alone(words):
    [node] = topology_of(3, *words).nodes
    assert (node.slots, node.masks, node.isolated) == (3, (("0",), ("1",), ("2",)), True)


def test_one_worker_a_node_has_all_gpus():
    found = topology_of(3, "per=node")
    [node] = found.nodes
    assert (found.device, node.slots, node.masks, node.isolated) == (
        "cuda",
        1,
        (("0", "1", "2"),),
        False,
    )
    assert (node.devices, len(node.gpus), node.numa) == (("0", "1", "2"), 3, ())


def test_one_worker_a_node_has_the_gpus_that_are_chosen():
    [node] = topology_of(3, "per=node", gpus="2,0").nodes
    assert (node.slots, node.masks) == (1, (("2", "0"),))


def test_one_worker_a_node_has_as_many_gpus_as_are_asked_for():
    found = topology_of(3, "per=node", gpus_per_node=2)
    [node] = found.nodes
    assert (found.device, node.slots, node.masks, node.devices) == (
        "cuda",
        1,
        (("0", "1"),),
        ("0", "1"),
    )
    for there, message in (
        (1, "2 GPUs asked for, but only 1"),
        (0, "2 GPUs asked for, but no GPU"),
    ):
        with pytest.raises(ConfigError, match=message):
            topology_of(there, "per=node", gpus_per_node=2)
    with pytest.raises(ConfigError, match=r"--device cpu .* GPUs"):
        topology_of(3, "per=node", gpus_per_node=2, device="cpu")


def test_one_worker_is_not_given_several_slices_of_a_gpu_of_which_it_would_use_one():
    slices = tuple(MigDevice(uuid=f"MIG-{number}", profile="1g") for number in range(3))
    [node] = topology_of(1, "per=node", mig=slices, gpus_per_node=1).nodes
    assert (node.slots, node.masks) == (1, (("MIG-0",),))
    with pytest.raises(ConfigError, match=r"CUDA .* slice"):
        topology_of(1, "per=node", mig=slices, gpus_per_node=2)


@pytest.mark.parametrize(
    ("gpus", "options"), [(0, {}), (3, {"device": "cpu"}), (0, {"procs_per_node": 1})], ids=str
)
def test_one_worker_a_node_does_without_gpus(gpus, options):
    found = topology_of(gpus, "per=node", **options)
    assert (found.device, [node.slots for node in found.nodes], found.nodes[0].masks) == (
        "cpu",
        [1],
        ((),),
    )


def test_gpus_that_are_asked_for_have_to_be_there():
    with pytest.raises(ConfigError, match="no GPU"):
        topology_of(0, "per=node", device="cuda")


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": 2},
        {"num_gpus": "auto"},
        {"num_procs": 1},
        {"procs_per_node": 2},
        {"isolate_gpus": True},
    ],
    ids=str,
)
def test_one_worker_a_node_contradicts_other_sizes(options):
    (field,) = options
    with pytest.raises(
        ConfigError, match=f"-o per=node and --{field.replace('_', '-')} contradict"
    ):
        backend("per=node").sized(TrainOptions(**options))


# --- the environment


def test_keras_2_is_used_unless_the_user_chooses_otherwise():
    assert backend().default_variables(Topology(nodes=(), device="cpu")) == {
        "TF_USE_LEGACY_KERAS": "1"
    }
