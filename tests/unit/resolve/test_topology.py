"""From hosts and sizes to nodes. Host lists are written as --hosts takes them; sources of schedulers by hand."""

from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.gpus import Gpu, GpuInventory
from distlaunch.core.model.topology import Topology
from distlaunch.resolve.allocation import Allocation, Host
from distlaunch.resolve.hostfile import parse_hosts
from distlaunch.resolve.options import TrainOptions
from distlaunch.resolve.topology import build_topology

CUDA = "CUDA_VISIBLE_DEVICES"


def gpus(count: int) -> GpuInventory:
    return GpuInventory(gpus=tuple(Gpu(index=i, uuid=f"GPU-{i}") for i in range(count)), source="nvml")


def hosts(text: str) -> tuple[Host, ...]:
    return parse_hosts(text)


def plan(make_facts, text, *, source="flags", here=None, seen=0, environ=None, allocation=None, **options) -> Topology:
    """Plan over hosts, written as for --hosts; ``seen`` GPUs are on the one that is ``here``."""
    given_ = {"source": source, "by_user": source == "flags", "hosts": hosts(text), **(allocation or {})}
    facts = make_facts(gpus=gpus(seen), environ=environ or {})
    return build_topology(Allocation(**given_), TrainOptions(script="train.py", **options), facts, here=here)


def refused(make_facts, text, **changed) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(make_facts, text, **changed)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


def sizes(topology: Topology) -> dict[str, int | None]:
    return {node.host: node.slots for node in topology.nodes}


# --- sizes


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a:2,b:2", {}, {"a": 2, "b": 2}),
        ("a:1,b:2", {}, {"a": 1, "b": 2}),
        ("a:2,b:2", {"num_procs": 4}, {"a": 2, "b": 2}),
        ("a:4", {"num_procs": 2}, {"a": 2}),
        ("a:4,b:4", {"num_procs": 4}, {"a": 4}),
        ("a:4,b:4", {"num_procs": 6}, {"a": 4, "b": 2}),
        ("a:4,b:4", {"num_procs": 6, "spread": True}, {"a": 3, "b": 3}),
        ("a:4,b:4", {"num_procs": 1, "spread": True}, {"a": 1}),
        ("a:3,b:1,c:2", {"num_procs": 5, "spread": True}, {"a": 2, "b": 1, "c": 2}),
        ("a:4,b:4", {"num_gpus": 8}, {"a": 4, "b": 4}),
        ("a:4,b:4", {"num_gpus": "auto"}, {"a": 4, "b": 4}),
        ("a:4,b:4", {"gpus_per_node": 2}, {"a": 2, "b": 2}),
        ("a:4,b:4", {"procs_per_node": 3}, {"a": 3, "b": 3}),
        ("a,b", {"procs_per_node": 3}, {"a": 3, "b": 3}),
        ("a,b:2", {"procs_per_node": 2}, {"a": 2, "b": 2}),
        ("a,b", {"gpus_per_node": 8}, {"a": 8, "b": 8}),
        ("a,b", {"device": "cpu"}, {"a": 1, "b": 1}),
        ("a:4,b:4,c:4", {"num_nodes": 2}, {"a": 4, "b": 4}),
        ("a:4,b:4", {"num_nodes": 2, "num_gpus": 4}, {"a": 2, "b": 2}),
        ("a,b", {"num_nodes": 2, "num_gpus": 8}, {"a": 4, "b": 4}),
        ("a:4,b:4,c:4", {"num_nodes": 2, "num_procs": 8}, {"a": 4, "b": 4}),
        ("a:4,b:4,c:4", {"num_gpus": 4, "gpus_per_node": 2}, {"a": 2, "b": 2}),
        ("a:4,b:4", {"gpus": "0,2"}, {"a": 2, "b": 2}),
        ("a,b", {"gpus": "0,2"}, {"a": 2, "b": 2}),
        ("a:4,b", {"num_procs": 3}, {"a": 3}),
        ("a:8,b:8", {"procs_per_node": 8, "device": "cuda", "gpus": "0,1"}, {"a": 8, "b": 8}),
    ],
)
def test_the_request_is_exact(make_facts, text, options, expected):
    assert sizes(plan(make_facts, text, **options)) == expected


