from __future__ import annotations

import pytest

from distlaunch.core.model.topology import Note, NoteKind
from distlaunch.planning.allocation import Host
from tests.facts import mentions
from tests.unit.planning.topologies import plan, refused, sizes

CUDA = "CUDA_VISIBLE_DEVICES"


# --- this machine among the nodes


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
    assert (
        "--exclude"
        in refused(make_facts, "localhost", here=0, seen=1, exclude="localhost:0").message
    )
    assert "localhost" not in sizes(
        plan(make_facts, "a:1,localhost:8", here=1, seen=4, num_procs=1)
    )


def test_without_gpus_slots_are_cpu_workers_and_that_is_reported(make_facts):
    topology = plan(make_facts, "localhost:2", here=0)
    assert (topology.device, sizes(topology)) == ("cpu", {"localhost": 2})
    assert "2 CPU workers" in topology.notes[0].text
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
    granted = {
        "hosts": (
            Host(name="a", slots=2, devices=("2", "3")),
            Host(name="b", slots=2, devices=("0", "1")),
        )
    }
    topology = plan(make_facts, "x", source="pbs", here=0, seen=4, allocation=granted)
    assert [node.devices for node in topology.nodes] == [("2", "3"), ("0", "1")]
    assert topology.nodes[0].masks == (("2", "3"),) * 2
    narrowed = plan(
        make_facts, "x", source="pbs", here=0, seen=4, allocation=granted, exclude="a:0@b:1"
    )
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
    assert (
        plan(
            make_facts, "a:2,b:2", source="openmpi", here=0, seen=2, allocation=TASKS, **options
        ).device
        == "cuda"
    )


def test_the_first_task_of_a_node_says_that_workers_run_on_the_cpu(make_facts):
    def notices(local_rank: int, **options) -> tuple[str, ...]:
        allocation = {**TASKS, "local_rank": local_rank}
        topology = plan(
            make_facts, "a:2,b:2", source="openmpi", here=0, allocation=allocation, **options
        )
        return tuple(note.text for note in topology.notes if note.kind is NoteKind.KNOWN_NODES)

    (note,) = notices(0)
    assert mentions(note, "no GPU", "CPU")
    assert (
        notices(1)
        == notices(0, device="cpu")
        == notices(0, procs_per_node=2)
        == notices(0, seen=1)
        == ()
    )


def test_the_only_task_of_each_node_is_a_launcher_like_any_other(make_facts):
    assert plan(make_facts, "a:1", source="openmpi", here=0, seen=1, allocation=TASKS).here == 0


@pytest.mark.parametrize("options", [{"num_procs": 2}, {"procs_per_node": 4}, {"gpus_per_node": 1}])
def test_a_size_that_is_not_the_tasks_is_refused(make_facts, options):
    error = refused(
        make_facts, "a:2,b:2", source="slurm", here=0, seen=2, allocation=TASKS, **options
    )
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
        (
            "a:1,b:1,c:1",
            None,
            {"master_addr": "m", "master_port": 7},
            {"exclude": "a"},
            ("b", None),
        ),
        ("localhost:1,b:1", 0, {}, {}, ("nodeA", None)),
        ("127.0.0.1:1,b:1", 0, {}, {}, ("nodeA", None)),
        ("x", None, {"hosts": UNKNOWN}, {}, (None, None)),
        ("x", None, {"hosts": UNKNOWN}, {"master_addr": "m"}, ("m", None)),
        (
            "x",
            None,
            {"hosts": (Host(name="10.0.0.4", slots=1), *UNKNOWN)},
            {"exclude": "10.0.0.4"},
            (None, None),
        ),
        ("node-0:1,b:1", None, {}, {}, ("node-0", None)),
    ],
)
def test_the_others_reach_rank_0_by_a_name_that_they_can_resolve(
    make_facts, text, here, allocation, options, expected
):
    topology = plan(make_facts, text, here=here, allocation=allocation, device="cpu", **options)
    assert (topology.master_addr, topology.master_port) == expected


def test_notes_of_the_source_are_passed_on(make_facts):
    assert plan(make_facts, "a:1,b:1", allocation={"notes": ("listen",)}).notes == (
        Note(text="listen"),
    )


def test_a_missing_name_is_none(make_facts):
    unknown = {"hosts": UNKNOWN}
    topology = plan(make_facts, "x", source="azureml", allocation=unknown, device="cpu")
    assert [node.known for node in topology.nodes] == [False, False]
    assert "--master-addr" in topology.notes[0].text
    assert (
        "node-1"
        in refused(make_facts, "x", source="azureml", allocation=unknown, exclude="node-1").message
    )
    assert sizes(plan(make_facts, "x", allocation=unknown, device="cpu", include="*")) == {
        "node-1": 1,
        "node-2": 1,
    }


def test_a_loopback_name_of_another_node_is_refused(make_facts):
    assert "localhost" in refused(make_facts, "localhost:2,vm:2", here=1, device="cpu").message
    assert any(
        "localhost" in note.text
        for note in plan(make_facts, "a:1,b:1", master_addr="localhost").notes
    )
