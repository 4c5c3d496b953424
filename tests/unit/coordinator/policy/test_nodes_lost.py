from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.attempt import CAUSE_S
from distlaunch.coordinator.policy.hang_detection import SAMPLES, STOP_ANSWER_S
from distlaunch.coordinator.policy.job_nodes import AFTER_S
from distlaunch.coordinator.policy.node_setup import LOOK_AGAIN_S
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.planning.surveyed_nodes import NodesDifferError
from tests.facts import mentions
from tests.unit.coordinator.remote_agents import exited


def stops(job, actions) -> list[tuple[int, int, float]]:
    return [(node, stop.signum, stop.grace_s) for node, stop in job.sent(m.Stop, actions)]


def exit_of(rank: int) -> WorkerExit:
    return exited(1.0, rank=rank, returncode=0)


def test_the_others_are_stopped_and_the_job_ends_with_69_and_names_the_lost_node(make_nodes):
    job = make_nodes(3, failure_grace_s=4.0).run()
    job.now = 10.0
    assert stops(job, job.lost(1)) == [(0, signal.SIGTERM, 4.0), (2, signal.SIGTERM, 4.0)]
    assert job.policy.ended == 2, "its workers count as ended"
    assert job.exit_code is None
    job.stop_others(1)
    assert job.exit_code == 69
    [failed] = job.of(p.ReportFailure)
    cause = failed.diagnosis.cause
    assert (cause.ranks, cause.host) == ((2, 3), "n1")
    assert mentions(cause.summary, "lost", "10 s")
    assert len(failed.diagnosis.others) == 1
    assert mentions(failed.diagnosis.others, "ranks 0-1,4-5")
    assert failed.final
    assert job.entries("node_lost") == [
        {"node": 1, "host": "n1", "why": "silent for 10 s", "attempt": 0, "ranks": [2, 3]}
    ]


def test_the_report_shows_the_last_step_of_its_workers(make_nodes):
    job = make_nodes(2).run()
    beats = (m.Heartbeat(rank=2, values={"step": 120}), m.Heartbeat(rank=3, values={"step": 119}))
    job.say(1, m.Alive(attempt=0, heartbeats=beats, wrote=()))
    job.lost(1)
    job.stop_others(1)
    [failed] = job.of(p.ReportFailure)
    assert mentions(failed.diagnosis.cause.message, "120", "rank 2")


def test_several_lost_nodes_are_one_failure(make_nodes):
    job = make_nodes(4, per_node=1).run()
    job.lost(1)
    job.lost(3)
    job.stop_others(1, 3)
    [failed] = job.of(p.ReportFailure)
    assert failed.diagnosis.cause.ranks == (1, 3)
    assert failed.diagnosis.cause.host == "n[1,3]"
    assert failed.diagnosis.cause.summary.startswith("2 nodes are lost: silent")
    assert job.exit_code == 69


def test_when_all_nodes_are_lost_nobody_is_waited_for(make_nodes):
    job = make_nodes(2).run()
    job.lost(0)
    assert job.exit_code is None
    job.lost(1)
    assert job.exit_code == 69


@pytest.mark.parametrize("consequences_first", [True, False])
def test_workers_that_lose_a_connection_are_no_cause(make_nodes, consequences_first):
    job = make_nodes(2, per_node=2).run()
    if consequences_first:
        job.exited(0, 1, tail=job.LOST)
        job.now += CAUSE_S / 2
    job.lost(1)
    if not consequences_first:
        job.exited(0, 1, tail=job.LOST)
    job.exited(1, -15, reported=True)
    job.gone(0)
    [failed] = job.of(p.ReportFailure)
    assert (failed.diagnosis.cause.host, job.exit_code) == ("n1", 69)
    assert mentions(failed.diagnosis.others, "rank 0", "lost")


def test_a_loss_that_shows_only_after_the_stop_is_still_the_cause(make_nodes):
    job = make_nodes(2, per_node=1).run()
    job.exited(0, 1, tail=job.LOST)
    job.now += STOP_ANSWER_S
    assert len(stops(job, job.tick())) == 2
    job.gone(0)
    assert job.exit_code is None, "node 1 has not said that it is gone"
    job.now += 9.0
    job.lost(1)
    [failed] = job.of(p.ReportFailure)
    assert failed.diagnosis.cause.host == "n1"
    assert job.exit_code == 69


def test_a_worker_that_failed_by_itself_before_the_loss_is_the_cause(make_nodes):
    job = make_nodes(2, per_node=2).run()
    job.now = 5.0
    job.exited(2, 7, tail=job.RAISED)
    job.now = 5.1
    job.lost(1)
    job.stop_others(1)
    [failed] = job.of(p.ReportFailure)
    assert (failed.diagnosis.cause.ranks, job.exit_code) == ((2,), 7)
    assert any("lost with node n1" in line for line in failed.diagnosis.others)


