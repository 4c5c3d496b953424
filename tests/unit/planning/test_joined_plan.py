from __future__ import annotations

import pytest

from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.core.model.record import replace
from distlaunch.core.protocol.agent_messages import Reached, Route
from distlaunch.planning.agreement import NodesDifferError
from distlaunch.planning.allocation import Allocation, Host
from distlaunch.planning.joined_plan import LauncherRecord
from distlaunch.planning.rendezvous import choose_rendezvous_without_plan
from tests.facts import mentions
from tests.unit.planning.joined_planners import reported, slurm, surveyed, tasks

# --- where launchers meet


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rendezvous": "h:5", "node_rank": 0}, ("h", (5,), 0, "yes")),
        ({"rendezvous": "h", "node_rank": 1}, ("h", (29400,), 1, "no")),
        ({"rendezvous": "[fd00::1]:5", "node_rank": 2}, ("fd00::1", (5,), 2, "no")),
        ({"rendezvous": "fd00::1", "node_rank": 2}, ("fd00::1", (29400,), 2, "no")),
        ({"rendezvous": "127.0.0.1:5"}, ("127.0.0.1", (5,), None, "first")),
        ({"rendezvous": "n0:5"}, ("n0", (5,), None, "first")),
        ({"rendezvous": "10.0.0.7:5"}, ("10.0.0.7", (5,), None, "first")),
        ({"rendezvous": "h:5"}, ("h", (5,), None, "no")),
        ({"master_addr": "h", "node_rank": 1}, ("h", (29400,), 1, "no")),
        ({"master_addr": "h", "master_port": 7, "node_rank": 1}, ("h", (29400,), 1, "no")),
    ],
    ids=str,
)
def test_the_user_gives_the_rendezvous(by_hand, options, expected):
    found = by_hand(**options).rendezvous
    assert (found.host, found.ports, found.rank, found.leads) == expected


@pytest.mark.parametrize(
    "text", ["h:", "h:x", "h:0", "h:70000", "[::1", "[::1]5", ":5", "-h:5", "a b:5"]
)
def test_a_bad_rendezvous_is_refused(by_hand, text):
    with pytest.raises(ConfigError, match="--rendezvous"):
        by_hand(rendezvous=text, node_rank=0)


def test_one_port_cannot_be_the_launchers_and_rank_0s(by_hand):
    with pytest.raises(ConfigError, match="port 5"):
        by_hand(rendezvous="h:5", node_rank=0, master_port=5)


def test_a_slurm_jobs_number_gives_a_series_of_ports(from_source):
    jobs = (slurm(), slurm(job_id="1235.0", number=1235))
    first, other = (from_source(each).rendezvous for each in jobs)
    assert (first.host, first.job_key) == ("a", "1234")
    assert len(set(first.ports) | set(other.ports)) == len(first.ports) + len(other.ports) == 8
    assert all(20000 <= port < 30004 for port in (*first.ports, *other.ports))


def test_a_port_that_the_source_names_is_the_launchers_and_rank_0_gets_another(from_source):
    planner = from_source(slurm(source="kubernetes", master_addr="m", master_port=23456))
    assert (planner.rendezvous.host, planner.rendezvous.ports) == ("m", (23456,))
    _, plan = planner.plan_attempt(
        {0: surveyed("a"), 1: surveyed("b")}, {1: LauncherRecord(host="b", info=reported(planner))}
    )
    assert plan.wanted_port == 0


def test_launchers_of_workers_are_numbered_node_by_node(from_source):
    ranks = [
        from_source(tasks(node, local)).rendezvous.rank
        for node, slots in ((0, 2), (1, 3))
        for local in range(slots)
    ]
    assert ranks == [0, 1, 2, 3, 4]
    assert from_source(tasks(1, 2)).hosts == (
        "rank 0 on a",
        "rank 1 on a",
        "rank 2 on b",
        "rank 3 on b",
        "rank 4 on b",
    )


@pytest.mark.parametrize(
    "options",
    [
        {"rendezvous": "h:5", "node_rank": 2},
        {"rendezvous": "n0:5"},
        {"rendezvous": "h:5"},
        {"master_addr": "h", "master_port": 7, "node_rank": 1, "job_id": "x"},
    ],
    ids=str,
)
def test_a_launcher_without_a_plan_knows_where_to_call(by_hand, options):
    planner = by_hand(**options)
    assert choose_rendezvous_without_plan(planner._options, planner._location) == planner.rendezvous


@pytest.mark.parametrize(
    "allocation",
    [
        slurm(node_rank=1),
        slurm(source="kubernetes", master_addr="m", master_port=23456),
        tasks(1, 2),
        Allocation(
            source="slurm",
            hosts=(Host(name="a", slots=2),),
            part="worker",
            node_rank=0,
            local_rank=1,
            master_addr="m",
            master_port=23456,
        ),
    ],
    ids=str,
)
def test_a_launcher_of_a_system_without_a_plan_knows_where_to_call(from_source, allocation):
    planner = from_source(allocation)
    assert choose_rendezvous_without_plan(planner._options, planner._location) == planner.rendezvous


