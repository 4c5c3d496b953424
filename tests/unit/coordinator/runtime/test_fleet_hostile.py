"""The fleet, and nodes that say what no agent of ours says: they are lost, and nothing of it
counts."""

from __future__ import annotations

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.core.protocol import agent_messages as m
from tests.unit.coordinator.fleets import REMARK, exited

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
def test_a_node_that_tells_of_what_it_does_not_run_is_lost(nodes, message):
    fleet = nodes(2)
    for node in (0, 1):
        fleet.join(node)
        fleet.give(node, node)
    fleet.say("n1", message)
    fleet.pump(lambda: fleet.of(a.Lost))
    assert [event.node for event in fleet.of(a.Lost)] == [1]
    assert not fleet.of(a.FromNode)
    fleet.say("n0", REMARK)
    fleet.pump(lambda: fleet.of(a.FromNode))
    assert fleet.kept.said == []


def test_a_clock_of_hundreds_of_digits_is_no_hello(nodes):
    fleet = nodes(1)
    fleet.fleet.connect(0, 0.0)
    fleet.pump(lambda: "n0" in fleet.links)
    fleet.say("n0", m.Hello(hostname="n0", python="3", pid=1, clock=10**400))
    fleet.pump(lambda: fleet.of(a.Unreachable))
    assert not fleet.of(a.Joined)


def test_output_without_credit_loses_the_node_before_it_fills_the_memory(nodes):
    fleet = nodes(1)
    fleet.join(0)
    fleet.give(0, 0)
    fleet.kept.full = True
    chunk = b"x" * (1 << 20)
    fleet.pump(lambda: fleet.heard("n0", m.Credit))
    window = fleet.heard("n0", m.Credit)[0].size
    fleet.say_much("n0", *[m.Output(rank=0, stream=1, data=chunk)] * 30)
    fleet.pump(lambda: fleet.of(a.Lost))
    assert "more output" in fleet.of(a.Lost)[0].why
    assert sum(len(each[2]) for each in fleet.kept.said if len(each) == 3) <= window + (12 << 20)


def test_what_is_read_of_workers_that_have_ended_may_go_beyond_the_credit(nodes):
    fleet = nodes(1)
    fleet.join(0)
    fleet.give(0, 0, 1)
    fleet.pump(lambda: fleet.heard("n0", m.Credit))
    fleet.kept.full = True
    window = fleet.heard("n0", m.Credit)[0].size
    full = [
        m.Output(rank=rank, stream=stream, data=b"x" * (1 << 20))
        for rank in (0, 1)
        for stream in (1, 2)
    ]
    fleet.say_much(
        "n0", *[m.Output(rank=0, stream=1, data=b"x" * (1 << 18))] * (window >> 18), *full, REMARK
    )
    fleet.pump(lambda: fleet.of(a.FromNode))
    assert not fleet.of(a.Lost)
    fleet.kept.full = False
    fleet.kept.wake()
    fleet.pump(
        lambda: sum(each.size for each in fleet.heard("n0", m.Credit)) == 2 * window + (4 << 20)
    )


def test_nothing_is_taken_of_a_node_after_it_has_said_that_it_ends(nodes):
    fleet = nodes(1)
    fleet.join(0)
    fleet.give(0, 0)
    late = (m.Output(rank=0, stream=1, data=b"late"), exited(1.0))
    fleet.say("n0", m.AgentEnding(why="the agent was ended by signal 15"), *late)
    fleet.pump(lambda: fleet.of(a.Lost))
    assert [type(event) for event in fleet.events] == [a.Joined, a.Lost]
    assert fleet.kept.said == []


def test_output_of_an_attempt_that_comes_when_another_has_begun_is_paid_back_and_not_filed(nodes):
    fleet = nodes(1)
    fleet.join(0)
    fleet.give(0, 0)
    fleet.pump(lambda: fleet.heard("n0", m.Credit))
    window = fleet.heard("n0", m.Credit)[0].size
    fleet.fleet.begin_attempt(1)  # in which the node has no part
    fleet.say_much(
        "n0", m.Output(rank=0, stream=1, data=b"x" * (window // 2)), m.RankEnded(rank=0), REMARK
    )
    fleet.pump(lambda: fleet.of(a.FromNode) and len(fleet.heard("n0", m.Credit)) == 2)
    assert fleet.kept.said == [("attempt", 1)]
    assert not fleet.of(a.Lost)
