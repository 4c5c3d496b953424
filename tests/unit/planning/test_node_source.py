from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.backends.base import Backend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Gpu, GpuInventory
from distlaunch.launch.make_plan import starts_all_workers
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.build_plan import build_plan
from distlaunch.planning.build_topology import build_topology
from distlaunch.planning.clusters.select import NAMES, SYSTEMS
from distlaunch.planning.explain import explain
from distlaunch.planning.facts import Surroundings
from distlaunch.planning.gpu_masks import accept_mask
from distlaunch.planning.hosts.this_host import Identity
from distlaunch.planning.local_topology import local_topology
from distlaunch.planning.node_source import Location, locate, option_of_host_list
from distlaunch.planning.train_options import TrainOptions
from tests.examples import examples

CUDA = "CUDA_VISIBLE_DEVICES"


class Plain(Backend):
    """A backend that adds nothing."""

    name = "plain"


def located(
    make_facts, environ=None, *, texts=None, discovered=None, identity=None, **options
) -> Location | None:
    identity = identity or Identity(hostname="nodeA", addresses=("10.0.0.7",))
    around = Surroundings(texts=texts or {}, discovered=discovered, identity=identity)
    return locate(TrainOptions(**options), make_facts(environ=environ, surroundings=around))[0]


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        ({"hosts": "nodeB,nodeA"}, {}, (1, "all", "--hosts")),
        ({"hosts": "nodeB,10.0.0.7"}, {}, (1, "all", "--hosts")),
        ({"hosts": "nodeB"}, {}, (None, "all", "--hosts")),
        ({"hosts": "nodeB,nodeC", "node_rank": 1}, {}, (1, "node", "--hosts")),
        ({"hosts": "nodeA,nodeB", "node_rank": 0, "source": "flags"}, {}, (0, "node", "--hosts")),
        ({"num_nodes": 2, "node_rank": 1, "master_addr": "h"}, {}, (1, "node", "--num-nodes")),
        ({"num_nodes": (1, 2), "node_rank": 0, "master_addr": "h"}, {}, (0, "node", "--num-nodes")),
        ({"include": "nodea"}, {}, (0, "all", "--include")),
        ({"exclude": "localhost:0"}, {}, (0, "all", "--exclude")),
        ({}, {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[A]"}, None),
        ({}, {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "nodeB,nodeA"}, (1, "all", "slurm")),
    ],
)
def test_this_machine_is_found_among_the_hosts(make_facts, options, environ, expected):
    if expected is None:
        with pytest.raises(ConfigError):
            located(make_facts, environ, **options)
        return
    found = located(make_facts, environ, **options)
    assert (found.here, found.allocation.part, found.who) == expected


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        ({}, {}),
        ({"num_nodes": 1}, {"RANK": "1"}),
        ({"node_rank": 0}, {}),
        ({"source": "flags"}, {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}),
    ],
)
def test_nobody_names_nodes(make_facts, options, environ):
    assert located(make_facts, environ, **options) is None


def test_without_surroundings_nothing_is_looked_for(make_facts):
    facts = make_facts(environ={"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert locate(TrainOptions(), facts) == (None, ())


def test_a_rank_of_the_system_may_not_be_changed(make_facts):
    environ = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "m",
        "PET_MASTER_PORT": "1",
    }
    assert located(make_facts, environ, node_rank=1).here == 1
    with pytest.raises(ConfigError, match=r"--node-rank 0 .* PET_NODE_RANK .* 1"):
        located(make_facts, environ, node_rank=0)


@pytest.mark.parametrize(
    ("pair", "first", "second"),
    [
        ({"hosts": "a", "hostfile": "f"}, "--hosts", "--hostfile"),
        ({"hosts": "a", "source": "pbs"}, "--hosts", "--source"),
        ({"discover": "c", "hostfile": "f"}, "--hostfile", "--discover"),
    ],
)
def test_two_lists_contradict_each_other(pair, first, second):
    with pytest.raises(ConfigError, match=f"^{first} .* {second} "):
        option_of_host_list(TrainOptions(**pair))


def test_the_cpus_that_slurm_grants_are_known_on_its_node(make_facts):
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "nodeA", "SLURM_CPUS_ON_NODE": "6"}
    assert located(make_facts, environ).allocation.cpus == 6
    assert located(make_facts, environ, hosts="nodeA").allocation.cpus is None
    with pytest.raises(ConfigError, match="SLURM_CPUS_ON_NODE='six'"):
        located(make_facts, {**environ, "SLURM_CPUS_ON_NODE": "six"})


