from __future__ import annotations

import signal
import threading

import pytest

from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from tests.facts import mentions
from tests.unit.coordinator.joined.joined_launcher import CLOSED, VERDICT, commence, stop
from tests.unit.coordinator.remote_agents import GONE


def test_signals_are_reported_to_the_coordinator(joined_launcher):
    launcher = joined_launcher(
        commence(),
        lambda: launcher.signals.come(signal.SIGUSR1),
        lambda: launcher.signals.come(signal.SIGTERM),
        lambda: None,
        stop(),
        VERDICT,
    )
    assert launcher.run() == 7
    assert [each.signum for each in launcher.sent(p.LauncherSignalled)] == [
        signal.SIGUSR1,
        signal.SIGTERM,
    ]
    assert "SIGTERM: telling node 0 (h:5)" in launcher.records.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_that_was_asked_for_is_not_forgotten_when_the_coordinator_is_lost(
    joined_launcher, number
):
    launcher = joined_launcher(
        commence(),
        lambda: launcher.signals.come(number),
        lambda: None,
        CLOSED,
        max_restarts=3,
        flexible=True,
    )
    assert launcher.run() == 128 + number
    asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert [each.signum for each in launcher.handled(m.Stop)] == [asked]
    assert launcher.records.of("job_ended") == [{"exit_code": 128 + number}]


@pytest.mark.parametrize(
    "number", [0, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL]
)
def test_every_stop_that_a_coordinator_asks_for_reaches_the_workers(joined_launcher, number):
    """0: Slurm has sent the signal already, and the grace begins."""
    launcher = joined_launcher(commence(), stop(signum=number, grace_s=3.0), VERDICT)
    assert launcher.run() == 7
    assert [(each.signum, each.grace_s) for each in launcher.handled(m.Stop)] == [(number, 3.0)]


def test_workers_that_were_asked_to_end_are_not_asked_twice(joined_launcher):
    launcher = joined_launcher(
        commence(),
        lambda: launcher.signals.come(signal.SIGINT),
        lambda: setattr(launcher.own, "is_silent", True),
        stop(signum=signal.SIGINT),
        lambda: setattr(launcher.own, "is_silent", False),
        CLOSED,
    )
    assert launcher.run() == 130
    assert [(each.signum, each.grace_s) for each in launcher.handled(m.Stop)] == [
        (signal.SIGINT, 25.0),
        (0, 5.0),
    ]


def test_term_at_one_launcher_of_an_elastic_job_ends_its_part_alone(joined_launcher):
    launcher = joined_launcher(
        commence(),
        lambda: launcher.signals.come(signal.SIGTERM),
        leaves=True,
        flexible=True,
        grace_s=7.0,
    )
    assert launcher.run() == 143
    (ending,) = launcher.sent(m.AgentEnding)
    assert mentions(ending.why, "SIGTERM")
    assert not launcher.sent(p.LauncherSignalled)
    assert [(each.signum, each.grace_s) for each in launcher.handled(m.Stop)] == [
        (signal.SIGTERM, 7.0)
    ]
    assert len(launcher.records.of("left")) == 1
    assert launcher.records.of("coordinator_lost") == []


def test_ctrl_c_at_one_launcher_of_an_elastic_job_is_for_the_whole_job(joined_launcher):
    reported = lambda: launcher.signals.come(signal.SIGINT)  # noqa: E731 - as the other steps
    launcher = joined_launcher(
        commence(), reported, lambda: None, VERDICT, leaves=True, flexible=True
    )
    assert launcher.run() == 7
    assert [each.signum for each in launcher.sent(p.LauncherSignalled)] == [signal.SIGINT]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_workers_are_stopped_for_a_lost_coordinator_is_the_exit_code(
    joined_launcher, number
):
    launcher = joined_launcher(commence(), CLOSED, max_restarts=3, flexible=True)
    launcher.own.is_silent = True
    launcher.own.on_stop = lambda: (
        launcher.signals.come(number),
        launcher.own.say(m.AgentNotice(text="", warning=False)),
    )
    launcher.signals.on_read = lambda: launcher.own.say(GONE)
    assert launcher.run() == 128 + number
    assert f"{signal.Signals(number).name}: ending" in launcher.records.text


def test_the_second_signal_kills_workers_that_are_stopped_for_a_lost_coordinator(
    joined_launcher, monkeypatch
):
    monkeypatch.setattr("distlaunch.coordinator.policy.signals.SECOND_S", 0.2)
    launcher = joined_launcher(
        commence(), lambda: launcher.signals.come(signal.SIGTERM), lambda: None, CLOSED
    )
    launcher.own.is_silent = True
    later = threading.Timer(0.25, lambda: launcher.signals.come(signal.SIGTERM))
    launcher.own.on_stop = later.start
    assert launcher.run() == 143
    later.join()
    assert mentions(launcher.records.text, "SIGTERM", "killing")
    assert launcher.own.closed


def test_a_node_that_breaks_while_its_workers_are_stopped_for_a_lost_coordinator_ends_the_launcher(
    joined_launcher,
):
    launcher = joined_launcher(commence(), CLOSED, max_restarts=3, flexible=True, again=[[VERDICT]])

    def breaks():
        launcher.own.is_broken = True
        launcher.own.say(m.AgentFailed(text="the spawner has vanished"))

    launcher.own.is_silent, launcher.own.on_stop = True, breaks
    assert launcher.run() == 70
    assert "internal error: the spawner has vanished" in launcher.records.text
    assert not launcher.records.of("calling_again")


def test_a_node_that_breaks_in_the_pause_before_the_coordinator_is_called_again_ends_the_launcher(
    joined_launcher,
):
    launcher = joined_launcher(CLOSED, again=[[VERDICT]])
    fault = m.AgentFailed(text="the spawner has vanished")
    launcher.records.on_event = lambda kind: kind == "coordinator_lost" and launcher.own.say(fault)
    assert launcher.run() == 70
    assert not launcher.records.of("calling_again")


def test_a_second_term_right_behind_the_first_does_not_take_the_grace_from_a_launcher_that_leaves(
    joined_launcher, monkeypatch
):
    monkeypatch.setattr("distlaunch.coordinator.policy.signals.MERGE_S", 60.0)
    launcher = joined_launcher(
        commence(),
        lambda: launcher.signals.come(signal.SIGTERM),
        leaves=True,
        flexible=True,
        grace_s=7.0,
    )
    launcher.own.is_silent, launcher.own.on_stop = (
        True,
        lambda: launcher.signals.come(signal.SIGTERM),
    )
    launcher.signals.on_read = lambda: launcher.handled(m.Stop) and launcher.own.say(GONE)
    assert launcher.run() == 143
    assert "SIGTERM: killing" not in launcher.records.text


def test_a_stop_in_the_pause_before_the_coordinator_is_called_again_ends_the_launcher(
    joined_launcher,
):
    launcher = joined_launcher(
        lambda: launcher.own.say(m.AgentNotice(text="", warning=False)), CLOSED
    )
    launcher.records.on_event = lambda kind: (
        kind == "coordinator_lost" and launcher.signals.come(signal.SIGINT)
    )
    assert launcher.run() == 130
