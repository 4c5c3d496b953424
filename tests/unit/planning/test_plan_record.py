from __future__ import annotations

import json

import pytest

from distlaunch.backends.registry import find_backend
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import Gpu, Node, Topology
from distlaunch.planning.build_plan import bind, build_plan
from distlaunch.planning.local_topology import local_topology
from distlaunch.planning.master_address import MasterChoice
from distlaunch.planning.train_options import TrainOptions


def plan(make_facts, *, topology=None, facts=None, job="job-1", **options) -> LaunchPlan:
    chosen = TrainOptions(**{"script": "train.py", "num_procs": 2, **options})
    facts = make_facts(**(facts or {}))
    topology = topology or local_topology(chosen, facts)
    return build_plan(
        chosen,
        facts,
        topology,
        find_backend("pytorch-ddp")({}, {}),
        job_id=job,
        run_dir=job and f"/r/{job}",
    )


def variables(planned: LaunchPlan, rank: int = 0) -> dict[str, str]:
    return {**planned.shared_env, **planned.workers[rank].env}


def test_neither_record_nor_repr_shows_a_secret(make_facts):
    planned = plan(make_facts, facts={"environ": {"TOKEN": "sesame-1"}}, env=("KEY=sesame-2",))
    assert variables(planned)["KEY"] == "sesame-2"
    assert "sesame" not in json.dumps(planned.record()) + repr(planned)
    assert planned.record()["env_given"] == ["KEY"]


def test_the_record_holds_what_we_set_for_each_worker(make_facts):
    record = plan(make_facts, facts={"environ": {"A": "1"}}).record()
    assert json.loads(json.dumps(record)) == record
    assert (record["master_port"], record["world_size"], record["source"]) == (None, 2, "local")
    (node,) = record["nodes"]
    assert (node["host"], node["node_rank"], node["slots"], node["devices"]) == ("nodeA", 0, 2, [])
    second = node["workers"][1]
    assert (second["rank"], second["local_rank"], second["argv"]) == (
        1,
        1,
        ["/usr/bin/python3", "train.py"],
    )
    assert (second["env"]["RANK"], record["env"]["WORLD_SIZE"]) == ("1", "2")
    assert "A" not in {**record["env"], **second["env"]}
    assert not record["env"].keys() & second["env"].keys(), "a worker's holds what differs"


def test_an_expanded_record_repeats_what_workers_share(make_facts):
    planned = bind(plan(make_facts), attempt=0, master_port=4711)
    short, long = planned.record(), planned.record(expand=True)
    assert {**long, "nodes": None} == {**short, "nodes": None}
    for brief, whole in zip(short["nodes"][0]["workers"], long["nodes"][0]["workers"], strict=True):
        assert whole["env"] == {**short["env"], **brief["env"]}
        assert whole["env"]["MASTER_PORT"] == "4711"


@pytest.mark.parametrize("name", ["HF_TOKEN", "api_key", "MY_SECRET_1", "DB_PASSWORD"])
def test_values_are_masked_by_their_names(make_facts, name):
    planned = plan(make_facts)
    first, *others = planned.workers
    planned = replace(
        planned,
        env={**planned.env, name: "sesame"},
        workers=(replace(first, env={name: "sesame"}), *others),
    )
    for record in (planned.record(), planned.record(expand=True)):
        assert record["env"][name] == record["nodes"][0]["workers"][0]["env"][name] == "***"
        assert record["nodes"][0]["workers"][1]["env"]["RANK"] == "1"
    assert planned.shared_env[name] == "sesame"


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("slots", [(1, 3, 2), (2, None, 1), (None,)])
def test_the_record_is_written_piece_by_piece_as_it_is(make_facts, slots, expand):
    nodes = tuple(Node(host=f"h{place}", slots=count) for place, count in enumerate(slots))
    planned = plan(make_facts, topology=Topology(nodes=nodes, device="cpu"))
    written = "".join(planned.json_chunks(expand=expand, more={"explain": {"a": ["b"]}}))
    assert json.loads(written) == {**planned.record(expand=expand), "explain": {"a": ["b"]}}
    assert max(map(len, written.splitlines())) < 2000, "a worker has a line of its own"


# --- many nodes


def test_on_many_nodes_each_worker_has_its_nodes_numbers(make_facts):
    nodes = (Node(host="a", slots=3), Node(host="b", slots=1), Node(host="c", slots=2))
    planned = plan(
        make_facts, topology=Topology(nodes=nodes, device="cpu", source="flags", master_addr="a")
    )
    seen = [
        [
            variables(planned, rank)[name]
            for name in ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        ]
        for rank in range(6)
    ]
    assert seen == [
        [node, node, local, size]
        for node, local, size in (
            ("0", "0", "3"),
            ("0", "1", "3"),
            ("0", "2", "3"),
            ("1", "0", "1"),
            ("2", "0", "2"),
            ("2", "1", "2"),
        )
    ]
    shared = {
        "WORLD_SIZE": "6",
        "ROLE_WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "a",
    }
    assert planned.env.items() >= shared.items()
    assert (planned.first_ranks, planned.record()["source"]) == ((0, 3, 4), "flags")


