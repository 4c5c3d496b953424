from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Gpu, GpuInventory, Topology
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.build_topology import build_topology
from distlaunch.planning.hosts.hostfile import parse_hosts
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions


def plan(
    make_facts, text, *, source="flags", here=None, seen=0, allocation=None, **options
) -> Topology:
    """Return the plan over hosts in the syntax of --hosts. ``here`` has ``seen`` GPUs."""
    given = {
        "source": source,
        "by_user": source == "flags",
        "hosts": parse_hosts(text),
        **(allocation or {}),
    }
    gpus = GpuInventory(
        gpus=tuple(Gpu(index=i, uuid=f"GPU-{i}") for i in range(seen)), source="nvml"
    )
    asked = TrainOptions(script="train.py", **options)
    return build_topology(Allocation(**given), asked, make_facts(gpus=gpus), here=here)


def refused(make_facts, text, **changed) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(make_facts, text, **changed)
    return caught.value


def sizes(topology: Topology) -> dict[str, int | None]:
    return {node.host: node.slots for node in topology.nodes}


# --- what slots count


def slotted(unit: str, *counts: int | None, **more) -> dict[str, object]:
    """Return hosts a, b, ... of a scheduler that counts ``unit``."""
    hosts = tuple(
        Host(name="abc"[at], slots=count, unit=unit, **more) for at, count in enumerate(counts)
    )
    return {"hosts": hosts}


@pytest.mark.parametrize("seen", [0, 2])
@pytest.mark.parametrize("counts", [(3,), (3, 3)])
def test_gpus_that_were_granted_and_are_not_here_are_refused(make_facts, counts, seen):
    granted = slotted("gpus", *counts)
    error = refused(make_facts, "x", source="slurm", here=0, seen=seen, allocation=granted)
    assert "slurm gives a 3 GPUs" in error.message
    assert ("--procs-per-node" if len(counts) > 1 else "--num-procs") in error.hint
    topology = plan(
        make_facts, "x", source="slurm", here=0, seen=seen, allocation=granted, procs_per_node=5
    )
    assert set(sizes(topology).values()) == {5}


def test_granted_gpus_do_not_limit_workers_on_cpus_nor_cores_workers_on_gpus(make_facts):
    assert sizes(
        plan(make_facts, "x", source="slurm", allocation=slotted("gpus", 4, 4), device="cpu")
    ) == {
        "a": 1,
        "b": 1,
    }
    cores = {"source": "pbs", "here": 0, "allocation": slotted("cores", 4, 4)}
    assert sizes(plan(make_facts, "x", **cores, seen=2)) == {"a": 2, "b": None}
    assert sizes(plan(make_facts, "x", **cores, seen=8, gpus_per_node=8)) == {"a": 8, "b": 8}
    assert sizes(plan(make_facts, "x", **cores, seen=2, device="cpu")) == {"a": 4, "b": 4}
    assert sizes(plan(make_facts, "x", **cores, seen=2, num_procs=8)) == {"a": 4, "b": 4}
    assert sizes(plan(make_facts, "x", **cores)) == {"a": 4, "b": None}


def test_an_unknown_number_of_gpus_may_be_zero(make_facts):
    topology = plan(
        make_facts, "x", source="skypilot", here=1, allocation=slotted("gpus", None, None)
    )
    assert (sizes(topology), topology.device) == ({"a": None, "b": 1}, "auto")


def test_more_tasks_than_gpus_are_refused_with_what_helps(make_facts):
    error = refused(
        make_facts, "x", source="kubernetes", here=0, seen=2, allocation=slotted("workers", 4)
    )
    assert "--gpus-per-node 2" in error.hint


@pytest.mark.parametrize(
    ("unit", "slots", "options", "expected"),
    [
        ("gpus", 2, {"device": "cpu"}, {"a": 4, "b": 3}),
        ("gpus", None, {"device": "cpu"}, {"a": 4, "b": 3}),
        ("gpus", 2, {"device": "cpu", "procs_per_node": 1}, {"a": 1, "b": 1}),
        ("gpus", 2, {}, {"a": 2, "b": 2}),
        ("gpus", 2, {"device": "cuda"}, {"a": 2, "b": 2}),
    ],
)
def test_workers_without_gpus_go_by_the_tasks_that_were_asked_for(
    make_facts, unit, slots, options, expected
):
    granted = tuple(
        Host(name=name, slots=slots, unit=unit, tasks=n) for name, n in (("a", 4), ("b", 3))
    )
    assert (
        sizes(plan(make_facts, "x", source="slurm", allocation={"hosts": granted}, **options))
        == expected
    )


# --- filters and --gpus


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("b:4", {"include": "b:2,3", "gpus": "4,5"}),
        ("b:4,c:4", {"include": "b:1,2@c", "gpus": "4,5"}),
        ("a,b", {"exclude": "a:7", "gpus": "3,2"}),
        ("a,b", {"exclude": "a:0,4", "gpus": "1,2"}),
        ("a,b", {"include": "a:7@b", "gpus": "3,2"}),
    ],
)
@pytest.mark.parametrize("here", [None, 0])
def test_a_slot_that_gpus_does_not_pick_is_refused_here_and_elsewhere(
    make_facts, text, options, here
):
    assert mentions(refused(make_facts, text, here=here, seen=8, **options).message, "no slot")


@pytest.mark.parametrize("here", [None, 0])
def test_an_excluded_gpu_is_on_no_list(make_facts, here):
    topology = plan(make_facts, "a,b", here=here, seen=8, exclude="a:0", gpus="3,2")
    assert [node.devices for node in topology.nodes] == [("2",), ("3", "2")]


def test_workers_share_the_gpus_that_filters_left(make_facts):
    shared = {"procs_per_node": 2, "device": "cuda"}
    for text in ("localhost:4", "localhost"):
        (node,) = plan(make_facts, text, here=0, seen=4, exclude="localhost:0,1", **shared).nodes
        assert node.masks == (("2", "3"),) * 2
    (node,) = plan(
        make_facts, "a:8", here=0, seen=4, include="a:0", procs_per_node=8, device="cuda"
    ).nodes
    assert node.masks == (("0",),) * 8
    (node,) = plan(make_facts, "a:4", exclude="a:0,1", **shared).nodes
    assert (node.slots, node.chosen, node.without) == (2, None, (0, 1))
    (node,) = plan(make_facts, "a:4", include="a:0,1", procs_per_node=4, device="cuda").nodes
    assert (node.slots, node.chosen) == (4, (0, 1))


def test_gpus_that_were_not_granted_are_not_picked(make_facts):
    granted = {"hosts": (Host(name="a", slots=2, unit="gpus", devices=("2", "3")),)}
    assert (
        "2,3"
        in refused(
            make_facts, "x", source="pbs", here=0, seen=4, allocation=granted, gpus="0"
        ).message
    )


@pytest.mark.parametrize(
    ("text", "options", "shown"),
    [
        ("a:2,b:2,c:2", {"num_nodes": 2}, "not needed for --num-nodes 2: c"),
        ("a:2,b:2,c:2", {"num_nodes": (1, 2)}, "not needed for --num-nodes 1:2: c"),
        ("a:2,b:2", {"spread": True}, "--spread has no effect"),
    ],
)
def test_skipped_variables_are_reported(make_facts, text, options, shown):
    assert shown in plan(make_facts, text, **options).notes[0].text
