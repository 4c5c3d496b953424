from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.core.model.record import replace
from distlaunch.core.protocol.agent_messages import Interface
from distlaunch.planning.build_plan import bind
from distlaunch.planning.interfaces import addresses
from distlaunch.planning.master_address import choose_reached
from distlaunch.planning.worker_addresses import cluster_of
from tests.facts import mentions
from tests.unit.planning.node_reports import DOCKER, GLOO, NCCL, TENSORPIPE, node, reached, way


def test_the_first_address_that_all_have_reached_is_taken(make_surveyed):
    surveys = [
        node(make_surveyed, "a", "eth0 10.0.0.1/24", "eth1 10.1.0.1/24", named=("10.1.0.1",)),
        node(make_surveyed, "b", "eth0 10.0.0.2/24", "eth1 10.1.0.2/24", named=("10.1.0.2",)),
        node(make_surveyed, "c", "eth1 10.1.0.3/24"),
    ]
    answers = {
        1: reached(way("10.0.0.1", "10.0.0.2", "eth0"), way("10.1.0.1", "10.1.0.2", "eth1")),
        2: reached(way("10.1.0.1", "10.1.0.3", "eth1")),
    }
    met = choose_reached(
        surveys, answers, tried=("10.0.0.1", "10.1.0.1"), hosts=("a", "b", "c"), nccl=False
    )
    assert (met.address, met.env) == ("10.1.0.1", {})


def two(make_surveyed, first, second, answer, **more):
    """Return the choice for two nodes, at the first address of the first node."""
    surveys = [
        node(make_surveyed, "a", *first.pop("written"), **first),
        node(make_surveyed, "b", *second.pop("written"), **second),
    ]
    tried = more.pop("tried", addresses(surveys[0], "a", interface=more.get("interface")))
    return choose_reached(surveys, {1: reached(*answer)}, tried=tried, hosts=("a", "b"), **more)


def test_hosts_with_one_interface_and_good_names_need_nothing(make_surveyed):
    met = two(
        make_surveyed,
        {
            "written": ["lo 127.0.0.1/8", "eth0 10.0.0.1/24", "eth0 fe80::1/64"],
            "named": ("10.0.0.1",),
        },
        {"written": ["eth0 10.0.0.2/24"]},
        [way("10.0.0.1", "10.0.0.2", "eth0")],
    )
    assert (met.address, met.env) == ("10.0.0.1", {})


@pytest.mark.parametrize("named", [("127.0.1.1",), (), ("127.0.1.1", "10.0.0.2"), ("10.0.0.99",)])
def test_gloo_gets_an_interface_where_a_hosts_own_name_leads_elsewhere(make_surveyed, named):
    met = two(
        make_surveyed,
        {"written": ["eth0 10.0.0.1/24"]},
        {"written": ["eth0 10.0.0.2/24"], "named": named},
        [way("10.0.0.1", "10.0.0.2", "eth0")],
    )
    assert met.env == {1: {GLOO: "eth0", TENSORPIPE: "eth0"}}


def test_the_master_gets_an_interface_as_well(make_surveyed):
    met = two(
        make_surveyed,
        {"written": ["eth3 10.0.0.1/24"], "named": ("127.0.1.1",)},
        {"written": ["eth0 10.0.0.2/24"]},
        [way("10.0.0.1", "10.0.0.2")],
    )
    assert met.env == {0: {GLOO: "eth3", TENSORPIPE: "eth3"}}


def test_with_several_interfaces_the_one_of_the_route_is_named(make_surveyed):
    met = two(
        make_surveyed,
        {"written": ["eth0 192.168.0.1/24", "eth1 10.1.0.1/24"]},
        {"written": ["eth0 192.168.7.2/24", "ens5 10.1.0.2/24"]},
        [way("10.1.0.1", "10.1.0.2", "ens5")],
    )
    assert met.address == "10.1.0.1"
    assert met.env == {
        0: {GLOO: "eth1", TENSORPIPE: "eth1", NCCL: "=eth1"},
        1: {GLOO: "ens5", TENSORPIPE: "ens5", NCCL: "=ens5"},
    }


