from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Gpu, GpuInventory, MigDevice, Topology
from distlaunch.planning.local_topology import local_topology
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions

FOUR = GpuInventory(
    gpus=tuple(
        Gpu(index=i, uuid=f"GPU-{i}0000000-0000", name="H100", numa_node=i // 2) for i in range(4)
    ),
    source="nvml",
)
SLICED = GpuInventory(
    gpus=(
        Gpu(
            index=0,
            uuid="GPU-a",
            mig=tuple(MigDevice(uuid=f"MIG-{x}", profile="1g.10gb") for x in "xyz"),
        ),
    ),
    source="nvml",
)
AMD = GpuInventory(
    gpus=tuple(Gpu(index=i, uuid=f"GPU-{i:016x}", vendor="amd") for i in range(2)), source="kfd"
)
BROKEN = GpuInventory(source="device files", problem="nvidia-smi: silent")
CUDA = "CUDA_VISIBLE_DEVICES"


def resolve(make_facts, found=None, environ=None, **options) -> Topology:
    return local_topology(
        TrainOptions(script="train.py", **options), make_facts(gpus=found, environ=environ or {})
    )


def refused(make_facts, found=None, environ=None, **options) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(make_facts, found, environ, **options)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2
    return caught.value


def node_of(topology: Topology):
    [node] = topology.nodes
    assert node.host == "nodeA"
    assert len(node.masks) == node.slots
    return node


# --- GPUs


@pytest.mark.parametrize(
    "options", [{}, {"num_gpus": "auto"}, {"device": "cuda"}, {"num_nodes": 1}, {"num_gpus": 4}]
)
def test_all_gpus_are_used_one_worker_each_and_every_worker_sees_all(make_facts, options):
    topology = resolve(make_facts, FOUR, **options)
    node = node_of(topology)
    assert (topology.device, topology.world_size, topology.notes) == ("cuda", 4, ())
    assert (node.mask_variable, node.masks, node.isolated) == (
        CUDA,
        (("0", "1", "2", "3"),) * 4,
        False,
    )
    assert node.devices == ("0", "1", "2", "3")
    assert node.numa == (0, 0, 1, 1)


@pytest.mark.parametrize(
    "options", [{"num_gpus": 2}, {"gpus_per_node": 2}, {"num_gpus": 2, "gpus_per_node": 2}]
)
def test_fewer_gpus_are_the_first_ones(make_facts, options):
    node = node_of(resolve(make_facts, FOUR, **options))
    assert (node.slots, node.masks, node.devices) == (2, (("0", "1"),) * 2, ("0", "1"))


def test_chosen_gpus_are_used_in_their_order(make_facts):
    node = node_of(resolve(make_facts, FOUR, gpus="3,1"))
    assert (node.masks, node.devices, node.numa) == ((("3", "1"),) * 2, ("3", "1"), (1, 0))


def test_a_mask_is_subdivided(make_facts):
    node = node_of(resolve(make_facts, FOUR, {CUDA: "2,3"}, num_gpus=1))
    assert (node.masks, node.devices) == ((("2",),), ("2",))


def test_isolated_workers_see_one_gpu_each(make_facts):
    node = node_of(resolve(make_facts, FOUR, isolate_gpus=True))
    assert (node.masks, node.isolated) == ((("0",), ("1",), ("2",), ("3",)), True)


def test_mig_slices_isolate_without_being_asked(make_facts):
    node = node_of(resolve(make_facts, SLICED))
    assert (node.slots, node.isolated) == (3, True)
    assert node.masks == (("MIG-x",), ("MIG-y",), ("MIG-z",))


def test_amd_gpus_have_their_own_mask(make_facts):
    node = node_of(resolve(make_facts, AMD))
    assert (node.mask_variable, node.slots) == ("HIP_VISIBLE_DEVICES", 2)


@pytest.mark.parametrize("asked", [{"num_gpus": 5}, {"gpus_per_node": 8}])
def test_more_gpus_than_there_are_is_an_error_that_lists_them(make_facts, asked):
    error = refused(make_facts, FOUR, **asked)
    assert f"{next(iter(asked.values()))} GPUs asked for" in error.message
    assert "4" in error.message
    assert "--num-procs" in error.hint


def test_more_gpus_than_the_mask_allows_names_the_mask(make_facts):
    assert f"{CUDA}=1" in refused(make_facts, FOUR, {CUDA: "1"}, num_gpus=2).message


def test_a_gpu_that_is_not_there_is_named(make_facts):
    assert "9" in refused(make_facts, FOUR, gpus="9").message


# --- no GPU


def test_without_gpus_one_cpu_worker_runs_and_that_is_reported(make_facts):
    topology = resolve(make_facts)
    node = node_of(topology)
    assert (topology.device, node.slots, node.devices) == ("cpu", 1, ())
    note = topology.notes[0].text
    assert mentions(note, "CPU")
    assert "--num-procs" in note


def test_hidden_gpus_are_none(make_facts):
    topology = resolve(make_facts, FOUR, {CUDA: ""})
    assert (topology.device, topology.world_size) == ("cpu", 1)
    assert CUDA in topology.notes[0].text


@pytest.mark.parametrize(
    "asked", [{"num_gpus": 2}, {"num_gpus": "auto"}, {"gpus_per_node": 1}, {"device": "cuda"}]
)
def test_gpus_asked_for_and_not_there_are_an_error(make_facts, asked):
    error = refused(make_facts, **asked)
    assert "GPU" in error.message
    assert "--num-procs" in error.hint


def test_chosen_gpus_that_are_not_there_are_an_error(make_facts):
    assert mentions(refused(make_facts, gpus="0").message, "--gpus 0")


@pytest.mark.parametrize("asked", [{}, {"num_gpus": 2}, {"device": "cuda"}])
def test_a_driver_that_does_not_answer_is_an_error_and_no_silent_cpu_run(make_facts, asked):
    error = refused(make_facts, BROKEN, **asked)
    assert "nvidia-smi: silent" in error.message
    assert "--num-procs" in error.hint


# --- CPU workers


@pytest.mark.parametrize(
    "options", [{"num_procs": 3}, {"procs_per_node": 3}, {"num_procs": 3, "device": "cpu"}]
)
@pytest.mark.parametrize("gpus", [None, FOUR, BROKEN])
def test_cpu_workers_see_no_gpu(make_facts, options, gpus):
    topology = resolve(make_facts, gpus, **options)
    node = node_of(topology)
    assert (topology.device, node.slots, topology.notes) == ("cpu", 3, ())
    assert (node.mask_variable, node.masks, node.devices, node.isolated) == (
        CUDA,
        ((), (), ()),
        (),
        False,
    )


def test_device_cpu_alone_is_one_worker(make_facts):
    topology = resolve(make_facts, FOUR, device="cpu")
    assert (topology.device, topology.world_size, node_of(topology).masks) == ("cpu", 1, ((),))


def test_processes_share_gpus_with_device_cuda(make_facts):
    topology = resolve(make_facts, FOUR, device="cuda", num_procs=6)
    node = node_of(topology)
    assert (topology.device, node.slots) == ("cuda", 6)
    assert node.masks == (("0", "1", "2", "3"),) * 6
    assert node.devices == ("0", "1", "2", "3", "0", "1")
    assert node.numa == (0, 0, 1, 1, 0, 0)


def test_isolated_processes_take_gpus_in_turn(make_facts):
    node = node_of(
        resolve(make_facts, FOUR, device="cuda", num_procs=3, gpus="2,0", isolate_gpus=True)
    )
    assert node.masks == (("2",), ("0",), ("2",))


def test_processes_that_are_to_share_gpus_need_one(make_facts):
    refused(make_facts, device="cuda", num_procs=2)


# --- contradictions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_nodes": 2}, "--num-nodes 2"),
        ({"num_procs": 2, "num_gpus": 2}, "both requested"),
        ({"procs_per_node": 2, "gpus_per_node": 2}, "both requested"),
        ({"num_procs": 2, "procs_per_node": 3}, "--num-procs 2 and --procs-per-node 3"),
        ({"num_gpus": 2, "gpus_per_node": 3}, "--num-gpus 2 and --gpus-per-node 3"),
        ({"device": "cpu", "num_gpus": 1}, "--device cpu"),
        ({"device": "cpu", "gpus": "0"}, "--device cpu"),
        ({"num_procs": 2, "gpus": "0"}, "--gpus"),
    ],
)
def test_contradictions_are_refused(make_facts, options, words):
    assert words in refused(make_facts, FOUR, **options).message


@pytest.mark.parametrize(
    "options",
    [
        {"num_nodes": 2},
        {"num_procs": 2, "num_gpus": 2},
        {"device": "cpu", "num_gpus": 1},
        {"num_procs": 1, "gpus": "0"},
    ],
)
def test_contradictions_come_with_a_way_out(make_facts, options):
    assert "--" in refused(make_facts, FOUR, **options).hint
