from __future__ import annotations

import errno
import os
import socket
from contextlib import closing

import pytest

from distlaunch.core.probe.network import probe_interfaces
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions
from tests.ports import free_port

SERVES = (
    "import os, socket\n"
    "server = socket.socket(socket.AF_INET6)\n"
    "server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)\n"
    "server.bind(('::', int(os.environ['PORT'])))\n"
    "server.listen()\n"
    "print('serving', flush=True)\n"
    "server.accept()[0].sendall(b'rank 0')\n"
)


def token_at(address: str, port: int) -> bytes:
    words = b""
    with socket.create_connection((address, port), timeout=30) as connection:
        while data := connection.recv(100):
            words += data
    return words


def foreign(port: int, *, reuse: bool, family: int = socket.AF_INET6) -> str:
    """Try to listen on a port as a foreign program would."""
    with socket.socket(family) as other:
        if reuse:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("", port))
            other.listen()
        except OSError as exc:
            return errno.errorcode[exc.errno or 0]
    return "taken"


@pytest.mark.parametrize("wanted", ["any", "a number"])
def test_the_held_port_sends_its_token_until_rank_0_has_it(agent, wanted):
    port = 0
    if wanted == "a number":
        port = free_port()
    for attempt in range(3):
        prepared = agent.prepare(port, attempt=attempt, token=f"token {attempt}")
        assert prepared.problem is None
        for address in ("127.0.0.1", "::1"):
            assert token_at(address, prepared.port) == b"token %d\n" % attempt
        for family in (socket.AF_INET, socket.AF_INET6):
            for reuse in (True, False):
                assert foreign(prepared.port, reuse=reuse, family=family) == "EADDRINUSE"
        agent.start(SERVES, attempt=attempt, env={**agent.env, "PORT": str(prepared.port)})
        agent.until_taken(0, b"serving")
        assert token_at("127.0.0.1", prepared.port) == b"rank 0"
        agent.until(m.AttemptEnded, attempt + 1)
        agent.taken.clear()


def test_many_connections_and_idle_ones_hold_nothing_up(agent):
    port = agent.prepare(0, token="t").port
    idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(500)]
    assert {each.recv(10) for each in idle} == {b"t\n"}
    with open(f"/proc/{agent.process.pid}/limits", encoding="ascii"):
        assert len(os.listdir(f"/proc/{agent.process.pid}/fd")) < 50
    agent.start(SERVES, env={**agent.env, "PORT": str(port)})
    agent.until_taken(0, b"serving")
    for each in idle:
        each.close()
    assert token_at("::1", port) == b"rank 0"
    agent.until(m.AttemptEnded)


def test_a_node_that_is_no_longer_the_masters_gives_the_port_back(agent):
    port = agent.prepare(0, token="t").port
    assert agent.prepare(None).port is None
    assert foreign(port, reuse=False) == "taken"


# --- the other nodes' side


def reach(agent, *addresses: str, port: int, token: str = "t", bound_s: float = 20.0) -> m.Reached:
    before = len(agent.of(m.Reached))
    agent.send(m.Reach(attempt=3, addresses=addresses, port=port, token=token, bound_s=bound_s))
    return agent.until(m.Reached, before + 1)[-1]


def test_all_addresses_with_the_right_listener_are_found_in_the_order_given(make_agent):
    master, other = make_agent(), make_agent()
    port = master.prepare(0, token="t").port
    own = [(name, address) for name, address, _ in probe_interfaces()]
    addresses = ("::1", *(address for _, address in own), "localhost", "127.0.0.1")
    reached = reach(other, *addresses, port=port)
    assert (reached.attempt, reached.problem) == (3, None)
    assert tuple(route.address for route in reached.routes) == addresses
    for name, address in own:
        [route] = [route for route in reached.routes if route.address == address]
        assert (route.local, route.interface) == (address, name)


def test_a_listener_with_another_token_is_not_taken_for_the_master(make_agent):
    with closing(socket.create_server(("127.0.0.1", 0))) as impostor:
        agent = make_agent()
        agent.send(
            m.Reach(
                attempt=0,
                addresses=("127.0.0.1",),
                port=impostor.getsockname()[1],
                token="right",
                bound_s=30.0,
            )
        )
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(b"rinse\n")
            [reached] = agent.until(m.Reached)
    assert reached.routes == ()
    assert mentions(reached.problem, "127.0.0.1", "another program")


def test_an_unreachable_host_is_reported_and_does_not_hold_up_the_rest(make_agent):
    master, other = make_agent(), make_agent()
    port = master.prepare(0, token="t").port
    with closing(
        socket.create_server(("127.0.0.1", 0), backlog=1)
    ) as silent_listener:  # takes connections and says nothing
        unanswered = silent_listener.getsockname()[1]
        reached = reach(other, "no-such-host.invalid", "127.0.0.1", port=unanswered, bound_s=0.5)
    assert reached.routes == ()
    assert mentions(reached.problem, "no-such-host.invalid", "resolved")
    assert "127.0.0.1: no answer" in reached.problem
    assert [
        route.address
        for route in reach(other, "no-such-host.invalid", "127.0.0.1", port=port).routes
    ] == ["127.0.0.1"]
    nobody = free_port()
    assert reach(other, "127.0.0.1", port=nobody).problem == "127.0.0.1: Connection refused"
    assert reach(other, port=nobody).problem == "no address"


def test_a_new_order_replaces_one_that_is_under_way(make_agent):
    master, other = make_agent(), make_agent()
    port = master.prepare(0, token="t").port
    with closing(socket.create_server(("127.0.0.1", 0))) as silent_listener:
        other.send(
            m.Reach(
                attempt=0,
                addresses=("127.0.0.1",),
                port=silent_listener.getsockname()[1],
                token="t",
                bound_s=60.0,
            )
        )
        assert [route.address for route in reach(other, "127.0.0.1", port=port).routes] == [
            "127.0.0.1"
        ]
    assert len(other.of(m.Reached)) == 1