def test_workers_that_a_system_ended_as_it_went_down_are_no_cause(make_nodes):
    job = make_nodes(2, per_node=2).run()
    job.now = 5.0
    job.exited(2, -15)
    job.now = 6.0
    job.lost(1)
    job.stop_others(1)
    [failed] = job.of(p.ReportFailure)
    assert mentions(failed.diagnosis.cause.summary, "lost")
    assert job.exit_code == 69


def test_a_failure_that_comes_after_the_loss_is_none_of_its_own(make_nodes):
    job = make_nodes(2, per_node=2).run()
    job.now = 5.0
    job.lost(1)
    job.now = 6.0
    job.exited(0, 3, tail=job.RAISED, reported=True)
    job.exited(1, -15, reported=True)
    job.gone(0)
    assert job.exit_code == 69


def test_first_is_who_ended_first_on_the_coordinators_clock(make_nodes):
    job = make_nodes(2, per_node=1).run()
    job.now = 5.0
    job.exited(0, 1, tail=job.RAISED, ended=4.9)
    job.exited(1, 2, tail=job.RAISED.replace(b"the cause", b"the first"), ended=4.5)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert (failed.diagnosis.cause.ranks, failed.diagnosis.cause.host) == ((1,), "n1")
    assert job.exit_code == 2


# --- restarts


def test_a_loss_is_a_restart_which_waits_for_the_node(make_nodes):
    job = make_nodes(2, max_restarts=1, failure_grace_s=5.0).run()
    job.now = 100.0
    assert job.connects(job.lost(1)) == [], "the job may end"
    job.now = 102.0
    actions = job.stop_others(1)
    assert job.connects(actions) == [(1, 5.0 + AFTER_S - 2.0)], (
        "what ran there may take the failure grace"
    )
    [failed] = job.of(p.ReportFailure, actions)
    assert (failed.final, failed.restarts) == (False, 0)
    assert [node for node, _ in job.sent(m.Survey, actions)] == [0]
    job.survey_all()
    job.gather(1)
    assert mentions(job.notices, "node n1", "left", "10 s", "back")
    job.come_up()
    assert (job.attempt, job.policy.restarts, job.phase) == (1, 1, "running")
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.exit_code == 0


def test_a_node_that_does_not_come_back_in_time_ends_the_job(make_nodes):
    job = make_nodes(2, max_restarts=3, join_timeout_s=60.0).run()
    job.lost(1, "closed")
    job.stop_others(1)
    job.survey_all()
    job.unreachable(1, text="no route")
    job.pass_time(60.0)
    assert job.exit_code == 69
    assert mentions(job.notices, "1 of 2")
    assert "no route" in job.notices


def test_all_nodes_are_surveyed_anew_for_a_restart(make_nodes):
    job = make_nodes(3, max_restarts=1).run()
    job.exited(0, 1, tail=job.RAISED)
    job.pass_time(1.0)
    for rank in job.ranks[1:]:
        job.exited(rank, -15, reported=True)
    actions = job.all_gone()
    assert [node for node, _ in job.sent(m.Survey, actions)] == [0, 1, 2]
    job.survey_all()
    assert job.sent(m.Prepare)[-3:] == [
        (0, m.Prepare(attempt=1, port=0, token="word1")),
        (1, m.Prepare(attempt=1, port=None)),
        (2, m.Prepare(attempt=1, port=None)),
    ]


def test_later_messages_of_a_lost_node_are_ignored(make_nodes):
    job = make_nodes(2, max_restarts=1).run()
    job.lost(1)
    assert job.exited(2, 1, tail=job.RAISED) == []
    assert job.gone(1) == []
    assert job.lost(1) == [], "a node is lost once"
    job.stop_others(1)
    assert job.policy.restarts == 1


def test_a_node_that_is_back_while_the_others_still_stop_is_not_mixed_into_the_old_attempt(
    make_nodes,
):
    job = make_nodes(2, max_restarts=1).run()
    job.lost(1)
    job.joined(1)
    assert job.gone(1) == []
    assert job.exit_code is None
    job.stop_others(1)
    job.survey_all()
    assert job.phase == "preparing"
    assert job.node_numbers == (0, 1)


def test_a_long_failure_grace_leaves_the_node_its_time_to_come_back(make_nodes):
    job = make_nodes(2, max_restarts=1, failure_grace_s=300.0, join_timeout_s=60.0).run()
    job.lost(1)
    actions = job.stop_others(1)
    assert job.connects(actions) == [(1, 300.0 + AFTER_S)]
    job.survey_all()
    job.pass_time(305.0)
    job.gather(1)
    assert job.phase == "preparing"


def test_a_script_that_differs_after_the_job_has_run_is_looked_at_for_longer(make_nodes):
    job = make_nodes(2, max_restarts=1).run()
    job.exited(0, 1, tail=job.RAISED)
    job.pass_time(1.0)
    for rank in job.ranks[1:]:
        job.exited(rank, -15, reported=True)
    job.all_gone()
    job.refuses = NodesDifferError("differ", nodes=(1,))
    job.surveyed(0, 1, script_sha256="77")
    while job.now < 30.0:
        job.pass_time(LOOK_AGAIN_S)
        job.survey_all()
    assert job.phase == "connecting"
    job.refuses = None
    job.pass_time(LOOK_AGAIN_S)
    job.survey_all()
    assert job.phase == "preparing"


