"""Listeners on a rendezvous port, ours and foreign ones, and functions that connect to them."""

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

IDENTITY = JobIdentity(release="1.2.3", job_key="77")
BOUND_S = 60.0
FIND = socket.getaddrinfo


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


class ListenerThread:
    """A listener whose main loop runs in a thread. It records admission requests and its notices."""

    def __init__(
        self,
        host="127.0.0.1",
        ports=(0,),
        *,
        job_identity=IDENTITY,
        admit=None,
        greet=b"",
        gate=None,
    ) -> None:
        self.lines = []
        self.requests = []
        self.connections = []
        self._greet = greet
        self._gate = gate
        self._admit = admit or (lambda request: Welcome(job_id="job", rank=request.rank))
        self._listener = Listener(
            host,
            ports,
            job_identity=job_identity,
            owner="ours",
            admit=self._on_request,
            log=self.lines.append,
        )
        self.port = self._listener.port
        self._end, self._ending = os.pipe()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _on_request(self, request):
        self.requests.append(request)
        return self._admit(request)

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
            for request, connection in self._listener.ready():
                if self._greet:
                    connection.send(self._greet)
                self.connections.append((request, connection))

    def close(self) -> None:
        os.write(self._ending, b"\0")
        self._thread.join()
        os.close(self._end)
        os.close(self._ending)
        self._listener.close()
        for _, connection in self.connections:
            connection.close()


def connect_to(
    host,
    ports,
    *,
    job_identity=IDENTITY,
    rank=3,
    within_s=BOUND_S,
    progress=None,
    watched=None,
    other_addresses=None,
    answer_s=connect.ANSWER_S,
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
        answer_s=answer_s,
    )


@contextmanager
def server(answer):
    """Listen as a foreign program would, in a thread; ``answer`` gets each connection."""
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


def resolve_with(monkeypatch, find):
    """Resolve each host name to the addresses that ``find`` returns. Numeric addresses stay as they are."""

    def looked_up(host, *args, flags=0, **kwargs):
        if flags & socket.AI_NUMERICHOST:
            return FIND(host, *args, flags=flags, **kwargs)
        return [row for one in find() for row in FIND(one, *args, flags=flags, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)


@contextmanager
def stop_when_waiting_for(pattern):
    """Yield a function that connects until ``pattern`` matches the reason why it still waits.

    The function returns all reasons.
    """
    reading, writing = os.pipe()
    reasons = []

    def progress(_, why):
        reasons.append(why)
        if re.search(pattern, why):
            os.write(writing, b"\0")

    def connect_until(host, ports, **more):
        with pytest.raises(ConnectInterrupted):
            connect_to(host, ports, progress=progress, watched=reading, **more)
        return reasons

    try:
        yield connect_until
    finally:
        os.close(reading)
        os.close(writing)
