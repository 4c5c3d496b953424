"""The connections to the other nodes: read in the main loop, written by threads.

``Connections`` reads all connections in turns, sends pings, and loses nodes that are silent; its
subclasses handle the messages. ``NodeConnection`` is one connection with its decoder, message
budget and clock offset. Each connection has a ``SendThread``, so that ``send`` never waits for the
network. ``StartBound`` finds nodes that answer pings but do not start their workers.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Generic, TypeVar

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.message_budget import Budget
from distlaunch.core.errors import ProtocolError
from distlaunch.core.model.record import Record
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.agent_messages import LATE_S
from distlaunch.core.protocol.codec import Decoder, encode
from distlaunch.transport.connection import Connection, ConnectionEnd, EndKind

START_S = 60.0
"""How long a node may take to start its workers, or to report a longer step (an import of
--preload)."""


class StartBound:
    """Time limit for a node to start its workers. Times are on the job's clock."""

    __slots__ = ("_awaited", "_began", "until")

    def __init__(self) -> None:
        self.until: float | None = None
        """When the start times out; None if no workers are being started."""
        self._awaited = 0
        self._began = 0.0

    def begin(self, workers: int, now: float) -> None:
        """Record that the node was asked to start this many workers."""
        self._awaited, self._began, self.until = workers, now, now + START_S

    def on_message(self, message: object, now: float) -> None:
        """Process any message of the node.

        One about started or ended workers, and a notice of a longer step, extends the limit, or
        removes it once all workers have started. Others change nothing.
        """
        if self.until is None:
            return
        match message:
            case WorkerExit() | m.AttemptEnded() | m.AgentFailed():
                self._awaited = 0
            case m.Started():
                self._awaited -= len(message.pids)
            case m.AgentNotice() | m.PreloadEnded():
                pass
            case _:
                return
        # A node reports a long import repeatedly, each time after twice as long as before.
        self.until = None if self._awaited <= 0 else now + (now - self._began) + START_S

    def stop(self, grace_s: float) -> None:
        """Record that the node was asked to stop its workers within ``grace_s``, which extends the
        limit."""
        if self.until is not None:
            self.until += grace_s

    def end(self) -> None:
        """Remove the limit: the node has no workers to start."""
        self.until = None

    def why_late(self, now: float) -> str | None:
        """Return why the node is considered lost, as a clause. Return None if its limit has not
        passed."""
        if self.until is None or now < self.until:
            return None
        return f"its workers have not started within {now - self._began:.0f} s"


def loss_kind(end: ConnectionEnd) -> a.LossKind:
    """Return the kind of loss of a node whose connection has ended."""
    match end.kind:
        case EndKind.RAY_DRIVER:
            return a.LossKind.RAY_DRIVER
        case EndKind.RAY_ACTOR:
            return a.LossKind.RAY_ACTOR
        case _:
            return a.LossKind.GONE


_ROUND_S = 0.05
"""After this time the main loop handles signals and deadlines, before it reads the remaining
connections."""
M = TypeVar("M", bound=Record)


