"""The fleet of agents that srun has started, over made-up links: whose signals are whose."""

from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.slurm_agents import StepFleet
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from tests.unit.coordinator.fleets import exited

TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


class SrunConnector:
    """What the fleet has of srun: all agents are of one step, until ``anew``."""

    def __init__(self, open_connection) -> None:
        self.open = open_connection
        self.broken = False
        self.calls: list[str] = []

    def say(self, line: str) -> None:
        raise AssertionError(line)

    def on_agent_lost(self, host: str) -> None:
        self.broken = True
        self.calls.append(f"lost {host}")

    def is_ending(self, host: str) -> bool:
        return self.broken

    def anew(self) -> None:
        self.broken = False

    def cancel(self) -> None:
        self.calls.append("give up")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def steps(nodes):
    """Give a fleet of two nodes that have joined, and its srun as ``srun``."""

    def make(*, signals_all: bool = False):
        def fleet(targets, *, open_connection, **more):
            made = StepFleet(
                targets, srun=SrunConnector(open_connection), signals_all=signals_all, **more
            )
            made.end_opening = made._srun.cancel
            return made

        found = nodes(2, make=fleet)
        found.srun = found.fleet._srun
        for node in range(2):
            found.join(node)
        return found

    return make


def told(fleet) -> list[tuple[int | None, int, bool]]:
    return [(event.node, event.signum, event.reached) for event in fleet.of(a.Signalled)]


def lost(fleet) -> list[int]:
    return [event.node for event in fleet.of(a.Lost)]


@pytest.mark.parametrize("signals_all", [False, True])
def test_a_signal_of_slurm_is_told_with_its_node_and_whether_workers_have_it(steps, signals_all):
    fleet = steps(signals_all=signals_all)
    fleet.say("n1", m.AgentSignalled(signum=TERM))
    fleet.say("n0", m.AgentSignalled(signum=USR1))
    fleet.pump(lambda: len(fleet.of(a.Signalled)) == 2)
    assert sorted(told(fleet)) == [(0, USR1, signals_all), (1, TERM, signals_all)]
    assert not lost(fleet)


@pytest.mark.parametrize("signum", [9999, -15, 0, int(signal.SIGKILL), 10**30])
def test_an_agent_that_tells_of_what_is_no_signal_for_the_job_is_lost(steps, signum):
    fleet = steps()
    fleet.say("n1", m.AgentSignalled(signum=signum))
    fleet.pump(lambda: lost(fleet) == [1])
    assert not told(fleet)


def test_term_after_the_loss_of_an_agent_of_the_step_is_no_signal_but_a_loss(steps):
    fleet = steps()
    fleet.links["n0"].theirs.close()
    fleet.pump(lambda: lost(fleet) == [0])
    fleet.say("n1", m.AgentSignalled(signum=USR1))
    fleet.pump(lambda: told(fleet) == [(1, USR1, False)])
    fleet.say("n1", m.AgentSignalled(signum=TERM))
    fleet.pump(lambda: lost(fleet) == [0, 1])
    assert told(fleet) == [(1, USR1, False)]
    assert fleet.of(a.Lost)[1].why == "Slurm ended it, as an agent of the same step had ended"


def test_an_agent_that_slurm_ends_is_lost_once_its_workers_have_ended(steps):
    fleet = steps()
    for node in range(2):
        fleet.give(node, node)
    fleet.links["n0"].theirs.close()
    fleet.pump(lambda: lost(fleet) == [0])
    fleet.say(
        "n1", m.AgentSignalled(signum=TERM), m.Started(attempt=0, pids={1: 9}), exited(8.0, rank=1)
    )
    fleet.pump(lambda: any(isinstance(event.message, WorkerExit) for event in fleet.of(a.FromNode)))
    assert lost(fleet) == [0]
    fleet.say("n1", m.RankEnded(rank=1), m.AttemptEnded(attempt=0, left=()))
    fleet.pump(lambda: lost(fleet) == [0, 1])
    assert isinstance(fleet.of(a.FromNode)[-1].message, m.AttemptEnded)
    assert not told(fleet)


def test_in_the_next_step_term_is_a_signal_again(steps):
    fleet = steps()
    fleet.give(1, 0)
    fleet.links["n0"].theirs.close()
    fleet.pump(lambda: lost(fleet) == [0])
    fleet.say("n1", m.AgentSignalled(signum=TERM))
    fleet.links["n1"].theirs.close()  # before its workers have ended
    fleet.pump(lambda: lost(fleet) == [0, 1])
    fleet.srun.anew()
    fleet.events.clear()
    fleet.links.clear()  # both of these ends are closed
    for node in range(2):
        fleet.join(node)
    fleet.say("n1", m.AgentSignalled(signum=TERM))
    fleet.pump(lambda: told(fleet) == [(1, TERM, False)])
    assert not lost(fleet)


def test_what_an_agent_tells_of_signals_before_it_has_said_hello_is_nobodys(steps):
    fleet = steps()
    fleet.fleet.disconnect(1)
    fleet.links.pop("n1").theirs.close()
    fleet.fleet.connect(1, 0.0)
    fleet.pump(lambda: "n1" in fleet.links)
    fleet.say(
        "n1",
        m.AgentSignalled(signum=TERM),
        m.Hello(hostname="n1", python="3.11.4", pid=1, clock=7.0),
    )
    fleet.pump(lambda: [event.node for event in fleet.of(a.Joined)].count(1) == 2)
    assert not told(fleet)


def test_what_srun_says_is_shown_but_its_manners_and_no_more_than_forty_lines(steps):
    fleet = steps()
    for line in (
        "srun: retrying",
        "srun: forcing job termination",
        "slurmstepd: got SIGCONT",
        *map(str, range(100)),
    ):
        fleet.srun.say(line)
    fleet.pump(lambda: fleet.of(a.Noted))
    said = [event.text for event in fleet.of(a.Noted)]
    assert said[:2] == ["srun: retrying", "0"]
    assert len(said) <= 40


def test_agents_leave_before_srun_is_ended_and_what_it_then_says_is_nobodys(steps):
    fleet = steps()
    fleet.srun.say("srun: error: n1: task 1: Exited with exit code 1")
    for link in fleet.links.values():
        link.theirs.close()
    fleet.fleet.close()
    assert fleet.srun.calls[-1] == "close"
    assert not [event for event in fleet.fleet._taken_events() if isinstance(event, a.Noted)]
    fleet.close = lambda: None
