"""Connecting and surveying the nodes of a job of fixed size."""

from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.node_setup import LOOK_AGAIN_S, LOOK_S, WAITING_S
from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.core.protocol import agent_messages as m
from distlaunch.planning.surveyed_nodes import NodesDifferError
from tests.facts import mentions

ODD = "it sends what no agent of ours does"

# --- nodes that cannot be reached


def test_all_hosts_that_fail_come_in_one_report_when_the_last_has_answered(make_nodes):
    job = make_nodes(4)
    job.begin()
    job.unreachable(
        1, step="host key", text="it is not known", hint="ssh-keyscan n1", passing=False
    )
    job.gather(0)
    job.unreachable(3, step="login", text="no key was accepted", passing=False)
    assert job.exit_code is None
    job.gather(2)
    assert job.exit_code == 69
    [message] = [error.text for error in job.of(p.JobError)]
    assert mentions(message.splitlines()[0], "error", "2 of 4")
    for words in (
        "n1",
        "host key",
        "it is not known",
        "ssh-keyscan n1",
        "n3",
        "login",
        "no key was accepted",
    ):
        assert words in message
    assert "n0" not in message


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
    assert "n1" in job.notices
    assert "refused" in job.notices
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
    job = make_nodes(3, retry_timeout_s=15.0)
    job.begin()
    job.gather(0)
    for _ in range(4):
        job.unreachable(1, text="refused")
    job.pass_time(WAITING_S)
    assert "waiting for n[1-2] (n1: connect: refused)" in job.notices
    job.pass_time(10.0)
    assert job.exit_code is None, "n2 has not answered yet"
    [*_] = job.unreachable(2, text="no route")
    assert job.exit_code == 69
    assert "refused" in job.notices
    assert "no route" in job.notices


def test_after_a_loss_there_is_all_the_time(make_nodes):
    job = make_nodes(2, retry_timeout_s=15.0, max_restarts=1).run()
    job.lost(1)
    job.exited(0, -15, reported=True)
    job.exited(1, -15, reported=True)
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
    assert "n0" in job.notices
    assert "n2" in job.notices


def test_a_node_of_a_fixed_job_that_sends_odd_messages_ends_the_setup_with_that_reason(make_nodes):
    job = make_nodes(2, join_timeout_s=30.0)
    job.begin()
    job.gather(0)
    job.joined(1)
    job.step(p.Lost(node=1, why=ODD, kind=p.LossKind.ODD))
    assert job.exit_code == 69, "the same agent would send the same again"
    assert ODD in job.notices


def test_a_node_of_an_elastic_job_that_sends_odd_messages_is_reported_with_the_first_reason(
    make_nodes,
):
    job = make_nodes(3, bounds=(2, 3), join_timeout_s=30.0)
    job.begin()
    job.gather(0)
    job.joined(1)
    job.step(p.Lost(node=1, why=ODD, kind=p.LossKind.ODD))
    job.unreachable(1, text="refused")
    job.pass_time(60.0)
    assert job.exit_code == 69
    [error] = [error.text for error in job.of(p.JobError)]
    assert ODD in error
    assert "refused" not in error


def test_nodes_that_never_answer_are_named_at_the_join_timeout(make_nodes):
    job = make_nodes(3, join_timeout_s=30.0)
    job.begin()
    job.gather(0)
    job.joined(1)
    job.pass_time(30.0)
    assert job.exit_code == 69
    assert mentions(job.notices, "30 s")
    assert mentions(job.notices, "30 s")


def test_joined_launchers_get_a_notice_of_who_is_missing_and_several_of_one_host_are_distinguished(
    make_nodes,
):
    job = make_nodes(3, join_timeout_s=30.0, launchers=True)
    job.begin()
    for node in (0, 2):
        job.step(p.Joined(node=node, host="vm"))
        job.surveyed(node)
    job.unreachable(1, step="call", text="odd message")
    job.pass_time(WAITING_S)
    [waits] = [say for say in job.of(p.ShowMessage) if "waiting up to" in say.text]
    assert waits.level == "warning"
    job.pass_time(30.0)
    assert job.exit_code == 69
    assert mentions(job.notices, "1 of 3", "0,2")
    assert "odd message" in job.notices.splitlines()[-1]