def test_launchers_without_a_known_host_are_called_by_their_rank(by_hand):
    assert by_hand("me", rendezvous="h:5", node_rank=0).hosts == ("me", "node 1", "node 2")
    assert by_hand("me", rendezvous="h:5", node_rank=1).hosts == ("h", "node 1", "node 2")


@pytest.mark.parametrize(
    ("environ", "options", "leaves"),
    [
        ({}, {"num_nodes": (2, 3)}, True),
        ({}, {}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"num_nodes": (2, 3)}, True),
        *(
            ({name: "1"}, {"num_nodes": (2, 3)}, False)
            for name in (
                "SLURM_JOB_ID",
                "PBS_JOBID",
                "LSB_JOBID",
                "PE_HOSTFILE",
                "FLUX_JOB_SIZE",
                "PMI_RANK",
            )
        ),
    ],
    ids=str,
)
def test_term_is_for_a_launcher_alone_if_no_system_around_it_signals_all(
    by_hand, environ, options, leaves
):
    planner = by_hand(rendezvous="h:5", node_rank=1, **options)
    planner._facts = replace(planner._facts, environ={**planner._facts.environ, **environ})
    assert planner.stops_alone is leaves


# --- what they have to agree in


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, None),
        ({"slots": 5}, None),
        ({"num_nodes": (2, 2)}, "node 1 (n1) was started for 2 nodes, n0 (rank 0) for 3"),
        ({"num_nodes": (2, 3)}, "was started for 2:3 nodes"),
        ({"command": "other"}, "another command"),
        (
            {"backend": "horovod"},
            "node 1 (n1) has --backend 'horovod', n0 (rank 0) --backend 'plain'",
        ),
        (
            {"choices": "other"},
            "node 1 (n1) has other options of --backend plain (-o) than n0 (rank 0)",
        ),
        ({"slots": 0}, "0 workers"),
        ({"slots": 1 << 30}, "workers"),
        ({"attempt": 3, "restarts": 3}, None),
    ],
    ids=str,
)
def test_contradictions_are_named(by_hand, more, message):
    planner = by_hand(rendezvous="h:5", node_rank=0)
    conflict = planner.conflict(1, "n1", reported(planner, **more))
    assert conflict is None if message is None else message in conflict


def test_a_total_of_workers_leaves_no_node_a_choice(by_hand):
    planner = by_hand(rendezvous="h:5", node_rank=0, procs_per_node=None, num_procs=6)
    assert planner.conflict(1, "n1", reported(planner, slots=2)) is None
    assert mentions(
        planner.conflict(1, "n1", reported(planner, slots=3)), "3 workers", "n0", "rank 0", "2"
    )


def test_commands_are_the_same_wherever_the_script_lies(by_hand):
    def digest(script, *args, **more):
        return reported(
            by_hand(
                script=script, script_args=args, **{"rendezvous": "h:6", "node_rank": 0, **more}
            )
        ).command

    assert digest("/a/t.py", "1") == digest("/b/t.py", "1")
    assert digest("t.py", "1") == digest("t.py", "1", master_port=5, node_rank=1)
    assert len({digest("t.py", "1"), digest("t.py", "2"), digest("t.py"), digest("u.py", "1")}) == 4


def test_a_clock_that_is_far_off_is_reported(by_hand):
    planner = by_hand(rendezvous="h:5", node_rank=0)
    assert planner.clock_note(1, "n1", reported(planner, wall=1000.0), wall=900.0) is None
    assert mentions(
        planner.clock_note(1, "n1", reported(planner, wall=1600.0), wall=1000.0),
        "node 1",
        "n1",
        "10 min",
        "ahead",
    )
    behind = planner.clock_note(1, "n1", reported(planner, wall=400.0), wall=1000.0)
    assert mentions(behind, "n1", "10 min", "behind")
    far = planner.clock_note(1, "n1", reported(planner, wall=1e308), wall=0.0)
    assert mentions(far, "n1", "99 h", "ahead")


# --- the coordinator's plan


def test_ranks_follow_the_numbers_and_unequal_slots_are_ordinary(by_hand):
    planner = by_hand(rendezvous="h:5", node_rank=0)
    known = {
        number: LauncherRecord(host=f"n{number}", info=reported(planner, slots=number))
        for number in (2, 1)
    }
    node_numbers, plan = planner.plan_attempt(
        {number: surveyed(f"n{number}") for number in (2, 0, 1)}, known
    )
    assert node_numbers == (0, 1, 2)
    assert [(worker.rank, worker.node_rank, worker.local_rank) for worker in plan.workers] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 2, 0),
        (4, 2, 1),
    ]
    assert planner.hosts_and_first_ranks(plan) == (("n0", 0), ("n1", 2), ("n2", 3))