def test_after_a_node_of_unknown_size_no_rank_is_known(make_facts):
    nodes = (Node(host="a", slots=2), Node(host="b", slots=None), Node(host="c", slots=4))
    planned = plan(make_facts, topology=Topology(nodes=nodes, device="auto", master_addr="a"))
    assert (
        planned.world_size,
        [worker.rank for worker in planned.workers],
        planned.first_ranks,
    ) == (
        None,
        [0, 1],
        (0, 2),
    )
    assert not planned.env.keys() & {"WORLD_SIZE", "ROLE_WORLD_SIZE"}
    record = planned.record()
    assert record["world_size"] is None
    assert [node["slots"] for node in record["nodes"]] == [2, None, 4]
    assert [node["workers"] and len(node["workers"]) for node in record["nodes"]] == [2, None, None]


def test_only_this_machines_cpus_are_shared_out(make_facts):
    nodes = (Node(host="a", slots=2), Node(host="b", slots=2))
    planned = plan(make_facts, topology=Topology(nodes=nodes, device="cpu", here=1), bind="cores")
    assert [worker.cpus and len(worker.cpus) for worker in planned.workers] == [None, None, 8, 8]
    assert ["OMP_NUM_THREADS" in worker.env for worker in planned.workers] == [
        False,
        False,
        True,
        True,
    ]


def test_threads_are_a_share_of_what_the_scheduler_grants(make_facts):
    topology = Topology(nodes=(Node(host="a", slots=2),), device="cpu", cpus=6)
    assert variables(plan(make_facts, topology=topology))["OMP_NUM_THREADS"] == "3"


def test_an_id_that_launchers_have_yet_to_agree_on_is_null(make_facts):
    planned = plan(make_facts, job="")
    assert planned.record()["job_id"] is None
    assert planned.record()["run_dir"] is None
    ids = {
        "TORCHELASTIC_RUN_ID",
        "DISTLAUNCH_JOB_ID",
        "DISTLAUNCH_RUN_DIR",
        "TORCHELASTIC_ERROR_FILE",
    }
    assert not ids & variables(planned).keys()


@pytest.mark.parametrize(
    ("topology", "options", "expected"),
    [
        ({}, {}, ("127.0.0.1", None)),
        ({"several": True}, {}, (None, None)),
        ({"several": True, "master_addr": "a", "master_port": 7}, {}, ("a", 7)),
        (
            {"several": True, "master_addr": "a", "master_port": 7},
            {"master_addr": "m", "master_port": 9},
            ("m", 9),
        ),
        ({"several": True}, {"master_addr": "m"}, ("m", None)),
    ],
)
def test_the_master_is_chosen_by_the_user_then_by_the_source(
    make_facts, topology, options, expected
):
    nodes = (Node(host="a", slots=1), Node(host="b", slots=1))[
        : 2 if topology.pop("several", False) else 1
    ]
    planned = plan(make_facts, topology=Topology(nodes=nodes, device="cpu", **topology), **options)
    assert (planned.master_addr, planned.master_port) == expected
    assert planned.env.get("MASTER_ADDR") == expected[0]


def test_an_elastic_plan_shows_its_bounds(make_facts):
    nodes = (Node(host="a", slots=1), Node(host="b", slots=1))
    fixed = plan(make_facts, topology=Topology(nodes=nodes, device="cpu")).record()
    assert (fixed["min_nodes"], fixed["max_nodes"]) == (2, 2)
    elastic = plan(make_facts, topology=Topology(nodes=nodes, device="cpu", bounds=(1, 4))).record()
    assert (elastic["min_nodes"], elastic["max_nodes"]) == (1, 4)


def test_the_record_shows_the_login_user_and_the_gpus(make_facts):
    gpus = (Gpu(index=4, uuid="GPU-4", name="H100"), None)
    nodes = (
        Node(host="a", slots=2, devices=("0", "1"), gpus=gpus),
        Node(host="b", slots=1, user="me", port=2222, devices=None, chosen=(2,)),
    )
    one, other = plan(make_facts, topology=Topology(nodes=nodes, device="cuda")).record()["nodes"]
    assert one["gpus"] == [{"device": "0", "index": 4, "uuid": "GPU-4", "name": "H100"}, None]
    assert (other["user"], other["port"], other["chosen"], other["devices"]) == (
        "me",
        2222,
        [2],
        None,
    )
    assert not one.keys() & {"user", "port", "chosen", "without"}


def test_a_nodes_variables_that_repeat_one_of_ours_are_shown_and_none_that_it_inherits(make_facts):
    nodes = (Node(host="a", slots=1), Node(host="b", slots=1, env={"PATH": "/opt/bin"}))
    planned = replace(
        plan(make_facts, topology=Topology(nodes=nodes, device="cpu")),
        repeated={"GOSSIP_IFACE": "GLOO_SOCKET_IFNAME"},
    )
    met = MasterChoice(address="10.0.0.1", env={1: {"GLOO_SOCKET_IFNAME": "eth1"}})
    one, other = bind(planned, attempt=0, master_port=7, master=met).record()["nodes"]
    assert "env" not in one
    assert other["env"] == {"GLOO_SOCKET_IFNAME": "eth1", "GOSSIP_IFACE": "eth1"}
