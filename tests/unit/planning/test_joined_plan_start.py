from __future__ import annotations

import pytest

from distlaunch.coordinator.policy.start_messages import interfaces_of
from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import launcher_messages as p
from tests.unit.planning.joined_planners import Plain, tasks


def commence(**more) -> p.StartWorkers:
    values = {
        "attempt": 1,
        "restarts": 1,
        "node_rank": 1,
        "local_ranks": (0, 1),
        "hosts": ("n0", "n1", "n2"),
        "slots": (1, 2, 4),
        "master_addr": "10.0.0.1",
        "master_port": 5555,
        "interface": "eth0",
        "nccl_interface": "",
    }
    return p.StartWorkers(**{**values, **more})


def test_a_joined_launcher_plans_its_own_workers_only(by_hand):
    plan = by_hand("n1", rendezvous="h:5", node_rank=1).plan_start(commence(), ["lo", "eth0"])
    assert [(worker.rank, worker.local_rank, worker.node_rank) for worker in plan.workers] == [
        (1, 0, 1),
        (2, 1, 1),
    ]
    assert {
        name: plan.env[name]
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    } == {
        "WORLD_SIZE": "7",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5555",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    assert plan.workers[0].env["TORCHELASTIC_ERROR_FILE"] == "/jobs/j/attempt-1/rank-1.error.json"
    assert interfaces_of(plan, 1) == ("eth0", "")


def test_a_joined_launcher_takes_no_interface_that_it_has_not(by_hand):
    planner = by_hand("n1", rendezvous="h:5", node_rank=1)
    named_in = commence(interface="eth0; rm", nccl_interface="eth9")
    assert interfaces_of(planner.plan_start(named_in, ["lo", "eth0"]), 1) == ("", "")


@pytest.mark.parametrize(
    "more",
    [
        {"node_rank": 3},
        {"node_rank": -1},
        {"hosts": ()},
        {"slots": (1, 2)},
        {"slots": (1, 3, 4)},
        {"slots": (0, 2, 4)},
        {"local_ranks": (0,)},
        {"local_ranks": (0, 1, 2)},
        {"master_port": 0},
        {"master_port": 70000},
        {"attempt": -1},
        {"master_addr": "a b"},
        {"master_addr": "x" * 300},
        {"master_addr": "$(id)"},
        {"slots": (1, 2, 1 << 40)},
        {"master_addr": ""},
        {"master_addr": "-h"},
        {"attempt": 1 << 40},
        {"attempt": 1 << 40, "restarts": 1 << 40},
        {"restarts": -1},
        {"restarts": 2},
        {"hosts": ("n0", "n1"), "slots": (1, 2)},
        {"hosts": ("n0", "n1", "n\x1b2")},
        {"hosts": ("n0", "n1", "n" * 300)},
        {"local_ranks": ()},
        {"local_ranks": (-1, 0)},
    ],
    ids=str,
)
def test_a_joined_launcher_refuses_a_start_that_makes_no_sense(by_hand, more):
    with pytest.raises(ProtocolError):
        by_hand("n1", rendezvous="h:5", node_rank=1).plan_start(commence(**more), ["eth0"])


def test_a_launcher_of_one_worker_starts_that_one(from_source):
    named_in = commence(hosts=("a", "b"), slots=(2, 3), node_rank=1, local_ranks=(2,))
    plan = from_source(tasks(1, 2)).plan_start(named_in, ["eth0"])
    assert [(worker.rank, worker.env["LOCAL_RANK"]) for worker in plan.workers] == [(4, "2")]


@pytest.mark.parametrize("local_ranks", [(), (1,), (0, 2), (3,)], ids=str)
def test_a_launcher_of_one_worker_starts_no_other(from_source, local_ranks):
    named_in = commence(hosts=("a", "b"), slots=(2, 3), node_rank=1, local_ranks=local_ranks)
    with pytest.raises(ProtocolError):
        from_source(tasks(1, 2)).plan_start(named_in, ["eth0"])


def test_new_workers_get_the_job_id_of_a_coordinator_that_came_back(by_hand):
    planner = by_hand("n1", rendezvous="h:5", node_rank=1)
    planner.set_job_id("j-2")
    plan = planner.plan_start(commence(), [])
    assert (plan.env["DISTLAUNCH_JOB_ID"], plan.env["TORCHELASTIC_RUN_ID"]) == ("j-2", "j-2")
    assert plan.env["DISTLAUNCH_RUN_DIR"] == "/jobs/j"


# --- where workers listen


class Listening(Plain):
    """A backend whose workers have a port each."""

    worker_ports = 1

    def cluster_variables(self, cluster):
        return {"CLUSTER": " ".join(cluster)}

    def task_variables(self, workers, rank):
        return {"CLUSTER": f" {rank} of {workers}"}


CLUSTER = (*(f"10.0.0.{rank}:{rank + 1}" for rank in range(6)), "[fd00::1]:65535")


def test_workers_of_a_joined_launcher_get_the_addresses_of_all(by_hand):
    planner = by_hand("n1", rendezvous="h:5", node_rank=1)
    planner._backend = Listening({}, {})
    plan = planner.plan_start(commence(cluster=CLUSTER), ["eth0"])
    assert plan.env_starts == {"CLUSTER": " ".join(CLUSTER)}
    assert [worker.env["CLUSTER"] for worker in plan.workers] == [" 1 of 7", " 2 of 7"]


@pytest.mark.parametrize(
    "cluster",
    [
        CLUSTER[1:],
        (*CLUSTER, "a:1"),
        (),
        *((*CLUSTER[1:], odd) for odd in ("a", ":1", "a:0", "a:65536", "a b:1", "[a:1")),
    ],
    ids=str,
)
def test_a_cluster_that_makes_no_sense_is_refused(by_hand, cluster):
    planner = by_hand("n1", rendezvous="h:5", node_rank=1)
    planner._backend = Listening({}, {})
    with pytest.raises(ProtocolError):
        planner.plan_start(commence(cluster=cluster), ["eth0"])


def test_a_joined_launcher_whose_backend_knows_of_no_ports_refuses_them(by_hand):
    with pytest.raises(ProtocolError, match=r"7 ports .* --backend plain"):
        by_hand("n1", rendezvous="h:5", node_rank=1).plan_start(commence(cluster=CLUSTER), ["eth0"])
