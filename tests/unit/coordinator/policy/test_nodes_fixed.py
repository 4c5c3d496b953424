"""A job of a fixed number of nodes, from the list of hosts to its start."""

from __future__ import annotations

import pytest

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions


def test_all_nodes_are_connected_at_once_and_each_is_surveyed_as_it_joins(make_nodes):
    job = make_nodes(3)
    job.begin()
    assert job.connects() == [(0, 0.0), (1, 0.0), (2, 0.0)]
    assert [node for node, _ in job.sent(m.Survey, job.joined(1))] == [1]
    assert job.phase == "connecting"


def test_the_way_from_hosts_to_running_workers(make_nodes):
    job = make_nodes(3, master_port=29500)
    job.begin()
    job.gather()
    assert job.phase == "preparing"
    assert job.sent(m.Prepare) == [
        (0, m.Prepare(attempt=0, port=29500, token="word0")),
        (1, m.Prepare(attempt=0, port=None)),
        (2, m.Prepare(attempt=0, port=None)),
    ]
    job.prepared(0, port=29500)
    job.prepared(2)
    assert job.sent(m.Reach) == []
    job.prepared(1)
    question = m.Reach(
        attempt=0, addresses=("10.0.0.1", "n0"), port=29500, token="word0", bound_s=5.0
    )
    assert job.sent(m.Reach) == [(1, question), (2, question)]
    job.reached(2)
    [start] = job.of(p.StartAttempt, job.reached(1))
    assert (start.attempt, start.port, start.attempt_plan) == (0, 29500, job.composed[0])
    assert start.master.address == "10.0.0.1"
    for rank in job.ranks:
        job.started(rank)
    assert (job.phase, job.policy.up, job.policy.world_size) == ("running", 6, 6)
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.exit_code == 0


def test_events_are_recorded_during_the_job(make_nodes):
    job = make_nodes(2).run()
    assert job.entries("node_joined") == [
        {"node": 0, "host": "n0", "again": False},
        {"node": 1, "host": "n1", "again": False},
    ]
    assert job.entries("composed") == [
        {"attempt": 0, "nodes": 2, "world_size": 4, "hosts": "n[0-1]"}
    ]
    assert job.entries("attempt_started") == [
        {"attempt": 0, "master_port": 5000, "master_addr": "10.0.0.1"}
    ]


def test_a_single_node_is_not_asked_to_reach_itself(make_nodes):
    job = make_nodes(1)
    job.begin()
    job.gather()
    assert job.sent(m.Prepare) == [(0, m.Prepare(attempt=0, port=0))]
    assert job.of(p.StartAttempt, job.prepared(0, port=4711)) == [
        p.StartAttempt(attempt=0, port=4711, attempt_plan=job.composed[0])
    ]
    assert job.sent(m.Reach) == []


def test_each_node_holds_ports_for_its_workers_anew_for_every_attempt(make_nodes):
    job = make_nodes(2, worker_ports=3, max_restarts=1)
    job.begin()
    job.gather()
    assert job.sent(m.Prepare) == [
        (0, m.Prepare(attempt=0, port=0, token="word0", ports=6)),
        (1, m.Prepare(attempt=0, port=None, ports=6)),
    ]
    job.prepared(1, ports=tuple(range(20, 26)))
    job.prepared(0, ports=tuple(range(10, 16)))
    [start] = job.of(p.StartAttempt, job.reached(1))
    assert start.ports == (*range(10, 16), *range(20, 26))
    for rank in job.ranks:
        job.started(rank)
    job.fail()
    job.gather()
    job.prepared(0, ports=tuple(range(30, 36)))
    job.prepared(1, ports=tuple(range(40, 46)))
    [start] = job.of(p.StartAttempt, job.reached(1))
    assert start.ports == (*range(30, 36), *range(40, 46))


# --- preparing, reaching


