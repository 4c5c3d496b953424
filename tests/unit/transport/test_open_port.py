from __future__ import annotations

import os
import socket
from contextlib import ExitStack, closing

import pytest

from distlaunch.core.agent.node.ports import hold_port
from distlaunch.core.errors import ConfigError
from distlaunch.transport.tcp_listener import PortTakenError, open_port
from tests.facts import mentions
from tests.ports import free_port


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def opened():
    with ExitStack() as stack:

        def open_it(host, ports):
            found = open_port(host, ports, owner="ours")
            for one in found:
                stack.enter_context(closing(one))
            return found

        yield open_it


@pytest.fixture
def taken():
    """Return a port with a listener that sets SO_REUSEADDR."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def reaches(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["node0.cluster", "", "::", "0.0.0.0", "192.0.2.1", "2001:db8::1"])
def test_by_a_name_or_an_address_of_somewhere_else_it_is_open_on_all_addresses(opened, host):
    [one] = opened(host, [0])
    port = one.getsockname()[1]
    assert reaches("127.0.0.1", port)
    assert reaches("127.0.0.2", port)
    assert reaches("::1", port)


@pytest.mark.parametrize(("host", "elsewhere"), [("127.0.0.1", "127.0.0.2"), ("::1", "127.0.0.1")])
def test_by_an_address_of_this_machine_it_is_open_on_that_one_alone(opened, host, elsewhere):
    [one] = opened(host, [0])
    assert reaches(host, one.getsockname()[1])
    assert not reaches(elsewhere, one.getsockname()[1])


def test_localhost_is_both_addresses_of_the_loopback(opened):
    found = opened("localhost", [0])
    [port] = {one.getsockname()[1] for one in found}
    assert reaches("127.0.0.1", port)
    assert reaches("::1", port)
    assert not reaches("127.0.0.2", port)


@pytest.mark.parametrize("host", ["", "127.0.0.1", "localhost"])
def test_a_port_that_somebody_listens_on_is_refused_and_he_is_named(opened, taken, host):
    with pytest.raises(PortTakenError) as error:
        opened(host, [taken])
    assert mentions(error.value.message, f"port {taken}", "in use", f"pid {os.getpid()}")
    assert "--rendezvous" in error.value.hint


def test_two_of_ours_cannot_have_the_same_port(opened):
    [one] = opened("", [0])
    port = one.getsockname()[1]
    for host in ("", "127.0.0.1", "::1", "localhost"):
        with pytest.raises(ConfigError, match=f"port {port} .* use"):
            opened(host, [port])


def test_a_port_that_a_job_of_ours_holds_for_its_rank_0_is_refused(opened):
    port = free_port()
    held = hold_port(port, owner="another")
    try:
        with pytest.raises(
            ConfigError,
            match=rf"port {port} .* job another \(pid {os.getpid()}\)",
        ):
            opened("", [port])
    finally:
        held.release()


def test_of_a_series_the_first_free_one_is_taken(opened, taken):
    port = free_port()
    [one] = opened("", [taken, port])
    assert one.getsockname()[1] == port


def test_a_series_that_others_have_is_refused_with_each_named(opened, taken):
    with socket.create_server(("127.0.0.1", 0)) as second:
        other = second.getsockname()[1]
        with pytest.raises(PortTakenError) as error:
            opened("", [taken, other])
    assert mentions(error.value.message, f"ports {taken}, {other}", f"port {taken}", "in use")
    assert mentions(error.value.message, f"port {other}", "in use")


def test_after_a_crash_what_its_connections_have_left_does_not_matter(opened):
    [first] = opened("", [0])
    port = first.getsockname()[1]
    with (
        socket.create_connection(("127.0.0.1", port)) as caller,
        closing(first.accept()[0]) as accepted,
    ):
        first.close()
        accepted.shutdown(socket.SHUT_WR)  # FIN-WAIT, as the caller does not notice
        [again] = opened("", [port])
        assert again.getsockname()[1] == port
        caller.close()
        accepted.close()
    again.close()  # TIME-WAIT
    assert opened("", [port])