# --- losses that are no failure


def test_a_lost_node_does_not_hold_up_the_end_when_asked_to_stop(make_nodes):
    job = make_nodes(2).run()
    job.signal(signal.SIGTERM)
    job.lost(1)
    job.stop_others(1)
    assert job.exit_code == 143
    assert job.of(p.ReportFailure) == []
    assert mentions(job.notices, "1 node", "lost")


def test_asked_to_stop_after_a_loss_the_report_still_names_it(make_nodes):
    job = make_nodes(2, max_restarts=2).run()
    job.lost(1)
    job.now += 1.0
    job.signal(signal.SIGINT)
    job.stop_others(1)
    assert job.exit_code == 130
    [failed] = job.of(p.ReportFailure)
    assert (failed.final, failed.diagnosis.cause.host) == (True, "n1")


def test_a_node_whose_workers_have_all_ended_well_may_go(make_nodes):
    job = make_nodes(2, per_node=1).run()
    job.exited(1)
    assert stops(job, job.lost(1, "closed")) == []
    assert mentions(job.notices, "n1", "left", "closed", "0")
    job.exited(0)
    job.gone(0)
    assert job.exit_code == 0


def test_a_node_that_is_gone_already_may_go(make_nodes):
    job = make_nodes(2, per_node=1).run()
    job.exited(1)
    job.gone(1)
    job.lost(1)
    assert job.phase == "running"
    job.exited(0)
    job.gone(0)
    assert job.exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        [m.Started(attempt=0, pids={2: 5, 3: 6})],
        [exit_of(2)],
        [exit_of(2), exit_of(2)],
        [exit_of(2), exit_of(0)],
        [exit_of(2), exit_of(7)],
    ],
    ids=["nothing", "only the start", "one of two", "the same twice", "another node's", "nobody's"],
)
@pytest.mark.parametrize("left", [(), (5,)])
def test_a_node_that_ends_an_attempt_without_reporting_each_exit_is_lost(make_nodes, words, left):
    job = make_nodes(2).run()
    for message in words:
        job.say(1, message)
    actions = job.gone(1, left=left)
    assert job.of(p.Disconnect, actions) == [p.Disconnect(node=1)]
    assert stops(job, actions) == [(0, signal.SIGTERM, job.policy.settings.failure_grace_s)]
    job.exited(0)
    job.exited(1)
    job.gone(0)
    assert job.exit_code == 69
    [failed] = job.of(p.ReportFailure)
    missing = "rank 3" if exit_of(2) in words else "ranks 2-3"
    assert failed.diagnosis.cause.host == "n1"
    assert mentions(failed.diagnosis.cause.summary, missing)


def test_the_only_node_has_to_report_each_exit_as_well(make_job):
    job = make_job(1, 2).run()
    job.exited(0)
    job.gone()
    assert job.exit_code == 70
    assert mentions(job.notices, "left", "rank 1")


def test_a_fault_on_a_node_is_the_loss_of_it_and_ends_a_job_of_fixed_size_with_70(make_nodes):
    job = make_nodes(2).run()
    actions = job.fault(1, "the spawner was killed")
    assert p.Disconnect(node=1) in actions
    assert [node for node, _, _ in stops(job, actions)] == [0]
    job.stop_others(1)
    assert job.exit_code == 70
    [failed] = job.of(p.ReportFailure)
    assert "internal error: the spawner was killed" in failed.diagnosis.cause.summary


def test_a_fault_of_the_launcher_itself_stops_all_and_ends_the_job_with_70(make_nodes):
    job = make_nodes(2, max_restarts=3).run()
    assert [
        node for node, _, _ in stops(job, job.step(p.LauncherFailed(text="output thread")))
    ] == [0, 1]
    job.stop_others()
    assert job.exit_code == 70


# --- hangs


def test_the_stacks_of_a_lost_node_are_not_awaited(make_nodes):
    job = make_nodes(2, per_node=1, hang_timeout_s=22.0).run()
    job.exited(1)
    job.pass_time(23.0)
    *before, first, second = job.sent(m.CollectStacks)  # before: after the end of rank 1
    assert (first[0], second[0]) == (0, 1)
    serial = second[1].serial
    stack = m.Stack(rank=0, pid=1, state="S", text="")
    job.say(0, m.Stacks(attempt=0, serial=serial, stacks=(stack,)))
    assert job.entries("hang") == []
    job.lost(1)
    for number in range(1, SAMPLES):
        job.pass_time(5.0)
        later = job.sent(m.CollectStacks)[len(before) + 2 :]
        assert [node for node, _ in later] == [0] * number
        job.say(0, m.Stacks(attempt=0, serial=serial + number, stacks=(stack,)))
    assert len(job.entries("hang")) == 1
    assert job.phase == "stopping"
