from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from distlaunch.transport.connection import describe_end
from distlaunch.transport.tcp_connection import TcpConnection
from tests.contract.test_links import (  # noqa: F401 - pytest collects them here, with the fixtures below
    End,
    test_bytes_after_the_greeting_are_not_lost,
    test_bytes_go_both_ways,
    test_closing_from_another_thread_wakes_a_sender_that_nobody_reads_from,
    test_many_bytes_come_whole,
    test_many_bytes_go_and_come_at_once,
    test_many_bytes_go_whole,
    test_nothing_has_come_before_something_was_asked_for,
    test_output_before_the_end_comes_first,
    test_sending_after_the_end_is_an_os_error,
    test_several_links_at_once_are_apart,
    test_unread_output_is_held_back_at_the_other_end,
    until,
)
from tests.facts import mentions
from tests.sshd import STAND_IN

BOUND_S = 60.0
CALLER = """
import os, socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
os.dup2(connection.fileno(), 0)
os.dup2(connection.fileno(), 1)
connection.close()
main("word", 3)
"""


class Others:
    """Processes that connect to us."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(BOUND_S)
        self.processes = []
        self.links = []

    def open(self) -> TcpConnection:
        port = str(self.listening.getsockname()[1])
        self.processes.append(
            subprocess.Popen([sys.executable, "-I", "-S", "-c", STAND_IN + CALLER, port])
        )
        connection, address = self.listening.accept()
        connection.settimeout(BOUND_S)
        greeting = b"\ndistlaunch-agent word\n"
        assert connection.recv(len(greeting), socket.MSG_WAITALL) == greeting
        link = TcpConnection(connection, f"{address[0]}:{address[1]}")
        self.links.append(link)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.listening.close()
        for process in self.processes:
            process.wait(BOUND_S)


@pytest.fixture
def others():
    made = Others()
    yield made
    made.close()


@pytest.fixture
def opened(others):
    return others.open


@pytest.fixture
def end(opened):
    return End(opened())


def test_the_end_of_the_other_side_is_the_end_of_the_stream_for_ever(end):
    end.say("end 7")
    assert end.until_end() == b""
    assert end.link.receive() is None
    assert end.link.receive() is None
    assert end.poll.poll(0)
    assert mentions(describe_end(end.link.end()), "closed", "peer")


def test_a_killed_process_at_the_other_end_is_noticed(end):
    end.say("kill")
    end.until_end()
    assert mentions(describe_end(end.link.end()), "closed", "peer")


def test_a_connection_that_was_reset_is_reported_as_lost():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        caller = socket.create_connection(listening.getsockname())
        link = TcpConnection(listening.accept()[0], "here")
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    caller.close()
    end = End(link)
    end.until_end()
    assert mentions(describe_end(link.end()), "lost", "connection reset by peer")
    link.close()


def test_closing_ends_the_other_side(end, others):
    end.link.close()
    assert others.processes[0].wait(BOUND_S) == 0


def test_closing_twice_and_receiving_after_that_are_harmless(end):
    end.link.close()
    end.link.close()
    assert end.link.receive() is None
    assert describe_end(end.link.end()).endswith("closed")
    with pytest.raises(OSError):
        end.link.send(b"x")


def test_a_link_leaves_no_thread_and_no_descriptor(opened):
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        opened().close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_messages_before_closing_arrive_though_the_other_sides_were_not_read():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        caller = socket.create_connection(listening.getsockname())
        link = TcpConnection(listening.accept()[0], "here")
    with caller:
        caller.send(b"what nobody reads")
        until(lambda: End(link).poll.poll(1000))
        link.send(b"verdict")
        link.close()
        caller.settimeout(BOUND_S)
        assert caller.recv(100) == b"verdict"
        assert caller.recv(100) == b""


def test_it_sends_small_messages_at_once_and_finds_a_silent_network(end):
    options = {
        (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 30_000,
    }
    with socket.socket(fileno=os.dup(end.link.fileno())) as same:
        assert {key: same.getsockopt(*key) for key in options} == options
