from __future__ import annotations

import pytest

from tests.facts import mentions
from tests.unit.planning.topologies import plan, refused, sizes

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


def test_facts_that_only_the_node_knows_stay_open(make_facts):
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
        ("a:4,b:4", {"num_procs": 2, "num_gpus": 2}, ("both requested",)),
        ("a:4,b:4", {"device": "cpu", "num_gpus": 2}, ("--device cpu",)),
        ("a:4,b:4", {"gpus": "0,GPU-7"}, ("GPU-7", "2 nodes")),
        ("a:4,b:4", {"gpus": "0,1", "gpus_per_node": 4}, ("--gpus-per-node 4", "2 slots")),
        ("a,b", {"gpus": "0,1", "gpus_per_node": 4}, ("--gpus-per-node 4", "2 slots")),
    ],
)
def test_an_impossible_request_is_refused(make_facts, text, options, words):
    message = refused(make_facts, text, **options).message
    for word in words:
        assert word in message


def test_the_way_out_is_the_number_for_each_node(make_facts):
    assert "--procs-per-node 2" in refused(make_facts, "a,b", num_procs=4).hint


@pytest.mark.parametrize(
    ("options", "used", "warning"),
    [
        (
            {"num_gpus": 4},
            {"n1": 4},
            "--num-gpus 4 is for the whole job, so n[2-4] get no worker; --gpus-per-node 4 starts 4 on each host",
        ),
        (
            {"num_procs": 12},
            {"n1": 4, "n2": 4, "n3": 4},
            "--num-procs 12 is for the whole job, so n4 gets no worker; without --num-procs all slots are used",
        ),
        (
            {"num_procs": 2, "spread": True},
            {"n1": 1, "n2": 1},
            "--num-procs 2 is for the whole job, so n[3-4] get no worker; --procs-per-node 2 starts 2 on each host",
        ),
    ],
)
def test_a_total_that_leaves_named_hosts_idle_is_a_warning(make_facts, options, used, warning):
    topology = plan(make_facts, "n[1-4]:4", **options)
    assert sizes(topology) == used
    assert (topology.warnings, topology.notes) == ((warning,), ())


def test_a_total_beside_the_number_for_each_host_leaves_hosts_idle_on_purpose(make_facts):
    topology = plan(make_facts, "n[1-4]:4", num_procs=4, procs_per_node=4)
    assert sizes(topology) == {"n1": 4}
    assert topology.warnings == ()
    (note,) = topology.notes
    assert mentions(note.text, "--num-procs 4", "n[2-4]")


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
    assert mentions(error.message, "1", "2 nodes", "n2")
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
    assert [(node.chosen, node.without) for node in topology.nodes] == [
        (None, ()),
        ((0, 2), ()),
        (None, (1,)),
    ]


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
