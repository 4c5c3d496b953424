from __future__ import annotations

import signal

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.job_nodes import AFTER_S, BACK_S, COOLING_S, LOSSES_S
from distlaunch.coordinator.policy.node_setup import ELASTIC_WAIT_S, LOOK_AGAIN_S
from distlaunch.core.errors import NodesError
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions

BACK = max(BACK_S, 5.0 + AFTER_S)
"""When a lost node is tried first: what ran there has the failure grace."""


# --- when it goes on


def test_an_elastic_job_starts_at_once_when_all_are_there(make_nodes):
    job = make_nodes(4, bounds=(2, 4))
    job.begin()
    job.gather()
    assert job.phase == "preparing"
    assert job.node_numbers == (0, 1, 2, 3)


def test_with_enough_nodes_the_others_are_waited_for_a_while(make_nodes):
    job = make_nodes(4, bounds=(2, 4))
    job.begin()
    job.pass_time(20.0)
    job.gather(0, 2)
    job.unreachable(1)
    job.pass_time(ELASTIC_WAIT_S - 0.1)
    assert job.phase == "connecting"
    job.pass_time(0.2)
    assert job.phase == "preparing"
    assert job.node_numbers == (0, 2)
    assert "without n1 (connect: refused) and 1 other" in job.notices


def test_a_node_that_has_not_joined_in_time_is_reported(make_nodes):
    job = make_nodes(3, bounds=(2, 3))
    job.begin()
    job.gather(0, 1)
    job.pass_time(ELASTIC_WAIT_S)
    assert job.phase == "preparing"
    assert mentions(job.notices, "without n2")


def test_a_node_that_cannot_take_part_is_reported_and_not_waited_for(make_nodes):
    job = make_nodes(3, bounds=(1, 3))
    job.begin()
    job.gather(0, 1)
    job.unreachable(2, step="login", text="no key was accepted", passing=False)
    assert job.node_numbers == (0, 1)
    assert "without n2 (login: no key was accepted)" in job.notices


def test_fewer_than_the_least_end_the_job_at_the_join_timeout_and_the_missing_are_named(make_nodes):
    job = make_nodes(4, bounds=(3, 4), join_timeout_s=30.0)
    job.begin()
    job.gather(0)
    job.unreachable(1, text="no route")
    job.unreachable(2, step="login", text="no key was accepted", passing=False)
    job.pass_time(29.9)
    assert job.exit_code is None
    job.pass_time(0.2)
    assert job.exit_code == 69
    assert mentions(job.notices, "1 of", "3 nodes")
    for words in ("n1", "no route", "n2", "no key was accepted", "n3"):
        assert words in job.notices


def test_a_total_that_the_first_nodes_cannot_hold_waits_for_more(make_nodes):
    job = make_nodes(3, bounds=(1, 3), join_timeout_s=30.0)
    job.refuses = NodesError("8 workers do not fit on 2 nodes")
    job.begin()
    job.gather(0, 1)
    job.pass_time(ELASTIC_WAIT_S)
    assert job.phase == "connecting"
    job.refuses = None
    job.gather(2)
    assert job.node_numbers == (0, 1, 2)


def test_a_total_that_cannot_be_held_ends_the_job(make_nodes):
    job = make_nodes(3, bounds=(1, 3), join_timeout_s=30.0)
    job.refuses = NodesError("8 workers do not fit on 2 nodes")
    job.begin()
    job.gather(0, 1)
    job.pass_time(30.0)
    assert job.exit_code == 69
    assert mentions(job.notices, "8 workers")


# --- losing nodes


def test_the_rest_re_form_at_once_and_that_is_no_restart(make_nodes):
    job = make_nodes(4, bounds=(2, 4)).run()
    job.now = 50.0
    actions = job.lost(2)
    assert [node for node, _ in job.sent(m.Stop, actions)] == [0, 1, 3]
    assert job.connects(actions) == [(2, BACK)]
    job.stop_others(2)
    job.survey_all()
    assert job.phase == "preparing"
    assert job.node_numbers == (0, 1, 3)
    assert mentions(job.notices, "node n2", "ranks 4-5", "10 s", "3 of 4")
    assert len([say for say in job.of(p.ShowMessage) if "n2" in say.text]) == 1
    job.come_up()
    assert (job.attempt, job.policy.restarts, job.policy.world_size) == (1, 0, 6)
    assert job.of(p.ReportFailure) == []
    assert job.entries("reforming") == [{"attempt": 1, "lost": 1}]
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.exit_code == 0


