"""Layer job: the link to the coordinator, as a launcher that has joined has it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.wire import peers as p
from distlaunch.core.wire import remote as r
from distlaunch.core.wire.codec import Decoder, encode
from distlaunch.job.peers import Peer, Writer
from distlaunch.job.transport.link import Link

_LAST_S = 2.0
"""So long what has been said last may take to leave."""


class Coordinator:
    """It can be lost, and opened again; what is said while there is none is lost."""

    def __init__(self) -> None:
        self._peer: Peer[p.ToPeer] | None = None

    @property
    def link(self) -> Link | None:
        """Give what to poll and to receive from, if there is one."""
        return None if self._peer is None else self._peer.link

    def open(self, link: Link) -> None:
        """Have a link. Raises ConfigError if no thread can be started for it."""
        self._peer = peer = Peer[p.ToPeer](0, Decoder(p.TO_PEER, r.REMOTE_PARTS))
        peer.open(link, now=0.0)
        peer.writer = Writer(peer, lambda: link, name="to the coordinator")
        try:
            peer.writer.start()
        except RuntimeError as exc:
            raise ConfigError("no thread can be started", hint="the limit of processes is reached: ulimit -u") from exc

    def decoded(self, data: bytes) -> Iterable[p.ToPeer]:
        """Give the messages that are whole now. Raises ProtocolError, after those before it."""
        return () if self._peer is None else self._peer.decoder.feed(data)

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
