"""A launcher that cannot take part sends the reason to node 0."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from distlaunch.coordinator.joined.launcher import decline
from distlaunch.core.model.record import replace
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import Decoder
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.planning.rendezvous import Rendezvous
from distlaunch.transport.tcp_listener import Listener
from tests.unit.coordinator.remote_agents import WITHIN_S

PARTY = JobIdentity(release="1", job_key="j", token=b"secret")
PLACE = Rendezvous(host="127.0.0.1", ports=(0,), of_source=False, job_key="j", rank=2, leads="no")


@pytest.fixture
def listener():
    made = Listener(
        "127.0.0.1",
        (0,),
        job_identity=PARTY,
        owner="j",
        admit=lambda call: p.Welcome(job_id="j", rank=call.rank),
        log=print,
    )
    yield made
    made.close()


def declines(place: Rendezvous) -> threading.Thread:
    words = {"host": "n2", "why": "train.py missing"}
    thread = threading.Thread(target=decline, args=(place, PARTY), kwargs=words)
    thread.start()
    return thread


def test_node_0_reports_who_cannot_take_part_and_why(listener):
    thread = declines(replace(PLACE, ports=(listener.port,)))
    end = time.monotonic() + WITHIN_S
    while not (admitted := listener.ready()):
        assert time.monotonic() < end
    [(call, link)] = admitted
    assert (call.rank, call.host) == (2, "n2")
    decoder = Decoder(p.FROM_LAUNCHER, m.REMOTE_NESTED_TYPES)
    received: list = []
    while not received:
        assert time.monotonic() < end
        received += decoder.feed(link.receive() or b"")
    assert received == [m.AgentEnding(why="train.py missing")]
    link.close()
    thread.join()


@pytest.mark.parametrize("rank", [0, None])
def test_node_0_itself_and_who_has_no_number_call_nobody(listener, rank):
    declines(replace(PLACE, ports=(listener.port,), rank=rank)).join()
    assert not listener.ready()


def test_without_node_0_nothing_is_sent():
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        declines(replace(PLACE, ports=(taken.getsockname()[1],))).join()
