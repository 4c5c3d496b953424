"""A job of a fixed number of nodes, from the list of hosts to its start."""

from __future__ import annotations

import signal

import pytest

from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.core.wire import messages as m
from distlaunch.core.wire import remote as r
from distlaunch.job import actions as p
from distlaunch.job.gathering import LOOK_AGAIN_S, LOOK_S, WAITING_S
from distlaunch.resolve.members import NodesDiffer


def test_all_nodes_are_connected_at_once_and_each_is_surveyed_as_it_joins(make_nodes):
    job = make_nodes(3)
    job.begin()
    assert job.connects() == [(0, 0.0), (1, 0.0), (2, 0.0)]
    assert [node for node, _ in job.sent(r.Survey, job.joined(1))] == [1]
    assert job.phase == "gathering"


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
    assert job.sent(r.Reach) == []
    job.prepared(1)
    question = r.Reach(attempt=0, addresses=("10.0.0.1", "n0"), port=29500, token="word0", bound_s=5.0)
    assert job.sent(r.Reach) == [(1, question), (2, question)]
    job.reached(2)
    [start] = job.of(p.StartAttempt, job.reached(1))
    assert (start.attempt, start.port, start.composition) == (0, 29500, job.composed[0])
    assert start.meeting.address == "10.0.0.1"
    for rank in job.ranks:
        job.started(rank)
    assert (job.phase, job.policy.up, job.policy.world_size) == ("running", 6, 6)
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.exit_code == 0


def test_what_is_recorded_on_the_way(make_nodes):
    job = make_nodes(2).run()
    assert job.entries("node_joined") == [
        {"node": 0, "host": "n0", "again": False},
        {"node": 1, "host": "n1", "again": False},
    ]
    assert job.entries("composed") == [{"attempt": 0, "nodes": 2, "world_size": 4, "hosts": "n[0-1]"}]
    assert job.entries("attempt_started") == [{"attempt": 0, "master_port": 5000, "master_addr": "10.0.0.1"}]


def test_a_single_node_is_not_asked_to_reach_itself(make_nodes):
    job = make_nodes(1)
    job.begin()
    job.gather()
    assert job.sent(m.Prepare) == [(0, m.Prepare(attempt=0, port=0))]
    assert job.of(p.StartAttempt, job.prepared(0, port=4711)) == [
        p.StartAttempt(attempt=0, port=4711, composition=job.composed[0])
    ]
    assert job.sent(r.Reach) == []


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


# --- nodes that cannot be reached


def test_all_hosts_that_fail_come_in_one_report_when_the_last_has_answered(make_nodes):
    job = make_nodes(4)
    job.begin()
    job.unreachable(1, step="host key", text="it is not known", hint="ssh-keyscan n1", passing=False)
    job.gather(0)
    job.unreachable(3, step="login", text="no key was accepted", passing=False)
    assert job.exit_code is None
    job.gather(2)
    assert job.exit_code == 69
    [said] = [say.text for say in job.of(p.Say) if say.level == "error"]
    assert said.startswith("error: 2 of 4 nodes cannot be used\n")
    for words in ("n1", "host key", "it is not known", "ssh-keyscan n1", "n3", "login", "no key was accepted"):
        assert words in said
    assert "n0" not in said


def test_a_failure_that_may_pass_is_tried_again_later_and_later_until_the_join_timeout(make_nodes):
    job = make_nodes(2, join_timeout_s=20.0)
    job.begin()
    job.gather(0)
    delays = []
    for _ in range(5):
        [(node, delay_s)] = job.connects(job.unreachable(1, text="refused"))
        assert node == 1
        delays.append(delay_s)
    assert delays == [0.5, 1.0, 2.0, 4.0, 5.0]
    job.pass_time(19.9)
    assert job.exit_code is None
    job.pass_time(0.1)
    assert job.exit_code == 69
    assert "n1" in job.said
    assert "refused" in job.said
    assert len(job.entries("node_unreachable")) == 1, "the same failure is recorded once"