def test_nccl_gets_several_interfaces_although_names_are_good(make_surveyed):
    first = {"written": ["eth0 10.0.0.1/24", "ib0 10.9.0.1/24"]}
    second = {"written": ["eth0 10.0.0.2/24", "veth1 fe80::2/64"]}
    route = [way("10.0.0.1", "10.0.0.2", "eth0")]
    assert two(make_surveyed, dict(first), dict(second), route).env == {
        0: {NCCL: "=eth0"},
        1: {NCCL: "=eth0"},
    }
    assert two(make_surveyed, first, second, route, nccl=False).env == {}


def test_docker_of_the_same_address_on_all_nodes_does_not_count(make_surveyed):
    met = two(
        make_surveyed,
        {"written": [DOCKER, "eth0 10.0.0.1/24"], "named": ("10.0.0.1",)},
        {"written": [DOCKER, "eth0 10.0.0.2/24"], "named": ("10.0.0.2",)},
        [way("10.0.0.1", "10.0.0.2", "eth0")],
    )
    assert (met.address, met.env) == ("10.0.0.1", {})


def test_ipv6_alone_works(make_surveyed):
    met = two(
        make_surveyed,
        {"written": ["lo ::1/128", "eth0 fd00::1/64", "eth0 fe80::1/64"], "named": ("::1",)},
        {"written": ["eth0 fd00::2/64"]},
        [way("fd00::1", "fd00::2", "eth0")],
    )
    assert (met.address, met.env) == ("fd00::1", {0: {GLOO: "eth0", TENSORPIPE: "eth0"}})


def test_variables_of_the_user_or_the_node_stay(make_surveyed):
    first = {"written": ["eth0 10.0.0.1/24", "eth1 10.1.0.1/24"], "named": ()}
    second = {
        "written": ["eth0 10.0.0.2/24", "eth1 10.1.0.2/24"],
        "named": (),
        "environ": {NCCL: "ib0"},
    }
    met = two(
        make_surveyed,
        first,
        second,
        [way("10.0.0.1", "10.0.0.2", "eth0")],
        set_by_user={GLOO: "eth1"},
    )
    assert met.env == {0: {TENSORPIPE: "eth0", NCCL: "=eth0"}, 1: {TENSORPIPE: "eth0"}}


def test_the_users_interface_is_named_to_all_that_need_it(make_surveyed):
    met = two(
        make_surveyed,
        {"written": ["eth0 10.0.0.1/24", "eth1 10.1.0.1/24"]},
        {"written": ["eth0 10.0.0.2/24", "eth1 10.1.0.2/24"]},
        [way("10.1.0.1", "10.0.0.2", "eth0")],
        interface="eth1",
    )
    assert met.address == "10.1.0.1"
    assert met.env[0] == met.env[1] == {GLOO: "eth1", TENSORPIPE: "eth1", NCCL: "=eth1"}


def test_a_node_without_the_users_interface_is_named(make_surveyed):
    with pytest.raises(ConfigError, match=r"--interface: b has no interface 'eth1'"):
        two(
            make_surveyed,
            {"written": ["eth0 10.0.0.1/24", "eth1 10.1.0.1/24"]},
            {"written": ["eth0 10.0.0.2/24"]},
            [way("10.1.0.1", "10.0.0.2", "eth0")],
            interface="eth1",
        )


def test_the_users_address_may_be_a_name_that_no_interface_has(make_surveyed):
    met = two(
        make_surveyed,
        {"written": ["eth0 192.168.3.1/24", "eth1 10.1.0.1/24"], "named": ("127.0.1.1",)},
        {"written": ["eth1 10.1.0.2/24"]},
        [way("gw.example", "10.1.0.2", "eth1")],
        tried=("gw.example",),
        nccl=False,
    )
    assert (met.address, met.env) == ("gw.example", {0: {GLOO: "eth1", TENSORPIPE: "eth1"}})


