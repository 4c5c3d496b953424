"""Connections to the rendezvous port: to any listener, at any time."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from distlaunch.core.agent import connect
from distlaunch.core.agent.connect import ConnectInterrupted, RejectedError
from distlaunch.core.errors import NodesError
from distlaunch.core.model.record import replace
from distlaunch.core.protocol.codec import encode
from distlaunch.core.protocol.launcher_messages import Rejected, Welcome
from tests.facts import mentions
from tests.ports import free_port
from tests.process.conftest import until
from tests.process.listener import (
    BOUND_S,
    FIND,
    IDENTITY,
    ListenerThread,
    connect_to,
    own_locks,  # noqa: F401 - for every test here
    resolve_with,
    server,
    stop_when_waiting_for,
)


def test_a_launcher_is_admitted_and_reads_the_next_messages_itself():
    with closing(ListenerThread(greet=b"what comes next")) as listener:
        connection, welcome = connect_to("127.0.0.1", [listener.port])
        with connection:
            assert welcome == Welcome(job_id="job", rank=3)
            assert connection.recv(100) == b"what comes next"
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.getblocking()
        assert [(one.rank, one.host) for one in listener.requests] == [(3, "n3")]


def test_a_listener_that_comes_late_is_called_until_it_is_there():
    port = free_port()
    listeners, reasons = [], []

    def progress(elapsed_s, why):
        reasons.append((elapsed_s, why))
        if len(reasons) == 3:
            listeners.append(ListenerThread(ports=[port]))

    try:
        connection, _ = connect_to("127.0.0.1", [port], progress=progress)
        connection.close()
    finally:
        for one in listeners:
            one.close()
    assert [why for _, why in reasons] == ["connection refused"] * 3
    assert [elapsed_s for elapsed_s, _ in reasons] == sorted(elapsed_s for elapsed_s, _ in reasons)


def test_a_name_that_is_known_late_is_looked_up_until_it_is(monkeypatch):
    times = []

    def find():
        times.append(1)
        if len(times) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["127.0.0.1"]

    resolve_with(monkeypatch, find)
    reasons = []
    with closing(ListenerThread()) as listener:
        connection, _ = connect_to(
            "train-0.train", [listener.port], progress=lambda _, why: reasons.append(why)
        )
        connection.close()
    assert len(set(reasons)) == 1
    assert mentions(reasons[0], "cannot be resolved: Name or service not known")


def test_another_address_of_the_host_is_used_only_if_its_name_is_unknown(monkeypatch):
    asked = []

    def other_addresses():
        asked.append(1)
        return ["nobody.either", "127.0.0.1"]

    def looked_up(host, *args, **kwargs):
        if host in {b"n1", b"nobody.either"}:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return FIND(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    with closing(ListenerThread()) as listener:
        connection, _ = connect_to("n1", [listener.port], other_addresses=other_addresses)
        connection.close()
        assert asked
        asked.clear()
        connection, _ = connect_to("localhost", [listener.port], other_addresses=other_addresses)
        connection.close()
        assert not asked


def test_a_name_that_nobody_can_resolve_leads_to_the_option_for_an_address():
    with pytest.raises(NodesError) as error:
        connect_to("a..b", [29400], within_s=0.3, other_addresses=lambda: ())
    assert mentions(error.value.message, "a..b", "resolved")
    assert error.value.hint.startswith("--rendezvous ADDRESS:PORT")


def test_a_host_that_got_another_address_is_found_there(monkeypatch):
    times = []

    def find():
        times.append(1)
        return ["127.0.0.9"] if len(times) < 2 else ["127.0.0.1"]

    resolve_with(monkeypatch, find)
    with closing(ListenerThread()) as listener:
        connection, _ = connect_to("train-0.train", [listener.port])
        connection.close()


def test_all_addresses_of_a_name_are_tried(monkeypatch):
    resolve_with(monkeypatch, lambda: ["::1", "127.0.0.7", "127.0.0.1"])
    with closing(ListenerThread()) as listener:
        connection, _ = connect_to("both", [listener.port], within_s=BOUND_S)
        connection.close()
        assert len(listener.requests) == 1


def test_a_listener_with_several_addresses_is_called_once(monkeypatch):
    resolve_with(monkeypatch, lambda: ["::1", "127.0.0.1", "127.0.0.2"])
    with closing(ListenerThread("")) as listener:
        connection, _ = connect_to("all", [listener.port])
        connection.close()
        assert len(listener.requests) == 1


def test_a_resolver_that_hangs_is_not_asked_again_and_ends_no_later_than_the_deadline(monkeypatch):
    hang, asked = threading.Event(), []

    def find():
        asked.append(1)
        hang.wait(BOUND_S)
        return ["127.0.0.1"]

    resolve_with(monkeypatch, find)
    try:
        with pytest.raises(NodesError, match="not been resolved"):
            connect_to("slow", [1], within_s=1.0)
        assert len(asked) == 1
    finally:
        hang.set()


def test_nobody_there_until_the_deadline_is_reported_with_the_reason():
    port = free_port()
    with pytest.raises(NodesError) as error:
        connect_to("127.0.0.1", [port], within_s=0.3)
    assert mentions(error.value.message, "node 0", f"127.0.0.1:{port}", "0 s", "connection refused")
    assert error.value.exit_code == 69
    assert "--rendezvous" in error.value.hint


def test_a_name_that_cannot_be_resolved_is_reported_as_unknown(monkeypatch):
    with pytest.raises(NodesError, match=r"a\.\.b:29400 .* 0 s.* resolved"):
        connect_to("a..b", [29400], within_s=0.3)


class _Web(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_a_web_server_is_named():
    web = HTTPServer(("127.0.0.1", 0), _Web)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        with stop_when_waiting_for(
            "what listens there is no launcher of distlaunch: it speaks HTTP"
        ) as connect_until:
            connect_until("127.0.0.1", [web.server_address[1]])
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda one: one.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n"), "it speaks HTTP"),
        (lambda one: one.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"), "it speaks SSH"),
        (
            lambda one: one.sendall(b"220 mail ready\r\n"),
            "it sends data that is no message of distlaunch",
        ),
        (lambda one: None, "it sends nothing"),
        (lambda one: one.close(), "(it closed the connection|connection reset by peer)"),
    ],
    ids=["http", "ssh", "smtp", "silence", "closing"],
)
def test_a_foreign_listener_is_named(answer, words):
    more = {"answer_s": 0.5} if words == "it sends nothing" else {}
    with server(answer) as port, stop_when_waiting_for(words) as connect_until:
        connect_until("127.0.0.1", [port], **more)


def test_a_launcher_that_is_asked_to_connect_again_does():
    answers = [
        Rejected(text="not yet", hint=None, exit_code=2, again=True),
        Welcome(job_id="job", rank=0),
    ]
    reasons = []
    with closing(ListenerThread(admit=lambda _: answers.pop(0))) as listener:
        connection, _ = connect_to(
            "127.0.0.1", [listener.port], progress=lambda _, why: reasons.append(why)
        )
        connection.close()
        assert len({one.nonce for one in listener.requests}) == 2
        assert {one.instance for one in listener.requests} == {"i"}
    assert reasons == ["not yet"]


def test_a_launcher_that_is_rejected_for_good_does_not_connect_again():
    turned = Rejected(
        text="node rank 3 is taken by n7",
        hint="give each its own --node-rank",
        exit_code=2,
        again=False,
    )
    with closing(ListenerThread(admit=lambda _: turned)) as listener:
        with pytest.raises(RejectedError) as error:
            connect_to("127.0.0.1", [listener.port])
        assert len(listener.requests) == 1
        assert listener.lines == []
    assert error.value.message == f"node 0 at 127.0.0.1:{listener.port}: node rank 3 is taken by n7"
    assert (error.value.hint, error.value.exit_code) == (turned.hint, 2)


def test_a_foreign_listener_that_rejects_us_does_not_end_the_wait():
    port, listeners = free_port(), []

    def refuse(connection):
        connection.recv(4096)
        connection.sendall(encode(Rejected(text="go away", hint=None, exit_code=2, again=False)))
        connection.close()

    def progress(_, why):
        if not listeners and "go away" in why:
            listeners.append(ListenerThread(ports=[port]))

    try:
        with server(refuse) as other:
            connection, _ = connect_to("127.0.0.1", [other, port], progress=progress)
            connection.close()
    finally:
        for one in listeners:
            one.close()


def test_a_wrong_token_is_reported_at_both_ends():
    with closing(ListenerThread(job_identity=replace(IDENTITY, token=b"one"))) as listener:
        for job_identity in (replace(IDENTITY, token=b"two"), IDENTITY):
            with pytest.raises(NodesError) as error:
                connect_to("127.0.0.1", [listener.port], job_identity=job_identity, within_s=1.0)
            assert mentions(error.value.message, "token")
            assert "same token" in error.value.hint
            assert error.value.exit_code == 69
        until(lambda: listener.lines, "a line of the listener")
        [line] = listener.lines
        assert not listener.requests
    assert mentions(line, "(n3)", f"port {listener.port}", "closed", "token")


def test_another_release_is_reported_at_both_ends():
    with closing(ListenerThread()) as listener:
        with pytest.raises(NodesError, match=r"distlaunch 1\.2\.3, n3 is distlaunch 2\.0"):
            connect_to(
                "127.0.0.1",
                [listener.port],
                job_identity=replace(IDENTITY, release="2.0"),
                within_s=1.0,
            )
        until(lambda: listener.lines, "a line of the listener")
        assert mentions(listener.lines[0], "1.2.3", "n3", "2.0")


@pytest.mark.parametrize(
    "somebody_listens", [False, True], ids=["while nobody listens", "while nobody answers"]
)
def test_a_watched_descriptor_stops_the_connecting(somebody_listens):
    reading, writing = os.pipe()
    reasons = []

    def progress(_, why):
        reasons.append(why)
        if len(reasons) == 1:
            os.write(writing, b"\0")

    try:
        if somebody_listens:
            with server(lambda _: None) as port, pytest.raises(ConnectInterrupted):
                connect_to("127.0.0.1", [port], progress=progress, watched=reading)
        else:
            with pytest.raises(ConnectInterrupted):
                connect_to("127.0.0.1", [free_port()], progress=progress, watched=reading)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_connection_with_itself_counts_as_refused():
    endpoint = connect.Endpoint((socket.AF_INET, ("127.0.0.1", 1)), lambda: None)
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        assert own.getpeername() == own.getsockname()
        endpoint.connection = own
        assert endpoint.on_ready(0.0) is None
    assert endpoint.connection is None
    assert endpoint.why == os.strerror(errno.ECONNREFUSED).lower()


def test_a_slow_listener_with_two_addresses_admits_the_launcher_once(monkeypatch):
    """Both are called, as the first does not answer soon, but only one gets a proof."""
    resolve_with(monkeypatch, lambda: ["127.0.0.1", "127.0.0.2"])
    monkeypatch.setattr(connect, "_ACCEPTED_STAGGER_S", 0.0)
    gate, proofs = threading.Event(), []

    def admit(request):
        pending = listener._listener._pending.values()
        others = [
            one.connection
            for one in pending
            if not (one.side.call and one.side.call.nonce == request.nonce)
        ]
        proofs.append((len(others), select.select(others, [], [], 0.5)[0]))
        return Welcome(job_id="job", rank=3)

    with closing(ListenerThread("", gate=gate, admit=admit)) as listener:
        connection, _ = connect_to("both", [listener.port], progress=lambda *_: gate.set())
        connection.close()
        assert proofs == [(1, [])]
        until(lambda: not listener._listener._pending, "the end of the other connection")
        assert listener.lines == []
