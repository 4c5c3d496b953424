from __future__ import annotations

import os
import threading
import time

import pytest

from distlaunch.transport.connect_errors import ConnectStepError
from distlaunch.transport.ssh import jumps
from distlaunch.transport.ssh.config import HostSettings, SshOptions

BOUND_S = 30.0
NODE = HostSettings(
    host="n", hostname="n", port=22, user="u", key_files=(), agent=None, jumps="jump"
)


class Transport:
    def __init__(self) -> None:
        self.works = True
        self.clear_to_send = threading.Event()

    def is_active(self) -> bool:
        return self.works

    def open_channel(self, *_, **__) -> object:
        return object()


class Connected:
    def __init__(self) -> None:
        self.transport = Transport()
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    close_soon = close


class Hosts:
    """Connects on request."""

    def __init__(self) -> None:
        self.made: list[Connected] = []
        self.asked = threading.Semaphore(0)
        self.may = threading.Semaphore(0)
        self.answers = True
        self.jumps = jumps.Jumps(self.reach)

    def reach(self, settings, before, until):
        self.asked.release()
        assert self.may.acquire(timeout=BOUND_S)
        if not self.answers:
            raise ConnectStepError("connect", "no answer")
        self.made.append(Connected())
        return self.made[-1]

    def stream(self):
        environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
        return self.jumps.open_stream(
            NODE, (), time.monotonic() + BOUND_S, options=SshOptions(), environ=environ
        )


@pytest.fixture
def hosts():
    return Hosts()


def test_a_jump_host_is_connected_to_once_and_left_by_the_last(hosts):
    hosts.may.release()
    first, second = hosts.stream(), hosts.stream()
    [connected] = hosts.made
    first.free()
    first.free()
    assert not connected.closed
    second.free()
    assert connected.closed == 1


@pytest.mark.parametrize("answers", [True, False])
def test_nobody_who_leaves_waits_for_one_who_connects_anew(hosts, answers):
    """The main loop closes the connections of a lost jump host one by one, while the first node is
    tried again."""
    hosts.may.release()
    first, second = hosts.stream(), hosts.stream()
    hosts.made[0].transport.works = False
    hosts.answers = answers
    ended = []

    def again() -> None:
        try:
            ended.append(hosts.stream())
        except ConnectStepError as error:
            ended.append(error)

    first.free()
    thread = threading.Thread(target=again)
    hosts.asked.acquire()
    thread.start()
    assert hosts.asked.acquire(timeout=BOUND_S)
    left = threading.Event()

    def leave() -> None:
        second.free()
        left.set()

    leaving = threading.Thread(target=leave)
    leaving.start()
    has_left = left.wait(BOUND_S / 3)
    hosts.may.release()
    for each in (thread, leaving):
        each.join(BOUND_S)
    assert has_left
    assert hosts.made[0].closed
    [outcome] = ended
    if answers:
        assert not hosts.made[1].closed
        outcome.free()
        assert hosts.made[1].closed == 1
    else:
        assert outcome.text == "jump host jump: no answer"
