"""The control server, with clients that behave and others that do not."""

from __future__ import annotations

import json
import os
import select
import selectors
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from distlaunch.coordinator.policy.advisory import Advisory, AdvisoryFault
from distlaunch.coordinator.runtime.control import CONNECTIONS, ControlServer, _Connection
from distlaunch.coordinator.runtime.main_loop_calls import MainLoopCalls
from distlaunch.core.errors import ConfigError
from distlaunch.core.protocol import control_messages
from distlaunch.core.protocol.control_messages import (
    LONGEST_REQUEST,
    ControlError,
    ControlRefusal,
    read_result,
    result_line,
    socket_name,
)
from distlaunch.jobs.control import NoControlError, ask, ask_at, connect
from tests.process.conftest import until

STEP_S = 60.0
NOBODY = 65534


class Loop:
    """A main loop in a thread, and a control server with some handlers."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = str(run_dir)
        self.calls = MainLoopCalls()
        self.later: Future[object] = Future()
        self.faults: list[AdvisoryFault] = []
        self.waiting = 0
        """How many requests wait for ``later``."""
        self._is_ending = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        handlers = {
            "echo": dict,
            "big": lambda fields: "x" * fields["bytes"],
            "refuse": self._refuse,
            "break": lambda fields: fields["none"],
            "object": lambda _: object(),
            "later": self._wait_for_later,
            "thread": lambda _: threading.get_ident() == self._thread.ident,
        }
        self.server = ControlServer(
            self.run_dir, self.calls, handlers, Advisory(self.faults.append)
        )
        self.server.start()

    def _wait_for_later(self, _: object) -> object:
        self.waiting += 1
        return self.later

    @staticmethod
    def _refuse(_: object) -> object:
        raise ConfigError("not now")

    def _run(self) -> None:
        while not self._is_ending:
            select.select([self.calls], [], [])
            self.calls.run()

    def _end(self) -> None:
        self._is_ending = True

    def stop_main_loop(self) -> None:
        if self._thread.is_alive():
            self.calls.call(self._end)
            self._thread.join()
        self.calls.close()

    def close(self) -> None:
        self.server.close()
        self.stop_main_loop()


@pytest.fixture
def loop(tmp_path, monkeypatch):
    base = Path("/tmp") / f"dl-control-{os.getpid()}"  # the path of a socket must be short
    base.mkdir()
    monkeypatch.setattr(control_messages, "_BASES", (str(base), str(base / "second")))
    loop = Loop(tmp_path)
    yield loop
    loop.close()
    for directory, _, names in os.walk(base, topdown=False):
        for name in names:
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)


def raw(loop: Loop, data: bytes) -> bytes:
    """Send bytes and return all that comes back before the connection ends."""
    with connect(loop.run_dir) as client:
        client.settimeout(STEP_S)
        client.sendall(data)
        return client.makefile("rb").read()


def refusal_in(line: bytes) -> str:
    return json.loads(line)["error"]["kind"]


def test_a_request_is_answered_in_the_main_loop(loop):
    assert ask(loop.run_dir, "echo", timeout_s=STEP_S, ranks=[1, 2]) == {"ranks": [1, 2]}
    assert ask(loop.run_dir, "thread", timeout_s=STEP_S) is True


def test_several_requests_go_over_one_connection(loop):
    with connect(loop.run_dir) as client:
        for number in range(100):
            assert ask_at(client, "echo", timeout_s=STEP_S, n=number) == {"n": number}


def test_requests_that_are_sent_at_once_are_answered_in_order(loop):
    line = b'{"schema": 1, "request": "echo", "n": %d}\n'
    with connect(loop.run_dir) as client:
        client.settimeout(STEP_S)
        client.sendall(b"".join(line % number for number in range(50)))
        answers = client.makefile("rb")
        assert [json.loads(answers.readline())["result"]["n"] for _ in range(50)] == [*range(50)]


def test_a_handler_may_answer_later(loop):
    threading.Timer(0.05, lambda: loop.later.set_result({"stacks": 3})).start()
    assert ask(loop.run_dir, "later", timeout_s=STEP_S) == {"stacks": 3}


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("refuse", ControlRefusal.FAILED),
        ("break", ControlRefusal.FAILED),
        ("object", ControlRefusal.FAILED),
        ("unknown", ControlRefusal.UNKNOWN),
    ],
)
def test_a_request_may_be_refused(loop, kind, refusal):
    with pytest.raises(ControlError) as refused:
        ask(loop.run_dir, kind, timeout_s=STEP_S)
    assert refused.value.refusal is refusal
    assert ask(loop.run_dir, "echo", timeout_s=STEP_S) == {}


def test_a_cancelled_answer_is_refused(loop):
    loop.later.cancel()
    with pytest.raises(ControlError) as refused:
        ask(loop.run_dir, "later", timeout_s=STEP_S)
    assert refused.value.refusal is ControlRefusal.FAILED
    assert ask(loop.run_dir, "echo", timeout_s=STEP_S) == {}


def test_an_answer_of_another_schema_is_refused(monkeypatch):
    old = result_line([])
    monkeypatch.setattr(control_messages, "SCHEMA", control_messages.SCHEMA + 1)
    assert read_result(result_line([])) == []
    with pytest.raises(ControlError) as refused:
        read_result(old)
    assert refused.value.refusal is ControlRefusal.MALFORMED


def test_without_a_thread_there_is_no_socket(loop, tmp_path, monkeypatch):
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError

    run_dir = str(tmp_path / "other")
    server = ControlServer(run_dir, loop.calls, {"echo": dict}, Advisory(loop.faults.append))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        server.start()
    with pytest.raises(NoControlError):
        connect(run_dir)
    assert server.path == ""
    server.close()


def test_an_event_of_an_earlier_connection_does_not_end_the_next(loop, tmp_path):
    server = ControlServer(str(tmp_path / "other"), loop.calls, {}, Advisory(loop.faults.append))
    ours, client = socket.socketpair()
    ours.settimeout(0)
    connection = server._connections[ours.fileno()] = _Connection(ours)
    server._selector.register(ours, selectors.EVENT_READ)
    server._on_ready(connection, selectors.EVENT_READ)
    assert ours.fileno() in server._connections
    client.close()
    server.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\0\0\n",
        b"[" * 60_000 + b"\n",
        b'{"request": "echo"}\n',
        b'{"schema": 99, "request": "echo"}\n',
        b'{"schema": 1, "request": ["echo"]}\n',
        b"null\n",
        b"x" * LONGEST_REQUEST,
    ],
    ids=range(9),
)
def test_garbage_is_answered_with_an_error_and_the_connection_is_closed(loop, garbage):
    assert refusal_in(raw(loop, garbage)) == "malformed"
    assert ask(loop.run_dir, "echo", timeout_s=STEP_S) == {}


def test_a_thousand_connections_do_not_keep_another_client_out(loop):
    clients = []
    try:
        clients.extend(connect(loop.run_dir, timeout_s=STEP_S) for _ in range(1000))
        assert ask(loop.run_dir, "echo", timeout_s=STEP_S) == {}
    finally:
        for client in clients:
            client.close()


def test_connections_that_await_an_answer_are_not_closed_for_others(loop):
    clients = [connect(loop.run_dir) for _ in range(CONNECTIONS)]
    request = b'{"schema": 1, "request": "later"}\n'
    try:
        for client in clients:
            client.settimeout(STEP_S)
            client.sendall(request)
        until(lambda: loop.waiting == CONNECTIONS, "the server has read all requests")
        with connect(loop.run_dir) as more:
            more.settimeout(STEP_S)
            refused = more.makefile("rb").read()
        assert refusal_in(refused) == "busy"
        loop.later.set_result(7)
        assert {json.loads(client.makefile("rb").readline())["result"] for client in clients} == {7}
    finally:
        for client in clients:
            client.close()


def test_a_client_that_reads_nothing_is_dropped_and_others_are_served(loop):
    with connect(loop.run_dir) as slow:
        slow.sendall(b'{"schema": 1, "request": "big", "bytes": 20000000}\n')
        slow.settimeout(STEP_S)
        assert ask(loop.run_dir, "echo", timeout_s=STEP_S) == {}
        received = 0
        while block := slow.recv(1 << 20):
            received += len(block)
        assert received < 20_000_000


def test_a_long_answer_arrives_whole(loop):
    assert len(ask(loop.run_dir, "big", timeout_s=STEP_S, bytes=5_000_000)) == 5_000_000


def test_after_the_end_of_the_main_loop_requests_are_refused(loop):
    loop.stop_main_loop()
    with pytest.raises(ControlError) as refused:
        ask(loop.run_dir, "echo", timeout_s=STEP_S)
    assert refused.value.refusal is ControlRefusal.ENDING


def test_the_socket_is_private_and_goes_with_the_server(loop):
    path = loop.server.path
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    loop.server.close()
    assert not os.path.exists(os.path.dirname(path))
    with pytest.raises(NoControlError):
        ask(loop.run_dir, "echo")


def test_a_second_job_in_the_directory_keeps_its_socket(loop, tmp_path):
    other = Loop(tmp_path / "other")
    try:
        loop.server.close()
        assert ask(other.run_dir, "echo", timeout_s=STEP_S) == {}
    finally:
        other.close()


def test_a_directory_of_wrong_mode_is_not_used(loop, tmp_path):
    first = os.path.dirname(loop.server.path)
    os.chmod(first, 0o755)
    with pytest.raises(NoControlError):
        connect(loop.run_dir)
    other = Loop(tmp_path / "other")
    try:
        assert os.path.dirname(other.server.path) != first
    finally:
        other.close()
        os.chmod(first, 0o700)


def test_a_socket_that_a_killed_launcher_has_left_is_removed_by_a_client(loop):
    path = loop.server.path
    loop.server.close()
    os.mkdir(os.path.dirname(path), 0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(NoControlError):
        connect(loop.run_dir)
    assert not os.path.exists(path)


def test_a_socket_that_a_killed_launcher_has_left_is_replaced_by_the_next(loop):
    path = loop.server.path
    loop.server.close()
    os.mkdir(os.path.dirname(path), 0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    server = ControlServer(loop.run_dir, loop.calls, {"echo": dict}, Advisory(loop.faults.append))
    server.start()
    try:
        assert ask(loop.run_dir, "echo", timeout_s=STEP_S) == {}
    finally:
        server.close()


def test_a_new_launcher_removes_the_sockets_of_killed_ones_and_no_others(loop, tmp_path):
    left = os.path.join(os.path.dirname(loop.server.path), socket_name("/left"))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(left)
    other = Loop(tmp_path / "other")
    try:
        assert not os.path.exists(left)
        assert ask(loop.run_dir, "echo", timeout_s=STEP_S) == {}
        assert ask(other.run_dir, "echo", timeout_s=STEP_S) == {}
    finally:
        other.close()


def test_a_new_launcher_keeps_files_and_the_sockets_of_other_programs(loop, tmp_path):
    directory = Path(loop.server.path).parent
    kept = [directory / "port-29500", directory / socket_name("/file"), directory / "foreign"]
    for path in kept[:2]:
        path.touch()
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(kept[2]))
    other = Loop(tmp_path / "other")
    try:
        assert [path for path in kept if path.exists()] == kept
    finally:
        other.close()


def test_a_client_does_not_remove_a_file_that_is_no_socket(loop):
    path = Path(loop.server.path)
    loop.server.close()
    path.parent.mkdir(mode=0o700)
    path.touch()
    with pytest.raises(NoControlError):
        connect(loop.run_dir)
    assert path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_is_refused_even_where_the_permissions_let_him_in(loop):
    path = loop.server.path
    for each in (os.path.dirname(path), path):
        os.chmod(each, 0o777)
    source = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "client = socket.socket(socket.AF_UNIX)\n"
        "client.settimeout(60)\n"
        "client.connect(sys.argv[1])\n"
        "try:\n"
        '    client.sendall(b\'{"schema": 1, "request": "echo"}\\n\')\n'
        "    print(client.recv(4096))\n"
        "except ConnectionError:\n"
        "    print(b'')\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", source, path],
        capture_output=True,
        text=True,
        timeout=STEP_S,
        check=True,
    )
    assert done.stdout == "b''\n"
    os.chmod(os.path.dirname(path), 0o700)
    assert ask(loop.run_dir, "echo", timeout_s=STEP_S) == {}


def test_a_removed_socket_comes_back(loop):
    os.unlink(loop.server.path)

    def answers() -> bool:
        loop.server._check_at = 0.0  # again: the thread may just set the time of its next look
        loop.server._wake()
        try:
            return ask(loop.run_dir, "echo", timeout_s=STEP_S) == {}
        except NoControlError:
            return False

    until(answers, "the socket is there again")


def test_a_fault_in_the_thread_closes_one_connection(loop, monkeypatch):
    def fail(_: bytes) -> None:
        raise TypeError("planted")

    with monkeypatch.context() as patched:
        patched.setattr("distlaunch.coordinator.runtime.control.read_request", fail)
        for _ in range(2):
            with pytest.raises(NoControlError):
                ask(loop.run_dir, "echo")
    assert ask(loop.run_dir, "echo", a=1) == {"a": 1}
    assert [fault.text for fault in loop.faults] == ["TypeError: planted"]
