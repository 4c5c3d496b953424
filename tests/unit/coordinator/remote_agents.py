"""Remote agents over socket pairs. Tests hold the nodes' ends."""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from contextlib import suppress

import pytest

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.remote_agents import RemoteAgents
from distlaunch.coordinator.runtime.remote_output import OutputThread
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.codec import Decoder, encode
from distlaunch.transport.connect_errors import ConnectFailure
from distlaunch.transport.connection import ConnectError, ConnectionEnd, EndKind, Target

WITHIN_S = 20.0
REMARK = m.AgentNotice(text="", warning=False)
GONE = m.AttemptEnded(attempt=0, left=())


class PairLink:
    """A connection whose other end the test holds."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(True)
        self.closed = False

    def fileno(self) -> int:
        return self.ours.fileno()

    def receive(self) -> bytes | None:
        try:
            return self.ours.recv(1 << 16, socket.MSG_DONTWAIT) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def send(self, data: bytes) -> None:
        self.ours.sendall(data)

    def close(self) -> None:
        self.closed = True
        self.ours.close()

    def end(self) -> ConnectionEnd:
        return ConnectionEnd(kind=EndKind.CLOSED)


class Kept:
    """A sink for output that may be full."""

    def __init__(self) -> None:
        self.written: list[tuple] = []
        self.full = False
        self.wake = lambda: None

    def output(self, rank, stream, data, now):
        self.written.append((rank, stream, data))

    def rank_ended(self, rank, now):
        self.written.append((rank, "ended"))

    def begin_attempt(self, attempt):
        self.written.append(("attempt", attempt))

    def tick(self, now):
        return None

    def has_room(self):
        return not self.full

    def on_room(self, wake):
        self.wake = wake


class Nodes:
    """Remote agents, and the nodes' ends of the connections."""

    def __init__(
        self, count: int, *, fanout: int = 64, kept: Kept | None = None, make=RemoteAgents, **more
    ) -> None:
        self.now = 100.0
        self.kept = kept or Kept()
        self.links: dict[str, PairLink] = {}
        self.refused: dict[str, ConnectFailure] = {}
        self.opening = threading.Semaphore(1000)
        self.at_once: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._open_now = 0
        self._lock = threading.Lock()
        self._decoders: dict[str, Decoder] = {}
        self._received: dict[str, list] = {}
        self.events: list[a.Event] = []
        self.agents = make(
            [Target(host=f"n{number}") for number in range(count)],
            open_connection=self.open,
            fanout=fanout,
            connect_s=10.0,
            output_thread=lambda grant: OutputThread(self.kept, nodes=count, grant=grant),
            clock=lambda: self.now,
            **more,
        )
        self.agents.start()

    def open(self, target: Target, bound_s: float):
        with self._lock:
            self._open_now += 1
            self.at_once.put(self._open_now)
        try:
            self.opening.acquire()
            if target.host in self.refused:
                raise ConnectError(self.refused[target.host])
            link = self.links[target.host] = PairLink()
            self._decoders[target.host] = Decoder(m.TO_REMOTE, m.REMOTE_NESTED_TYPES)
            self._received[target.host] = []
            return link
        finally:
            with self._lock:
                self._open_now -= 1

    def pump(self, condition) -> None:
        end = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < end, (self.events, self._received, self.kept.written)
            poll = select.poll()
            for descriptor, wanted in self.agents.descriptors().items():
                poll.register(descriptor, wanted)
            poll.poll(20)
            self.events += self.agents.receive()

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def say(self, host: str, *messages) -> None:
        for message in messages:
            self.links[host].theirs.sendall(encode(message))

    def say_much(self, host: str, *messages) -> None:
        """Send more than fits in the socket while the remote agents read, and check that the
        connection stays open."""

        def say() -> None:
            with suppress(OSError):
                self.say(host, *messages)

        saying = threading.Thread(target=say)
        saying.start()
        self.pump(lambda: not saying.is_alive())
        saying.join()

    def received(self, host: str, kind: type) -> list:
        try:
            while data := self.links[host].theirs.recv(1 << 16, socket.MSG_DONTWAIT):
                self._received[host] += self._decoders[host].feed(data)
        except BlockingIOError:
            pass
        return [message for message in self._received[host] if isinstance(message, kind)]

    def join(self, node: int, clock: float = 7.0) -> None:
        host = f"n{node}"
        self.agents.connect(node, 0.0)
        self.pump(lambda: host in self.links)
        self.say(host, m.Hello(hostname=host, python="3.11.4", pid=1, clock=clock))
        self.pump(lambda: any(event.node == node for event in self.of(a.Joined)))

    def give(self, node: int, *ranks: int, attempt: int = 0) -> None:
        """Start an attempt on a node, with these ranks."""
        workers = tuple(
            m.WorkerSpec(rank=rank, local_rank=0, argv=None, env={}, cpus=None, error_file=None)
            for rank in ranks
        )
        start = m.Start(
            attempt=attempt,
            argv=("true",),
            env={},
            cwd="/",
            workers=workers,
            uses_gpus=False,
            signal_group=False,
            terminal=False,
            rows=0,
            columns=0,
            stdin_rank=None,
        )
        self.agents.send(node, start)

    def close(self) -> None:
        for link in self.links.values():
            link.theirs.close()
        self.agents.close()


@pytest.fixture(name="nodes")
def remote_agents():
    """Return a function that makes remote agents of so many nodes."""
    made: list[Nodes] = []

    def make(count: int = 1, **options) -> Nodes:
        made.append(Nodes(count, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def exited(ended: float, *, rank: int = 0, attempt: int = 0, returncode: int = 1) -> WorkerExit:
    return WorkerExit(
        attempt=attempt,
        rank=rank,
        pid=5,
        returncode=returncode,
        uptime_s=1.0,
        ended=ended,
        told_to_stop=False,
        oom_kills=0,
        error_file=None,
        stderr_tail=b"",
    )
