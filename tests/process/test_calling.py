"""Calling the rendezvous port: whatever is there, and whenever it comes."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from distlaunch.core.agent import calling, trying
from distlaunch.core.agent.calling import Stopped, TurnedAwayError
from distlaunch.core.errors import NodesError
from distlaunch.core.model.record import replace
from distlaunch.core.wire.handshake import Party
from distlaunch.core.wire.peers import Turned, Welcome
from distlaunch.job.transport.listening import Listener

PARTY = Party(release="1.2.3", job_key="77")
BOUND_S = 60.0
FIND = socket.getaddrinfo


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


class Reception:
    """A listener with a main loop, in a thread."""

    def __init__(self, host="127.0.0.1", ports=(0,), *, party=PARTY, admit=None, greet=b"", gate=None) -> None:
        self.lines = []
        self.calls = []
        self.links = []
        self._greet = greet
        self._gate = gate
        self._admit = admit or (lambda call: Welcome(job_id="job", rank=call.rank))
        self._listener = Listener(host, ports, party=party, owner="ours", admit=self._asked, log=self.lines.append)
        self.port = self._listener.port
        self._end, self._ending = os.pipe()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _asked(self, call):
        self.calls.append(call)
        return self._admit(call)

    def _run(self) -> None:
        if self._gate is not None:
            self._gate.wait(BOUND_S)
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        for number, events in self._listener.descriptors().items():
            poll.register(number, events)
        while True:
            deadline = self._listener.deadline()
            left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000 + 1
            if self._end in [number for number, _ in poll.poll(left_ms)]:
                return
            for call, link in self._listener.ready():
                if self._greet:
                    link.send(self._greet)
                self.links.append((call, link))

    def close(self) -> None:
        os.write(self._ending, b"\0")
        self._thread.join()
        os.close(self._end)
        os.close(self._ending)
        self._listener.close()
        for _, link in self.links:
            link.close()


def call(host, ports, *, party=PARTY, rank=3, within_s=BOUND_S, progress=None, watched=None):
    return calling.call(
        host, ports, party=party, rank=rank, own_host="n3", instance="i", until=time.monotonic() + within_s,
        progress=progress, watched=watched,
    )  # fmt: skip


@contextmanager
def server(answer):
    """Somebody else who listens: ``answer`` gets each connection, in a thread."""
    kept = []
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            kept.append(connection)
            answer(connection)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
        for connection in kept:
            connection.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_caller_is_welcome_and_reads_what_follows_itself():
    with closing(Reception(greet=b"what comes next")) as reception:
        connection, welcome = call("127.0.0.1", [reception.port])
        with connection:
            assert welcome == Welcome(job_id="job", rank=3)
            assert connection.recv(100) == b"what comes next"
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.getblocking()
        assert [(one.rank, one.host) for one in reception.calls] == [(3, "n3")]


def test_a_listener_that_comes_late_is_called_until_it_is_there():
    port = free_port()
    receptions, told = [], []

    def progress(elapsed_s, why):
        told.append((elapsed_s, why))
        if len(told) == 3:
            receptions.append(Reception(ports=[port]))

    try:
        connection, _ = call("127.0.0.1", [port], progress=progress)
        connection.close()
    finally:
        for one in receptions:
            one.close()
    assert [why for _, why in told] == ["connection refused"] * 3
    assert [elapsed_s for elapsed_s, _ in told] == sorted(elapsed_s for elapsed_s, _ in told)


def names(monkeypatch, find):
    """Have names looked up by ``find``; numeric addresses are as ever."""

    def looked_up(host, *args, flags=0, **kwargs):
        if flags & socket.AI_NUMERICHOST:
            return FIND(host, *args, flags=flags, **kwargs)
        return [row for one in find() for row in FIND(one, *args, flags=flags, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)


def test_a_name_that_is_known_late_is_looked_up_until_it_is(monkeypatch):
    times = []

    def find():
        times.append(1)
        if len(times) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["127.0.0.1"]

    names(monkeypatch, find)
    told = []
    with closing(Reception()) as reception:
        connection, _ = call("train-0.train", [reception.port], progress=lambda _, why: told.append(why))
        connection.close()
    assert set(told) == {"its name cannot be resolved: Name or service not known"}


def test_a_host_that_got_another_address_is_found_there(monkeypatch):
    times = []

    def find():
        times.append(1)
        return ["127.0.0.9"] if len(times) < 2 else ["127.0.0.1"]

    names(monkeypatch, find)
    with closing(Reception()) as reception:
        connection, _ = call("train-0.train", [reception.port])
        connection.close()


def test_all_addresses_of_a_name_are_tried(monkeypatch):
    names(monkeypatch, lambda: ["::1", "127.0.0.7", "127.0.0.1"])
    with closing(Reception()) as reception:
        connection, _ = call("both", [reception.port], within_s=BOUND_S)
        connection.close()
        assert len(reception.calls) == 1


def test_a_listener_with_several_addresses_is_called_once(monkeypatch):
    names(monkeypatch, lambda: ["::1", "127.0.0.1", "127.0.0.2"])
    with closing(Reception("")) as reception:
        connection, _ = call("all", [reception.port])
        connection.close()
        assert len(reception.calls) == 1


def test_a_resolver_that_hangs_is_not_asked_again_and_ends_no_later_than_the_deadline(monkeypatch):
    hang, asked = threading.Event(), []

    def find():
        asked.append(1)
        hang.wait(BOUND_S)
        return ["127.0.0.1"]

    names(monkeypatch, find)
    try:
        with pytest.raises(NodesError, match="its name has not been resolved yet"):
            call("slow", [1], within_s=1.0)
        assert len(asked) == 1
    finally:
        hang.set()


def test_nobody_there_until_the_deadline_is_said_with_the_reason():
    port = free_port()
    with pytest.raises(NodesError) as error:
        call("127.0.0.1", [port], within_s=0.3)
    assert error.value.message == f"node 0 has not answered at 127.0.0.1:{port} within 0 s: connection refused"
    assert error.value.exit_code == 69
    assert "--rendezvous" in error.value.hint


def test_a_name_that_is_no_name_is_said_not_to_be_known(monkeypatch):
    with pytest.raises(NodesError, match=r"at a\.\.b:29400 within 0 s: its name cannot be resolved"):
        call("a..b", [29400], within_s=0.3)


@contextmanager
def stopping_at(words):
    """Give a way to call that is stopped once ``words`` are why it still waits; what was told is kept."""
    reading, writing = os.pipe()
    told = []

    def progress(_, why):
        told.append(why)
        if re.search(words, why):
            os.write(writing, b"\0")

    def call_until(host, ports):
        with pytest.raises(Stopped):
            call(host, ports, progress=progress, watched=reading)
        return told

    try:
        yield call_until
    finally:
        os.close(reading)
        os.close(writing)


class _Web(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_a_web_server_is_named():
    web = HTTPServer(("127.0.0.1", 0), _Web)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        with stopping_at("what listens there is no launcher of distlaunch: it speaks HTTP") as call_until:
            call_until("127.0.0.1", [web.server_address[1]])
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda one: one.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n"), "it speaks HTTP"),
        (lambda one: one.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"), "it speaks SSH"),
        (lambda one: one.sendall(b"220 mail ready\r\n"), "it sends what is no message of distlaunch"),
        (lambda one: None, "it says nothing"),
        (lambda one: one.close(), "(it closed the connection|connection reset by peer)"),
    ],
    ids=["http", "ssh", "smtp", "silence", "closing"],
)
def test_whoever_is_no_listener_of_ours_is_named(answer, words, monkeypatch):
    if words == "it says nothing":
        monkeypatch.setattr(trying, "ANSWER_S", 0.5)
    with server(answer) as port, stopping_at(words) as call_until:
        call_until("127.0.0.1", [port])


def test_one_who_is_told_to_come_again_does():
    answers = [Turned(text="not yet", hint=None, exit_code=2, again=True), Welcome(job_id="job", rank=0)]
    told = []
    with closing(Reception(admit=lambda _: answers.pop(0))) as reception:
        connection, _ = call("127.0.0.1", [reception.port], progress=lambda _, why: told.append(why))
        connection.close()
        assert len({one.nonce for one in reception.calls}) == 2
        assert {one.instance for one in reception.calls} == {"i"}
    assert told == ["not yet"]


def test_one_who_is_turned_away_for_good_does_not_call_again():
    turned = Turned(text="node rank 3 is taken by n7", hint="give each its own --node-rank", exit_code=2, again=False)
    with closing(Reception(admit=lambda _: turned)) as reception:
        with pytest.raises(TurnedAwayError) as error:
            call("127.0.0.1", [reception.port])
        assert len(reception.calls) == 1
        assert reception.lines == []
    assert error.value.message == f"node 0 at 127.0.0.1:{reception.port}: node rank 3 is taken by n7"
    assert (error.value.hint, error.value.exit_code) == (turned.hint, 2)


def test_a_wrong_token_is_said_at_both_ends():
    with closing(Reception(party=replace(PARTY, token=b"one"))) as reception:
        for party in (replace(PARTY, token=b"two"), PARTY):
            with pytest.raises(TurnedAwayError) as error:
                call("127.0.0.1", [reception.port], party=party)
            assert error.value.message == f"node 0 at 127.0.0.1:{reception.port}: the token is not the same"
            assert error.value.exit_code == 2
        until(lambda: reception.lines)
        [line] = reception.lines
        assert not reception.calls
    assert line.endswith(f"(n3) to port {reception.port} was closed: the token is not the same")


def until(condition) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_another_release_is_said_at_both_ends():
    with closing(Reception()) as reception:
        with pytest.raises(TurnedAwayError, match=r"distlaunch 1\.2\.3, n3 is distlaunch 2\.0"):
            call("127.0.0.1", [reception.port], party=replace(PARTY, release="2.0"))
        until(lambda: reception.lines)
        assert "the launcher that was called is distlaunch 1.2.3, n3 is distlaunch 2.0" in reception.lines[0]


def test_of_a_series_of_ports_the_one_of_our_job_is_found():
    with closing(Reception(party=replace(PARTY, job_key="76"))) as other, closing(Reception()) as ours:
        connection, _ = call("127.0.0.1", [other.port, free_port(), ours.port])
        connection.close()
        assert len(ours.calls) == 1
        assert not other.calls


def test_of_a_series_of_ports_that_others_have_each_is_told_of():
    with closing(Reception(party=replace(PARTY, job_key="76"))) as other, stopping_at("another job") as call_until:
        ports = [other.port, free_port()]
        why = call_until("127.0.0.1", ports)[-1]
    assert f"127.0.0.1:{ports[0]}: the port belongs to another job: it is of job '76'" in why
    assert f"127.0.0.1:{ports[1]}: connection refused" in why


def test_of_a_series_of_ports_all_are_named_at_the_deadline():
    ports = [free_port(), free_port()]
    with pytest.raises(NodesError, match=f"at 127.0.0.1, ports {ports[0]}, {ports[1]} within 0 s: connection refused"):
        call("127.0.0.1", ports, within_s=0.3)


def test_another_job_on_the_one_port_that_was_named_is_no_reason_to_wait():
    with (
        closing(Reception(party=replace(PARTY, job_key="76"))) as other,
        pytest.raises(
            TurnedAwayError, match="the port belongs to another job: it is of job '76', and n3 called for job '77'"
        ),
    ):
        call("127.0.0.1", [other.port])


@pytest.mark.parametrize("silent", [False, True], ids=["while nobody listens", "while nobody answers"])
def test_whoever_watches_something_else_is_stopped_by_it(silent):
    reading, writing = os.pipe()
    told = []

    def progress(_, why):
        told.append(why)
        if len(told) == 1:
            os.write(writing, b"\0")

    try:
        if silent:
            with server(lambda _: None) as port, pytest.raises(Stopped):
                call("127.0.0.1", [port], progress=progress, watched=reading)
        else:
            with pytest.raises(Stopped):
                call("127.0.0.1", [free_port()], progress=progress, watched=reading)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_connection_with_itself_counts_as_refused():
    place = trying.Place((socket.AF_INET, ("127.0.0.1", 1)), lambda: None)
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        assert own.getpeername() == own.getsockname()
        place.connection = own
        assert place.on_ready(0.0) is None
    assert place.connection is None
    assert place.why == os.strerror(errno.ECONNREFUSED).lower()


def silent(count):
    """Ports on which somebody listens who never says a word."""
    stack = ExitStack()
    return stack, [stack.enter_context(server(lambda _: None)) for _ in range(count)]


def test_listeners_that_say_nothing_hide_no_later_port():
    stack, ports = silent(3)
    with stack, closing(Reception()) as reception:
        began = time.monotonic()
        connection, _ = call("127.0.0.1", [*ports, reception.port])
        connection.close()
        assert time.monotonic() - began < trying.ANSWER_S
        assert len(reception.calls) == 1


def test_listeners_that_say_nothing_do_not_keep_others_from_being_tried_again():
    stack, ports = silent(1)
    port = free_port()
    receptions = []

    def progress(_, why):
        if not receptions and "connection refused" in why:
            receptions.append(Reception(ports=[port]))

    try:
        with stack:
            began = time.monotonic()
            connection, _ = call("127.0.0.1", [*ports, port], progress=progress)
            connection.close()
            assert time.monotonic() - began < trying.ANSWER_S
    finally:
        for one in receptions:
            one.close()


def test_listeners_that_say_nothing_are_named_at_the_deadline():
    stack, ports = silent(2)
    free = free_port()
    with stack, pytest.raises(NodesError) as error:
        call("127.0.0.1", [free, *ports], within_s=3.0)
    assert f"127.0.0.1:{free}: connection refused" in error.value.message
    places = ", ".join(f"127.0.0.1:{port}" for port in ports)
    assert f"{places}: what listens there is no launcher of distlaunch, or it hangs" in error.value.message


def test_two_addresses_of_one_listener_that_is_slow_are_let_in_once(monkeypatch):
    """Both are called, as the first does not answer soon, but only one gets a proof."""
    names(monkeypatch, lambda: ["127.0.0.1", "127.0.0.2"])
    monkeypatch.setattr(calling, "_HEARD_OUT_S", 0.0)
    gate, proofs = threading.Event(), []

    def admit(call):
        pending = reception._listener._pending.values()
        others = [one.connection for one in pending if not (one.side.call and one.side.call.nonce == call.nonce)]
        proofs.append((len(others), select.select(others, [], [], 0.5)[0]))
        return Welcome(job_id="job", rank=3)

    with closing(Reception("", gate=gate, admit=admit)) as reception:
        connection, _ = call("both", [reception.port], progress=lambda *_: gate.set())
        connection.close()
        assert proofs == [(1, [])]
        until(lambda: not reception._listener._pending)
        assert reception.lines == []


def old_listener(connection):
    """Answer as a launcher of another release of distlaunch does that has other messages."""
    connection.recv(1)
    connection.sendall(b"\x02whatever")


def test_of_a_series_of_ports_one_of_another_release_is_not_ours():
    port, receptions = free_port(), []

    def progress(_, why):
        if not receptions and "another release" in why:
            receptions.append(Reception(ports=[port]))

    try:
        with server(old_listener) as other:
            connection, _ = call("127.0.0.1", [other, port], progress=progress)
            connection.close()
        assert len(receptions[0].calls) == 1
    finally:
        for one in receptions:
            one.close()


def test_another_release_on_the_one_port_that_was_named_is_no_reason_to_wait():
    with server(old_listener) as port, pytest.raises(TurnedAwayError, match="another release of distlaunch"):
        call("127.0.0.1", [port])


def test_another_release_of_our_own_job_in_a_series_of_ports_is_no_reason_to_wait():
    text = r"the launcher that was called is distlaunch 2\.0"
    with (
        closing(Reception(party=replace(PARTY, release="2.0"))) as reception,
        pytest.raises(TurnedAwayError, match=text),
    ):
        call("127.0.0.1", [reception.port, free_port()])
