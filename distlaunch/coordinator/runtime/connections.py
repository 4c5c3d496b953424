"""Open links to the other nodes: one poll for all, pings, silence, clocks.

Subclasses interpret the messages. For each link there is one thread, which writes to it: whoever calls ``send`` never
waits for a network. All reading is the main loop's.
"""

from __future__ import annotations

import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.peers import Peer, ReadEnd
from distlaunch.core.errors import ProtocolError
from distlaunch.core.model.record import Record
from distlaunch.core.protocol import remote as r
from distlaunch.core.protocol.agent_messages import LATE_S
from distlaunch.core.protocol.codec import encode
from distlaunch.transport.connection import Link

_ROUND_S = 0.05
"""After so long the main loop looks at signals and deadlines before it reads the connections that are left."""
M = TypeVar("M", bound=Record)


class Links(ABC, Generic[M]):
    """The links of one job, by member number. ``clock`` is the job's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._peers: dict[int, Peer[M]] = {}
        self._by_descriptor: dict[int, Peer[M]] = {}
        self._unread: dict[int, Peer[M]] = {}
        """By descriptor, in the order of their turns: those that may have messages for us."""
        self._events: deque[a.Event] = deque()
        self._epoll = select.epoll()
        self._wake, self._wake_end = os.pipe()
        for descriptor in (self._wake, self._wake_end):
            os.set_blocking(descriptor, False)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._waking = threading.Lock()
        self._ping_at: float | None = None
        self._serial = 0
        self.silence_s = r.SILENCE_S
        """A connection that is silent for so long counts as lost. The other side uses the same timeout."""

    @abstractmethod
    def _take(self, peer: Peer[M], message: M) -> None:
        """Take in a message."""

    @abstractmethod
    def _lose(self, peer: Peer[M], why: str, kind: a.LossKind = a.LossKind.GONE) -> None:
        """Take in that a peer is gone: drop it, and tell."""

    def _ended(self, why: str) -> str:
        """Put for the user how a link has ended."""
        return why

    # --- sending

    def disconnect(self, node: int) -> None:
        """Leave a node."""
        peer = self._peers.pop(node, None)
        if peer is not None:
            self._drop(peer)

    def _tell(self, node: int, message: Record) -> None:
        """Send to a node; what cannot be sent any more is lost with it."""
        peer = self._peers.get(node)
        if peer is not None and peer.link is not None:
            peer.budget.sent(message)
            peer.write(encode(message))

    @property
    def has_unsent(self) -> bool:
        """Tell whether something is still on its way out."""
        return any(peer.has_unsent for peer in self._peers.values())

    # --- receiving

    def _notify(self) -> None:
        """Wake the main loop, from any thread."""
        with self._waking, suppress(BlockingIOError):
            if self._wake_end >= 0:
                os.write(self._wake_end, b"\0")

    def _read_all(self, within_s: float = 0.0) -> None:
        """Give each connection that has sent something one turn, the one first that has waited for longest.

        Those for which no time is left have their turn in the next call.
        """
        for descriptor, _ in self._epoll.poll(0.0 if self._unread else within_s):
            if descriptor == self._wake:
                with suppress(BlockingIOError):
                    os.read(self._wake, 65536)
            elif (peer := self._by_descriptor.get(descriptor)) is not None:
                self._unread.setdefault(descriptor, peer)
        until = time.monotonic() + _ROUND_S
        for descriptor, peer in list(self._unread.items()):
            self._unread.pop(descriptor, None)
            if not peer.gone.is_set() and self._read(peer):
                self._unread[descriptor] = peer
            if time.monotonic() >= until:
                break

    @property
    def _read_at(self) -> float | None:
        """When to call ``_read_all`` even if no descriptor is ready, on the job's clock."""
        return self._clock() if self._unread else None

    def _have(self, peer: Peer[M], link: Link) -> None:
        """Have a peer's link, and read what came with it in the next turn."""
        peer.open(link, now=self._clock())
        self._by_descriptor[link.fileno()] = self._unread[link.fileno()] = peer
        self._epoll.register(link.fileno(), select.EPOLLIN)

    def _read(self, peer: Peer[M]) -> bool:
        """Read one turn's messages of a peer; return whether there may be more."""
        peer.begin_turn(self._clock())
        try:
            while True:
                message = peer.next_message()
                if message is ReadEnd.TURN_OVER:
                    return True
                if message is ReadEnd.EMPTY:
                    return False
                if message is ReadEnd.CLOSED:
                    self._lose(peer, self._ended("" if peer.link is None else peer.link.why_closed()))
                    return False
                self._take(peer, message)
                if peer.gone.is_set():  # by its own word: what follows is nobody's
                    return False
        except ProtocolError as exc:
            self._lose(peer, f"it sends what no agent of ours does: {exc.message}", a.LossKind.ODD)
            return False

    def _taken_events(self) -> list[a.Event]:
        events = list(self._events)
        self._events.clear()
        return events

    def _drop(self, peer: Peer[M]) -> None:
        peer.gone.set()
        if peer.link is not None:
            descriptor = peer.link.fileno()
            self._unread.pop(descriptor, None)
            if self._by_descriptor.pop(descriptor, None) is not None:
                with suppress(OSError, ValueError):
                    self._epoll.unregister(descriptor)
            peer.close()

    def _close(self) -> None:
        """Free what is ours, once all peers are dropped."""
        with self._waking:  # a thread that opens a link may end later
            os.close(self._wake)
            os.close(self._wake_end)
            self._wake_end = -1
        self._epoll.close()

    # --- time

    def _tick(self) -> None:
        """Ping all, when that is due; those that have been silent for too long are lost."""
        now = self._clock()
        if self._ping_at is None:
            if any(peer.greeted for peer in self._peers.values()):
                self._ping_at = now + r.PING_S
            return
        if now < self._ping_at:
            return
        late = now > self._ping_at + LATE_S
        self._ping_at = now + r.PING_S
        for peer in [peer for peer in self._peers.values() if peer.link is not None]:
            if late:
                peer.heard = max(peer.heard, now - self.silence_s + LATE_S)
            elif now - peer.heard >= self.silence_s:
                self._lose(peer, f"silent for {now - peer.heard:.0f} s", a.LossKind.SILENT)
                continue
            self._ping(peer)
        if not self._peers:
            self._ping_at = None

    def _ping(self, peer: Peer[M]) -> None:
        self._serial += 1
        peer.pinged(self._serial, self._clock())
        told = None if self.silence_s == r.SILENCE_S else self.silence_s
        ping = r.Ping(serial=self._serial, silence_s=told)
        peer.budget.sent(ping)
        peer.write(encode(ping))
