from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.job import NOTICE_S
from distlaunch.coordinator.policy.restarts import Final, FinalReason
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.spawner_messages import LeftoverProcess, Leftovers
from tests.facts import mentions


def test_begin_asks_every_node_to_prepare_and_only_the_master_for_a_port(make_job):
    job = make_job(nodes=3, master_port=29500)
    job.begin()
    assert job.sent(m.Prepare) == [
        (0, m.Prepare(attempt=0, port=29500)),
        (1, m.Prepare(attempt=0, port=None)),
        (2, m.Prepare(attempt=0, port=None)),
    ]


def test_workers_start_only_when_the_last_node_is_prepared_and_with_the_masters_port(make_job):
    job = make_job(nodes=3)
    job.begin()
    assert job.prepared(2) == []
    assert job.prepared(0, port=4711) == []
    assert job.of(p.StartAttempt, job.prepared(1)) == [p.StartAttempt(attempt=0, port=4711)]
    assert job.entries("attempt_started") == [{"attempt": 0, "master_port": 4711}]


def test_a_node_that_prepares_twice_does_not_stand_in_for_another(make_job):
    job = make_job(nodes=2)
    job.begin()
    job.prepared(0)
    job.prepared(0)
    assert job.of(p.StartAttempt) == []


def test_a_problem_in_preparing_ends_the_job_with_its_words_and_hint(make_job):
    job = make_job(nodes=2)
    job.begin()
    job.prepared(1, problem="port 80 denied", hint="above 1023")
    assert job.exit_code == 2
    assert job.of(p.JobError) == [
        p.JobError(exit_code=2, message="port 80 denied", hints=("above 1023",))
    ]
    assert job.prepared(0) == []


def test_a_problem_without_hint_has_no_hint_line(make_job):
    job = make_job()
    job.begin()
    job.prepared(problem="no")
    assert job.notices == "error: no"


def test_a_port_of_the_user_that_cannot_be_used_has_the_hint_to_leave_it_out(make_job):
    job = make_job(master_port=2900)
    job.begin()
    job.prepared(problem="port 2900 is in use")
    assert mentions(job.of(p.JobError)[0].hints[0], "--master-port")


def test_a_warning_of_a_node_is_passed_on_and_stops_nothing(make_job):
    job = make_job()
    job.begin()
    job.prepared(warning="memory held")
    assert p.ShowMessage(text="memory held", level="warning") in job.actions
    assert job.phase == "starting"


def test_the_job_runs_when_the_last_worker_has_started(make_job):
    job = make_job(nodes=2, per_node=2)
    job.begin()
    for node in range(2):
        job.prepared(node)
    for rank in range(3):
        job.started(rank)
    assert (job.phase, job.policy.up) == ("starting", 3)
    job.started(3)
    assert (job.phase, job.policy.up) == ("running", 4)
    assert job.entries("workers_started")[3] == {"attempt": 0, "pids": {3: 1003}}


def test_all_workers_ending_well_is_exit_code_0_and_nobody_is_asked_to_stop(make_job):
    job = make_job(nodes=2, per_node=2).run()
    for rank in job.ranks:
        job.exited(rank)
    assert job.exit_code is None
    job.gone(1)
    assert job.exit_code is None, "node 0 may still have descendants of its workers"
    job.gone(0)
    assert job.exit_code == 0
    assert job.sent(m.Stop) == []
    assert job.entries("job_ended") == [{"exit_code": 0}]


def test_the_record_of_an_ended_worker_has_these_fields(make_job):
    job = make_job().run()
    job.exited(1, 0, uptime_s=1.23456)
    assert job.entries("worker_exited") == [
        {
            "attempt": 0,
            "rank": 1,
            "pid": 1001,
            "returncode": 0,
            "uptime_s": 1.235,
            "told_to_stop": False,
        }
    ]


def test_processes_that_kill_did_not_end_are_named_once_over_all_nodes(make_job):
    job = make_job(nodes=2, per_node=1).run()
    for rank in job.ranks:
        job.exited(rank)
    job.gone(0, left=(7, 8))
    job.gone(1, left=(9,))
    (notice,) = job.of(p.ShowMessage)
    assert mentions(notice.text, "KILL", "pid 7, 8, 9")
    assert job.exit_code == 0


def test_processes_that_not_even_kill_ended_keep_the_job_from_a_restart(make_job):
    job = make_job(max_restarts=1).run()
    job.exited(0, 1, tail=job.RAISED)
    job.exited(1, -9, reported=True)
    job.gone(left=(7,))
    assert job.exit_code == 1
    assert "pid 7" in job.notices
    [failed] = job.of(p.ReportFailure)
    assert failed.decision == Final(reason=FinalReason.PROCESSES_LEFT)


def test_nothing_happens_after_the_end(make_job):
    job = make_job().run()
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.phase == "ended"
    for late in (
        job.gone,
        job.tick,
        job.fault,
        job.begin,
        lambda: job.exited(0, 1),
        lambda: job.signal(signal.SIGINT),
    ):
        assert late() == []


