"""Requests of other shells to the nodes. Tests play the agents."""

from __future__ import annotations

import pytest

from distlaunch.coordinator.runtime.main_loop_calls import MainLoopClosedError
from distlaunch.coordinator.runtime.node_questions import (
    STACKS_S,
    USAGE_S,
    AskedNodes,
    NodeQuestions,
)
from distlaunch.core.errors import ConfigError
from distlaunch.core.protocol import agent_messages as m


def usage_of(serial: int, *ranks: int) -> m.Usage:
    workers = tuple(
        m.WorkerUsage(rank=rank, pid=10 + rank, age_s=1, processes=1, cpu_s=1, rss_bytes=1)
        for rank in ranks
    )
    return m.Usage(
        attempt=0,
        serial=serial,
        clock_s=1.0,
        agent_cpu_s=0.1,
        cpus=2,
        memory_bytes=9,
        available_bytes=5,
        interfaces=(),
        read_bytes=0,
        written_bytes=0,
        workers=workers,
    )


def stacks_of(serial: int, rank: int) -> m.Stacks:
    stack = m.Stack(rank=rank, pid=1, state="S", text="")
    return m.Stacks(attempt=0, serial=serial, stacks=(stack,))


class Nodes:
    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[tuple[int, object]] = []
        self.questions = NodeQuestions(
            send=lambda node, message: self.sent.append((node, message)), clock=lambda: self.now
        )

    def asked(self, **changed) -> AskedNodes:
        return AskedNodes(**{"attempt": 0, "hosts": {0: "n1", 3: "n2"}, **changed})

    def ask_usage(self, **changed):
        return self.questions.ask_usage(self.asked(**changed))

    @property
    def serial(self) -> int:
        return self.sent[-1][1].serial


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_a_question_is_answered_when_all_nodes_have_answered(nodes):
    future = nodes.ask_usage()
    assert [(node, type(message)) for node, message in nodes.sent] == [
        (0, m.ReadUsage),
        (3, m.ReadUsage),
    ]
    assert nodes.questions.on_message(0, usage_of(nodes.serial, 0))
    assert not future.done()
    nodes.questions.on_message(3, usage_of(nodes.serial, 1))
    answers = future.result(0)
    assert [(each.node, each.host) for each in answers.nodes] == [(0, "n1"), (3, "n2")]
    assert answers.unanswered == ()
    assert nodes.questions.deadline() is None


def test_nodes_that_do_not_answer_in_time_are_named(nodes):
    future = nodes.ask_usage()
    nodes.questions.on_message(3, usage_of(nodes.serial, 1))
    assert nodes.questions.deadline() == nodes.now + USAGE_S
    nodes.now += USAGE_S
    nodes.questions.tick()
    answers = future.result(0)
    assert [each.node for each in answers.nodes] == [3]
    assert answers.unanswered == ("n1",)


def test_a_lost_node_is_not_waited_for(nodes):
    future = nodes.questions.ask_stacks(nodes.asked())
    assert nodes.questions.deadline() == nodes.now + STACKS_S
    nodes.questions.on_message(0, stacks_of(nodes.serial, 0))
    nodes.questions.on_lost(3)
    assert future.result(0).unanswered == ("n2",)


def test_answers_to_the_policy_are_left_to_it(nodes):
    assert not nodes.questions.on_message(0, stacks_of(1, 0))
    assert not nodes.questions.on_message(0, m.Alive(attempt=0, heartbeats=(), wrote=(0,)))
    assert nodes.questions.on_message(0, stacks_of(-7, 0)), "a late answer is dropped"


def test_an_answer_of_a_node_that_was_not_asked_does_not_count(nodes):
    future = nodes.ask_usage(hosts={0: "n1"})
    nodes.questions.on_message(5, usage_of(nodes.serial, 0))
    assert not future.done()


def test_several_shells_share_a_question_and_its_answer_for_a_moment(nodes):
    first, second = nodes.ask_usage(), nodes.ask_usage()
    assert len(nodes.sent) == 2
    for node in (0, 3):
        nodes.questions.on_message(node, usage_of(nodes.serial, node))
    assert first.result(0) is second.result(0)
    assert nodes.ask_usage().result(0) is first.result(0)
    nodes.now += 1
    assert not nodes.ask_usage().done()
    assert len(nodes.sent) == 4


def test_a_new_attempt_gets_a_question_of_its_own(nodes):
    nodes.ask_usage()
    nodes.ask_usage(attempt=1)
    assert [message.attempt for _, message in nodes.sent] == [0, 0, 1, 1]


def test_ranks_are_those_that_people_know(nodes):
    future = nodes.ask_usage(hosts={0: "n1"}, first_shown=4)
    nodes.questions.on_message(0, usage_of(nodes.serial, 0, 1))
    assert [each.rank for each in future.result(0).nodes[0].usage.workers] == [4, 5]


def test_without_running_workers_there_is_nobody_to_ask(nodes):
    with pytest.raises(ConfigError):
        nodes.ask_usage(hosts={})


def test_open_questions_fail_when_the_main_loop_ends(nodes):
    open_ = [nodes.ask_usage(), nodes.ask_usage(), nodes.questions.ask_stacks(nodes.asked())]
    nodes.questions.close()
    for future in open_:
        assert isinstance(future.exception(timeout=0), MainLoopClosedError)
    assert nodes.questions.deadline() is None
