"""Who listens on the rendezvous port, launchers and others, and a way to call them."""

from __future__ import annotations

import os
import re
import select
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from distlaunch.core.agent import connect
from distlaunch.core.agent.connect import ConnectInterrupted
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.core.protocol.launcher_messages import Welcome
from distlaunch.transport.tcp_listener import Listener

PARTY = JobIdentity(release="1.2.3", job_key="77")
BOUND_S = 60.0
FIND = socket.getaddrinfo


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


class Reception:
    """A listener with a main loop, in a thread."""

    def __init__(
        self, host="127.0.0.1", ports=(0,), *, job_identity=PARTY, admit=None, greet=b"", gate=None
    ) -> None:
        self.lines = []
        self.calls = []
        self.links = []
        self._greet = greet
        self._gate = gate
        self._admit = admit or (lambda call: Welcome(job_id="job", rank=call.rank))
        self._listener = Listener(
            host,
            ports,
            job_identity=job_identity,
            owner="ours",
            admit=self._asked,
            log=self.lines.append,
        )
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


def call(
    host,
    ports,
    *,
    job_identity=PARTY,
    rank=3,
    within_s=BOUND_S,
    progress=None,
    watched=None,
    other_addresses=None,
):
    return connect.connect_to_listener(
        host,
        ports,
        job_identity=job_identity,
        rank=rank,
        own_host="n3",
        instance="i",
        until=time.monotonic() + within_s,
        progress=progress,
        watched=watched,
        other_addresses=other_addresses,
    )


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


def names(monkeypatch, find):
    """Have names looked up by ``find``; numeric addresses are as ever."""

    def looked_up(host, *args, flags=0, **kwargs):
        if flags & socket.AI_NUMERICHOST:
            return FIND(host, *args, flags=flags, **kwargs)
        return [row for one in find() for row in FIND(one, *args, flags=flags, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)


@contextmanager
def stopping_at(words):
    """Give a way to call that is stopped once ``words`` are why it still waits; what was told is
    kept."""
    reading, writing = os.pipe()
    told = []

    def progress(_, why):
        told.append(why)
        if re.search(words, why):
            os.write(writing, b"\0")

    def call_until(host, ports):
        with pytest.raises(ConnectInterrupted):
            call(host, ports, progress=progress, watched=reading)
        return told

    try:
        yield call_until
    finally:
        os.close(reading)
        os.close(writing)
