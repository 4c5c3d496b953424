"""The link to the coordinator, as a launcher that has joined has it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from distlaunch.coordinator.runtime.message_budget import CoordinatorBudget
from distlaunch.coordinator.runtime.peers import Peer, ReadEnd, Writer
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol import remote as r
from distlaunch.core.protocol.codec import encode
from distlaunch.transport.connection import Link

_LAST_S = 2.0
"""So long what has been said last may take to leave."""


class Coordinator:
    """It can be lost, and opened again; what is said while there is none is lost."""

    def __init__(self) -> None:
        self._peer: Peer[p.ToPeer] | None = None
        self.has_unread = False
        """More may have arrived than was read; no descriptor tells."""

    @property
    def link(self) -> Link | None:
        """Give what to poll and to receive from, if there is one."""
        return None if self._peer is None else self._peer.link

    def open(self, link: Link) -> None:
        """Have a link. Raises ConfigError if no thread can be started for it."""
        budget = CoordinatorBudget(time.monotonic())
        self._peer = peer = Peer[p.ToPeer](0, p.TO_PEER, r.REMOTE_PARTS, budget)
        peer.open(link, now=0.0)
        peer.writer = Writer(peer, lambda: link, name="to the coordinator")
        try:
            peer.writer.start()
        except RuntimeError as exc:
            raise ConfigError("no thread can be started", hint=explain_refusal()) from exc

    def receive(self) -> Iterator[p.ToPeer | ReadEnd]:
        """Yield the messages of one turn, then why it ends. Raises ProtocolError, after those before it."""
        if self._peer is None:
            return
        self._peer.begin_turn(time.monotonic())
        self.has_unread = False
        while (message := self._peer.next_message()) is not ReadEnd.EMPTY:
            self.has_unread = message is ReadEnd.TURN_OVER
            yield message
            if isinstance(message, ReadEnd):
                return

    def tell(self, message: Record) -> None:
        """Have a message sent, in its turn."""
        if self._peer is not None:
            self._peer.write(encode(message))

    def flush(self) -> None:
        """Let what has been said leave, for a bounded time."""
        until = time.monotonic() + _LAST_S
        while self._peer is not None and self._peer.has_unsent and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Close the link."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None