# --- who cannot


def four(make_surveyed):
    return [node(make_surveyed, f"n{rank}", f"eth0 10.0.0.{rank}/24") for rank in (1, 2, 3, 4)]


NAMES = ("n1", "n2", "n3", "n4")


def test_a_node_that_cannot_reach_the_master_is_named_with_the_reason(make_surveyed):
    good = reached(way("10.0.0.1", "10.0.0.2", "eth0"))
    answers = {1: good, 2: reached(problem="no route to host"), 3: good}
    with pytest.raises(NodesError) as caught:
        choose_reached(four(make_surveyed), answers, tried=("10.0.0.1",), hosts=NAMES)
    assert caught.value.exit_code == 69
    assert mentions(caught.value.message, "n3", "n1", "rank 0", "10.0.0.1", "no route to host")
    assert all(
        word in caught.value.hint
        for word in ("--interface", "--master-addr", "--master-port", "eth0 10.0.0.1/24")
    )


def test_a_node_that_did_not_answer_counts_as_one_that_cannot(make_surveyed):
    with pytest.raises(NodesError, match=r"n\[2-4\] .* n1"):
        choose_reached(four(make_surveyed), {}, tried=("10.0.0.1",), hosts=NAMES)


def test_nodes_in_two_networks_are_distinguished(make_surveyed):
    answers = {
        1: reached(way("10.0.0.1", "10.0.0.2")),
        2: reached(way("10.9.0.1", "10.9.0.3")),
        3: reached(way("10.0.0.1", "10.0.0.4")),
    }
    with pytest.raises(NodesError, match=r"n\[2,4\] by 10\.0\.0\.1 only, n3 by 10\.9\.0\.1 only"):
        choose_reached(four(make_surveyed), answers, tried=("10.0.0.1", "10.9.0.1"), hosts=NAMES)


def test_texts_stay_short_however_many_nodes_there_are(make_surveyed):
    surveys = [
        node(make_surveyed, f"n{rank}", f"eth0 10.0.{rank // 250}.{rank % 250}/16")
        for rank in range(2000)
    ]
    hosts = [f"n{rank:05d}x{rank * 7919 % 10007}" for rank in range(2000)]
    with pytest.raises(NodesError) as caught:
        choose_reached(surveys, {}, tried=("10.0.0.0",), hosts=hosts)
    assert len(caught.value.message) < 300
    answers = {rank: reached(way(f"10.1.{rank}", "x")) for rank in range(1, 2000)}
    with pytest.raises(NodesError) as caught:
        choose_reached(
            surveys, answers, tried=[f"10.1.{rank}" for rank in range(2000)], hosts=hosts
        )
    assert mentions(caught.value.message, "n00001x7919", "10.1.1", "1,991 others")
    assert len(caught.value.message) < 1200


def test_addresses_that_were_not_to_be_tried_do_not_count(make_surveyed):
    answers = {
        1: reached(way("10.0.0.1", "10.0.0.2"), way("\n\x1b[2J", "x")),
        2: reached(way("8.8.8.8\nerror", "10.0.0.3")),
        3: reached(way("10.9.0.1", "10.0.0.4")),
    }
    with pytest.raises(NodesError, match=r"^n3 .* n1, .* rank 0, .* 10.0.0.1, 10.9.0.1$"):
        choose_reached(four(make_surveyed), answers, tried=("10.0.0.1", "10.9.0.1"), hosts=NAMES)
    answers[2] = answers[1]
    with pytest.raises(
        NodesError, match=r"all nodes: n\[2-3\] by 10.0.0.1 only, n4 by 10.9.0.1 only$"
    ):
        choose_reached(four(make_surveyed), answers, tried=("10.0.0.1", "10.9.0.1"), hosts=NAMES)


