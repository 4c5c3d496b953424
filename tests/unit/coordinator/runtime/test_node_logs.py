"""Logs on the nodes of a running job, read for other shells. Tests play the agents."""

from __future__ import annotations

from base64 import b64decode

import pytest

from distlaunch.coordinator.policy.attempt import AttemptNodes
from distlaunch.coordinator.runtime.message_budget import NodeBudget
from distlaunch.coordinator.runtime.message_checks import (
    CoordinatorMessageCheck,
    NodeMessageCheck,
)
from distlaunch.coordinator.runtime.node_logs import ANSWER_S, LogPlace, NodeLogs
from distlaunch.core.errors import ConfigError, ProtocolError
from distlaunch.core.model.record import replace
from distlaunch.core.protocol import agent_messages as m

FOUR = AttemptNodes(
    numbers=(0, 2, 3, 5),
    hosts=("n1", "n2", "n3", "n4"),
    first_ranks=(0, 2, 4, 6),
    world_size=8,
    node_ranks={0: 0, 2: 1, 3: 2, 5: 3},
)
FILE = m.LogInfo(rank=2, stream=0, size=100, gap_begin=-1, left_out=0)


class Nodes:
    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[tuple[int, m.ListLogs | m.ReadLog]] = []
        self.away: set[int] = set()
        self.logs = NodeLogs(
            send=lambda node, message: self.sent.append((node, message)),
            clock=lambda: self.now,
            place=LogPlace(directory="/logs/exp", log_bytes=9),
            attempts={1: FOUR},
            is_connected=lambda node: node not in self.away,
        )

    def read(self, rank: int, *, offset: int = 0, size: int = 10):
        return self.logs.read(1, rank, 0, offset, size)

    def answer(self, node: int, data: bytes = b"x") -> None:
        [serial] = [message.serial for to, message in self.sent if to == node][-1:]
        self.logs.on_message(node, m.LogPart(serial=serial, data=data))

    def wait(self) -> None:
        self.now = max(self.now, self.logs.deadline())
        self.logs.tick()

    @property
    def asked(self) -> list[int]:
        return [node for node, _ in self.sent]


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_only_nodes_of_the_ranks_are_asked_and_each_for_its_own(nodes):
    found = nodes.logs.list(1, [(3, 4), (90, 1 << 60)])
    assert [(node, message.ranks) for node, message in nodes.sent] == [(2, (3,)), (3, (4,))]
    assert {(each.directory, each.log_bytes) for _, each in nodes.sent} == {("/logs/exp", 9)}
    for node, message in list(nodes.sent):
        assert not found.done()
        nodes.logs.on_message(node, m.LogList(serial=message.serial, files=(), index_bytes=24))
    assert [(each.host, each.index_bytes) for each in found.result()] == [("n2", 24), ("n3", 24)]


def test_a_node_lists_no_files_but_those_it_was_asked_for(nodes):
    found = nodes.logs.list(1, [(2, 3)])
    odd = (
        {"rank": 4},
        {"rank": -1},
        {"stream": 7},
        {"size": -1},
        {"gap_begin": 101},
        {"left_out": -1},
    )
    files = (*(replace(FILE, **fields) for fields in odd), FILE, FILE)
    nodes.logs.on_message(2, m.LogList(serial=1, files=files, index_bytes=-5))
    [answer] = found.result()
    assert (answer.files, answer.index_bytes) == ((FILE,), 0)


def test_nodes_that_are_lost_or_silent_are_named_and_the_others_shown(nodes):
    nodes.away.add(0)
    found = nodes.logs.list(1, [(0, 7)])
    nodes.logs.on_message(2, m.LogList(serial=1, files=(FILE,), index_bytes=0))
    nodes.logs.on_lost(3)
    nodes.now += ANSWER_S
    nodes.logs.tick()
    nodes.logs.on_message(5, m.LogList(serial=3, files=(FILE,), index_bytes=0))  # too late
    answers = {each.host: each for each in found.result()}
    assert {host for host, each in answers.items() if each.problem} == {"n1", "n3", "n4"}
    assert answers["n2"].files == (FILE,)


def test_a_node_gets_one_request_at_a_time_and_few_in_a_second(nodes):
    parts = [nodes.read(2, offset=each, size=1 << 40) for each in range(60)]
    assert len(nodes.sent) == 1
    begin = nodes.now
    for part in parts:
        if not nodes.sent or len(nodes.sent) <= parts.index(part):
            nodes.wait()
        nodes.answer(2)
        assert b64decode(part.result()["data"]) == b"x"
    assert nodes.now - begin >= 2.0
    assert {message.size for _, message in nodes.sent} == {m.LOG_PART_BYTES}
    assert [message.offset for _, message in nodes.sent] == list(range(60))