def test_what_only_the_node_knows_stays_open(make_facts):
    topology = plan(make_facts, "a:2,b,c:1")
    assert sizes(topology) == {"a": 2, "b": None, "c": 1}
    assert topology.world_size is None
    assert (topology.device, topology.nodes[1].devices) == ("auto", None)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("a:2,b:2", {"num_procs": 5}, ("5", "4 slots", "a,b")),
        ("a:2,b:2", {"num_gpus": 5}, ("--num-gpus 5", "4 slots")),
        ("a:2", {"num_procs": 5}, ("--num-procs 5", "2 slots", "a")),
        ("a:2", {"procs_per_node": 5}, ("--procs-per-node 5", "2 slots")),
        ("a:2,b:4", {"gpus_per_node": 4}, ("--gpus-per-node 4", "a", "2 slots")),
        ("a:4,b:4", {"num_gpus": 3, "num_nodes": 2}, ("--num-gpus 3", "2 nodes")),
        ("a:4,b:4", {"num_gpus": 1, "num_nodes": 2}, ("--num-gpus 1", "2 nodes")),
        ("a:3,b:1", {"num_gpus": 4, "num_nodes": 2}, ("4", "--gpus-per-node 2", "b", "1 slot")),
        ("a:4,b:4", {"num_nodes": 3}, ("--num-nodes 3", "2 hosts", "a,b")),
        ("a:4,b:4", {"num_nodes": (3, 5)}, ("--num-nodes 3:5", "2 hosts")),
        ("a:4", {"num_nodes": 2}, ("--num-nodes 2", "1 host,")),
        ("a:4,b:4", {"num_nodes": (1, 2), "num_procs": 4}, ("--num-procs 4", "1 to 2 nodes")),
        ("a,b", {"num_procs": 4}, ("--num-procs 4", "a", "not known")),
        ("a:2,b", {"num_procs": 4}, ("--num-procs 4", "b", "not known")),
        ("a:4,b", {"num_procs": 2, "spread": True}, ("b", "not known")),
        ("a:4,b:4", {"num_gpus": 3, "gpus_per_node": 2}, ("--num-gpus 3", "--gpus-per-node 2")),
        ("a:4,b:4", {"num_gpus": 6, "gpus_per_node": 2}, ("3 nodes", "2")),
        ("a:4,b:4", {"num_gpus": 2, "gpus_per_node": 2, "num_nodes": 2}, ("1 node", "2")),
        ("a:4,b:4", {"num_procs": 2, "num_gpus": 2}, ("together",)),
        ("a:4,b:4", {"device": "cpu", "num_gpus": 2}, ("--device cpu",)),
        ("a:4,b:4", {"gpus": "0,GPU-7"}, ("GPU-7", "2 nodes")),
        ("a:4,b:4", {"gpus": "0,1", "gpus_per_node": 4}, ("--gpus-per-node 4", "2 slots")),
        ("a,b", {"gpus": "0,1", "gpus_per_node": 4}, ("--gpus-per-node 4", "2 slots")),
    ],
)
def test_what_cannot_be_done_as_asked_is_refused(make_facts, text, options, words):
    message = refused(make_facts, text, **options).message
    for word in words:
        assert word in message


def test_the_way_out_is_the_number_for_each_node(make_facts):
    assert "--procs-per-node 2" in refused(make_facts, "a,b", num_procs=4).hint


def test_hosts_that_are_not_needed_are_said(make_facts):
    topology = plan(make_facts, "n[1-4]:4", num_procs=6)
    assert sizes(topology) == {"n1": 4, "n2": 2}
    assert topology.notes == ("not needed for --num-procs 6: n[3-4]",)


