from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.policy import events_and_actions as p
from distlaunch.coordinator.policy.restarts import Final, FinalReason
from distlaunch.coordinator.policy.signals import MERGE_S, SECOND_S
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
ASKING = ENDING[:3]


def stops(job, actions) -> list[tuple[int, int, float]]:
    return [(node, stop.signum, stop.grace_s) for node, stop in job.sent(m.Stop, actions)]


def kills(job, actions) -> bool:
    return [(signum, grace) for _, signum, grace in stops(job, actions)] == [
        (signal.SIGKILL, 0)
    ] * job.nodes


def test_a_signal_before_the_beginning_ends_the_job(make_job):
    job = make_job()
    job.signal(signal.SIGTERM)
    assert job.exit_code == 143
    assert job.entries("job_ended") == [{"exit_code": 143, "signal": "SIGTERM"}]


@pytest.mark.parametrize("signum", ENDING)
def test_while_nodes_prepare_a_signal_ends_the_job_at_once(make_job, signum):
    job = make_job(nodes=2)
    job.begin()
    job.prepared(0)
    job.signal(signum)
    assert job.exit_code == 128 + signum
    assert job.prepared(1) == []


@pytest.mark.parametrize("started", [0, 1, 2])
@pytest.mark.parametrize(
    ("signum", "asked"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_a_signal_asks_every_worker_and_gives_the_grace(make_job, started, signum, asked):
    job = make_job(nodes=2, per_node=1, grace_s=30.0)
    job.begin()
    job.prepared(0)
    job.prepared(1)
    for rank in range(started):
        job.started(rank)
    assert stops(job, job.signal(signum)) == [(0, asked, 30.0), (1, asked, 30.0)]
    assert job.entries("signal") == [{"signal": signum.name}]


@pytest.mark.parametrize("signum", ASKING)
@pytest.mark.parametrize("returncode", [0, 1, -15, -9])
def test_a_job_that_was_asked_to_stop_exits_with_the_signal_however_its_workers_end(
    make_job, signum, returncode
):
    job = make_job(max_restarts=3).run()
    job.signal(signum)
    for rank in job.ranks:
        job.exited(rank, returncode, tail=job.RAISED if returncode == 1 else b"", reported=True)
    job.all_gone()
    assert job.exit_code == 128 + signum
    assert [failed.while_stopping for failed in job.of(p.ReportFailure)] == [True] * (
        returncode == 1
    )


def test_the_last_line_says_which_workers_failed_while_they_stopped_and_why(make_job):
    job = make_job(per_node=3).run()
    job.signal(signal.SIGTERM)
    job.exited(0, 1, tail=job.RAISED, reported=True)
    job.exited(1, 0, reported=True)
    job.exited(2, 1, tail=job.RAISED, reported=True)
    job.all_gone()
    [failed] = job.of(p.ReportFailure)
    assert (failed.final, failed.diagnosis.cause.ranks) == (True, (0, 2))
    assert mentions(
        job.of(p.ShowMessage)[-1].text, "3 workers", "none", "0,2 of 3", "ValueError", "train.py:5"
    )
    assert job.exit_code == 143


def test_a_worker_that_only_lost_the_other_ranks_in_the_stop_has_not_failed(make_job):
    job = make_job().run()
    job.signal(signal.SIGTERM)
    job.exited(0, -15, reported=True)
    job.exited(1, 1, tail=job.LOST, reported=True)
    job.all_gone()
    assert job.of(p.ReportFailure) == []
    assert mentions(job.of(p.ShowMessage)[-1].text, "2 workers", "none")
    assert "failed" not in job.of(p.ShowMessage)[-1].text


def test_a_schedulers_term_does_not_kill_the_program_of_a_failed_jobs_wrapper_that_saves(make_job):
    job = make_job(repeated_term_kills=False).run()
    job.exited(0, 1)
    job.exited(1, -15, reported=True)
    assert job.phase == "stopping"
    assert stops(job, job.signal(signal.SIGTERM)) == []
    job.now += 2.0
    assert kills(job, job.signal(signal.SIGINT))


def test_quit_kills_at_once(make_job):
    job = make_job(nodes=2).run()
    assert kills(job, job.signal(signal.SIGQUIT))


def test_the_second_interrupt_of_a_person_kills_at_once(make_job):
    job = make_job(nodes=2).run()
    job.signal(signal.SIGINT)
    job.now += 1.0
    assert kills(job, job.signal(signal.SIGINT))
    assert mentions(job.notices, "killing")
    for rank in job.ranks:
        job.exited(rank, -9, reported=True)
    job.all_gone()
    assert job.exit_code == 130


def test_the_first_signal_gives_the_exit_code(make_job):
    job = make_job().run()
    job.signal(signal.SIGTERM)
    job.now += 1.0
    assert kills(job, job.signal(signal.SIGINT))
    job.all_gone()
    assert job.exit_code == 143


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_at_almost_the_same_time_are_one(make_job, second):
    job = make_job().run()
    job.signal(signal.SIGINT)
    job.now += MERGE_S / 2
    assert job.signal(second) == []


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_within_a_second_changes_nothing(make_job, second):
    job = make_job().run()
    job.signal(signal.SIGINT)
    job.now += SECOND_S * 0.9
    assert stops(job, job.signal(second)) == []


def test_a_second_signal_a_second_later_kills_though_one_came_too_early(make_job):
    job = make_job().run()
    job.signal(signal.SIGINT)
    job.now += SECOND_S / 5
    assert stops(job, job.signal(signal.SIGINT)) == []
    job.now += SECOND_S
    assert kills(job, job.signal(signal.SIGINT))


def test_a_third_signal_kills_however_soon_it_comes(make_job):
    job = make_job().run()
    job.signal(signal.SIGINT)
    job.now += SECOND_S / 4
    assert stops(job, job.signal(signal.SIGINT)) == []
    job.now += SECOND_S / 4
    assert kills(job, job.signal(signal.SIGINT))


@pytest.mark.parametrize("signum", ENDING)
@pytest.mark.parametrize("returncode", [0, 7])
def test_a_signal_when_all_workers_have_ended_changes_neither_exit_code_nor_report(
    make_job, signum, returncode
):
    job = make_job(nodes=2).run()
    for rank in job.ranks:
        job.exited(rank, returncode)
    hurries = job.signal(signum)
    assert stops(job, hurries), "the nodes wait no longer for what is left"
    job.all_gone()
    assert job.exit_code == returncode
    assert [failed.final for failed in job.of(p.ReportFailure)] == [True] * (returncode != 0)


def test_a_signal_when_all_workers_have_ended_prevents_the_restart(make_job):
    job = make_job(max_restarts=3).run()
    for rank in job.ranks:
        job.exited(rank, 7)
    job.signal(signal.SIGTERM)
    job.all_gone()
    assert job.exit_code == 143
    [failed] = job.of(p.ReportFailure)
    assert failed.decision == Final(reason=FinalReason.STOPPED)


def test_a_quit_right_after_another_signal_kills(make_job):
    job = make_job().run()
    job.signal(signal.SIGTERM)
    job.now += MERGE_S / 2
    assert kills(job, job.signal(signal.SIGQUIT))


def test_under_a_scheduler_a_repeated_term_counts_once(make_job):
    job = make_job(repeated_term_kills=False).run()
    job.signal(signal.SIGTERM)
    for _ in range(3):
        job.now += 2.0
        assert stops(job, job.signal(signal.SIGTERM)) == []


def test_under_a_scheduler_a_person_can_still_kill(make_job):
    job = make_job(repeated_term_kills=False).run()
    job.signal(signal.SIGTERM)
    job.now += 2.0
    assert kills(job, job.signal(signal.SIGINT))


def test_without_a_scheduler_a_repeated_term_kills(make_job):
    job = make_job().run()
    job.signal(signal.SIGTERM)
    job.now += 2.0
    assert kills(job, job.signal(signal.SIGTERM))


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_are_passed_on_and_change_nothing(make_job, signum):
    job = make_job(nodes=2).run()
    actions = job.signal(signum)
    assert job.sent(m.ForwardSignal, actions) == [
        (node, m.ForwardSignal(signum=signum)) for node in range(2)
    ]
    assert job.phase == "running"
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert job.exit_code == 0


def test_a_user_signal_during_the_grace_is_passed_on_and_does_not_kill(make_job):
    job = make_job().run()
    job.signal(signal.SIGTERM)
    job.now += 1.0
    actions = job.signal(signal.SIGUSR1)
    assert stops(job, actions) == []
    assert len(job.sent(m.ForwardSignal, actions)) == 1


def test_it_is_known_for_how_long_an_attempt_went_on_after_its_last_warning(make_job):
    job = make_job().run()
    job.signal(signal.SIGUSR1)
    job.now += 7200.0
    job.signal(signal.SIGUSR2)
    job.now += 90.0
    for rank in job.ranks:
        job.exited(rank)
    job.all_gone()
    assert (job.policy.warned, job.policy.since_warned_s) == (signal.SIGUSR2, 90.0)


# --- together with failures


def test_impatience_with_a_failing_job_kills_at_once(make_job):
    job = make_job().run()
    job.exited(0, 1)
    assert kills(job, job.signal(signal.SIGINT))
    job.exited(1, -9, reported=True)
    job.all_gone()
    assert job.exit_code == 130
    [failed] = job.of(p.ReportFailure)
    assert failed.decision == Final(reason=FinalReason.STOPPED)
    assert failed.diagnosis.cause.ranks == (0,), "the failure came first and is still explained"


def test_asked_to_stop_a_failed_attempt_is_not_restarted(make_job):
    job = make_job(max_restarts=5).run()
    job.exited(0, 1, tail=job.RAISED)
    job.signal(signal.SIGTERM)
    job.exited(1, -9, reported=True)
    job.all_gone()
    assert job.exit_code == 143
    assert job.attempt == 0


def test_a_signal_while_a_cause_is_awaited_ends_the_wait(make_job):
    job = make_job(per_node=2).run()
    job.exited(0, 1, tail=job.LOST)
    job.signal(signal.SIGTERM)
    assert job.policy.deadline() is None
    assert job.tick() == []


def test_a_signal_between_attempts_ends_the_job(make_job):
    job = make_job(max_restarts=5).run()
    job.fail()
    assert job.phase == "preparing"
    job.signal(signal.SIGINT)
    assert job.exit_code == 130


def test_a_signal_in_a_later_attempt_stops_that_attempt(make_job):
    job = make_job(max_restarts=5).run()
    job.fail()
    job.come_up()
    [(_, stop)] = job.sent(m.Stop, job.signal(signal.SIGTERM))
    assert stop.attempt == 1


def test_a_signal_when_all_workers_have_ended_well_only_ends_what_they_have_left(make_job):
    job = make_job(failure_grace_s=4.0).run()
    for rank in job.ranks:
        job.exited(rank)
    assert stops(job, job.signal(signal.SIGTERM)) == [(0, signal.SIGTERM, 4.0)]
    job.now += 1.0
    assert kills(job, job.signal(signal.SIGTERM))
    job.all_gone()
    assert job.exit_code == 0


# --- one worker on a terminal


@pytest.mark.parametrize("returncode", [-signal.SIGINT, 128 + signal.SIGINT])
def test_ctrl_c_in_the_workers_terminal_stops_the_job(make_job, returncode):
    job = make_job(per_node=1, terminal=True, max_restarts=3).run()
    job.exited(0, returncode)
    job.all_gone()
    assert job.exit_code == 130
    assert job.of(p.ReportFailure) == []


def test_without_a_terminal_exit_code_130_is_a_failure(make_job):
    job = make_job(per_node=1).run()
    job.exited(0, 130)
    job.all_gone()
    assert job.exit_code == 130
    assert len(job.of(p.ReportFailure)) == 1


def test_a_worker_with_a_terminal_fails_like_any(make_job):
    job = make_job(per_node=1, terminal=True).run()
    job.exited(0, 5, tail=job.RAISED)
    job.all_gone()
    assert job.exit_code == 5
    assert len(job.of(p.ReportFailure)) == 1


def test_a_stop_while_others_may_still_show_the_cause_asks_before_it_kills(make_job):
    job = make_job().run()
    job.exited(0, 1, tail=job.LOST)
    [(_, stop)] = job.sent(m.Stop, job.signal(signal.SIGTERM))
    assert (stop.signum, stop.grace_s) == (signal.SIGTERM, job.policy.settings.grace_s)


def test_a_schedulers_term_does_not_cut_the_grace_of_workers_that_were_asked_already(make_job):
    job = make_job(repeated_term_kills=False).run()
    job.exited(0, 1)
    assert stops(job, job.signal(signal.SIGTERM)) == []
    job.exited(1, -15, reported=True)
    job.all_gone()
    assert job.exit_code == 143