def test_one_notice_names_the_nodes_that_are_waited_for(make_nodes):
    job = make_nodes(4)
    job.begin()
    job.gather(0, 2)
    job.pass_time(WAITING_S)
    assert mentions(job.notices, "2 of 4", "55 s", "n[1,3]")
    before = len(job.of(p.ShowMessage))
    job.pass_time(20.0)
    assert len(job.of(p.ShowMessage)) == before


def test_nodes_that_are_here_and_are_looked_at_again_are_not_reported_as_missing(make_nodes):
    job = make_nodes(2)
    job.begin()
    for _ in range(12):
        for node in range(2):
            if not job.asked(node):
                job.joined(node)
            job.surveyed(node, script_sha256=None)
        job.pass_time(LOOK_AGAIN_S)
    assert job.exit_code == 69
    assert "waiting" not in job.notices


def test_a_node_that_is_lost_while_the_others_gather_is_connected_again(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather(0)
    [(node, _)] = job.connects(job.lost(0))
    assert node == 0
    job.gather(1)
    assert job.phase == "connecting"
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
    assert mentions(job.of(p.ShowMessage)[-1].text, signal.Signals(signum).name, "no worker")
    assert job.joined(0) == []


def test_a_signal_to_the_workers_while_there_are_none_goes_nowhere(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather(0)
    job.signal(signal.SIGUSR1)
    assert job.sent(m.ForwardSignal) == []


# --- what surveys find


FLAWS = {
    "directory": {
        "problem": "there is no directory /work",
        "problem_part": "directory",
        "hint": "--workdir",
        "python": None,
        "script_sha256": None,
    },
    "python": {
        "problem": "there is no Python for the workers: no /usr/bin/python3",
        "problem_part": "python",
        "python": None,
    },
    "script": {"script_sha256": None},
}


@pytest.mark.parametrize("step", FLAWS)
def test_a_missing_file_is_looked_for_again_before_it_counts(make_nodes, step):
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
    assert "n1" in job.notices


def test_a_file_that_a_network_file_system_shows_late_is_waited_for(make_nodes):
    job = make_nodes(2)
    job.begin()
    job.gather(0)
    job.joined(1)
    job.surveyed(1, script_sha256=None)
    assert job.phase == "connecting"
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
    assert job.phase == "connecting"


def test_differing_scripts_are_looked_at_again_and_then_end_the_job(make_nodes):
    job = make_nodes(3)
    job.refuses = NodesDifferError(
        "train.py is not the same: 5c on n[0-1], 77 on n2", nodes=(2,), hint="copy it"
    )
    job.begin()
    job.gather()
    assert job.phase == "connecting"
    looked_at = []
    while job.exit_code is None:
        looked_at += [node for node, _ in job.sent(m.Survey, job.pass_time(LOOK_AGAIN_S))]
        job.survey_all()
    assert set(looked_at) == {2}
    assert job.now == pytest.approx(LOOK_S)
    assert job.exit_code == 2
    assert mentions(job.notices, "train.py", "5c", "n[0-1]", "77", "n2")


def test_scripts_that_become_the_same_in_time_are_no_error(make_nodes):
    job = make_nodes(2)
    job.refuses = NodesDifferError("differ", nodes=(1,))
    job.begin()
    job.gather()
    job.refuses = None
    job.pass_time(LOOK_AGAIN_S)
    job.survey_all()
    assert job.phase == "preparing"


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("no", hint="yes"), 2), (NodesError("no", hint="yes"), 69)]
)
def test_a_failed_plan_ends_the_job_with_its_message(make_nodes, error, code):
    job = make_nodes(2)
    job.refuses = error
    job.begin()
    job.gather()
    assert job.exit_code == code
    assert job.of(p.JobError)[-1].text == "error: no\n  hint: yes"
