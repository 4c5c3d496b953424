from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, closing

import pytest

from distlaunch.transport.connect_errors import ConnectStepError
from distlaunch.transport.ssh.stream import Address, dial, resolve

NEVER_S = 1000.0
"""Longer than a test may take."""


def soon(within_s: float = 20.0) -> float:
    return time.monotonic() + within_s


def address(sock) -> Address:
    return Address(family=socket.AF_INET, sockaddr=sock.getsockname())


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def refusing():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


@pytest.fixture
def black_hole():
    """Return a listener whose queue is full: the kernel drops further connections."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server


def dialled(*addresses: Address, within_s: float | None = None, until=None) -> Address:
    sock, reached = dial(list(addresses), until=until or soon(), within_s=within_s, bind=None)
    sock.close()
    return reached


def test_numbers_are_not_looked_up(monkeypatch):
    monkeypatch.setattr(threading, "Thread", None)
    [found] = resolve("127.0.0.1", 2222, family=socket.AF_UNSPEC, until=soon())
    assert found.text == "127.0.0.1:2222"
    [found] = resolve("fd00::7", 22, family=socket.AF_UNSPEC, until=soon())
    assert found.text == "[fd00::7]:22"


def test_a_name_is_looked_up():
    assert resolve("localhost", 22, family=socket.AF_INET, until=soon())[0].text == "127.0.0.1:22"


@pytest.mark.parametrize("name", ["no-such-host.invalid", "", "a..b", "x" * 300, "\u00fc" * 300])
def test_an_unknown_host_is_reported(name):
    with pytest.raises(ConnectStepError) as caught:
        resolve(name, 22, family=socket.AF_INET, until=soon())
    assert caught.value.step == "resolve"


def test_a_resolver_that_hangs_is_left(monkeypatch):
    hangs = threading.Event()
    real = socket.getaddrinfo

    def slow(name, *args, flags, **kwargs):
        if flags:
            return real(name, *args, flags=flags, **kwargs)
        hangs.wait(NEVER_S)
        return real("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with pytest.raises(ConnectStepError, match="not resolved"):
        resolve("slow", 22, family=socket.AF_INET, until=soon(0.2))
    hangs.set()


def test_a_listener_is_reached(listening):
    assert dialled(address(listening)) == address(listening)


def test_a_refusal_is_reported_in_few_words(refusing):
    with pytest.raises(ConnectStepError) as caught:
        dialled(address(refusing))
    assert (caught.value.step, caught.value.text, caught.value.passing) == (
        "connect",
        "connection refused",
        True,
    )


def test_silence_ends_by_the_hosts_own_setting(black_hole):
    with pytest.raises(ConnectStepError, match=r"^no answer$"):
        dialled(address(black_hole), within_s=0.5, until=soon(NEVER_S))


def test_silence_ends_by_the_deadline(black_hole):
    with pytest.raises(ConnectStepError, match=r"^no answer$"):
        dialled(address(black_hole), within_s=NEVER_S, until=soon(0.3))


def test_the_next_address_is_tried_after_a_refusal(refusing, listening):
    assert dialled(address(refusing), address(listening)) == address(listening)


def test_a_silent_address_holds_up_no_other(black_hole, listening):
    both = address(black_hole), address(listening)
    assert dialled(*both, within_s=NEVER_S, until=soon(NEVER_S)) == address(listening)


def test_different_failures_are_distinguished(black_hole, refusing):
    with pytest.raises(ConnectStepError) as caught:
        dialled(address(black_hole), address(refusing), within_s=0.5)
    assert (
        caught.value.text
        == f"{address(refusing).text}: connection refused; {address(black_hole).text}: no answer"
    )


def test_an_address_that_is_not_ours_cannot_be_bound(listening):
    with pytest.raises(ConnectStepError, match="cannot assign"):
        dial([address(listening)], until=soon(), within_s=None, bind="192.0.2.1")
