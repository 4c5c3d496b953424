from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from distlaunch.core.agent.node.attempt_setup import AttemptSetup
from distlaunch.core.agent.node.ports import hold_port
from distlaunch.core.errors import ConfigError
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions


class Node:
    """A node's setup, and its answers."""

    def __init__(self, **more) -> None:
        self.answers: list[m.Prepared] = []
        self.setup = AttemptSetup(port=None, send=self.answers.append, post=lambda _: None, **more)

    def prepare(self, attempt: int = 0, **more) -> m.Prepared:
        order = m.Prepare(**{"attempt": attempt, "port": None, **more})
        self.setup.prepare(order, owner="j", pids=())
        return self.answers[-1]


@pytest.fixture
def make_node(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as stack:

        def make(**more):
            node = Node(**more)
            stack.callback(node.setup.release)
            return node

        yield make


@pytest.fixture
def node(make_node):
    return make_node()


def is_free(port: int, *, reuse: bool) -> bool:
    """Return whether a server with SO_REUSEADDR can bind the port."""
    with socket.socket(socket.AF_INET6) as other:
        if reuse:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("::", port))
            other.listen()
        except OSError:
            return False
    return True


@pytest.mark.parametrize("port", [None, 0])
def test_worker_ports_are_reserved_until_the_workers_start(node, port):
    answer = node.prepare(port=port, ports=3)
    ports = [*answer.ports, *([answer.port] if answer.port else [])]
    assert len(answer.ports) == 3
    assert len(set(ports)) == (3 if port is None else 4)
    assert not any(is_free(each, reuse=reuse) for each in ports for reuse in (False, True))
    node.setup.share(0.0)
    assert [is_free(each, reuse=False) for each in ports] == [False] * len(ports)
    assert [is_free(each, reuse=True) for each in ports] == [True] * len(ports)
    node.setup.release()
    assert [is_free(each, reuse=False) for each in ports] == [True] * len(ports)


def test_a_store_on_the_master_port_leaves_the_other_ports_to_the_workers(node):
    answer = node.prepare(port=0, ports=1)
    node.setup.serve_store("127.0.0.1")
    assert is_free(answer.ports[0], reuse=True)
    assert not is_free(answer.ports[0], reuse=False)


def test_each_attempt_reserves_as_many_ports_as_it_asks_for(node):
    assert [
        len(node.prepare(attempt, ports=ports).ports) for attempt, ports in enumerate((2, 0, 4, 1))
    ] == [2, 0, 4, 1]


def test_a_port_that_cannot_be_reserved_is_reported_without_a_number(make_node):
    held = []

    def hold(number, *, owner):
        if len(held) == 2:
            raise ConfigError("port 0 cannot be held: Too many open files")
        held.append(hold_port(number, owner=owner))
        return held[-1]

    answer = make_node(hold=hold).prepare(port=0, ports=3)
    assert (answer.port, answer.ports) == (None, ())
    assert mentions(answer.problem, "port 0", "Too many open files")
