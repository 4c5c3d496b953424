"""Connections to a series of ports, with listeners of other jobs, of other releases, or that send
nothing."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from distlaunch.core.errors import NodesError
from distlaunch.core.model.record import replace
from tests.facts import mentions
from tests.ports import free_port
from tests.process.listener import (
    BOUND_S,
    IDENTITY,
    ListenerThread,
    connect_to,
    own_locks,  # noqa: F401 - for every test here
    server,
    stop_when_waiting_for,
)

# --- other jobs


def test_of_a_series_of_ports_the_one_of_our_job_is_found():
    with (
        closing(ListenerThread(job_identity=replace(IDENTITY, job_key="76"))) as other,
        closing(ListenerThread()) as ours,
    ):
        connection, _ = connect_to("127.0.0.1", [other.port, free_port(), ours.port])
        connection.close()
        assert len(ours.requests) == 1
        assert not other.requests


def test_of_a_series_of_ports_that_others_have_each_is_reported():
    with (
        closing(ListenerThread(job_identity=replace(IDENTITY, job_key="76"))) as other,
        stop_when_waiting_for("another job") as connect_until,
    ):
        ports = [other.port, free_port()]
        why = connect_until("127.0.0.1", ports)[-1]
    assert mentions(why, f"127.0.0.1:{ports[0]}", "job '76'")
    assert f"127.0.0.1:{ports[1]}: connection refused" in why


def test_of_a_series_of_ports_all_are_named_at_the_deadline():
    ports = [free_port(), free_port()]
    with pytest.raises(
        NodesError,
        match=f"at 127.0.0.1, ports {ports[0]}, {ports[1]} within 0 s: connection refused",
    ):
        connect_to("127.0.0.1", ports, within_s=0.3)


def test_another_job_on_the_one_port_that_was_named_may_go_away_until_the_deadline():
    with (
        closing(ListenerThread(job_identity=replace(IDENTITY, job_key="76"))) as other,
        pytest.raises(
            NodesError,
            match=r"'76', .* n3 .* '77'",
        ),
    ):
        connect_to("127.0.0.1", [other.port], within_s=1.0)


# --- listeners that say nothing


def silent_listeners(count):
    """Return ports whose listeners accept connections and send nothing."""
    stack = ExitStack()
    return stack, [stack.enter_context(server(lambda _: None)) for _ in range(count)]


LONGER_S = 2 * BOUND_S
"""A wait for an answer that is longer than all the time that a launcher has."""


def test_silent_listeners_hide_no_later_port():
    stack, ports = silent_listeners(3)
    with stack, closing(ListenerThread()) as listener:
        connection, _ = connect_to("127.0.0.1", [*ports, listener.port], answer_s=LONGER_S)
        connection.close()
        assert len(listener.requests) == 1


def test_silent_listeners_do_not_keep_others_from_being_tried_again():
    stack, ports = silent_listeners(1)
    port = free_port()
    listeners = []

    def progress(_, why):
        if not listeners and "connection refused" in why:
            listeners.append(ListenerThread(ports=[port]))

    try:
        with stack:
            connection, _ = connect_to(
                "127.0.0.1", [*ports, port], progress=progress, answer_s=LONGER_S
            )
            connection.close()
    finally:
        for one in listeners:
            one.close()


def test_silent_listeners_are_named_at_the_deadline():
    stack, ports = silent_listeners(2)
    free = free_port()
    with stack, pytest.raises(NodesError) as error:
        connect_to("127.0.0.1", [free, *ports], within_s=3.0)
    assert f"127.0.0.1:{free}: connection refused" in error.value.message
    places = ", ".join(f"127.0.0.1:{port}" for port in ports)
    assert mentions(error.value.message, places, "no launcher")


# --- other releases


def old_listener(connection):
    """Answer as a launcher of another release of distlaunch does that has other messages."""
    connection.recv(1)
    connection.sendall(b"\x02whatever")


def test_of_a_series_of_ports_one_of_another_release_is_not_ours():
    port, listeners = free_port(), []

    def progress(_, why):
        if not listeners and "another release" in why:
            listeners.append(ListenerThread(ports=[port]))

    try:
        with server(old_listener) as other:
            connection, _ = connect_to("127.0.0.1", [other, port], progress=progress)
            connection.close()
        assert len(listeners[0].requests) == 1
    finally:
        for one in listeners:
            one.close()


def test_another_release_on_the_one_port_that_was_named_may_go_away_until_the_deadline():
    with (
        server(old_listener) as port,
        pytest.raises(NodesError, match="another release"),
    ):
        connect_to("127.0.0.1", [port], within_s=1.0)


def test_another_release_of_our_own_job_in_a_series_of_ports_is_named_at_the_deadline():
    text = r"the listening launcher is distlaunch 2\.0"
    with (
        closing(ListenerThread(job_identity=replace(IDENTITY, release="2.0"))) as listener,
        pytest.raises(NodesError, match=text),
    ):
        connect_to("127.0.0.1", [listener.port, free_port()], within_s=1.0)
