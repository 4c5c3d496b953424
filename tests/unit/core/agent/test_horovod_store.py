from __future__ import annotations

import errno
import http.client
import os
import random
import resource
import socket
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.agent.node.horovod_store import (
    HOLD_S,
    HorovodStore,
    MemoryBudget,
    Scopes,
    _Client,
    is_loopback,
)
from tests.examples import examples

BOUND_S = 60.0


@pytest.fixture
def port(request):
    """Return the port of a store. The parameter is how long it holds a GET for a missing value."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setblocking(False)
    number = listener.getsockname()[1]
    store = HorovodStore(listener, hold_s=getattr(request, "param", HOLD_S))
    store.start()
    yield number
    store.close()


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND_S)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def until_there(port, path):
    while True:
        status, body = ask(port, "GET", path)
        if status == 200:
            return body
        assert status == 404


def test_get_returns_what_was_put(port):
    value = bytes(range(256)) * 100
    assert ask(port, "PUT", "/global/0", value) == (200, b"")
    assert ask(port, "GET", "/global/0") == (200, value)
    assert ask(port, "PUT", "/global/0", b"") == (200, b"")
    assert ask(port, "GET", "/global/0") == (200, b"")


def test_scopes_are_separate(port):
    ask(port, "PUT", "/local_a/0", b"a")
    ask(port, "PUT", "/local_b/0", b"b")
    assert ask(port, "GET", "/local_a/0") == (200, b"a")


@pytest.mark.parametrize("port", [0.1], indirect=True)
def test_a_missing_value_is_404_after_a_while(port):
    assert ask(port, "GET", "/global/7")[0] == 404


def test_a_get_waits_until_the_value_is_put(port):
    got = []
    asking = [
        threading.Thread(target=lambda: got.append(until_there(port, "/global/1")))
        for _ in range(20)
    ]
    for each in asking:
        each.start()
    ask(port, "PUT", "/global/1", b"x")
    for each in asking:
        each.join(BOUND_S)
    assert got == [b"x"] * 20


@pytest.mark.parametrize("port", [0.1], indirect=True)
def test_values_of_the_previous_round_are_not_returned(port):
    for rank in range(3):
        ask(port, "PUT", f"/global/rank_{rank}", b"old host")
        ask(port, "PUT", f"/global/{rank}", b"old")
    ask(port, "PUT", "/other/0", b"other")
    assert ask(port, "DELETE", "/global/0") == (200, b"")
    assert ask(port, "GET", "/global/1") == (200, b"old")
    ask(port, "PUT", "/global/rank_0", b"new host")
    assert ask(port, "GET", "/global/rank_1")[0] == 404
    assert ask(port, "GET", "/global/1")[0] == 404
    assert ask(port, "GET", "/global/rank_0") == (200, b"new host")
    ask(port, "DELETE", "/global/1")
    ask(port, "PUT", "/global/1", b"new")
    assert ask(port, "GET", "/global/1") == (200, b"new")
    assert ask(port, "GET", "/global/rank_1")[0] == 404
    assert ask(port, "GET", "/other/0") == (200, b"other")


def test_many_ranks_wait_for_each_other(port):
    """Sixteen ranks put and get values in any order, then delete theirs and begin again."""
    ranks, failed = 16, []
    all_have_met = threading.Barrier(ranks)

    def run(rank):
        for turn in range(3):
            ask(port, "PUT", f"/global/rank_{rank}", b"%d" % turn)
            failed.extend(
                other
                for other in range(rank)
                if until_there(port, f"/global/rank_{other}") != b"%d" % turn
            )
            ask(port, "PUT", f"/global/{rank}", b"%d.%d" % (turn, rank))
            others = random.Random(rank).sample(range(ranks), ranks)
            got = {other: until_there(port, f"/global/{other}") for other in others}
            failed.extend(
                other for other, value in got.items() if value != b"%d.%d" % (turn, other)
            )
            all_have_met.wait(BOUND_S)
            ask(port, "DELETE", f"/global/{rank}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(BOUND_S)
    assert not failed


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (b"GET /global HTTP/1.1\r\n\r\n", b"400"),
        (b"PUT global/0 HTTP/1.1\r\n\r\n", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"PATCH /a/b HTTP/1.1\r\n\r\n", b"400"),
        (b"PUT /a/b HTTP/1.1\r\nContent-Length: many\r\n\r\n", b"400"),
        (b"PUT /a/b HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"413"),
        (b"x" * 10_000, b"400"),
    ],
)
def test_invalid_requests_are_refused_and_others_served(port, message, status):
    with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as connection:
        connection.sendall(message)
        assert connection.recv(65536).split(b" ")[1] == status
    assert ask(port, "PUT", "/global/0", b"x") == (200, b"")


def answer(connection):
    """Return everything that is received until the store closes the connection."""
    answered = b""
    while more := connection.recv(65536):
        answered += more
    return answered


def test_a_request_may_arrive_in_single_bytes(port):
    answers = []
    for words in (
        b"PUT /s/0 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /s/0 HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as connection:
            for place in range(len(words)):
                connection.sendall(words[place : place + 1])
            answers.append(answer(connection))
        with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as connection:
            connection.sendall(words)
            assert answer(connection) == answers[-1]
    assert answers[1].startswith(b"HTTP/1.1 200 ")
    assert answers[1].endswith(b"\r\n\r\nabc")


def test_a_value_larger_than_the_socket_buffers_arrives_complete(port):
    value = os.urandom(1 << 20)
    assert ask(port, "PUT", "/s/0", value) == (200, b"")
    with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as slow:
        slow.sendall(b"GET /s/0 HTTP/1.1\r\n\r\n")
        assert ask(port, "GET", "/s/0") == (200, value)  # others are served meanwhile
        assert answer(slow).endswith(value)


@settings(max_examples=examples(25), deadline=None)
@given(
    pieces=st.lists(
        st.binary(max_size=200)
        | st.sampled_from([b"GET /a/b HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"PUT /a/b "])
    )
)
def test_no_input_stops_the_store(pieces):
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    number = listener.getsockname()[1]
    store = HorovodStore(listener)
    store.start()
    try:
        with socket.create_connection(("127.0.0.1", number), timeout=BOUND_S) as connection:
            for piece in pieces:
                try:
                    connection.sendall(piece)
                except OSError:
                    break
        assert ask(number, "PUT", "/global/0", b"x") == (200, b"")
    finally:
        store.close()


def test_closing_a_used_store_leaves_nothing():
    before = set(os.listdir("/proc/self/fd"))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    number = listener.getsockname()[1]
    store = HorovodStore(listener)
    store.start()
    waiting = socket.create_connection(("127.0.0.1", number), timeout=BOUND_S)
    waiting.sendall(b"GET /a/b HTTP/1.1\r\n\r\n")
    ask(number, "PUT", "/global/0", b"x")
    store.close()
    assert waiting.recv(1) == b""
    waiting.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_memory_is_limited():
    scopes = Scopes()
    value = bytes(1 << 20)
    assert all(scopes.put("s", str(number), value) for number in range(255))
    assert not scopes.put("s", "255", value)
    assert scopes.put("s", "0", b"x")
    assert scopes.put("s", "255", value)


def test_scopes_keys_and_rounds_take_memory_too():
    budget = MemoryBudget(1 << 20)
    scopes = Scopes(budget)
    assert sum(scopes.put("s", f"{number:07000}", b"") for number in range(1000)) < 150
    budget = MemoryBudget(1 << 20)
    scopes = Scopes(budget)
    for number in range(10_000):
        scopes.put(str(number), "0", b"")
        scopes.finish(str(number), "0")
    assert budget.left < 2048
    assert scopes.put("0", "0", b"")  # a rank that begins anew needs no more than before


def test_a_value_keeps_its_memory_until_it_is_sent():
    budget = MemoryBudget(10_000)
    scopes = Scopes(budget)
    scopes.put("s", "0", bytes(5000))
    old = scopes.get("s", "0")
    old.add_user()
    assert not scopes.put("s", "0", bytes(5000))
    old.remove_user()
    assert scopes.put("s", "0", bytes(5000))


@pytest.fixture
def make_store():
    stores = []

    def make(**words):
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setblocking(False)
        stores.append(HorovodStore(listener, **words))
        return stores[-1], listener.getsockname()[1]

    yield make
    for each in stores:
        each.close()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=BOUND_S)


def test_connections_are_limited_by_open_files(make_store, monkeypatch):
    monkeypatch.setattr(
        resource, "getrlimit", lambda _: (len(os.listdir("/proc/self/fd")) + 64, 4096)
    )
    store, port = make_store()
    store.start()
    idle = [connect(port) for _ in range(32)]
    with connect(port) as one_more:
        assert one_more.recv(1) == b""
    for each in idle:
        each.close()
    assert until_served(port)


def until_served(port):
    for _ in range(1000):
        with suppress(OSError):
            if ask(port, "PUT", "/s/0", b"x") == (200, b""):
                return True
    return False


def test_incomplete_requests_are_limited_by_memory(make_store):
    store, port = make_store()
    store._budget.left = 1 << 20
    store.start()
    halves = [connect(port) for _ in range(40)]
    for each in halves:
        with suppress(OSError):
            each.sendall(b"PUT /s/0 HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + bytes(60_000))
    refused = 0
    for each in halves:
        each.settimeout(0.05)
        with suppress(OSError):
            refused += each.recv(100).startswith(b"HTTP/1.1 507")
        each.close()
    assert 20 <= refused <= 30
    assert until_served(port)


def test_a_body_in_single_bytes_takes_linear_time(make_store):
    store, _ = make_store()
    client = _Client(socket.socket(), 0.0)
    client.received += b"PUT /s/0 HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + bytes(900_000)
    store._on_data(client)
    head_once, client.received = client.received, Counting(client.received)
    for _ in range(100):
        store._on_data(client)
    assert client.received.searched == 0
    assert len(head_once) == 900_000
    client.socket.close()
    store.start()


class Counting(bytearray):
    searched = 0

    def partition(self, sep):
        self.searched += 1
        return super().partition(sep)


def test_closing_does_not_wait_for_open_requests(make_store):
    store, port = make_store()
    store.start()
    assert ask(port, "PUT", "/s/0", bytes(1 << 20)) == (200, b"")
    asking = [connect(port) for _ in range(300)]
    for each in asking:
        each.sendall(b"GET /s/0 HTTP/1.1\r\n\r\n")
    store._is_closing = True
    store._thread.join(BOUND_S)  # as soon as it is woken by any of them
    assert not store._thread.is_alive()
    for each in asking:
        each.close()


def test_a_store_that_fails_reports_it_and_closes_everything(make_store, monkeypatch):
    failed = []
    store, port = make_store(failed=failed.append)
    monkeypatch.setattr(store, "_on_ready", lambda _: 1 / 0)
    store.start()
    with connect(port) as connection:
        assert connection.recv(1) == b""
    store._thread.join(BOUND_S)
    assert failed == ["ZeroDivisionError: division by zero"]


def test_accepting_continues_after_a_lack_of_memory_or_descriptors(make_store, monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    short = Short(listener)
    store = HorovodStore(short)
    store.start()
    try:
        assert ask(listener.getsockname()[1], "PUT", "/s/0", b"x") == (200, b"")
        assert not short.errors
    finally:
        store.close()


class Short:
    """A listener whose first tries to accept fail."""

    def __init__(self, listener):
        self._listener = listener
        self.errors = [errno.EMFILE, errno.ENOBUFS, errno.ENOMEM]

    def accept(self):
        if self.errors:
            raise OSError(self.errors.pop(), "short")
        return self._listener.accept()

    def __getattr__(self, name):
        return getattr(self._listener, name)


def test_a_loopback_only_store_refuses_other_machines(make_store, monkeypatch):
    store, port = make_store(loopback_only=True)
    store.start()
    assert ask(port, "PUT", "/s/0", b"x") == (200, b"")
    monkeypatch.setattr(
        "distlaunch.core.agent.node.horovod_store.is_loopback",
        lambda address: address != "127.0.0.1",
    )
    with connect(port) as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1", True),
        ("::ffff:127.0.1.1", True),
        ("::1", True),
        ("10.0.0.127", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_loopback_is_recognised_in_both_families(address, here):
    assert is_loopback(address) == here