def test_a_million_hosts_do_not_make_a_long_message(make_facts):
    text = ",".join(f"x{'a' * (index % 7)}{index}:1" for index in range(2000))
    assert len(refused(make_facts, text, num_procs=5000).message) < 300


# --- a scheduler's nodes


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"num_gpus": 4}, "--gpus-per-node 2"),
        ({"num_gpus": 3}, "--gpus-per-node N"),
        ({"num_procs": 2}, "--procs-per-node 1"),
        ({"num_gpus": 4, "gpus_per_node": 4}, "--gpus-per-node 2"),
    ],
)
def test_a_node_that_a_scheduler_granted_is_not_left_idle(make_facts, options, hint):
    error = refused(make_facts, "n1:4,n2:4", source="slurm", **options)
    assert "1 of the 2 nodes idle that slurm granted: n2" in error.message
    assert hint in error.hint
    assert "--num-nodes 1" in error.hint


@pytest.mark.parametrize(
    ("options", "here", "expected"),
    [
        ({"num_gpus": 4, "spread": True}, None, {"n1": 2, "n2": 2}),
        ({"num_gpus": 4, "num_nodes": 1}, None, {"n1": 4}),
        ({"num_nodes": 1, "device": "cpu"}, 1, {"n2": 4}),
        ({"exclude": "n1"}, None, {"n2": 4}),
        ({"exclude": "n1", "num_gpus": 2}, None, {"n2": 2}),
        ({"gpus_per_node": 1}, None, {"n1": 1, "n2": 1}),
        ({"procs_per_node": 16}, None, {"n1": 16, "n2": 16}),
        ({"num_procs": 16, "num_nodes": 2}, None, {"n1": 8, "n2": 8}),
    ],
)
def test_a_node_is_given_up_on_purpose_or_used(make_facts, options, here, expected):
    assert sizes(plan(make_facts, "n1:4,n2:4", source="slurm", here=here, **options)) == expected


def test_one_node_of_a_list_by_hand_is_the_first(make_facts):
    assert sizes(plan(make_facts, "n1:4,n2:4", here=1, num_nodes=1)) == {"n1": 4}


def test_more_gpus_than_a_scheduler_granted_are_refused_and_cpu_workers_are_not(make_facts):
    error = refused(make_facts, "n1:4,n2:4", source="slurm", gpus_per_node=8)
    assert "--gpus-per-node 8" in error.message
    assert "4 slots" in error.message
    assert "--procs-per-node" in error.hint
    assert sizes(plan(make_facts, "n1:4", source="slurm", num_procs=6)) == {"n1": 6}


# --- elastic jobs


def test_an_elastic_job_is_planned_with_the_hosts_that_are_there(make_facts):
    topology = plan(make_facts, "a:1,b:1,c:1", num_nodes=(2, 4))
    assert (len(topology.nodes), topology.bounds) == (3, (2, 4))
    assert len(plan(make_facts, "a:1,b:1,c:1", num_nodes=(1, 2)).nodes) == 2


def test_a_source_may_make_a_job_elastic_and_the_option_wins(make_facts):
    elastic = {"nodes": (2, 4)}
    assert plan(make_facts, "a:1,b:1,c:1", allocation=elastic).bounds == (2, 4)
    fixed = plan(make_facts, "a:1,b:1,c:1", allocation=elastic, num_nodes=3)
    assert (len(fixed.nodes), fixed.bounds) == (3, None)


