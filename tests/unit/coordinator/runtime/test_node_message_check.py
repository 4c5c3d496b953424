from __future__ import annotations

import pytest

from distlaunch.coordinator.runtime.message_checks import NodeMessageCheck
from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from tests.unit.coordinator.remote_agents import exited


def commence(**fields) -> p.StartWorkers:
    values = {
        "attempt": 0,
        "restarts": 0,
        "node_rank": 1,
        "local_ranks": (0, 1),
        "hosts": ("a", "b", "c"),
        "slots": (3, 2, 1),
        "master_addr": "a",
        "master_port": 1,
        "interface": "",
        "nccl_interface": "",
    }
    return p.StartWorkers(**{**values, **fields})


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [
        ({}, {3, 4}),
        ({"node_rank": 0, "local_ranks": (0, 1, 2)}, {0, 1, 2}),
        ({"local_ranks": (1,)}, {4}),
    ],
)
def test_another_launcher_reports_only_its_own_ranks(fields, ranks):
    message_check = NodeMessageCheck(0)
    message_check.on_send(commence(**fields))
    for rank in range(-1, 7):
        if rank in ranks:
            assert message_check.check(exited(1.0, rank=rank))
        else:
            with pytest.raises(ProtocolError):
                message_check.check(exited(1.0, rank=rank))


def test_messages_about_an_earlier_attempt_do_not_count():
    message_check = NodeMessageCheck(0)
    message_check.on_send(commence())
    message_check.on_send(commence(attempt=1, node_rank=2, local_ranks=(0,)))
    assert not message_check.check(exited(1.0, rank=3, attempt=0))
    assert not message_check.check(m.AttemptEnded(attempt=0, left=()))
    assert message_check.check(m.AttemptEnded(attempt=1, left=()))


def test_a_node_that_was_sent_nothing_sends_nothing():
    for message in (m.AttemptEnded(attempt=0, left=()), exited(1.0), m.WorkerHalted(rank=0)):
        with pytest.raises(ProtocolError):
            NodeMessageCheck(0).check(message)
    assert NodeMessageCheck(0).check(m.AgentNotice(text="", warning=False))


def prepared(*ports: int, attempt: int = 0, problem: str | None = None) -> m.Prepared:
    return m.Prepared(
        attempt=attempt, port=None, problem=problem, hint=None, warning=None, ports=ports
    )


@pytest.mark.parametrize(
    "ports", [(), (5,), (5, 5), (5, 6, 7), (0, 5), (5, 70000), (-1, 5)], ids=str
)
def test_a_node_holds_as_many_ports_as_it_was_to_hold(ports):
    message_check = NodeMessageCheck(0)
    message_check.on_send(m.Prepare(attempt=0, port=None, ports=2))
    with pytest.raises(ProtocolError):
        message_check.check(prepared(*ports))
    assert message_check.check(prepared(5, 65535))
    assert message_check.check(prepared(problem="none"))
    message_check.on_send(m.Prepare(attempt=1, port=None))
    assert message_check.check(prepared(7, 8)), "late, of the attempt before"
    with pytest.raises(ProtocolError):
        message_check.check(prepared(7, attempt=1))


def test_a_node_reports_checkpoints_of_its_own_ranks_only():
    message_check = NodeMessageCheck(0)
    message_check.on_send(commence())
    for rank in range(-1, 7):
        saved = m.SavedCheckpoint(rank=rank, step=1, seconds=0.5, bytes=10)
        message = m.Alive(attempt=0, heartbeats=(), wrote=(), checkpoints=(saved,))
        if rank in (3, 4):
            assert message_check.check(message)
        else:
            with pytest.raises(ProtocolError):
                message_check.check(message)
