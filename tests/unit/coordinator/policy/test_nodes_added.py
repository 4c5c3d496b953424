"""Nodes that join a running job: spares, and hosts that ``--discover`` finds."""

from __future__ import annotations

import pytest

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.node_setup import DISCOVER_S, ELASTIC_WAIT_S
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions

# --- spares


def test_spares_are_connected_but_do_not_hold_up_the_start(make_nodes):
    job = make_nodes(4, bounds=(2, 2))
    job.begin()
    assert [node for node, _ in job.connects()] == [0, 1, 2, 3]
    job.joined(3)
    job.gather(0, 1)
    assert job.phase == "preparing"
    assert job.node_numbers == (0, 1)
    assert job.notices == "", "spares may come later"


def test_a_spare_stands_in_at_the_start_if_one_cannot_take_part(make_nodes):
    job = make_nodes(3, bounds=(2, 2))
    job.begin()
    job.gather(0, 2)
    assert job.phase == "connecting", "node 1 may yet come"
    job.unreachable(1, step="login", text="no key", passing=False)
    assert job.node_numbers == (0, 2)
    assert "without n1 (login: no key)" in job.notices


def test_a_spare_takes_the_place_of_a_lost_node_at_once_without_a_restart(make_nodes):
    job = make_nodes(3, bounds=(2, 2)).run()
    job.lost(0)
    job.stop_others(0)
    job.survey_all()
    assert job.node_numbers == (1, 2)
    assert mentions(job.notices, "node n0", "ranks 0-1", "10 s", "2 of 2", "n2")
    job.come_up()
    assert job.policy.restarts == 0
    assert job.sent(m.Prepare)[-2:] == [
        (1, m.Prepare(attempt=1, port=0, token="word1")),
        (2, m.Prepare(attempt=1, port=None)),
    ]


def test_without_a_spare_left_a_loss_is_a_failure(make_nodes):
    job = make_nodes(3, bounds=(2, 2)).run()
    job.lost(2)
    assert job.phase == "running"
    assert job.entries("node_lost") == [{"node": 2, "host": "n2", "why": "silent for 10 s"}]
    job.lost(1)
    job.stop_others(1)
    assert job.exit_code == 69
    assert job.of(p.ReportFailure)[0].final


# --- --discover


@pytest.fixture
def found(make_nodes):
    job = make_nodes(3, per_node=1, bounds=(2, 5), discover=True, join_timeout_s=100.0)

    def discovered(*hosts: str, problem=None) -> list[p.Action]:
        job.names += [host for host in hosts if host not in job.names]
        return job.step(p.Discovered(hosts=None if problem else hosts, problem=problem))

    job.discovered = discovered
    return job


def test_hosts_are_looked_for_at_each_re_forming_and_new_ones_take_part(found):
    job = found
    job.begin()
    job.gather()
    job.pass_time(0)
    job.come_up()
    assert job.of(p.Discover) == []
    job.lost(0)
    assert len(job.of(p.Discover, job.stop_others(0))) == 1
    job.survey_all()
    assert job.phase == "connecting", "the hosts are not known yet"
    actions = job.discovered("n0", "n1", "n2", "m7", "m7", "m8")
    assert job.connects(actions) == [(3, 0.0), (4, 0.0)]
    job.gather(3, 4)
    assert job.node_numbers == (1, 2, 3, 4)
    assert "hosts: m[7-8] came" in job.notices


def without_its_third(job):
    """Start a job and lose a node. The others are surveyed again."""
    job.begin()
    job.gather()
    job.come_up()
    job.lost(2)
    job.stop_others(2)
    job.survey_all()
    return job


def test_hosts_that_have_vanished_take_no_part_in_the_next_attempt(found):
    job = without_its_third(found)
    actions = job.discovered("n1", "m7", "m8")
    assert p.Disconnect(node=0) in actions
    job.gather(3, 4)
    assert job.node_numbers == (1, 3, 4)
    assert job.joined(2) == [p.Disconnect(node=2)], "it was on its way when it vanished"


def test_a_command_that_fails_leaves_the_hosts_as_they_were_and_is_reported_once(found):
    job = found
    job.begin()
    job.gather(0)
    job.pass_time(DISCOVER_S)
    assert len(job.of(p.Discover)) == 1
    job.discovered(problem="exit code 1")
    job.pass_time(DISCOVER_S)
    assert len(job.of(p.Discover)) == 2
    job.discovered(problem="exit code 1")
    assert job.notices.count("exit code 1") == 1
    job.gather(1)
    job.pass_time(ELASTIC_WAIT_S)
    assert job.node_numbers == (0, 1)


def test_a_command_that_hangs_does_not_hold_up_the_re_forming(found):
    job = without_its_third(found)
    job.pass_time(ELASTIC_WAIT_S)
    assert job.node_numbers == (0, 1)


def test_a_host_that_comes_back_to_the_list_is_used_again(found):
    job = found
    job.begin()
    job.gather(0)
    job.discovered("n0", "n1")
    job.discovered("n0", "n1", "n2")
    assert job.connects()[-1] == (2, 0.0)
    job.gather(1, 2)
    job.pass_time(ELASTIC_WAIT_S)
    assert job.node_numbers == (0, 1, 2)


def test_too_few_hosts_end_the_job_only_at_the_join_timeout_as_more_may_come(found):
    job = found
    job.begin()
    job.gather(0)
    for node in (1, 2):
        job.unreachable(node, step="login", passing=False)
    job.pass_time(99.0)
    assert job.exit_code is None
    job.pass_time(1.0)
    assert job.exit_code == 69
