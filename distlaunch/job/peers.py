"""Layer job: one node's link, as the fleet keeps it: its thread, its decoder, when it was heard, how its clock goes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from distlaunch.core.model.record import Record
from distlaunch.core.wire import remote as r
from distlaunch.core.wire.codec import Decoder
from distlaunch.job.transport.link import Link

_SAMPLE_S = 60.0
"""A measured clock offset is good for so long, until a quicker answer betters it: monotonic clocks drift apart."""


M = TypeVar("M", bound=Record)


class Peer(Generic[M]):
    """A node that is being connected to, or is connected. All but ``write`` is the main loop's."""

    def __init__(self, node: int, decoder: Decoder[M]) -> None:
        self.node = node
        self.gone = threading.Event()
        self.link: Link | None = None
        self.decoder = decoder
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