def test_an_elastic_job_takes_those_that_are_there_and_never_goes_without_the_coordinator(by_hand):
    planner = by_hand(rendezvous="h:5", node_rank=0, num_nodes=(2, 3))
    known = {number: LauncherRecord(host=f"n{number}", info=reported(planner)) for number in (1, 2)}
    node_numbers, plan = planner.plan_attempt({0: surveyed("n0"), 2: surveyed("n2")}, known)
    assert (node_numbers, plan.world_size, [node.host for node in plan.nodes]) == (
        (0, 2),
        4,
        ["n0", "n2"],
    )
    with pytest.raises(NodesError):
        planner.plan_attempt({1: surveyed("n1"), 2: surveyed("n2")}, known)


def test_scripts_that_differ_are_reported_by_the_names_of_their_hosts(by_hand):
    planner = by_hand(rendezvous="h:5", node_rank=0, num_nodes=2, module=False, script="train.py")
    known = {1: LauncherRecord(host="other", info=reported(planner))}
    with pytest.raises(NodesDifferError, match="on other, but") as caught:
        planner.plan_attempt(
            {0: surveyed("n0", script_sha256="a" * 64), 1: surveyed("n1", script_sha256="b" * 64)},
            known,
        )
    assert caught.value.nodes == (1,)


def test_the_rendezvous_is_tried_too(by_hand):
    node = surveyed("n0")
    assert by_hand(rendezvous="h:5", node_rank=0).addresses(node, "n0") == ("10.0.0.1", "h")
    assert by_hand(rendezvous="10.9.9.9:5", node_rank=0).addresses(node, "n0") == (
        "10.9.9.9",
        "10.0.0.1",
    )
    lonely = surveyed("n0", interfaces=())
    assert by_hand(rendezvous="127.0.0.1:5", node_rank=0).addresses(lonely, "n0") == ("127.0.0.1",)
    assert by_hand(rendezvous="h:5", node_rank=0, master_addr="m").addresses(node, "n0") == ("m",)
    with pytest.raises(ConfigError, match="--interface"):
        by_hand(rendezvous="h:5", node_rank=0, interface="ib0").addresses(node, "n0")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_workers_of_launchers_with_a_rendezvous_on_loopback_get_that_address(by_hand, host):
    planner = by_hand(rendezvous=f"{host}:5", num_nodes=2)
    bare = host.strip("[]")
    surveys = [surveyed("n0", named=("127.0.1.1",)), surveyed("n0", named=("127.0.1.1",))]
    assert planner.addresses(surveys[0], "n0") == (bare, "10.0.0.1")
    ways = tuple(Route(address=each, local=each, interface="") for each in (bare, "10.0.0.1"))
    met = planner.choose_master(surveys, {1: Reached(attempt=0, routes=ways, problem=None)})
    assert (met.address, met.env, met.addresses) == (bare, {}, (bare, bare))
    elsewhere = Reached(attempt=0, routes=ways[1:], problem=None)
    assert planner.choose_master(surveys, {1: elsewhere}).address == "10.0.0.1"


def test_no_worker_gets_the_unspecified_address_if_another_was_reached(by_hand):
    assert by_hand(rendezvous="0.0.0.0:5", node_rank=0).addresses(surveyed("n0"), "n0") == (
        "10.0.0.1",
        "0.0.0.0",
    )


def test_launchers_of_workers_make_the_plan_of_their_nodes(from_source):
    planner = from_source(tasks(0, 0))
    known = {
        n: LauncherRecord(host="a" if n < 2 else "b", info=reported(planner)) for n in range(1, 5)
    }
    surveys = {number: surveyed("x") for number in range(5)}
    node_numbers, plan = planner.plan_attempt(surveys, known)
    assert node_numbers == (0, 1, 2, 3, 4)
    assert [node.slots for node in plan.nodes] == [2, 3]
    assert planner.hosts_and_first_ranks(plan) == (
        ("nodeA", 0),
        ("nodeA", 1),
        ("b", 2),
        ("b", 3),
        ("b", 4),
    )
    route = Route(address="10.0.0.1", local="10.0.0.1", interface="eth0")
    reached = {rank: Reached(attempt=0, routes=(route,), problem=None) for rank in range(1, 5)}
    assert set(planner.choose_master([surveyed("x", named=("127.0.1.1",))] * 5, reached).env) == {
        0,
        1,
    }


def test_launchers_of_workers_give_one_address_for_each_node(from_source):
    planner = from_source(tasks(0, 0))
    ways = {
        place: Reached(
            attempt=0,
            problem=None,
            routes=(Route(address="10.0.0.1", local=f"10.0.0.{place}", interface=""),),
        )
        for place in range(1, 5)
    }
    met = planner.choose_master([surveyed(name) for name in "aabbb"], ways)
    assert met.addresses == ("10.0.0.1", "10.0.0.2")