class Connections(ABC, Generic[M]):
    """The connections of one job, by node number. ``clock`` is the job's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._node_connections: dict[int, NodeConnection[M]] = {}
        self._by_descriptor: dict[int, NodeConnection[M]] = {}
        self._unread: dict[int, NodeConnection[M]] = {}
        """Connections that may have messages, by descriptor, in the order of their turns."""
        self._events: deque[a.Event] = deque()
        self._epoll = select.epoll()
        self._wake, self._wake_end = os.pipe()
        for descriptor in (self._wake, self._wake_end):
            os.set_blocking(descriptor, False)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._waking = threading.Lock()
        self._ping_at: float | None = None
        self._serial = 0
        self.silence_s = m.SILENCE_S
        """A connection that is silent for this long is considered lost. The other side uses the
        same timeout."""

    @abstractmethod
    def _on_message(self, node_connection: NodeConnection[M], message: M) -> None:
        """Handle a message."""

    @abstractmethod
    def _lose(
        self, node_connection: NodeConnection[M], why: str, kind: a.LossKind = a.LossKind.GONE
    ) -> None:
        """Drop the connection of a lost node, and queue an event that reports the loss."""

    @abstractmethod
    def _describe_end(self, end: ConnectionEnd) -> str:
        """Return how a connection has ended, as a clause for the user."""

    # --- sending

    def disconnect(self, node: int) -> None:
        """Disconnect a node."""
        node_connection = self._node_connections.pop(node, None)
        if node_connection is not None:
            self._drop(node_connection)

    def _send_to(self, node: int, message: Record) -> None:
        """Send a message to a node. A message to a lost node is dropped."""
        node_connection = self._node_connections.get(node)
        if node_connection is not None and node_connection.connection is not None:
            node_connection.budget.on_sent(message)
            node_connection.write(encode(message))

    @property
    def has_unsent(self) -> bool:
        """Whether messages to any node wait to be sent."""
        return any(
            node_connection.has_unsent for node_connection in self._node_connections.values()
        )

    # --- receiving

    def _notify(self) -> None:
        """Wake the main loop. May be called from any thread."""
        with self._waking, suppress(BlockingIOError):
            if self._wake_end >= 0:
                os.write(self._wake_end, b"\0")

    def _read_all(self, within_s: float = 0.0) -> None:
        """Wait up to ``within_s`` for data. Then read each connection that has data, for one turn
        each, the longest waiting first.

        If the time is used up, the next call reads the remaining connections.
        """
        for descriptor, _ in self._epoll.poll(0.0 if self._unread else within_s):
            if descriptor == self._wake:
                with suppress(BlockingIOError):
                    os.read(self._wake, 65536)
            elif (node_connection := self._by_descriptor.get(descriptor)) is not None:
                self._unread.setdefault(descriptor, node_connection)
        until = time.monotonic() + _ROUND_S
        for descriptor, node_connection in list(self._unread.items()):
            self._unread.pop(descriptor, None)
            if not node_connection.is_closed.is_set() and self._read(node_connection):
                self._unread[descriptor] = node_connection
            if time.monotonic() >= until:
                break

    @property
    def _read_at(self) -> float | None:
        """When to call ``_read_all`` even if no descriptor is ready, on the job's clock."""
        return self._clock() if self._unread else None

    def _use(self, node_connection: NodeConnection[M], connection: Connection) -> None:
        """Use a new connection to a node. Bytes that have already arrived are read in the next
        turn."""
        node_connection.open(connection, now=self._clock())
        self._by_descriptor[connection.fileno()] = self._unread[connection.fileno()] = (
            node_connection
        )
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _read(self, node_connection: NodeConnection[M]) -> bool:
        """Read a node's messages for one turn. Return whether more messages may be left."""
        node_connection.begin_turn(self._clock())
        try:
            while True:
                message = node_connection.next_message()
                if message is ReadEnd.TURN_OVER:
                    return True
                if message is ReadEnd.EMPTY:
                    return False
                if message is ReadEnd.CLOSED:
                    end = (
                        ConnectionEnd(kind=EndKind.CLOSED)
                        if node_connection.connection is None
                        else node_connection.connection.end()
                    )
                    self._lose(node_connection, self._describe_end(end), loss_kind(end))
                    return False
                self._on_message(node_connection, message)
                if (
                    node_connection.is_closed.is_set()
                ):  # the message has ended it; later ones do not count
                    return False
        except ProtocolError as exc:
            self._lose(
                node_connection,
                f"it sends what no agent of ours does: {exc.message}",
                a.LossKind.ODD,
            )
            return False

    def _pop_events(self) -> list[a.Event]:
        events = list(self._events)
        self._events.clear()
        return events

    def _drop(self, node_connection: NodeConnection[M]) -> None:
        node_connection.is_closed.set()
        if node_connection.connection is not None:
            descriptor = node_connection.connection.fileno()
            self._unread.pop(descriptor, None)
            if self._by_descriptor.pop(descriptor, None) is not None:
                with suppress(OSError, ValueError):
                    self._epoll.unregister(descriptor)
            node_connection.close()

    def _close(self) -> None:
        """Close the epoll descriptor after all connections have been dropped."""
        with self._waking:  # a thread that opens a connection may end later
            os.close(self._wake)
            os.close(self._wake_end)
            self._wake_end = -1
        self._epoll.close()

    # --- time

    def _tick(self) -> None:
        """Send pings to all nodes if they are due, and lose nodes that have been silent for too
        long.

        If this process itself stood still, silent nodes get ``LATE_S`` more.
        """
        now = self._clock()
        if self._ping_at is None:
            if any(node_connection.greeted for node_connection in self._node_connections.values()):
                self._ping_at = now + m.PING_S
            return
        if now < self._ping_at:
            return
        late = now > self._ping_at + LATE_S
        self._ping_at = now + m.PING_S
        for node_connection in [
            node_connection
            for node_connection in self._node_connections.values()
            if node_connection.connection is not None
        ]:
            if late:
                node_connection.received_at = max(
                    node_connection.received_at, now - self.silence_s + LATE_S
                )
            elif now - node_connection.received_at >= self.silence_s:
                self._lose(
                    node_connection,
                    f"silent for {now - node_connection.received_at:.0f} s",
                    a.LossKind.SILENT,
                )
                continue
            self._ping(node_connection)
        if not self._node_connections:
            self._ping_at = None

    def _ping(self, node_connection: NodeConnection[M]) -> None:
        self._serial += 1
        node_connection.on_ping_sent(self._serial, self._clock())
        silence_s = None if self.silence_s == m.SILENCE_S else self.silence_s
        ping = m.Ping(serial=self._serial, silence_s=silence_s)
        node_connection.budget.on_sent(ping)
        node_connection.write(encode(ping))


