"""The GPUs of each node of an attempt, from its survey: inventory, masks, filters."""

from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.core.model.topology import Gpu, GpuInventory, MigDevice
from tests.facts import mentions

CUDA = "CUDA_VISIBLE_DEVICES"


def composed(make_planner, make_surveys, changed=None, **options):
    made = make_planner(**options)
    surveys = make_surveys(made, seen=8)
    for number, node in enumerate(made.hosts):
        if node.host in (changed or {}):
            surveys[number] = make_surveys(made, **{"seen": 8, **changed[node.host]})[number]
    return made.plan_attempt(surveys)[1]


def masks(plan) -> list[str]:
    """Return the mask of each node's first worker."""
    first = {worker.node_rank: worker.env.get(CUDA, "-") for worker in reversed(plan.workers)}
    return [first[rank] for rank in sorted(first)]


def sizes(plan) -> list[int]:
    return [node.slots for node in plan.nodes]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hosts": "a,b"}, [8, 8]),
        ({"hosts": "a:2,b"}, [2, 8]),
        ({"hosts": "a,b", "gpus_per_node": 4}, [4, 4]),
        ({"hosts": "a,b", "num_nodes": 2, "num_gpus": 12}, [6, 6]),
        ({"hosts": "a:8,b:8", "num_gpus": 12}, [8, 4]),
        ({"hosts": "a:8,b:8", "num_gpus": 12, "spread": True}, [6, 6]),
        ({"hosts": "a,b", "num_gpus": "auto"}, [8, 8]),
        ({"hosts": "a,b", "device": "cuda"}, [8, 8]),
        ({"hosts": "a,b", "include": "a:0,2@b:4-7"}, [2, 4]),
        ({"hosts": "a,b", "exclude": "b:0"}, [8, 7]),
        ({"hosts": "a,b", "gpus": "1,3,5"}, [3, 3]),
        ({"hosts": "a,b", "procs_per_node": 16, "device": "cuda"}, [16, 16]),
    ],
)
def test_nodes_run_a_worker_on_each_gpu_that_was_asked_for(
    make_planner, make_surveys, options, expected
):
    plan = composed(make_planner, make_surveys, **options)
    assert (sizes(plan), plan.device) == (expected, "cuda")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hosts": "a,b"}, ["0,1,2,3,4,5,6,7"] * 2),
        ({"hosts": "a:2,b:3"}, ["0,1", "0,1,2"]),
        ({"hosts": "a,b", "include": "a:0,2@b:4-7"}, ["0,2", "4,5,6,7"]),
        ({"hosts": "a,b", "gpus": "1,3"}, ["1,3"] * 2),
        ({"hosts": "a,b", "whole_gpus": 3}, ["0,1,2"] * 2),
        ({"hosts": "a,b", "whole_gpus": 2, "include": "a:0,2@b:4-7"}, ["0,2", "4,5"]),
    ],
)
def test_one_worker_a_node_has_all_of_its_gpus(make_planner, make_surveys, options, expected):
    plan = composed(make_planner, make_surveys, procs_per_node=1, whole_nodes=True, **options)
    assert (sizes(plan), masks(plan), plan.device) == ([1, 1], expected, "cuda")


def test_one_worker_a_node_does_without_gpus_where_no_node_has_any(make_planner, make_surveys):
    nothing = {"a": {"seen": 0}, "b": {"seen": 0}}
    plan = composed(
        make_planner, make_surveys, nothing, hosts="a:1,b:4", procs_per_node=1, whole_nodes=True
    )
    assert (sizes(plan), masks(plan), plan.device) == ([1, 1], ["", ""], "cpu")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hosts": "a,b"}, ["0,1,2,3,4,5,6,7"] * 2),
        ({"hosts": "a:2,b:3"}, ["0,1", "0,1,2"]),
        ({"hosts": "a,b", "include": "a:0,2@b:4-7"}, ["0,2", "4,5,6,7"]),
        ({"hosts": "a,b", "exclude": "b:0"}, ["0,1,2,3,4,5,6,7", "1,2,3,4,5,6,7"]),
        ({"hosts": "a,b", "gpus": "5,1"}, ["5,1", "5,1"]),
        ({"hosts": "a,b", "gpus": "1,3,5", "exclude": "b:1"}, ["1,3,5", "1,5"]),
        ({"hosts": "a:2,b:2", "isolate_gpus": True}, ["0", "0"]),
    ],
)
def test_masks_name_what_was_chosen(make_planner, make_surveys, options, expected):
    assert masks(composed(make_planner, make_surveys, **options)) == expected


def test_a_mask_of_the_node_itself_is_narrowed(make_planner, make_surveys):
    changed = {"b": {"environ": {CUDA: "2,5,6"}}}
    plan = composed(make_planner, make_surveys, changed, hosts="a,b")
    assert (sizes(plan), masks(plan)[1]) == ([8, 3], "2,5,6")
    plan = composed(make_planner, make_surveys, changed, hosts="a:2,b:2")
    assert masks(plan) == ["0,1", "2,5"]


def test_our_own_mask_does_not_count_for_other_machines(make_planner, make_surveys):
    made = make_planner(hosts="a,b", environ={CUDA: "0", "A": "1"})
    _, plan = made.plan_attempt(make_surveys(made, seen=4))
    assert masks(plan) == ["0,1,2,3"] * 2
    assert CUDA not in plan.base_env


