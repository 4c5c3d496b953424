"""The rendezvous port: all launchers of the job are admitted, whoever else connects."""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distlaunch.core.model.record import replace
from distlaunch.core.protocol.codec import encode
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.core.protocol.launcher_messages import PROTOCOL_VERSION, Call, Proof, Welcome
from distlaunch.transport.tcp_listener import HANDSHAKE_S, MOST_PENDING, Listener
from tests.examples import examples
from tests.facts import mentions

PROGRAMS = Path(__file__).parents[1] / "programs"
TOKEN = "8f14e45fceea167a5a36dedd4bea2543"
IDENTITY = JobIdentity(release="1.2.3", job_key="77", token=TOKEN.encode())
BOUND_S = 100.0
CALLERS = 64
CALL = Call(
    version=PROTOCOL_VERSION,
    release="1.2.3",
    job_key="77",
    rank=3,
    host="n3",
    instance="i",
    nonce="ab" * 32,
)


@pytest.fixture(autouse=True)
def own_limit_and_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Loop:
    """A main loop that has only a listener."""

    def __init__(self, *, job_identity=IDENTITY, clock=time.monotonic, **more) -> None:
        self.clock = clock
        self.lines = []
        self.calls = []
        self.links = []
        self.listener = Listener(
            "127.0.0.1",
            [0],
            job_identity=job_identity,
            owner="ours",
            admit=self._admit,
            log=self.lines.append,
            clock=clock,
            expected_callers=CALLERS,
            **more,
        )
        self.port = self.listener.port
        self.poll = select.poll()
        for number, events in self.listener.descriptors().items():
            self.poll.register(number, events)
        self.most_pending = 0

    def _admit(self, call):
        self.calls.append(call)
        return Welcome(job_id="job", rank=call.rank)

    def turn(self, within_s: float = 1.0) -> None:
        deadline = self.listener.deadline()
        left_s = within_s if deadline is None else min(within_s, max(0.0, deadline - self.clock()))
        self.poll.poll(left_s * 1000 + 1)
        self.links += self.listener.ready()
        self.most_pending = max(self.most_pending, len(self.listener._pending))

    def until(self, condition) -> None:
        deadline = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < deadline, self.lines
            self.turn(0.1)

    def close(self) -> None:
        self.listener.close()
        for _, link in self.links:
            link.close()


@pytest.fixture
def loop():
    with closing(Loop()) as made:
        yield made


@pytest.fixture
def run():
    with ExitStack() as stack:

        def start(program, *words):
            process = subprocess.Popen(
                [sys.executable, PROGRAMS / program, *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(end, process)
            return process

        yield start


def end(process) -> None:
    process.stdin.close()
    try:
        process.wait(BOUND_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def output_of(process) -> str:
    """Return the output so far, if there is any."""
    assert process.poll() is None
    return (
        process.stdout.readline().decode().strip()
        if select.select([process.stdout], [], [], 0)[0]
        else ""
    )


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("token", ["", TOKEN])
def test_all_launchers_of_a_job_get_in_in_any_order(run, token):
    with closing(Loop(job_identity=replace(IDENTITY, token=token.encode() or None))) as loop:
        callers = run("joins_as_launchers.py", "127.0.0.1", loop.port, CALLERS, token)
        loop.until(lambda: output_of(callers) == str(CALLERS))
        assert sorted(call.rank for call, _ in loop.links) == list(range(CALLERS))
        assert len(loop.calls) == CALLERS
        assert loop.lines == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("drip", {"too many are open"}),
        ("stays", {"too many are open"}),
        ("garbage", {"it sends data that is no message"}),
        ("http", {"it speaks HTTP"}),
        ("tls", {"it speaks TLS"}),
        ("token", {"the token is not the same"}),
    ],
)
def test_all_launchers_join_whatever_other_connections_do(loop, run, kind, words):
    crowds = [run("opens_connections.py", kind, "127.0.0.1", loop.port, 300) for _ in range(2)]
    up = set()
    loop.until(
        lambda: up.update(one for one in crowds if output_of(one) == "up") or len(up) == len(crowds)
    )
    callers = run("joins_as_launchers.py", "127.0.0.1", loop.port, CALLERS, TOKEN)
    loop.until(lambda: output_of(callers) == str(CALLERS))
    assert len(loop.calls) == CALLERS
    assert loop.most_pending <= MOST_PENDING
    first = [line for line in loop.lines if line.startswith("a connection from")]
    assert all(any(word in line for line in first) for word in words)
    assert len(first) == len({line.partition("was closed: ")[2] for line in first}) <= 4


def test_ten_thousand_half_open_connections_cost_a_bounded_amount(loop, run):
    before = resident()
    crowds = [run("opens_connections.py", "silent", "127.0.0.1", loop.port, 2500) for _ in range(4)]
    up = set()
    loop.until(
        lambda: up.update(one for one in crowds if output_of(one) == "up") or len(up) == len(crowds)
    )
    callers = run("joins_as_launchers.py", "127.0.0.1", loop.port, CALLERS, TOKEN)
    loop.until(lambda: output_of(callers) == str(CALLERS))
    assert loop.most_pending <= MOST_PENDING
    assert len(os.listdir("/proc/self/fd")) < MOST_PENDING + CALLERS + 100
    assert resident() - before < 32 << 20
    assert len([line for line in loop.lines if mentions(line, "a connection", "too many")]) == 1
    for _, link in loop.links:
        assert link.receive() in (b"", None)


PIECES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"GET / HTTP/1.1\r\n\r\n",
            b"SSH-2.0-x\r\n",
            b"\x16\x03\x01",
            b"\x01",
            b"\x02x",
            b"\x01\0\0\x02\0\0\0\0\0{",
            encode(CALL),
            encode(CALL)[:50],
            encode(replace(CALL, job_key="x")),
            encode(replace(CALL, version=9)),
            encode(Proof(proof="")),
            encode(Proof(proof="0" * 64)),
            b"{" * 9000,
        ]
    ),
)