def test_parts_of_many_nodes_are_not_in_flight_together():
    nodes = Nodes()
    many = range(20)
    nodes.logs = NodeLogs(
        send=lambda node, message: nodes.sent.append((node, message)),
        clock=lambda: nodes.now,
        place=LogPlace(directory="", log_bytes=0),
        attempts={
            1: AttemptNodes(
                numbers=tuple(many),
                hosts=tuple(f"n{each}" for each in many),
                first_ranks=tuple(many),
                world_size=20,
                node_ranks={each: each for each in many},
            )
        },
        is_connected=lambda _: True,
    )
    parts = [nodes.read(rank) for rank in many]
    while not all(part.done() for part in parts):
        waiting = [node for node in nodes.asked if not parts[node].done()]
        assert 1 <= len(waiting) <= 4
        nodes.answer(waiting[0])
    assert sorted(nodes.asked) == list(many)


def test_an_answer_of_another_kind_or_of_another_node_is_none(nodes):
    part = nodes.read(2)
    nodes.logs.on_message(3, m.LogPart(serial=1, data=b"other"))
    assert not part.done()
    nodes.logs.on_message(2, m.LogList(serial=1, files=(), index_bytes=0))
    with pytest.raises(ConfigError):
        part.result()


@pytest.mark.parametrize(
    "fields", [(0, 0, 0, 0, 5), (1, 8, 0, 0, 5), (1, 0, 3, 0, 5), (1, 0, 0, -1, 5)]
)
def test_requests_for_what_is_not_there_are_refused(nodes, fields):
    with pytest.raises(ConfigError):
        nodes.logs.read(*fields)
    assert nodes.sent == []


@pytest.mark.parametrize("odd", [3, None, [1], [1, 2, 3], ["0", "1"], [0.5, 1.5], {}])
def test_ranges_that_are_none_are_refused(nodes, odd):
    with pytest.raises(ConfigError):
        nodes.logs.list(1, [[0, 1], odd])
    assert nodes.sent == []


def test_open_requests_end_with_the_job(nodes):
    part, waiting = nodes.read(2), nodes.read(2)
    nodes.logs.close()
    assert part.exception() is not None
    assert waiting.exception() is not None
    assert nodes.logs.deadline() is None


# --- what a node may send


def read_log(serial: int, size: int = 10) -> m.ReadLog:
    return m.ReadLog(serial=serial, attempt=0, rank=0, stream=0, offset=0, size=size)


def list_logs(serial: int) -> m.ListLogs:
    return m.ListLogs(serial=serial, attempt=0, ranks=(0,))


def test_a_node_sends_no_log_that_it_was_not_asked_for():
    check = NodeMessageCheck(0)
    for serial, request in ((1, read_log(1)), (2, list_logs(2)), (3, read_log(3))):
        assert request.serial == serial
        check.on_send(request)
    assert check.check(m.LogPart(serial=1, data=b"x" * 10))
    for message in (
        m.LogPart(serial=1, data=b""),
        m.LogPart(serial=2, data=b""),
        m.LogPart(serial=3, data=b"x" * 11),
        m.LogList(serial=9, files=(), index_bytes=0),
    ):
        with pytest.raises(ProtocolError):
            check.check(message)


def test_a_large_part_has_room_only_while_one_is_awaited():
    budget = NodeBudget(0.0)
    budget.on_greeting()
    assert budget.size_of("LogPart").raw_bytes == 0
    budget.on_sent(read_log(1))
    assert budget.size_of("LogPart").raw_bytes == m.LOG_PART_BYTES
    budget.charge(m.LogPart(serial=1, data=b""), 0.0)
    assert budget.size_of("LogPart").raw_bytes == 0


def test_a_coordinator_names_no_directory_of_a_joined_launcher():
    check = CoordinatorMessageCheck()
    for request in (read_log(1), list_logs(1)):
        check.check(request, running=True)
        with pytest.raises(ProtocolError):
            check.check(replace(request, directory="/etc"), running=True)


@pytest.mark.parametrize("ranges", [[(0, 1)] * 9, [(0,)], ["0-1"]])
def test_ranges_that_are_none_or_too_many_are_refused(nodes, ranges):
    with pytest.raises(ConfigError):
        nodes.logs.list(1, ranges)
    assert nodes.sent == []


@pytest.mark.parametrize("offset", [-1, 1 << 63])
def test_an_offset_that_no_file_has_is_refused(nodes, offset):
    with pytest.raises(ConfigError):
        nodes.read(2, offset=offset)
    assert nodes.sent == []