# --- filters


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a:4,b:4", {"include": "b"}, {"b": 4}),
        ("a:4,b:4", {"include": "a@b:0,2"}, {"a": 4, "b": 2}),
        ("a:4,b:4", {"exclude": "b:0"}, {"a": 4, "b": 3}),
        ("a:4,b:4", {"exclude": "b:0", "num_procs": 7}, {"a": 4, "b": 3}),
        ("a,b", {"include": "b:0,2"}, {"b": 2}),
        ("a,b", {"exclude": "b:0", "gpus_per_node": 4}, {"a": 4, "b": 4}),
        ("a:5,b:5", {"exclude": "b:0", "gpus_per_node": 4}, {"a": 4, "b": 4}),
        ("a,b,c", {"exclude": "a:0", "gpus": "0", "num_nodes": 2}, {"b": 1, "c": 1}),
        ("a,b,c", {"exclude": "a:0-1", "gpus": "0,1", "num_nodes": 2}, {"b": 2, "c": 2}),
        ("a,b", {"exclude": "b:0"}, {"a": None, "b": None}),
    ],
)
def test_filters_leave_hosts_and_slots(make_facts, text, options, expected):
    assert sizes(plan(make_facts, text, **options)) == expected


def test_slots_that_were_chosen_elsewhere_are_handed_on(make_facts):
    topology = plan(make_facts, "a:4,b:4,c", include="a@b:0,2@c", exclude="c:1")
    assert [(node.chosen, node.without) for node in topology.nodes] == [(None, ()), ((0, 2), ()), (None, (1,))]


@pytest.mark.parametrize(
    ("text", "options", "left"),
    [
        ("a:4,b:4", {"exclude": "b:0", "num_procs": 8}, "7 slots"),
        ("a:4", {"exclude": "a:0", "num_procs": 4}, "3 slots"),
        ("a:4,b:4", {"exclude": "b:0", "num_procs": 8, "num_nodes": 2}, "3 slots"),
        ("a:4,b:4", {"exclude": "b:0", "num_gpus": 8, "gpus_per_node": 4}, "3 slots"),
        ("a:4,b:4", {"exclude": "a:0", "gpus_per_node": 4}, "3 slots"),
        ("a,b", {"exclude": "b:0", "procs_per_node": 4}, "3 slots"),
    ],
)
def test_more_in_all_than_a_filter_left_is_refused(make_facts, text, options, left):
    assert left in refused(make_facts, text, **options).message


# --- this machine among them


def test_only_this_machine_gets_masks(make_facts):
    topology = plan(make_facts, "a:2,b:2", here=0, seen=4)
    here, other = topology.nodes
    assert (here.mask_variable, here.masks, here.devices) == (CUDA, (("0", "1"),) * 2, ("0", "1"))
    assert (other.mask_variable, other.masks, other.devices) == (None, (), None)
    assert [gpu.uuid for gpu in here.gpus] == ["GPU-0", "GPU-1"]
    assert topology.here == 0


@pytest.mark.parametrize(
    ("text", "options", "mask", "devices"),
    [
        ("localhost:2", {}, "4,5", ("4", "5")),
        ("localhost:1", {}, "4,5", ("4",)),
        ("localhost", {}, "4,5", ("4", "5")),
        ("localhost", {"num_gpus": 1}, "4,5", ("4",)),
        ("localhost:3", {}, None, ("0", "1", "2")),
        ("localhost", {}, None, tuple("01234567")),
        ("localhost:8", {"include": "localhost:1,3"}, None, ("1", "3")),
        ("localhost", {"include": "localhost:1,3"}, None, ("1", "3")),
        ("localhost", {"include": "localhost:1"}, "4,5", ("5",)),
        ("localhost", {"exclude": "localhost:0"}, "4,5", ("5",)),
        ("localhost", {"exclude": "localhost:0"}, None, tuple("1234567")),
        ("localhost:8", {"exclude": "localhost:0", "num_gpus": 2}, None, ("1", "2")),
        ("localhost:8", {"gpus": "3,1"}, None, ("3", "1")),
        ("localhost:8", {"gpus": "GPU-6"}, None, ("6",)),
    ],
)
def test_slots_of_this_machine_are_its_visible_gpus(make_facts, text, options, mask, devices):
    environ = {} if mask is None else {CUDA: mask}
    (node,) = plan(make_facts, text, here=0, seen=8, environ=environ, **options).nodes
    assert len(node.devices) == node.slots
    # By UUID where --gpus names one.
    assert tuple(device.removeprefix("GPU-") for device in node.devices) == devices


