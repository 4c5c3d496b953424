from __future__ import annotations

import pytest

from distlaunch.coordinator.runtime.message_budget import (
    COORDINATOR_SIZES,
    NODE_SIZES,
    CoordinatorBudget,
    NodeBudget,
)
from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import MAX_RAW_BYTES, Decoder, encode
from tests.unit.coordinator.joined.joined_launcher import commence

PONG = m.Pong(serial=1, clock=0.0)
SURVEY = p.SurveyNode(serial=1)
OUTPUT = m.Output(rank=0, stream=1, data=b"x")


@pytest.fixture
def budget():
    budget = NodeBudget(100.0)
    budget.on_greeting()
    return budget


def take(budget, message, count, now=100.0) -> int:
    """Pass a message ``count`` times, or until it is refused. Return how often it was accepted."""
    for taken in range(count):
        try:
            budget.charge(message, now)
        except ProtocolError:
            return taken
    return count


def test_messages_that_nobody_asked_for_are_refused_at_some_point(budget):
    assert take(budget, PONG, 1000) < 100
    with pytest.raises(ProtocolError, match="Pong"):
        budget.charge(PONG, 100.0)


def test_an_agent_that_reports_once_a_second_is_never_refused(budget):
    for second in range(100_000):
        budget.charge(m.Alive(attempt=0, heartbeats=(), wrote=()), 100.0 + second)


def test_every_ping_may_be_answered_at_once_after_a_long_silence(budget):
    for _ in range(1000):
        budget.on_sent(m.Ping(serial=1))
    assert take(budget, PONG, 1000) == 1000


def test_all_workers_of_a_node_may_start_and_end_at_once(budget):
    budget.on_sent(commence(local_ranks=tuple(range(5000))))
    assert take(budget, m.Started(attempt=0, pids={0: 1}), 5000) == 5000
    assert take(budget, m.RankEnded(rank=0), 5000) == 5000


def test_a_flood_is_refused_after_any_time_without_messages(budget):
    assert take(budget, PONG, 1_000_000, now=1e9) < 100_000


def test_output_is_left_to_its_credit_once_the_agent_has_introduced_itself(budget):
    assert take(budget, OUTPUT, 10_000) == 10_000
    assert take(NodeBudget(100.0), OUTPUT, 10_000) < 100


def test_no_more_of_stdin_is_taken_than_was_sent(budget):
    budget.on_sent(m.StdinData(data=b"x" * 1000))
    assert take(budget, m.StdinConsumed(size=1, closed=False), 5000) == 1000
    assert take(budget, m.StdinConsumed(size=0, closed=False), 5000) < 100


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("Hello", 1 << 10, 1 << 16),
        ("LauncherInfo", 1 << 10, 1 << 16),
        ("Surveyed", 0, 0),
        ("Output", 0, 0),
        ("Stacks", 0, 0),
    ],
)
def test_before_its_introduction_a_node_may_send_little(name, least, most):
    assert least <= NodeBudget(0.0).size_of(name).object_bytes <= most


def test_a_large_survey_is_an_answer(budget):
    before = budget.size_of("Surveyed").object_bytes
    budget.on_sent(SURVEY)
    assert budget.size_of("Surveyed").object_bytes > 10 * before
    budget.charge(m.Pong(serial=1, clock=0.0), 100.0)
    assert budget.size_of("Surveyed").object_bytes > 10 * before


def test_stacks_are_as_large_as_the_workers_are_many(budget):
    assert budget.size_of("Stacks").object_bytes == 0
    budget.on_sent(commence(local_ranks=(0, 1)))
    budget.on_sent(m.CollectStacks(attempt=0, serial=1))
    two = budget.size_of("Stacks").object_bytes
    assert two > 2 * (64 << 10)
    budget.on_sent(commence(local_ranks=tuple(range(1000))))
    assert two < budget.size_of("Stacks").object_bytes < 64 << 20


def test_usage_is_as_large_as_the_workers_are_many(budget):
    before = budget.size_of("Usage").object_bytes
    budget.on_sent(commence(local_ranks=tuple(range(1000))))
    assert before + 500_000 < budget.size_of("Usage").object_bytes < 64 << 20


def test_output_comes_with_workers(budget):
    assert budget.size_of("Output").raw_bytes == 0
    budget.on_sent(commence())
    assert budget.size_of("Output").raw_bytes == MAX_RAW_BYTES


def frame(body: bytes, raw: int = 0) -> bytes:
    """Return the beginning of a frame that is much larger than allowed."""
    return b"\x01" + (32 << 20).to_bytes(4, "big") + raw.to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "body", [b'{"t":"Surveyed","serial":1', b'{"t":"Hello"', b'{"serial":1,"t":"Surveyed"']
)
def test_a_frame_of_many_megabytes_is_refused_by_its_beginning(body):
    decoder = Decoder(m.FROM_REMOTE, m.REMOTE_NESTED_TYPES, size_of=NodeBudget(0.0).size_of)
    decoder.add(frame(body.ljust(100)))
    with pytest.raises(ProtocolError, match=r"allowed size|the type"):
        decoder.next()


def test_messages_come_one_by_one_as_they_are_asked_for():
    decoder = Decoder(m.FROM_REMOTE, m.REMOTE_NESTED_TYPES)
    data = encode(PONG) * 3
    decoder.add(data[:-1])
    assert [decoder.next(), decoder.next(), decoder.next()] == [PONG, PONG, None]
    decoder.add(data[-1:])
    assert decoder.next() == PONG


def test_a_coordinator_may_list_many_nodes_and_no_more():
    budget = CoordinatorBudget(0.0)
    assert budget.size_of("StartWorkers").object_bytes >= 16 << 20
    assert budget.size_of("Ping").object_bytes <= 1 << 16
    assert take(budget, m.Ping(serial=1), 100_000, now=0.0) < 10_000


def test_every_message_has_a_size():
    assert NODE_SIZES.keys() == {*m.FROM_REMOTE, *p.FROM_LAUNCHER}
    assert COORDINATOR_SIZES.keys() == {*p.TO_LAUNCHER}
