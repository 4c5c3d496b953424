"""One node's link, as the fleet keeps it: its thread, its decoder, when it was heard, how its clock goes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Generic, TypeVar

from distlaunch.coordinator.runtime.message_budget import Budget
from distlaunch.core.model.record import Record
from distlaunch.core.protocol import remote as r
from distlaunch.core.protocol.codec import Decoder
from distlaunch.transport.connection import Link

_SAMPLE_S = 60.0
"""A measured clock offset is good for so long, until a quicker answer betters it: monotonic clocks drift apart."""


TURN_MESSAGES = 1024
TURN_S = 0.01
"""A connection that sends without end takes so much of the main loop before the next one is read."""

M = TypeVar("M", bound=Record)


class ReadEnd(Enum):
    """Why ``Peer.next_message`` returns no message."""

    EMPTY = "no more has arrived"
    TURN_OVER = "there may be more, in the next turn"
    CLOSED = "the link has ended"


class Peer(Generic[M]):
    """A node that is being connected to, or is connected. All but ``write`` is the main loop's."""

    def __init__(
        self,
        node: int,
        types: tuple[type[M], ...],
        parts: tuple[type[Record], ...],
        budget: Budget,
    ) -> None:
        """``types`` and ``parts`` are what the other side may send, as for ``Decoder``."""
        self.node = node
        self.budget = budget
        self.gone = threading.Event()
        self.link: Link | None = None
        self._decoder: Decoder[M] = Decoder(types, parts, size_of=budget.size_of)
        self._turn_left = 0
        self._turn_at = self._turn_until = 0.0
        self.greeted = False
        self.heard = 0.0
        """When anything came last."""
        self.offset = 0.0
        """What to add to the agent's clock to have ours."""
        self.writer: Writer[M] | None = None
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._pings: dict[int, float] = {}
        self._sample = (float("inf"), 0.0)  # round trip and time of the best answer

    def open(self, link: Link, *, now: float) -> None:
        """Have the link."""
        self.link = link
        self.heard = now

    def begin_turn(self, now: float) -> None:
        """Let ``next_message`` return ``TURN_MESSAGES`` messages within ``TURN_S``; ``now`` is the job's clock."""
        self._turn_at = now
        self._turn_left = TURN_MESSAGES
        self._turn_until = time.monotonic() + TURN_S

    def next_message(self) -> M | ReadEnd:
        """Return the next message that has arrived, or why there is none; never waits. Raises ProtocolError."""
        while True:
            now = time.monotonic()
            if self._turn_left <= 0 or now >= self._turn_until:
                return ReadEnd.TURN_OVER
            if (message := self._decoder.next()) is not None:
                self._turn_left -= 1
                self.budget.take(message, now)
                return message
            data = None if self.link is None else self.link.receive()
            if data is None:
                return ReadEnd.CLOSED
            if not data:
                return ReadEnd.EMPTY
            self.heard = self._turn_at
            self._decoder.add(data)

    def write(self, data: bytes) -> None:
        """Have the thread send this."""
        self._out.put(data)

    @property
    def has_unsent(self) -> bool:
        """Tell whether something waits to be sent."""
        return not self._out.empty()

    def next_out(self) -> bytes | None:
        """Wait for what is to be sent; None at the end. The thread's own."""
        return self._out.get()

    def greet(self, clock: float, now: float) -> None:
        """Take in the other side's first word, which tells its clock."""
        self.greeted = True
        self.budget.greet()
        self.offset = now - clock

    def pinged(self, serial: int, now: float) -> None:
        """Remember when a ping was sent."""
        self._pings[serial] = now
        while len(self._pings) > 8:
            del self._pings[next(iter(self._pings))]

    def pong(self, message: r.Pong, now: float) -> None:
        """Estimate how far the agent's clock is from ours: the answer came, at best, half way of the round trip."""
        sent = self._pings.pop(message.serial, None)
        if sent is None:
            return
        trip = now - sent
        if trip <= self._sample[0] or now - self._sample[1] > _SAMPLE_S:
            self._sample = (trip, now)
            self.offset = sent + trip / 2 - message.clock

    def close(self) -> None:
        """Close the link; the thread ends with it."""
        self.gone.set()
        link, self.link = self.link, None
        if link is not None:
            link.close()
        self._out.put(None)


class Writer(threading.Thread, Generic[M]):
    """Opens a peer's link, then sends what is queued for it, until its end."""

    def __init__(self, peer: Peer[M], open_link: Callable[[], Link | None], *, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._peer = peer
        self._open = open_link

    def run(self) -> None:
        """Open, then write."""
        link = self._open()
        if link is None:
            return
        with suppress(OSError):  # the main loop sees the end of the stream
            while (data := self._peer.next_out()) is not None:
                link.send(data)