def test_gpus_that_are_not_here_are_refused(make_facts):
    assert "only 4" in refused(make_facts, "localhost:8", here=0, seen=4).message
    assert "9" in refused(make_facts, "localhost", here=0, seen=4, include="localhost:9").message
    assert "--exclude" in refused(make_facts, "localhost", here=0, seen=1, exclude="localhost:0").message
    assert "localhost" not in sizes(plan(make_facts, "a:1,localhost:8", here=1, seen=4, num_procs=1))


def test_without_gpus_slots_are_cpu_workers_and_that_is_said(make_facts):
    topology = plan(make_facts, "localhost:2", here=0)
    assert (topology.device, sizes(topology)) == ("cpu", {"localhost": 2})
    assert "2 CPU workers" in topology.notes[0]
    assert sizes(plan(make_facts, "localhost", here=0)) == {"localhost": 1}
    assert "no GPU" in refused(make_facts, "localhost:2", here=0, device="cuda").message


def test_cpu_workers_see_no_gpu_on_any_node(make_facts):
    topology = plan(make_facts, "a:2,b:2", here=0, seen=4, num_procs=4)
    assert topology.device == "cpu"
    for node in topology.nodes:
        assert (node.mask_variable, node.masks, node.devices) == (CUDA, ((), ()), ())


def test_this_machine_may_be_any_of_them_or_none(make_facts):
    assert plan(make_facts, "a:2,b:2", here=1, seen=2).here == 1
    assert plan(make_facts, "a:2,b:2").here is None
    assert plan(make_facts, "a:2,b:2", here=0, seen=2, exclude="a").here is None
    assert plan(make_facts, "a:2,b:2,c:2", here=2, seen=2, exclude="a").here == 1


def test_devices_that_a_scheduler_names_are_used(make_facts):
    granted = {"hosts": (Host(name="a", slots=2, devices=("2", "3")), Host(name="b", slots=2, devices=("0", "1")))}
    topology = plan(make_facts, "x", source="pbs", here=0, seen=4, allocation=granted)
    assert [node.devices for node in topology.nodes] == [("2", "3"), ("0", "1")]
    assert topology.nodes[0].masks == (("2", "3"),) * 2
    narrowed = plan(make_facts, "x", source="pbs", here=0, seen=4, allocation=granted, exclude="a:0@b:1")
    assert [node.devices for node in narrowed.nodes] == [("3",), ("0",)]


def test_login_data_stays_with_the_host(make_facts):
    topology = plan(make_facts, "me@a:2:port=2222,b:2")
    assert [(node.user, node.port) for node in topology.nodes] == [("me", 2222), (None, None)]


# --- one launcher for each worker


TASKS = {"part": "worker", "node_rank": 0, "local_rank": 1}


def test_a_task_plans_the_whole_job_and_sees_only_its_own_gpu(make_facts):
    topology = plan(make_facts, "a:2,b:1", source="slurm", here=0, seen=1, allocation=TASKS)
    assert (sizes(topology), topology.here) == ({"a": 2, "b": 1}, None)
    assert [node.isolated for node in topology.nodes] == [True, True]
    together = plan(make_facts, "a:2,b:1", source="slurm", here=0, seen=2, allocation=TASKS)
    assert [node.isolated for node in together.nodes] == [False, False]


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": 4},
        {"num_gpus": "auto"},
        {"gpus_per_node": 2},
        {"device": "cuda"},
        {"procs_per_node": 2, "device": "cuda"},
        {"gpus": "0,1"},
    ],
    ids=str,
)
def test_gpus_that_a_task_asks_for_have_to_be_there(make_facts, options):
    error = refused(make_facts, "a:2,b:2", source="openmpi", here=0, allocation=TASKS, **options)
    assert "no GPU" in error.message
    assert plan(make_facts, "a:2,b:2", source="openmpi", here=0, seen=2, allocation=TASKS, **options).device == "cuda"