def test_a_node_that_comes_up_late_takes_part(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather(0)
    job.unreachable(1)
    job.pass_time(30.0)
    job.gather(1)
    assert job.phase == "preparing"


def test_at_the_first_start_a_node_that_fails_is_not_tried_for_long(make_nodes):
    job = make_nodes(3, patience_s=15.0)
    job.begin()
    job.gather(0)
    for _ in range(4):
        job.unreachable(1, text="refused")
    job.pass_time(WAITING_S)
    assert "waiting for n[1-2] (n1: connect: refused)" in job.said
    job.pass_time(10.0)
    assert job.exit_code is None, "n2 has not answered yet"
    [*_] = job.unreachable(2, text="no route")
    assert job.exit_code == 69
    assert "refused" in job.said
    assert "no route" in job.said


def test_after_a_loss_there_is_all_the_time(make_nodes):
    job = make_nodes(2, patience_s=15.0, max_restarts=1).run()
    job.lost(1)
    job.exited(0, -15, told=True)
    job.exited(1, -15, told=True)
    job.gone(0)
    job.unreachable(1, text="refused")
    job.pass_time(30.0)
    assert job.exit_code is None


def test_a_hopeless_job_does_not_wait_for_failures_that_may_pass(make_nodes):
    job = make_nodes(3)
    job.begin()
    job.unreachable(0)
    job.gather(1)
    job.unreachable(2, step="login", passing=False)
    assert job.exit_code == 69
    assert "n0" in job.said
    assert "n2" in job.said


def test_nodes_that_never_answer_are_named_at_the_join_timeout(make_nodes):
    job = make_nodes(3, join_timeout_s=30.0)
    job.begin()
    job.gather(0)
    job.joined(1)
    job.pass_time(30.0)
    assert job.exit_code == 69
    assert "no answer to the survey within 30 s" in job.said
    assert "not reached within 30 s" in job.said


def test_launchers_that_are_here_hear_who_is_waited_for_and_several_of_one_host_are_told_apart(make_nodes):
    job = make_nodes(3, join_timeout_s=30.0, launchers=True)
    job.begin()
    for node in (0, 2):
        job.step(p.Joined(node=node, host="vm"))
        job.surveyed(node)
    job.unreachable(1, step="call", text="it sends what no agent of ours does")
    job.pass_time(WAITING_S)
    [waits] = [say for say in job.of(p.Say) if "waiting up to" in say.text]
    assert waits.level == "warning"
    job.pass_time(30.0)
    assert job.exit_code == 69
    assert "1 of 3 nodes cannot be used; there: launchers 0,2 on vm\n" in job.said
    assert "it sends what no agent of ours does" in job.said.splitlines()[-1]


def test_the_user_hears_once_who_is_waited_for(make_nodes):
    job = make_nodes(4)
    job.begin()
    job.gather(0, 2)
    job.pass_time(WAITING_S)
    assert "2 of 4 nodes are here; waiting up to 55 s more for n[1,3]" in job.said
    before = len(job.of(p.Say))
    job.pass_time(20.0)
    assert len(job.of(p.Say)) == before


def test_nodes_that_are_here_and_are_looked_at_again_are_not_said_to_be_missing(make_nodes):
    job = make_nodes(2)
    job.begin()
    for _ in range(12):
        for node in range(2):
            if not job.asked(node):
                job.joined(node)
            job.surveyed(node, script_sha256=None)
        job.pass_time(LOOK_AGAIN_S)
    assert job.exit_code == 69
    assert "waiting" not in job.said


def test_a_node_that_is_lost_while_the_others_gather_is_connected_again(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather(0)
    [(node, _)] = job.connects(job.lost(0))
    assert node == 0
    job.gather(1)
    assert job.phase == "gathering"
    job.gather(0)
    assert job.phase == "preparing"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("joined", [0, 1, 2])
def test_a_signal_while_nodes_gather_or_prepare_ends_the_job_at_once(make_nodes, signum, joined):
    job = make_nodes(2)
    job.begin()
    for node in range(joined):
        job.gather(node)
    job.signal(signum)
    assert job.exit_code == 128 + signum
    assert "no worker had started" in job.said
    assert job.joined(0) == []


def test_a_signal_to_the_workers_while_there_are_none_goes_nowhere(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather(0)
    job.signal(signal.SIGUSR1)
    assert job.sent(m.Forward) == []


# --- what surveys find


FLAWS = {
    "directory": {
        "problem": "there is no directory /work",
        "hint": "--workdir",
        "python": None,
        "script_sha256": None,
    },
    "python": {"problem": "there is no Python for the workers: no /usr/bin/python3", "python": None},
    "script": {"script_sha256": None},
}


@pytest.mark.parametrize("step", FLAWS)
def test_what_is_missing_is_looked_at_again_before_it_counts(make_nodes, step):
    job = make_nodes(2)
    job.begin()
    job.gather(0)
    job.joined(1)
    looks = 0
    while job.exit_code is None:
        job.surveyed(1, **FLAWS[step])
        looks += 1
        job.pass_time(LOOK_AGAIN_S)
        assert looks <= LOOK_S / LOOK_AGAIN_S + 1
    assert looks == LOOK_S / LOOK_AGAIN_S + 1
    assert job.exit_code == 69
    [entry] = job.entries("node_unreachable")
    assert (entry["host"], entry["step"]) == ("n1", step)
    assert "n1" in job.said


def test_what_a_network_file_system_shows_late_costs_a_moment(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather(0)
    job.joined(1)
    job.surveyed(1, script_sha256=None)
    assert job.phase == "gathering"
    job.pass_time(LOOK_AGAIN_S)
    job.surveyed(1)
    assert job.phase == "preparing"


def test_an_answer_to_an_earlier_survey_does_not_count(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather(0)
    job.joined(1)
    old = job.asked(1)
    job.surveyed(1, script_sha256=None)
    job.pass_time(LOOK_AGAIN_S)
    assert job.asked(1) > old
    assert job.say(1, job.answer(1, serial=old)) == []
    assert job.phase == "gathering"


def test_differing_scripts_are_looked_at_again_and_then_end_the_job(make_nodes):
    job = make_nodes(3)
    job.refuses = NodesDiffer("train.py is not the same: 5c on n[0-1], 77 on n2", nodes=(2,), hint="copy it")
    job.begin()
    job.gather()
    assert job.phase == "gathering"
    looked_at = []
    while job.exit_code is None:
        looked_at += [node for node, _ in job.sent(r.Survey, job.pass_time(LOOK_AGAIN_S))]
        job.survey_all()
    assert set(looked_at) == {2}
    assert job.now == pytest.approx(LOOK_S)
    assert job.exit_code == 2
    assert "error: train.py is not the same: 5c on n[0-1], 77 on n2\n  hint: copy it" in job.said


def test_scripts_that_become_the_same_in_time_are_no_error(make_nodes):
    job = make_nodes(2)
    job.refuses = NodesDiffer("differ", nodes=(1,))
    job.begin()
    job.gather()
    job.refuses = None
    job.pass_time(LOOK_AGAIN_S)
    job.survey_all()
    assert job.phase == "preparing"


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no", hint="yes"), 2), (NodesError("no", hint="yes"), 69)])
def test_what_cannot_be_planned_ends_the_job_with_its_words(make_nodes, error, code):
    job = make_nodes(2)
    job.refuses = error
    job.begin()
    job.gather()
    assert job.exit_code == code
    assert job.of(p.Say)[-1] == p.Say(text="error: no\n  hint: yes", level="error")


# --- preparing, reaching


def test_a_problem_in_preparing_names_the_host(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather()
    job.prepared(0, problem="port 80 needs privileges", hint="take one above 1023")
    assert job.exit_code == 2
    assert job.said.endswith("error: n0: port 80 needs privileges\n  hint: take one above 1023")


def test_where_the_nodes_cannot_meet_the_job_ends_with_69(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather()
    job.prepared(0)
    job.prepared(1)
    job.reached(1, routes=(), problem="connection refused")
    assert job.exit_code == 69
    assert "no address of n0" in job.said


def test_a_node_that_does_not_say_whom_it_has_reached_has_reached_nobody(make_nodes):
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
    assert "n[0,2]" in job.said


def test_a_node_that_is_lost_before_anything_runs_is_waited_for_again(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather()
    job.prepared(0)
    actions = job.lost(1)
    assert (job.attempt, job.phase) == (1, "gathering")
    assert [node for node, _ in job.connects(actions)] == [1]
    job.survey_all()
    job.gather(1)
    assert job.prepared(1, attempt=0) == [], "that was for the attempt before"
    job.come_up()
    assert [start.attempt for start in job.of(p.StartAttempt)] == [1]
    assert job.policy.restarts == 0
    assert job.of(p.Failed) == []


def test_nodes_that_are_lost_again_and_again_before_the_start_do_not_hold_the_job_for_ever(make_nodes):
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
    [failed] = job.of(p.Failed)
    assert (failed.diagnosis.cause.ranks, failed.diagnosis.cause.host) == ((2, 0, 1), "n[0-2]")


def test_a_remark_names_its_host_and_the_same_from_other_hosts_is_said_once(make_nodes):
    job = make_nodes(3).run()
    for node in range(3):
        job.say(node, m.Remark(text="starting cold: no torch\x1b[31m", warning=True))
    assert [say.text for say in job.of(p.Say)] == ["n0: starting cold: no torch\\x1b[31m"]


def test_messages_of_nodes_that_take_no_part_change_nothing(make_nodes):
    job = make_nodes(3, bounds=(2, 2)).run()
    before = (job.phase, job.policy.up, job.policy.ended)
    assert job.gone(2) == []
    assert job.say(2, m.Started(attempt=0, pids={9: 9})) == []
    assert job.say(2, r.Reached(attempt=0, routes=(), problem=None)) == []
    assert (job.phase, job.policy.up, job.policy.ended) == before


@pytest.mark.parametrize(("returncode", "code"), [(256, 255), (-200, 255), (255, 255), (512, 255)])
def test_no_exit_code_of_a_worker_makes_a_failed_job_end_with_0(make_nodes, returncode, code):
    job = make_nodes(2, per_node=1).run()
    job.exited(1, returncode)
    job.exited(0, -15, told=True)
    job.all_gone()
    assert job.exit_code == code


def test_a_node_cannot_stop_the_launcher(make_nodes):
    job = make_nodes(2).run()
    assert job.say(1, m.WorkerHalted(rank=2)) == []


def test_remarks_of_thousands_of_nodes_are_not_all_shown(make_nodes):
    job = make_nodes(2).run()
    for number in range(5000):
        job.say(1, m.Remark(text=f"GPU memory is still held by pid {number}", warning=True))
    assert len(job.of(p.Say)) <= 200


def test_workers_that_a_node_makes_up_do_no_harm(make_nodes):
    job = make_nodes(2, per_node=1).run()
    for rank in (7, -3, 10**9, 1):
        exited = m.WorkerExited(
            attempt=0,
            rank=rank,
            pid=0,
            returncode=1,
            uptime_s=float("nan"),
            ended=float("inf"),
            told_to_stop=False,
            oom_kills=-1,
            error_file="{",
            tail=b"\xff\x1b[2J",
        )
        job.say(1, exited)
    job.say(1, m.Started(attempt=0, pids=dict.fromkeys(range(1000), -1)))
    job.gone(1)
    job.exited(0)
    job.gone(0)
    assert job.exit_code == 1
