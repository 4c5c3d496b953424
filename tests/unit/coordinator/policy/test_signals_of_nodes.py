from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.policy.events_and_actions import Signalled
from distlaunch.coordinator.policy.job_settings import Scheduler
from distlaunch.coordinator.policy.signals import ECHO_S, HOLD_S, Signals
from distlaunch.core.model.record import replace
from distlaunch.core.protocol import agent_messages as m

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


def test_a_signal_to_all_agents_and_the_launcher_counts_once():
    signals = Signals(holds=False)
    first = Signalled(signum=USR1)
    assert signals.on_signal(first, 1.0) == first
    for node in (0, 1, 2):
        assert signals.on_signal(Signalled(signum=USR1, node=node), 1.0 + 0.3 * node) is None
    other = Signalled(signum=TERM, node=1)
    assert signals.on_signal(other, 1.5) == other


def test_one_that_comes_again_to_the_same_or_much_later_counts_again():
    signals = Signals(holds=False)
    event = Signalled(signum=USR1, node=2)
    for now in (1.0, 1.1, 1.1 + ECHO_S):
        assert signals.on_signal(event, now) == event
    late = Signalled(signum=USR1, node=1)
    assert signals.on_signal(late, 1.2 + 2 * ECHO_S) == late


def test_one_that_comes_to_all_within_half_a_minute_counts_once_and_a_second_round_as_the_second():
    signals = Signals(holds=False)
    for round_, begin in ((0, 100.0), (1, 110.0)):
        acted = [
            signals.on_signal(Signalled(signum=TERM, node=node), begin + 1.0 * node)
            for node in range(6)
        ]
        assert [event is not None for event in acted] == [True] + [False] * 5, round_


def test_the_second_signal_of_one_launcher_counts_though_others_have_reported_the_first_since():
    signals = Signals(holds=False)
    event = Signalled(signum=signal.SIGINT, node=3)
    assert signals.on_signal(event, 1.0) == event
    assert signals.on_signal(Signalled(signum=signal.SIGINT), 6.0) is None
    assert signals.on_signal(event, 7.0) == event


def test_a_late_first_is_no_second():
    signals = Signals(holds=False)
    first, late = Signalled(signum=TERM, node=1), Signalled(signum=TERM, node=2)
    assert [signals.on_signal(first, now) for now in (1.0, 2.0)] == [first, first]
    assert [signals.on_signal(late, now) for now in (3.0, 4.0)] == [None, None]
    assert signals.on_signal(late, 5.0) == late


def test_our_signal_waits_for_an_agents_report_if_workers_are_signalled_as_well():
    signals = Signals(holds=True)
    assert signals.on_signal(Signalled(signum=TERM), 1.0) is None
    assert signals.deadline() == 1.0 + HOLD_S
    reached = Signalled(signum=TERM, node=0, reached=True)
    assert signals.on_signal(reached, 1.05) == replace(reached, came=1.0)
    assert signals.deadline() is None
    assert signals.due(2.0) == []


def test_ours_counts_when_no_agent_has_got_it():
    signals = Signals(holds=True)
    own = Signalled(signum=USR1)
    signals.on_signal(own, 1.0)
    assert signals.due(1.0 + HOLD_S / 2) == []
    assert signals.due(1.0 + HOLD_S) == [replace(own, came=1.0)]
    assert signals.on_signal(Signalled(signum=USR1, node=3, reached=True), 1.5) is None


def test_where_workers_are_signalled_as_well_a_second_launcher_shows_that_they_were():
    signals = Signals(holds=True)
    assert signals.on_signal(Signalled(signum=TERM, node=1), 1.0) is None
    assert signals.on_signal(Signalled(signum=TERM, node=1), 1.01) is None
    assert signals.on_signal(Signalled(signum=TERM), 1.05) == Signalled(
        signum=TERM, reached=True, came=1.0
    )
    assert signals.on_signal(Signalled(signum=TERM, node=2), 1.06) is None
    assert signals.due(2.0) == []


def test_a_signal_to_one_launcher_alone_is_passed_on_to_workers():
    signals = Signals(holds=True)
    event = Signalled(signum=TERM, node=1)
    assert signals.on_signal(event, 1.0) is None
    assert signals.due(1.0 + HOLD_S) == [replace(event, came=1.0)]


@pytest.mark.parametrize(
    "event", [Signalled(signum=signal.SIGINT), Signalled(signum=TERM, kill=True)]
)
def test_a_signal_of_a_person_is_never_delayed(event):
    assert Signals(holds=True).on_signal(event, 1.0) == event


def test_ctrl_c_to_kill_is_no_echo_of_another_launchers_signal():
    signals = Signals(holds=False)
    signals.on_signal(Signalled(signum=signal.SIGINT, node=1), 1.0)
    typed = Signalled(signum=signal.SIGINT, kill=True)
    assert signals.on_signal(typed, 2.0) == typed


def stop_of(job) -> m.Stop:
    [(_, stop)] = job.sent(m.Stop, job.actions)
    return stop


@pytest.mark.parametrize(
    ("signum", "grace_s", "left_s"),
    [(TERM, 60.0, 25.0), (TERM, 10.0, 10.0), (signal.SIGINT, 60.0, 60.0)],
)
def test_under_a_scheduler_workers_are_killed_by_us_before_they_would_be_by_it(
    make_job, signum, grace_s, left_s
):
    job = make_job(per_node=1, grace_s=grace_s, scheduler=Scheduler(kill_after_s=30.0))
    job.begin()
    job.prepared(0)
    job.started(0)
    job.signal(signum)
    assert stop_of(job).grace_s == left_s


def test_a_job_that_the_scheduler_has_begun_anew_counts_on(make_job):
    job = make_job(scheduler=Scheduler(attempt=3))
    job.begin()
    assert job.policy.attempt == 3
    assert [prepare.attempt for _, prepare in job.sent(m.Prepare, job.actions)] == [3]


def test_a_signal_to_a_spawner_is_one_with_that_to_its_launcher_or_agent():
    signals = Signals(holds=False)
    at_spawner, at_agent = (
        Signalled(signum=TERM, node=0, spawner=True),
        Signalled(signum=TERM, node=0),
    )
    assert signals.on_signal(at_spawner, 1.0) == at_spawner
    assert signals.on_signal(Signalled(signum=TERM), 1.01) is None
    assert signals.on_signal(at_agent, 1.02) is None
    assert signals.on_signal(at_spawner, 3.0) == at_spawner


def test_a_spawners_report_shows_that_workers_were_signalled_as_well():
    signals = Signals(holds=True)
    assert signals.on_signal(Signalled(signum=TERM, node=0, spawner=True), 1.0) is None
    acted = signals.on_signal(Signalled(signum=TERM), 1.05)
    assert acted is not None
    assert acted.reached