def test_a_lost_node_joins_again_at_the_next_attempt(make_nodes):
    job = make_nodes(3, bounds=(2, 3)).run()
    job.lost(0)
    job.stop_others(0)
    job.survey_all()
    job.come_up()
    assert job.node_numbers == (1, 2)
    job.now += 8.0
    job.joined(0)
    assert mentions(job.notices, "node n0", "back")
    assert job.phase == "running"
    job.lost(2)
    job.stop_others(2)
    job.survey_all()
    assert job.node_numbers == (0, 1)
    assert mentions(job.notices, "2 of 3", "n0")


def test_lost_nodes_are_tried_again_later_and_later(make_nodes):
    job = make_nodes(3, bounds=(2, 3)).run()
    job.lost(2)
    job.now += 100.0
    delays = [delay_s for _ in range(5) for _, delay_s in job.connects(job.unreachable(2))]
    assert delays == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_below_the_least_number_the_job_waits_for_nodes_and_names_them(make_nodes):
    job = make_nodes(2, bounds=(2, 3), join_timeout_s=60.0).run()
    job.lost(1)
    actions = job.stop_others(1)
    assert [node for node, _ in job.connects(actions)] == [1], "sooner than in the background"
    job.survey_all()
    job.pass_time(6.0)
    assert mentions(job.notices, "node n1", "ranks 2-3", "10 s", "1 of 2")
    job.gather(1)
    job.pass_time(ELASTIC_WAIT_S)
    assert job.phase == "preparing"
    assert job.notices.count("(ranks 2-3) left") == 1


def test_below_the_least_number_at_the_join_timeout_the_job_ends_with_69(make_nodes):
    job = make_nodes(2, bounds=(2, 3), join_timeout_s=60.0).run()
    job.lost(1)
    job.stop_others(1)
    job.survey_all()
    job.pass_time(60.0)
    assert job.exit_code == 69
    assert mentions(job.notices, "lost", "10 s", "back")


def test_asked_to_stop_while_the_rest_is_to_re_form_the_job_is_stopped(make_nodes):
    job = make_nodes(3, bounds=(1, 3)).run()
    job.lost(1)
    job.now += 1.0
    job.signal(signal.SIGTERM)
    job.stop_others(1)
    assert job.exit_code == 143
    assert job.of(p.ReportFailure) == []


def test_a_failure_of_a_worker_is_a_restart_like_any(make_nodes):
    job = make_nodes(3, bounds=(1, 3), max_restarts=1).run()
    job.exited(0, 1, tail=job.RAISED)
    job.pass_time(1.0)
    job.lost(2)
    for rank in (1, 2, 3):
        job.exited(rank, -15, reported=True)
    job.gone(0)
    job.gone(1)
    assert (job.policy.restarts, job.attempt) == (1, 1)
    job.survey_all()
    assert job.node_numbers == (0, 1)
    assert mentions(job.notices, "2 of 3")


def test_several_nodes_that_leave_are_reported_in_one_line(make_nodes):
    job = make_nodes(6, per_node=1, bounds=(1, 6)).run()
    job.lost(1)
    job.lost(3, "the connection was closed")
    job.lost(4)
    job.stop_others(1, 3, 4)
    job.survey_all()
    text = (
        "nodes n1 (rank 1), n4 (rank 4) left: silent for 10 s; node n3 (rank 3) left: the connection was"
        " closed; going on with 3 of 6 nodes"
    )
    assert text in job.notices


def test_very_many_nodes_that_leave_are_reported_in_a_short_line(make_nodes):
    job = make_nodes(400, per_node=1, bounds=(1, 400)).run()
    left = [node for node in range(400) if node % 7 == 0]
    for node in left:
        job.lost(node)
    job.stop_others(*left)
    job.survey_all()
    assert job.phase == "preparing"
    assert max(len(say.text) for say in job.of(p.ShowMessage)) < 300