def test_the_first_task_of_a_node_says_that_workers_run_on_the_cpu(make_facts):
    def said(local_rank: int, **options) -> tuple[str, ...]:
        allocation = {**TASKS, "local_rank": local_rank}
        return plan(make_facts, "a:2,b:2", source="openmpi", here=0, allocation=allocation, **options).told

    (note,) = said(0)
    assert note.startswith("no GPU was found: workers run on the CPU")
    assert said(1) == said(0, device="cpu") == said(0, procs_per_node=2) == said(0, seen=1) == ()


def test_the_only_task_of_each_node_is_a_launcher_like_any_other(make_facts):
    assert plan(make_facts, "a:1", source="openmpi", here=0, seen=1, allocation=TASKS).here == 0


@pytest.mark.parametrize("options", [{"num_procs": 2}, {"procs_per_node": 4}, {"gpus_per_node": 1}])
def test_a_size_that_is_not_the_tasks_is_refused(make_facts, options):
    error = refused(make_facts, "a:2,b:2", source="slurm", here=0, seen=2, allocation=TASKS, **options)
    assert "2 tasks" in error.message or "idle" in error.message


# --- where rank 0 is


UNKNOWN = (Host(name="node-1", known=False, slots=1), Host(name="node-2", known=False, slots=1))
"""Hosts of which a source knows the number alone."""


@pytest.mark.parametrize(
    ("text", "here", "allocation", "options", "expected"),
    [
        ("a:1,b:1", None, {}, {}, ("a", None)),
        ("a:1", None, {}, {}, (None, None)),
        ("a:1,b:1", None, {"master_addr": "m", "master_port": 7}, {}, ("m", 7)),
        ("a:1", None, {"master_addr": "m", "master_port": 7}, {}, (None, None)),
        ("a:1,b:1,c:1", None, {"master_addr": "m", "master_port": 7}, {"exclude": "a"}, ("b", None)),
        ("localhost:1,b:1", 0, {}, {}, ("nodeA", None)),
        ("127.0.0.1:1,b:1", 0, {}, {}, ("nodeA", None)),
        ("x", None, {"hosts": UNKNOWN}, {}, (None, None)),
        ("x", None, {"hosts": UNKNOWN}, {"master_addr": "m"}, ("m", None)),
        ("x", None, {"hosts": (Host(name="10.0.0.4", slots=1), *UNKNOWN)}, {"exclude": "10.0.0.4"}, (None, None)),
        ("node-0:1,b:1", None, {}, {}, ("node-0", None)),
    ],
)
def test_the_others_reach_rank_0_by_a_name_that_they_can_resolve(make_facts, text, here, allocation, options, expected):
    topology = plan(make_facts, text, here=here, allocation=allocation, device="cpu", **options)
    assert (topology.master_addr, topology.master_port) == expected


def test_notes_of_the_source_are_passed_on(make_facts):
    assert plan(make_facts, "a:1,b:1", allocation={"notes": ("listen",)}).notes == ("listen",)


def test_a_name_that_nobody_told_is_none(make_facts):
    unknown = {"hosts": UNKNOWN}
    topology = plan(make_facts, "x", source="azureml", allocation=unknown, device="cpu")
    assert [node.known for node in topology.nodes] == [False, False]
    assert "--master-addr" in topology.notes[0]
    assert "node-1" in refused(make_facts, "x", source="azureml", allocation=unknown, exclude="node-1").message
    assert sizes(plan(make_facts, "x", allocation=unknown, device="cpu", include="*")) == {"node-1": 1, "node-2": 1}


def test_a_loopback_name_of_another_node_is_refused(make_facts):
    assert "localhost" in refused(make_facts, "localhost:2,vm:2", here=1, device="cpu").message
    assert any("localhost" in note for note in plan(make_facts, "a:1,b:1", master_addr="localhost").notes)