@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(st.lists(st.tuples(st.integers(0, 5), PIECES), max_size=15))
def test_random_bytes_admit_no_launcher_and_each_kind_is_reported_once(parts):
    clock = Clock()
    with closing(Loop(clock=clock)) as loop, ExitStack() as stack:
        callers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", loop.port)))
            for _ in range(6)
        ]
        for number, data in parts:
            with suppress(OSError):  # it has been closed for what came before
                callers[number].sendall(data)
            loop.turn(0.0)
        clock.now += HANDSHAKE_S
        loop.until(lambda: not loop.listener._pending)
        assert not loop.calls
        assert not loop.links
        kinds = loop.listener._notices._kinds
        assert len(loop.lines) == len(kinds) <= 12
        assert all(line.isprintable() for line in loop.lines)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_call_that_takes_too_long_is_closed_and_reported_once_a_kind():
    clock = Clock()
    with closing(Loop(clock=clock)) as loop, ExitStack() as stack:
        callers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", loop.port)))
            for _ in range(6)
        ]
        for one in callers[:3]:
            one.send(b"\x01")
        loop.until(lambda: len(loop.listener._stages[1]) == 3 and len(loop.listener._pending) == 6)
        assert loop.listener.deadline() == 100.0 + HANDSHAKE_S
        clock.now += HANDSHAKE_S
        loop.until(lambda: not loop.listener._pending)
        assert [one.recv(1) for one in callers] == [b""] * 6
        unfinished, silent = sorted(line.partition(" was closed: ")[2] for line in loop.lines)
        assert mentions(unfinished, "not finish", "5 s")
        assert mentions(silent, "nothing", "5 s")
        clock.now += 60
        loop.until(lambda: len(loop.lines) == 4)
        assert all(mentions(line, "2 more", "a connection") for line in loop.lines[2:])


def test_a_port_scan_is_not_mentioned(loop):
    for _ in range(3):
        socket.create_connection(("127.0.0.1", loop.port)).close()
    loop.until(lambda: not loop.poll.poll(50))
    assert loop.lines == []


def test_without_a_descriptor_left_those_that_are_not_known_make_room(run):
    with closing(Loop(raise_limit=lambda _: False)) as loop, ExitStack() as stack:
        used = len(os.listdir("/proc/self/fd"))
        callers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", loop.port)))
            for _ in range(10)
        ]
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (used + 10 + 5, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        loop.until(lambda: any("no more files can be open here" in line for line in loop.lines))
        loop.until(lambda: not loop.poll.poll(50))
        assert 1 <= len(loop.listener._pending) <= 6
        assert callers


def test_with_no_descriptor_at_all_it_waits_instead_of_spinning():
    clock = Clock()
    made = Loop(clock=clock, raise_limit=lambda _: False)
    with closing(made) as loop, socket.create_connection(("127.0.0.1", loop.port)):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        assert loop.poll.poll(5000)
        assert loop.listener.ready() == []
        assert not loop.poll.poll(50)
        assert loop.listener.deadline() > clock.now
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        clock.now += 1
        loop.until(lambda: loop.listener._pending)


def test_our_limit_of_open_files_is_raised_as_far_as_needed():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    with closing(Loop()):
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, MOST_PENDING + CALLERS)


def test_a_flood_of_connections_is_taken_at_a_bounded_rate():
    clock = Clock()
    with closing(Loop(clock=clock, burst=8)) as loop, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", loop.port)))
        for _ in range(10):
            loop.turn(0.05)
        assert len(loop.listener._pending) == 8
        assert not loop.poll.poll(50)
        clock.now = loop.listener.deadline()
        for _ in range(10):
            loop.turn(0.05)
        assert len(loop.listener._pending) == 16