def test_a_problem_in_preparing_names_the_host(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather()
    job.prepared(0, problem="port 80 denied", hint="above 1023")
    assert job.exit_code == 2
    assert job.notices.endswith("error: n0: port 80 denied\n  hint: above 1023")


def test_where_the_nodes_cannot_reach_rank_0_the_job_ends_with_69(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather()
    job.prepared(0)
    job.prepared(1)
    job.reached(1, routes=(), problem="connection refused")
    assert job.exit_code == 69
    assert mentions(job.notices, "no address", "n0")


def test_a_node_that_lists_no_reached_nodes_has_reached_none(make_nodes):
    job = make_nodes(3)
    job.begin()
    job.gather()
    for node in range(3):
        job.prepared(node)
    job.reached(1)
    job.pass_time(60.0)
    assert job.exit_code == 69


def test_nodes_that_never_prepare_are_named(make_nodes):
    job = make_nodes(3)
    job.begin()
    job.gather()
    job.prepared(1)
    job.pass_time(600.0)
    assert job.exit_code == 69
    assert "n[0,2]" in job.notices


def test_only_rank_0s_node_reports_its_port(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather()
    job.prepared(0, port=5000)
    job.prepared(1, port=22)
    assert {question.port for _, question in job.sent(m.Reach)} == {5000}


def test_a_node_that_is_lost_before_anything_runs_is_waited_for_again(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather()
    job.prepared(0)
    actions = job.lost(1)
    assert (job.attempt, job.phase) == (1, "connecting")
    assert [node for node, _ in job.connects(actions)] == [1]
    job.survey_all()
    job.gather(1)
    assert job.prepared(1, attempt=0) == [], "that was for the attempt before"
    job.come_up()
    assert [start.attempt for start in job.of(p.StartAttempt)] == [1]
    assert job.policy.restarts == 0
    assert job.of(p.ReportFailure) == []


def test_nodes_that_are_lost_again_and_again_before_the_start_do_not_hold_the_job_for_ever(
    make_nodes,
):
    job = make_nodes(2, join_timeout_s=60.0)
    job.begin()
    job.gather()
    for _ in range(40):
        if job.exit_code is not None:
            break
        job.pass_time(5.0)
        job.lost(1)
        job.survey_all()
        job.gather(1)
    assert job.exit_code == 69


# --- what nodes say


def test_a_failure_on_several_hosts_names_them(make_nodes):
    job = make_nodes(3, per_node=1).run()
    for rank in (2, 0, 1):
        job.exited(rank, 1, tail=job.RAISED)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert (failed.diagnosis.cause.ranks, failed.diagnosis.cause.host) == ((2, 0, 1), "n[0-2]")


def test_a_notice_names_its_host_and_the_same_from_other_hosts_is_reported_once(make_nodes):
    job = make_nodes(3).run()
    for node in range(3):
        job.say(node, m.AgentNotice(text="starting cold: no torch\x1b[31m", warning=True))
    assert [say.text for say in job.of(p.ShowMessage)] == ["n0: starting cold: no torch\\x1b[31m"]


def test_messages_of_nodes_that_take_no_part_change_nothing(make_nodes):
    job = make_nodes(3, bounds=(2, 2)).run()
    before = (job.phase, job.policy.up, job.policy.ended)
    assert job.gone(2) == []
    assert job.say(2, m.Started(attempt=0, pids={9: 9})) == []
    assert job.say(2, m.Reached(attempt=0, routes=(), problem=None)) == []
    assert (job.phase, job.policy.up, job.policy.ended) == before


@pytest.mark.parametrize(("returncode", "code"), [(256, 255), (-200, 255), (255, 255), (512, 255)])
def test_no_exit_code_of_a_worker_makes_a_failed_job_end_with_0(make_nodes, returncode, code):
    job = make_nodes(2, per_node=1).run()
    job.exited(1, returncode)
    job.exited(0, -15, reported=True)
    job.all_gone()
    assert job.exit_code == code


def test_a_node_cannot_stop_the_launcher(make_nodes):
    job = make_nodes(2).run()
    assert job.say(1, m.WorkerHalted(rank=2)) == []


def test_remarks_of_thousands_of_nodes_are_not_all_shown(make_nodes):
    job = make_nodes(2).run()
    for number in range(5000):
        job.say(1, m.AgentNotice(text=f"GPU memory is still held by pid {number}", warning=True))
    assert len(job.of(p.ShowMessage)) <= 200


def test_workers_that_a_node_makes_up_do_no_harm(make_nodes):
    job = make_nodes(2, per_node=1).run()
    for rank in (7, -3, 10**9, 1):
        exited = WorkerExit(
            attempt=0,
            rank=rank,
            pid=0,
            returncode=1,
            uptime_s=float("nan"),
            ended=float("inf"),
            told_to_stop=False,
            oom_kills=-1,
            error_file="{",
            stderr_tail=b"\xff\x1b[2J",
        )
        job.say(1, exited)
    job.say(1, m.Started(attempt=0, pids=dict.fromkeys(range(1000), -1)))
    job.gone(1)
    job.exited(0)
    job.gone(0)
    assert job.exit_code == 1