def test_mig_slices_of_one_node_are_isolated_there_alone(make_planner, make_surveys):
    mig = GpuInventory(
        gpus=(
            Gpu(
                index=0,
                uuid="GPU-x",
                mig=(MigDevice(uuid="MIG-1", profile="3g"), MigDevice(uuid="MIG-2", profile="3g")),
            ),
        ),
        source="nvml",
    )
    plan = composed(make_planner, make_surveys, {"b": {"gpus": mig}}, hosts="a:2,b")
    assert [worker.env[CUDA] for worker in plan.workers] == ["0,1", "0,1", "MIG-1", "MIG-2"]
    assert [worker.env["LOCAL_RANK"] for worker in plan.workers] == ["0", "1", "0", "0"]
    assert [node.isolated for node in plan.nodes] == [False, True]


def test_each_nodes_gpus_are_its_own_although_nodes_are_alike(make_planner, make_surveys):
    plan = composed(make_planner, make_surveys, hosts="n[1-3]", include="n1@n2:2,4@n3")
    assert [gpu.uuid for gpu in plan.nodes[2].gpus] == [f"GPU-n3-{index}" for index in range(8)]
    assert [gpu.uuid for gpu in plan.nodes[1].gpus] == ["GPU-n2-2", "GPU-n2-4"]
    assert plan.nodes[1].numa == (0, 1)


@pytest.mark.parametrize(
    ("options", "changed", "words"),
    [
        (
            {"hosts": "a,b", "gpus_per_node": 8},
            {"b": {"seen": 4}},
            ("b: 8 GPUs asked for, but only 4 can be used",),
        ),
        ({"hosts": "a:8,b:8"}, {"b": {"seen": 4}}, ("b: 8 GPUs asked for, but only 4",)),
        (
            {"hosts": "a,b", "gpus_per_node": 8},
            {"b": {"seen": 0}},
            ("b: 8 GPUs asked for, but no GPU can be used",),
        ),
        (
            {"hosts": "a,b", "num_nodes": 2, "num_gpus": 16},
            {"b": {"seen": 4}},
            ("b: 8 GPUs asked for, but only 4",),
        ),
        (
            {"hosts": "a,b,c", "gpus_per_node": 8},
            {"b": {"seen": 4}, "c": {"seen": 4}},
            ("b,c: 8 GPUs asked",),
        ),
        (
            {"hosts": "a,b,c", "gpus_per_node": 8},
            {"b": {"seen": 4}, "c": {"seen": 2}},
            ("b: 8 GPUs", "only 4", "; c: 8 GPUs", "only 2"),
        ),
        ({"hosts": "a,b", "gpus": "1,9"}, {}, ("a,b: --gpus 1,9: there is no GPU 9",)),
        ({"hosts": "a,b", "device": "cuda"}, {"b": {"seen": 0}}, ("b:", "no GPU")),
        ({"hosts": "a,b"}, {"a": {"seen": 0}}, ("a has no GPU that can be used, and b has some",)),
        (
            {"hosts": "a,b,c"},
            {"b": {"seen": 0}},
            ("b has no GPU that can be used, and a,c have some",),
        ),
        (
            {"hosts": "a,b"},
            {
                "b": {
                    "gpus": GpuInventory(source="nvml", problem="the NVIDIA driver does not answer")
                }
            },
            ("b: the GPUs here cannot be used: the NVIDIA driver does not answer",),
        ),
        (
            {"hosts": "a"},
            {"a": {"gpus": GpuInventory(source="nvml", problem="broken")}},
            ("a: the GPUs", "broken"),
        ),
    ],
)
def test_a_node_that_has_less_than_it_is_to_give_is_named(
    make_planner, make_surveys, options, changed, words
):
    with pytest.raises(ConfigError) as caught:
        composed(make_planner, make_surveys, changed, **options)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_the_hint_for_workers_without_gpus_is_the_one_for_several_nodes(make_planner, make_surveys):
    with pytest.raises(ConfigError) as caught:
        composed(make_planner, make_surveys, {"b": {"seen": 4}}, hosts="a,b", gpus_per_node=8)
    assert mentions(caught.value.hint, "--procs-per-node", "GPUs")


def test_a_slot_that_a_node_has_not_is_refused_by_its_name(make_planner, make_surveys):
    with pytest.raises(ConfigError, match=r"b"):
        composed(make_planner, make_surveys, {"b": {"seen": 2}}, hosts="a,b", include="a@b:0,6")


def test_a_spare_that_has_less_is_too_little_when_it_is_needed(make_planner, make_surveys):
    made = make_planner(hosts="a,b,c", gpus_per_node=8, spares=1)
    surveys = make_surveys(made, seen=8)
    surveys[2] = make_surveys(made, seen=4)[2]
    assert made.plan_attempt(surveys)[0] == (0, 1)
    with pytest.raises(NodesError, match=r"c: 8 GPUs .* 4"):
        made.plan_attempt({0: surveys[0], 2: surveys[2]})


def test_a_mask_without_a_driver_counts_if_the_hosts_slots_match(make_planner, make_surveys):
    changed = {"b": {"seen": 0, "environ": {CUDA: "4,5"}}}
    plan = composed(make_planner, make_surveys, changed, hosts="a:2,b:2")
    assert (masks(plan)[1], plan.device) == ("4,5", "cuda")
    assert mentions(plan.notes, "b", "no GPU")
