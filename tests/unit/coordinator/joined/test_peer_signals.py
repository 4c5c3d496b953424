"""Signals at a launcher that has joined a job: whom it tells of them, and what it ends by
itself."""

from __future__ import annotations

import signal
import threading

import pytest

from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from tests.facts import mentions
from tests.unit.coordinator.joined.peering import CLOSED, VERDICT, commence, stop
from tests.unit.coordinator.remote_agents import GONE


def test_signals_are_reported_to_the_coordinator(peering):
    peer = peering(
        commence(),
        lambda: peer.signals.come(signal.SIGUSR1),
        lambda: peer.signals.come(signal.SIGTERM),
        lambda: None,
        stop(),
        VERDICT,
    )
    assert peer.run() == 7
    assert [each.signum for each in peer.said(p.LauncherSignalled)] == [
        signal.SIGUSR1,
        signal.SIGTERM,
    ]
    assert "SIGTERM: telling node 0 (h:5)" in peer.told.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_that_was_asked_for_is_not_forgotten_when_the_coordinator_is_lost(peering, number):
    peer = peering(
        commence(),
        lambda: peer.signals.come(number),
        lambda: None,
        CLOSED,
        max_restarts=3,
        flexible=True,
    )
    assert peer.run() == 128 + number
    asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert [each.signum for each in peer.handled(m.Stop)] == [asked]
    assert peer.told.of("job_ended") == [{"exit_code": 128 + number}]


@pytest.mark.parametrize(
    "number", [0, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL]
)
def test_every_stop_that_a_coordinator_asks_for_reaches_the_workers(peering, number):
    """0: Slurm has asked them already, and their grace begins."""
    peer = peering(commence(), stop(signum=number, grace_s=3.0), VERDICT)
    assert peer.run() == 7
    assert [(each.signum, each.grace_s) for each in peer.handled(m.Stop)] == [(number, 3.0)]


def test_workers_that_were_asked_to_end_are_not_asked_twice(peering):
    peer = peering(
        commence(),
        lambda: peer.signals.come(signal.SIGINT),
        lambda: setattr(peer.own, "deaf", True),
        stop(signum=signal.SIGINT),
        lambda: setattr(peer.own, "deaf", False),
        CLOSED,
    )
    assert peer.run() == 130
    assert [(each.signum, each.grace_s) for each in peer.handled(m.Stop)] == [
        (signal.SIGINT, 25.0),
        (0, 5.0),
    ]


def test_term_at_one_launcher_of_an_elastic_job_ends_its_part_alone(peering):
    peer = peering(
        commence(),
        lambda: peer.signals.come(signal.SIGTERM),
        leaves=True,
        flexible=True,
        grace_s=7.0,
    )
    assert peer.run() == 143
    (ending,) = peer.said(m.AgentEnding)
    assert mentions(ending.why, "SIGTERM")
    assert not peer.said(p.LauncherSignalled)
    assert [(each.signum, each.grace_s) for each in peer.handled(m.Stop)] == [(signal.SIGTERM, 7.0)]
    assert len(peer.told.of("left")) == 1
    assert peer.told.of("coordinator_lost") == []


def test_ctrl_c_at_one_launcher_of_an_elastic_job_is_for_the_whole_job(peering):
    told = lambda: peer.signals.come(signal.SIGINT)  # noqa: E731 - as the other steps
    peer = peering(commence(), told, lambda: None, VERDICT, leaves=True, flexible=True)
    assert peer.run() == 7
    assert [each.signum for each in peer.said(p.LauncherSignalled)] == [signal.SIGINT]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_workers_are_stopped_for_a_lost_coordinator_is_the_exit_code(
    peering, number
):
    peer = peering(commence(), CLOSED, max_restarts=3, flexible=True)
    peer.own.deaf = True
    peer.own.on_stop = lambda: (
        peer.signals.come(number),
        peer.own.say(m.AgentNotice(text="", warning=False)),
    )
    peer.signals.on_read = lambda: peer.own.say(GONE)
    assert peer.run() == 128 + number
    assert f"{signal.Signals(number).name}: ending" in peer.told.text


def test_the_second_signal_kills_workers_that_are_stopped_for_a_lost_coordinator(
    peering, monkeypatch
):
    monkeypatch.setattr("distlaunch.coordinator.policy.signals.SECOND_S", 0.2)
    peer = peering(commence(), lambda: peer.signals.come(signal.SIGTERM), lambda: None, CLOSED)
    peer.own.deaf = True
    later = threading.Timer(0.25, lambda: peer.signals.come(signal.SIGTERM))
    peer.own.on_stop = later.start
    assert peer.run() == 143
    later.join()
    assert mentions(peer.told.text, "SIGTERM", "killing")
    assert peer.own.closed


def test_a_node_that_breaks_while_its_workers_are_stopped_for_a_lost_coordinator_ends_the_launcher(
    peering,
):
    peer = peering(commence(), CLOSED, max_restarts=3, flexible=True, again=[[VERDICT]])

    def breaks():
        peer.own.is_broken = True
        peer.own.say(m.AgentFailed(text="the spawner has vanished"))

    peer.own.deaf, peer.own.on_stop = True, breaks
    assert peer.run() == 70
    assert "internal error: the spawner has vanished" in peer.told.text
    assert not peer.told.of("calling_again")


def test_a_node_that_breaks_in_the_pause_before_the_coordinator_is_called_again_ends_the_launcher(
    peering,
):
    peer = peering(CLOSED, again=[[VERDICT]])
    fault = m.AgentFailed(text="the spawner has vanished")
    peer.told.on_event = lambda kind: kind == "coordinator_lost" and peer.own.say(fault)
    assert peer.run() == 70
    assert not peer.told.of("calling_again")


def test_a_second_term_right_behind_the_first_does_not_take_the_grace_from_a_launcher_that_leaves(
    peering, monkeypatch
):
    monkeypatch.setattr("distlaunch.coordinator.policy.signals.MERGE_S", 60.0)
    peer = peering(
        commence(),
        lambda: peer.signals.come(signal.SIGTERM),
        leaves=True,
        flexible=True,
        grace_s=7.0,
    )
    peer.own.deaf, peer.own.on_stop = True, lambda: peer.signals.come(signal.SIGTERM)
    peer.signals.on_read = lambda: peer.handled(m.Stop) and peer.own.say(GONE)
    assert peer.run() == 143
    assert "SIGTERM: killing" not in peer.told.text


def test_a_stop_in_the_pause_before_the_coordinator_is_called_again_ends_the_launcher(peering):
    peer = peering(lambda: peer.own.say(m.AgentNotice(text="", warning=False)), CLOSED)
    peer.told.on_event = lambda kind: (
        kind == "coordinator_lost" and peer.signals.come(signal.SIGINT)
    )
    assert peer.run() == 130