@pytest.mark.parametrize("late", ["prepared", "started", "exited", "gone"])
def test_messages_of_an_old_attempt_are_ignored(make_job, late):
    job = make_job(nodes=2, per_node=1, max_restarts=1).run()
    job.fail()
    assert (job.attempt, job.phase) == (1, "preparing")
    for node in range(2):
        job.prepared(node)
    before = (job.policy.phase, job.policy.up, job.policy.ended)
    actions = {
        "prepared": lambda: job.prepared(0, problem="late", attempt=0),
        "started": lambda: job.started(1, attempt=0),
        "exited": lambda: job.exited(1, 1, attempt=0),
        "gone": lambda: job.gone(1, attempt=0),
    }[late]()
    assert actions == []
    assert (job.policy.phase, job.policy.up, job.policy.ended) == before
    for rank in job.ranks:
        job.started(rank)
        job.exited(rank)
    job.gone(0)
    assert job.exit_code is None, "node 1 has not said that it is gone in this attempt"
    job.gone(1)
    assert job.exit_code == 0


def test_a_worker_that_ends_before_the_others_have_started_is_a_failure_like_any(make_job):
    job = make_job(nodes=2, per_node=1)
    job.begin()
    job.prepared(0)
    job.prepared(1)
    job.started(0)
    stops = job.sent(m.Stop, job.exited(0, 127))
    assert [node for node, _ in stops] == [0, 1]
    job.started(1)
    assert job.phase == "stopping"
    job.exited(1, -15, reported=True)
    job.all_gone()
    assert job.exit_code == 127


def test_the_worker_stopped_from_its_terminal_suspends_the_launcher(make_job):
    job = make_job(per_node=1, terminal=True).run()
    assert job.say(0, m.WorkerHalted(rank=0)) == [p.Suspend()]


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_fault_ends_the_job_with_70_when_the_other_nodes_are_gone(make_job, nodes):
    job = make_job(nodes=nodes, per_node=1).run()
    job.fault(0, "the spawner was killed")
    assert mentions(job.notices, "node0", "the spawner was killed")
    assert job.entries("fault") == [{"text": "the spawner was killed"}]
    for rank in range(1, nodes):
        assert job.exit_code is None
        job.exited(rank, -15, reported=True)
        job.gone(rank)
    assert job.exit_code == 70
    assert job.of(p.ReportFailure) == [], "no diagnosis of workers that we killed"


def test_a_fault_beats_the_restarts(make_job):
    job = make_job(nodes=2, per_node=1, max_restarts=5).run()
    job.exited(1, 1, tail=job.RAISED)
    job.fault(0)
    job.gone(1)
    assert job.exit_code == 70


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_fault_before_anything_runs_ends_the_job_at_once(make_job, nodes):
    job = make_job(nodes=nodes)
    job.begin()
    job.fault(nodes - 1)
    for node in range(nodes - 1):
        job.prepared(node)
    assert job.exit_code == 70


def test_a_second_fault_is_not_waited_for(make_job):
    job = make_job(nodes=2, per_node=1).run()
    job.fault(0)
    job.fault(1)
    assert job.exit_code == 70


def test_ports_for_workers_are_held_by_their_nodes_and_come_in_the_order_of_ranks(make_job):
    job = make_job(nodes=2, per_node=2, worker_ports=1)
    job.begin()
    assert job.sent(m.Prepare) == [
        (0, m.Prepare(attempt=0, port=0, ports=2)),
        (1, m.Prepare(attempt=0, port=None, ports=2)),
    ]
    job.prepared(1, ports=(7, 8))
    [start] = job.of(p.StartAttempt, job.prepared(0, port=4711, ports=(9, 5)))
    assert (start.port, start.ports) == (4711, (9, 5, 7, 8))


LEFT = Leftovers(count=1, shown=(LeftoverProcess(pid=7, rank=2, command="upload.sh"),))
WAITING = "waiting up to 5 s (--linger) for 1 process left by rank 2 on node1: upload.sh (pid 7)"


def ended_well(make_job):
    job = make_job(nodes=2, linger_s=5.0).run()
    job.now = 10.0
    for rank in job.ranks:
        job.exited(rank)
    assert job.phase == "lingering"
    return job


def test_a_node_that_only_finishes_its_output_is_not_reported_to_wait_for_leftovers(make_job):
    job = ended_well(make_job)
    job.now += 20.0
    job.tick()
    assert "waiting" not in job.notices


@pytest.mark.parametrize("after_s", [0.5, 3.0])
def test_leftovers_are_named_once_and_not_in_the_first_second(make_job, after_s):
    job = ended_well(make_job)
    job.now += after_s
    job.say(1, m.LeftoversRunning(attempt=0, processes=LEFT))
    if after_s < NOTICE_S:
        job.tick()
        assert "waiting" not in job.notices
    job.now = 10.0 + max(after_s, NOTICE_S)
    assert job.policy.deadline() <= job.now
    job.tick()
    job.say(1, m.LeftoversRunning(attempt=0, processes=LEFT))
    job.now += 1.0
    job.tick()
    assert job.notices.count("waiting") == 1
    assert WAITING in job.notices


def test_leftovers_that_have_ended_before_the_notice_are_not_named(make_job):
    job = ended_well(make_job)
    job.now += 0.5
    job.say(1, m.LeftoversRunning(attempt=0, processes=LEFT))
    job.gone(1)
    job.now += 1.0
    job.tick()
    assert "waiting" not in job.notices
