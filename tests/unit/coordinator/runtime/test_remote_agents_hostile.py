"""Nodes that send impossible messages are lost, and nothing of them counts."""

from __future__ import annotations

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.core.protocol import agent_messages as m
from tests.unit.coordinator.remote_agents import REMARK, exited
from tests.unit.coordinator.runtime.test_node_questions import usage_of

ELSEWHERE = {
    "output": m.Output(rank=0, stream=1, data=b"not mine"),
    "output of no rank": m.Output(rank=10**6, stream=1, data=b"x"),
    "output of no stream": m.Output(rank=1, stream=7, data=b"x"),
    "no output": m.Output(rank=1, stream=1, data=b""),
    "an end of output": m.RankEnded(rank=0),
    "an exit": exited(1.0, rank=0),
    "an exit of no rank": exited(1.0, rank=-1),
    "an exit to come": exited(1.0, rank=1, attempt=1),
    "an exit before the first": exited(1.0, rank=1, attempt=-1),
    "a status of no process": exited(1.0, rank=1, returncode=-(10**15)),
    "a start": m.Started(attempt=0, pids={1: 5, 0: 6}),
    "a sign of life": m.Alive(
        attempt=0, heartbeats=(m.Heartbeat(rank=0, values={"step": 5}),), wrote=()
    ),
    "signs of output": m.Alive(attempt=0, heartbeats=(), wrote=(0,)),
    "stacks": m.Stacks(attempt=0, serial=1, stacks=(m.Stack(rank=0, pid=1, state="R", text=""),)),
    "usage": usage_of(-1, 0),
    "a halt": m.WorkerHalted(rank=0),
    "the end of an attempt to come": m.AttemptEnded(attempt=1, left=()),
    "a port for an attempt to come": m.Prepared(
        attempt=2, port=80, problem=None, hint=None, warning=None
    ),
    "a way for an attempt to come": m.Reached(attempt=2, routes=(), problem=None),
    "a signal, which is its own": m.AgentSignalled(signum=15),
    "no signal": m.AgentSignalled(signum=9999),
    "a clock of hundreds of digits": exited(10**400),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_node_that_reports_workers_it_does_not_run_is_lost(nodes, message):
    agents = nodes(2)
    for node in (0, 1):
        agents.join(node)
        agents.give(node, node)
    agents.say("n1", message)
    agents.pump(lambda: agents.of(a.Lost))
    assert [event.node for event in agents.of(a.Lost)] == [1]
    assert not agents.of(a.FromNode)
    agents.say("n0", REMARK)
    agents.pump(lambda: agents.of(a.FromNode))
    assert agents.kept.written == []


def test_a_clock_of_hundreds_of_digits_is_no_hello(nodes):
    agents = nodes(1)
    agents.agents.connect(0, 0.0)
    agents.pump(lambda: "n0" in agents.links)
    agents.say("n0", m.Hello(hostname="n0", python="3", pid=1, clock=10**400))
    agents.pump(lambda: agents.of(a.Unreachable))
    assert not agents.of(a.Joined)


def test_output_without_credit_loses_the_node_before_it_fills_the_memory(nodes):
    agents = nodes(1)
    agents.join(0)
    agents.give(0, 0)
    agents.kept.full = True
    chunk = b"x" * (1 << 20)
    agents.pump(lambda: agents.received("n0", m.Credit))
    window = agents.received("n0", m.Credit)[0].size
    agents.say_much("n0", *[m.Output(rank=0, stream=1, data=chunk)] * 30)
    agents.pump(lambda: agents.of(a.Lost))
    assert "more output" in agents.of(a.Lost)[0].why
    assert sum(len(each[2]) for each in agents.kept.written if len(each) == 3) <= window + (
        12 << 20
    )


def test_output_of_ended_workers_may_go_beyond_the_credit(nodes):
    agents = nodes(1)
    agents.join(0)
    agents.give(0, 0, 1)
    agents.pump(lambda: agents.received("n0", m.Credit))
    agents.kept.full = True
    window = agents.received("n0", m.Credit)[0].size
    full = [
        m.Output(rank=rank, stream=stream, data=b"x" * (1 << 20))
        for rank in (0, 1)
        for stream in (1, 2)
    ]
    agents.say_much(
        "n0", *[m.Output(rank=0, stream=1, data=b"x" * (1 << 18))] * (window >> 18), *full, REMARK
    )
    agents.pump(lambda: agents.of(a.FromNode))
    assert not agents.of(a.Lost)
    agents.kept.full = False
    agents.kept.wake()
    agents.pump(
        lambda: sum(each.size for each in agents.received("n0", m.Credit)) == 2 * window + (4 << 20)
    )


def test_no_message_of_a_node_counts_after_its_goodbye(nodes):
    agents = nodes(1)
    agents.join(0)
    agents.give(0, 0)
    late = (m.Output(rank=0, stream=1, data=b"late"), exited(1.0))
    agents.say("n0", m.AgentEnding(why="the agent was ended by signal 15"), *late)
    agents.pump(lambda: agents.of(a.Lost))
    assert [type(event) for event in agents.events] == [a.Joined, a.Lost]
    assert agents.kept.written == []


def test_output_of_an_attempt_that_comes_when_another_has_begun_is_paid_back_and_not_filed(nodes):
    agents = nodes(1)
    agents.join(0)
    agents.give(0, 0)
    agents.pump(lambda: agents.received("n0", m.Credit))
    window = agents.received("n0", m.Credit)[0].size
    agents.agents.begin_attempt(1)  # in which the node has no part
    agents.say_much(
        "n0", m.Output(rank=0, stream=1, data=b"x" * (window // 2)), m.RankEnded(rank=0), REMARK
    )
    agents.pump(lambda: agents.of(a.FromNode) and len(agents.received("n0", m.Credit)) == 2)
    assert agents.kept.written == [("attempt", 1)]
    assert not agents.of(a.Lost)
