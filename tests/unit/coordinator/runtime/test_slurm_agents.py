"""Agents that srun has started, over socket pairs, and their signals."""

from __future__ import annotations

import signal

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.slurm_agents import SlurmAgents
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions
from tests.unit.coordinator.remote_agents import exited

TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


class SrunConnector:
    """A connector of agents that all belong to one step, until ``anew``."""

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
    """Return remote agents of two connected nodes, with the fake srun as ``srun``."""

    def make(*, signals_all: bool = False):
        def agents(targets, *, open_connection, **more):
            made = SlurmAgents(
                targets, srun=SrunConnector(open_connection), signals_all=signals_all, **more
            )
            made.end_opening = made._srun.cancel
            return made

        found = nodes(2, make=agents)
        found.srun = found.agents._srun
        for node in range(2):
            found.join(node)
        return found

    return make


def reported(agents) -> list[tuple[int | None, int, bool]]:
    return [(event.node, event.signum, event.reached) for event in agents.of(a.Signalled)]


def lost(agents) -> list[int]:
    return [event.node for event in agents.of(a.Lost)]


@pytest.mark.parametrize("signals_all", [False, True])
def test_a_signal_of_slurm_is_reported_with_its_node_and_whether_workers_have_it(
    steps, signals_all
):
    agents = steps(signals_all=signals_all)
    agents.say("n1", m.AgentSignalled(signum=TERM))
    agents.say("n0", m.AgentSignalled(signum=USR1))
    agents.pump(lambda: len(agents.of(a.Signalled)) == 2)
    assert sorted(reported(agents)) == [(0, USR1, signals_all), (1, TERM, signals_all)]
    assert not lost(agents)


@pytest.mark.parametrize("signum", [9999, -15, 0, int(signal.SIGKILL), 10**30])
def test_an_agent_that_reports_an_impossible_signal_is_lost(steps, signum):
    agents = steps()
    agents.say("n1", m.AgentSignalled(signum=signum))
    agents.pump(lambda: lost(agents) == [1])
    assert not reported(agents)


def test_term_after_the_loss_of_an_agent_of_the_step_is_no_signal_but_a_loss(steps):
    agents = steps()
    agents.links["n0"].theirs.close()
    agents.pump(lambda: lost(agents) == [0])
    agents.say("n1", m.AgentSignalled(signum=USR1))
    agents.pump(lambda: reported(agents) == [(1, USR1, False)])
    agents.say("n1", m.AgentSignalled(signum=TERM))
    agents.pump(lambda: lost(agents) == [0, 1])
    assert reported(agents) == [(1, USR1, False)]
    assert mentions(agents.of(a.Lost)[1].why, "Slurm", "step")


def test_an_agent_that_slurm_ends_is_lost_once_its_workers_have_ended(steps):
    agents = steps()
    for node in range(2):
        agents.give(node, node)
    agents.links["n0"].theirs.close()
    agents.pump(lambda: lost(agents) == [0])
    agents.say(
        "n1", m.AgentSignalled(signum=TERM), m.Started(attempt=0, pids={1: 9}), exited(8.0, rank=1)
    )
    agents.pump(
        lambda: any(isinstance(event.message, WorkerExit) for event in agents.of(a.FromNode))
    )
    assert lost(agents) == [0]
    agents.say("n1", m.RankEnded(rank=1), m.AttemptEnded(attempt=0, left=()))
    agents.pump(lambda: lost(agents) == [0, 1])
    assert isinstance(agents.of(a.FromNode)[-1].message, m.AttemptEnded)
    assert not reported(agents)


def test_in_the_next_step_term_is_a_signal_again(steps):
    agents = steps()
    agents.give(1, 0)
    agents.links["n0"].theirs.close()
    agents.pump(lambda: lost(agents) == [0])
    agents.say("n1", m.AgentSignalled(signum=TERM))
    agents.links["n1"].theirs.close()  # before its workers have ended
    agents.pump(lambda: lost(agents) == [0, 1])
    agents.srun.anew()
    agents.events.clear()
    agents.links.clear()  # both of these ends are closed
    for node in range(2):
        agents.join(node)
    agents.say("n1", m.AgentSignalled(signum=TERM))
    agents.pump(lambda: reported(agents) == [(1, TERM, False)])
    assert not lost(agents)


def test_a_signal_that_an_agent_reports_before_hello_has_no_node(steps):
    agents = steps()
    agents.agents.disconnect(1)
    agents.links.pop("n1").theirs.close()
    agents.agents.connect(1, 0.0)
    agents.pump(lambda: "n1" in agents.links)
    agents.say(
        "n1",
        m.AgentSignalled(signum=TERM),
        m.Hello(hostname="n1", python="3.11.4", pid=1, clock=7.0),
    )
    agents.pump(lambda: [event.node for event in agents.of(a.Joined)].count(1) == 2)
    assert not reported(agents)


def test_output_of_srun_is_shown_without_its_prefix_up_to_forty_lines(steps):
    agents = steps()
    for line in (
        "srun: retrying",
        "srun: forcing job termination",
        "slurmstepd: got SIGCONT",
        *map(str, range(100)),
    ):
        agents.srun.say(line)
    agents.pump(lambda: agents.of(a.LinePrinted))
    shown = [event.text for event in agents.of(a.LinePrinted)]
    assert shown[:2] == ["srun: retrying", "0"]
    assert len(shown) <= 40


def test_agents_leave_before_srun_is_ended_and_its_later_output_is_dropped(steps):
    agents = steps()
    agents.srun.say("srun: error: n1: task 1: Exited with exit code 1")
    for link in agents.links.values():
        link.theirs.close()
    agents.agents.close()
    assert agents.srun.calls[-1] == "close"
    assert not [event for event in agents.agents._pop_events() if isinstance(event, a.LinePrinted)]
    agents.close = lambda: None