def test_a_fault_on_a_node_of_an_elastic_job_is_a_loss(make_nodes):
    job = make_nodes(3, bounds=(1, 3)).run()
    job.fault(1, "the spawner was killed")
    job.stop_others(1)
    job.survey_all()
    assert job.node_numbers == (0, 2)
    assert mentions(job.notices, "left", "killed", "2 of 3")


def test_a_notice_about_a_node_that_is_then_lost_is_dropped(make_nodes):
    job = make_nodes(2, bounds=(1, 2))
    job.begin()
    job.gather(0)
    job.joined(1)
    job.surveyed(1, script_sha256=None)
    job.lost(1)
    assert job.sent(m.Survey, job.pass_time(LOOK_AGAIN_S)) == []


# --- a node that is lost again and again


def test_a_node_that_is_lost_three_times_in_ten_minutes_is_left_alone_for_a_while(make_nodes):
    job = make_nodes(3, bounds=(1, 3), failure_grace_s=1.0).run()
    delays = []
    for _ in range(4):
        [(_, delay_s)] = job.connects(job.lost(2))
        delays.append(delay_s)
        job.now += 100.0
        job.joined(2)
        if 2 in job.node_numbers:
            job.stop_others(2)
            job.survey_all()
            job.come_up()
    assert delays == [BACK_S, BACK_S, COOLING_S, 2 * COOLING_S]
    assert mentions(job.notices, "node n2", "3 times", "10 min", "60 s")


def test_losses_of_long_ago_do_not_count(make_nodes):
    job = make_nodes(3, bounds=(1, 3)).run()
    delays = []
    for _ in range(5):
        [(_, delay_s)] = job.connects(job.lost(2))
        delays.append(delay_s)
        job.now += LOSSES_S / 2
        job.joined(2)
    assert set(delays) == {BACK}


def test_a_job_that_needs_the_node_waits_for_its_cooling_down(make_nodes):
    job = make_nodes(2, bounds=(2, 3), join_timeout_s=30.0).run()
    for _ in range(3):
        job.lost(1)
        job.stop_others(1)
        job.survey_all()
        if job.policy._attempt_start._node_setup.nodes[1].cools_until > job.now:
            break
        job.pass_time(7.0)
        job.gather(1)
        job.pass_time(ELASTIC_WAIT_S)
        job.come_up()
    job.pass_time(COOLING_S + 20.0)
    assert job.exit_code is None, "the join timeout begins when it may be used again"
    job.gather(1)
    job.pass_time(ELASTIC_WAIT_S)
    assert job.phase == "preparing"


# --- nodes that cannot prepare, or find no way to the master


def test_a_node_that_cannot_prepare_is_left_out_if_the_others_will_do(make_nodes):
    job = make_nodes(3, bounds=(2, 3))
    job.begin()
    job.gather()
    job.prepared(1)
    job.prepared(2, problem="no thread")
    assert job.exit_code is None
    assert mentions(job.notices, "node n2", "left out", "no thread")
    assert job.phase in ("connecting", "preparing")


def test_where_nobody_can_be_spared_a_node_that_cannot_prepare_ends_the_job(make_nodes):
    job = make_nodes(2, bounds=(2, 2))
    job.begin()
    job.gather()
    job.prepared(1, problem="no thread can be started")
    assert job.exit_code == 2


def test_a_node_that_finds_no_way_to_the_master_is_left_out(make_nodes):
    job = make_nodes(3, bounds=(2, 3))
    job.begin()
    job.gather()
    for node in range(3):
        job.prepared(node)
    job.reached(1)
    actions = job.reached(2, routes=(), problem="no route to host")
    assert "node n2 left out: no route to host" in job.notices
    assert [node for node, _ in job.connects(actions)] == [2]
    assert (job.attempt, job.phase) == (1, "connecting")
    job.survey_all()
    assert job.node_numbers == (0, 1)


def test_where_no_node_finds_a_route_the_master_is_the_problem(make_nodes):
    job = make_nodes(3, bounds=(1, 3))
    job.begin()
    job.gather()
    for node in range(3):
        job.prepared(node)
    job.reached(1, 2, routes=(), problem="no route to host")
    assert job.exit_code == 69