_SAMPLE_S = 60.0
"""How long a measured clock offset is used, unless a faster answer replaces it. Monotonic clocks
drift apart."""


TURN_MESSAGES = 1024
TURN_S = 0.01
"""Longest time for reading one connection before the next one is read."""


class ReadEnd(Enum):
    """Why ``NodeConnection.next_message`` returns no message."""

    EMPTY = "no more has arrived"
    TURN_OVER = "there may be more, in the next turn"
    CLOSED = "the connection has ended"


class NodeConnection(Generic[M]):
    """The connection to a node, open or being opened. Only ``write`` may be called from any
    thread."""

    def __init__(
        self,
        node: int,
        types: tuple[type[M], ...],
        nested_types: tuple[type[Record], ...],
        budget: Budget,
    ) -> None:
        """``types`` and ``nested_types`` are the messages, and the records in messages, that the
        other side may send."""
        self.node = node
        self.budget = budget
        self.is_closed = threading.Event()
        self.connection: Connection | None = None
        self._decoder: Decoder[M] = Decoder(types, nested_types, size_of=budget.size_of)
        self._turn_left = 0
        self._turn_at = self._turn_until = 0.0
        self.greeted = False
        self.received_at = 0.0
        """When the last bytes arrived."""
        self.clock_offset_s = 0.0
        """The job's clock minus the agent's clock."""
        self.writer: SendThread[M] | None = None
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._pings: dict[int, float] = {}
        self._sample = (float("inf"), 0.0)  # round trip and time of the best answer

    def open(self, connection: Connection, *, now: float) -> None:
        """Use an open connection."""
        self.connection = connection
        self.received_at = now

    def begin_turn(self, now: float) -> None:
        """Start a turn, which limits how long this node delays the other nodes.

        During a turn, ``next_message`` returns at most ``TURN_MESSAGES`` messages, and only for
        ``TURN_S``. ``now`` is on the job's clock.
        """
        self._turn_at = now
        self._turn_left = TURN_MESSAGES
        self._turn_until = time.monotonic() + TURN_S

    def next_message(self) -> M | ReadEnd:
        """Return the next message without waiting; if there is none, the reason.

        Raises ProtocolError for an invalid message.
        """
        while True:
            now = time.monotonic()
            if self._turn_left <= 0 or now >= self._turn_until:
                return ReadEnd.TURN_OVER
            if (message := self._decoder.next()) is not None:
                self._turn_left -= 1
                self.budget.charge(message, now)
                return message
            data = None if self.connection is None else self.connection.receive()
            if data is None:
                return ReadEnd.CLOSED
            if not data:
                return ReadEnd.EMPTY
            self.received_at = self._turn_at
            self._decoder.add(data)

    def write(self, data: bytes) -> None:
        """Queue bytes for the writer thread."""
        self._out.put(data)

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait to be sent."""
        return not self._out.empty()

    def next_out(self) -> bytes | None:
        """Return the next bytes to send; None when the connection is closed. Blocks until either is
        the case.

        Called only by the connection's ``SendThread``.
        """
        return self._out.get()

    def on_greeting(self, clock: float, now: float) -> None:
        """Handle the first message of the other side, which has the time of its clock: take a first
        estimate of the clock offset."""
        self.greeted = True
        self.budget.on_greeting()
        self.clock_offset_s = now - clock

    def on_ping_sent(self, serial: int, now: float) -> None:
        """Record that a ping with this serial number was sent at ``now``."""
        self._pings[serial] = now
        while len(self._pings) > 8:
            del self._pings[next(iter(self._pings))]

    def on_pong(self, message: m.Pong, now: float) -> None:
        """Estimate the clock offset anew if this answer came faster than the best one of the last
        ``_SAMPLE_S``.

        The estimate assumes that the other side answered half way through the round trip.
        """
        sent = self._pings.pop(message.serial, None)
        if sent is None:
            return
        trip = now - sent
        if trip <= self._sample[0] or now - self._sample[1] > _SAMPLE_S:
            self._sample = (trip, now)
            self.clock_offset_s = sent + trip / 2 - message.clock

    def close(self) -> None:
        """Close the connection and end its writer thread."""
        self.is_closed.set()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        self._out.put(None)


class SendThread(threading.Thread, Generic[M]):
    """Thread that opens the connection to a node, and sends the queued bytes until the connection
    is closed."""

    def __init__(
        self,
        node_connection: NodeConnection[M],
        open_connection: Callable[[], Connection | None],
        *,
        name: str,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._node_connection = node_connection
        self._open = open_connection

    def run(self) -> None:
        """Open, then write."""
        connection = self._open()
        if connection is None:
            return
        with suppress(OSError):  # the main loop sees the end of the stream
            while (data := self._node_connection.next_out()) is not None:
                connection.send(data)
