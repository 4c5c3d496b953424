"""Turns of the main loop: a connection that sends without end does not delay others."""

from __future__ import annotations

import threading
from contextlib import suppress

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.codec import encode
from tests.facts import mentions
from tests.unit.coordinator.remote_agents import REMARK, WITHIN_S


def flood(nodes, host, message) -> threading.Event:
    """Send a message again and again until the connection is closed."""
    full = threading.Event()
    data = encode(message) * 100

    def send() -> None:
        with suppress(OSError):
            while True:
                nodes.links[host].theirs.sendall(data)
                full.set()

    threading.Thread(target=send, daemon=True).start()
    full.wait(WITHIN_S)
    return full


def test_a_turn_ends_while_a_node_sends_output_without_end(nodes):
    agents = nodes(3)
    for node in range(3):
        agents.join(node)
        agents.give(node, node)
    flood(agents, "n0", m.Output(rank=0, stream=1, data=b"x"))
    for _ in range(20):
        agents.agents.receive()
    agents.say("n2", REMARK)
    agents.pump(lambda: agents.of(a.FromNode))
    assert [event.node for event in agents.of(a.FromNode)] == [2]
    agents.links["n0"].theirs.shutdown(2)


def test_a_node_that_answers_without_end_is_dropped_and_the_others_go_on(nodes):
    agents = nodes(2)
    for node in range(2):
        agents.join(node)
    flood(agents, "n0", m.Pong(serial=1, clock=0.0))
    agents.say("n1", REMARK)
    agents.pump(lambda: agents.of(a.Lost) and agents.of(a.FromNode))
    [lost] = agents.of(a.Lost)
    assert (lost.node, lost.kind) == (0, a.LossKind.ODD)
    assert mentions(lost.why, "Pong")
    assert [event.node for event in agents.of(a.FromNode)] == [1]


def test_the_rest_of_a_turn_is_read_though_nothing_more_comes(nodes):
    agents = nodes()
    agents.join(0)
    agents.give(0, *range(5000))
    agents.say_much("n0", *(m.Started(attempt=0, pids={rank: 1}) for rank in range(5000)))
    agents.pump(lambda: len(agents.of(a.FromNode)) == 5000)
    assert [next(iter(event.message.pids)) for event in agents.of(a.FromNode)] == list(range(5000))


def test_a_message_may_drop_a_connection_whose_turn_has_not_come(nodes, monkeypatch):
    agents = nodes(2)
    for node in range(2):
        agents.join(node)
    taken = []

    def drop_the_other(peer, message):
        taken.append(message)
        agents.agents.disconnect(1 - peer.node)

    monkeypatch.setattr(agents.agents, "_on_message", drop_the_other)
    for host in ("n0", "n1"):
        agents.say(host, REMARK)
    agents.pump(lambda: taken)
    assert taken == [REMARK]