@pytest.mark.parametrize(
    ("mask", "hosts", "gpus", "trusted"),
    [
        ("4,5", "nodeA:2", GpuInventory(), True),
        ("GPU-a,GPU-b", "nodeA:2", GpuInventory(), True),
        ("4,5", "nodeA:3", GpuInventory(), False),
        ("4,5", "nodeA", GpuInventory(), False),
        ("4,5", "nodeB:2", GpuInventory(), False),
        ("4,x", "nodeA:2", GpuInventory(), False),
        ("-1", "nodeA:1", GpuInventory(), False),
        ("", "nodeA:1", GpuInventory(), False),
        (None, "nodeA:1", GpuInventory(), False),
        ("4,5", "nodeA:2", GpuInventory(problem="the driver hangs"), False),
        ("4,5", "nodeA:2", GpuInventory(gpus=(Gpu(index=4), Gpu(index=5)), source="nvml"), False),
    ],
)
def test_a_mask_counts_without_gpus_only_if_the_hosts_slots_match(
    make_facts, mask, hosts, gpus, trusted
):
    facts = make_facts(environ={} if mask is None else {CUDA: mask}, gpus=gpus)
    location = located(make_facts, hosts=hosts)
    changed, note = accept_mask(facts, location.allocation, here=location.here, who=location.who)
    assert bool(note) == trusted
    options = TrainOptions(hosts=hosts)
    if location.here is None or gpus.problem:
        assert changed == facts
        return
    (node,) = build_topology(location.allocation, options, changed, here=0).nodes
    assert (node.devices == tuple((mask or "").split(","))) == (trusted or bool(gpus.gpus))


def test_where_devices_come_from_is_reported_by_who_chose_them(make_facts):
    facts = make_facts(
        gpus=GpuInventory(gpus=tuple(Gpu(index=index) for index in range(4)), source="nvml")
    )
    host = Host(name="nodeA", slots=2, unit="gpus", devices=("2", "3"))
    topology = build_topology(
        Allocation(source="pbs", hosts=(host,)), TrainOptions(), facts, here=0
    )
    assert topology.nodes[0].devices == ("2", "3")
    assert topology.nodes[0].devices_from.endswith("2,3 granted")


def test_only_what_is_ours_alone_may_be_started(make_facts):
    for hosts, alone in (("nodeA:2", True), ("nodeB:2", False), ("nodeA:1,nodeB:1", False)):
        options = TrainOptions(hosts=hosts)
        location = located(make_facts, hosts=hosts)
        topology = build_topology(location.allocation, options, make_facts(), here=location.here)
        assert starts_all_workers(location, topology) == alone


def test_one_of_several_launchers_is_not_alone(make_facts):
    hosts = (Host(name="nodeA", slots=2), Host(name="nodeB", slots=2))
    for part, source in (("node", "kubernetes"), ("worker", "openmpi"), ("all", "slurm")):
        allocation = Allocation(source=source, hosts=hosts, part=part)
        topology = build_topology(allocation, TrainOptions(), make_facts(), here=0)
        location = Location(allocation=allocation, who=source, here=0, by="", name="nodeA")
        assert not starts_all_workers(location, topology)


# --- whatever is around

MARKERS = sorted(
    {marker for _, _, markers in SYSTEMS for marker in markers}
    | {"RANK", "WORLD_SIZE", "HOSTNAME", CUDA}
)
VALUES = st.sampled_from(
    ["", "0", "1", "2", "4", "2:4", "n[1-2]", "a,b", "2(x2)", "nodeA", "x", "é\n", "-1", '["a"]']
)
SIZES = st.one_of(st.none(), st.integers(1, 9))
OPTIONS = st.fixed_dictionaries(
    {
        "hosts": st.sampled_from(
            [None, None, None, "a:2,nodeA:2", "n[1-3]", "nodeA", "[::1]:3", "a@", "\x1b"]
        ),
        "source": st.sampled_from(["auto", "auto", "auto", *NAMES, "?"]),
        "num_gpus": st.one_of(st.just("auto"), SIZES),
        "num_procs": SIZES,
        "gpus_per_node": SIZES,
        "num_nodes": st.one_of(SIZES, st.just((1, 3))),
        "node_rank": st.one_of(st.none(), st.integers(0, 3)),
        "master_addr": st.sampled_from([None, "m"]),
        "include": st.sampled_from([None, None, "a:0", "nodeA", "*", "["]),
        "exclude": st.sampled_from([None, None, "a:0", "nodeA"]),
        "spread": st.booleans(),
    }
)


@settings(deadline=None, max_examples=examples(60), database=None)
@given(environ=st.dictionaries(st.sampled_from(MARKERS), VALUES, max_size=6), values=OPTIONS)
def test_any_surroundings_give_a_plan_that_can_be_explained_or_an_error_of_one_line(
    make_facts, environ, values
):
    identity = Identity(hostname="nodeA", addresses=("::1",))
    around = Surroundings(texts={}, discovered=None, identity=identity)
    facts = make_facts(environ=environ, surroundings=around)
    options = TrainOptions(script="train.py", **values)
    try:
        location, lost = locate(options, facts)
        if location is None:
            topology = local_topology(options, facts)
        else:
            facts, _ = accept_mask(facts, location.allocation, here=location.here, who=location.who)
            topology = build_topology(location.allocation, options, facts, here=location.here)
        plan = build_plan(options, facts, topology, Plain({}, {}), job_id="j", run_dir="/r")
        lines = explain(options, facts, topology, plan, location=location, lost=lost).lines()
    except ConfigError as error:
        lines = [error.message, error.hint or ""]
    assert all(line.isprintable() for line in lines), lines