@given(data=st.data(), nodes=st.integers(2, 5))
def test_an_address_is_taken_only_if_all_others_reached_it(make_surveyed, data, nodes):
    tried = ("10.0.0.1", "10.1.0.1", "fd00::1")
    surveys = [
        node(make_surveyed, f"n{rank}", f"eth0 10.0.0.{rank + 1}/24") for rank in range(nodes)
    ]
    sets = [data.draw(st.sets(st.sampled_from(tried))) for _ in range(nodes - 1)]
    answers = {
        rank: reached(*(way(each, f"10.0.0.{rank + 1}", "eth0") for each in those))
        for rank, those in enumerate(sets, 1)
    }
    common = [each for each in tried if all(each in those for those in sets)]
    hosts = [f"n{rank}" for rank in range(nodes)]
    if common:
        assert choose_reached(surveys, answers, tried=tried, hosts=hosts).address == common[0]
        return
    with pytest.raises(NodesError):
        choose_reached(surveys, answers, tried=tried, hosts=hosts)


# --- in the plan


def test_the_rendezvous_is_part_of_the_plan_of_the_attempt(make_planner, make_surveys):
    made = make_planner(hosts="a:1,b:2", environ={"PATH": "/p"})
    surveys = make_surveys(made)
    surveys[1] = make_surveys(made, named=("127.0.1.1",), python="/opt/python3")[1]
    node_numbers, plan = made.plan_attempt(surveys)
    assert made.addresses(surveys[0], "a") == ("10.0.0.1",)
    met = made.choose_master(
        [surveys[number] for number in node_numbers],
        {1: reached(way("10.0.0.1", "10.0.0.2", "eth0"))},
    )
    bound = bind(plan, attempt=2, master_port=4711, master=met)
    assert (bound.env["MASTER_ADDR"], bound.env["MASTER_PORT"], bound.attempt) == (
        "10.0.0.1",
        "4711",
        2,
    )
    assert bound.nodes[0].env == {"PATH": "/p"}
    assert bound.nodes[1].env == {GLOO: "eth0", TENSORPIPE: "eth0"}
    nodes = bound.record()["nodes"]
    assert ("env" in nodes[0], nodes[1]["env"]) == (False, {GLOO: "eth0", TENSORPIPE: "eth0"})


def test_workers_are_found_where_their_nodes_were_when_they_reached_the_first(
    make_planner, make_surveys
):
    made = make_planner(hosts="a:1,b:2")
    surveys = make_surveys(made)
    node_numbers, plan = made.plan_attempt(surveys)
    met = made.choose_master(
        [surveys[number] for number in node_numbers],
        {1: reached(way("10.0.0.1", "fd00::2", "eth0"))},
    )
    assert met.addresses == ("10.0.0.1", "fd00::2")
    plan = replace(plan, worker_ports=2)
    assert cluster_of(plan, range(1, 7), met) == (
        "10.0.0.1:1",
        "10.0.0.1:2",
        "[fd00::2]:3",
        "[fd00::2]:4",
        "[fd00::2]:5",
        "[fd00::2]:6",
    )


def test_the_composer_takes_the_users_settings_for_the_rendezvous(make_planner, make_surveys):
    made = make_planner(hosts="a,b", env=("GLOO_SOCKET_IFNAME=eth9",), master_addr="m.example")
    surveys = make_surveys(made, named=())
    assert made.addresses(surveys[0], "a") == ("m.example",)
    made.plan_attempt(surveys)
    met = made.choose_master(
        [surveys[0], surveys[1]], {1: reached(way("m.example", "10.0.0.2", "eth0"))}
    )
    assert (met.address, met.env[1]) == ("m.example", {TENSORPIPE: "eth0"})


def test_an_interface_that_a_node_lacks_is_reported_before_anything_is_prepared(
    make_planner, make_surveys
):
    made = make_planner(hosts="a,b", interface="eth0")
    surveys = make_surveys(made)
    surveys[1] = make_surveys(
        made, interfaces=(Interface(name="ens1", address="10.0.0.2", prefix=24),)
    )[1]
    with pytest.raises(ConfigError, match="--interface: b has no interface 'eth0'"):
        made.plan_attempt(surveys)
