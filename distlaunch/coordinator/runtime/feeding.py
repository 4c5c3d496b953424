"""Our stdin for rank 0, where that runs on a machine of its own."""

from __future__ import annotations

import os
import stat

from distlaunch.core.protocol import remote as r

_CHUNK_BYTES = 64 << 10
_WINDOW_BYTES = 256 << 10


class Feeder:
    """Reads our stdin as rank 0 takes it. The main loop polls ``fileno`` while ``wants_more``."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._node: int | None = None
        self._under_way = 0
        self._ended = False
        self._tell_end = False
        self.unread = 0
        """Bytes of our stdin that rank 0 never read."""

    @staticmethod
    def is_worth_it(descriptor: int = 0) -> bool:
        """Tell whether anything can come: not from a terminal, which is not passed on, nor from /dev/null."""
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            return False
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)

    def begin(self, node: int) -> None:
        """Feed rank 0 on this node from now on; what an earlier attempt took is gone."""
        self._node, self._under_way, self._tell_end = node, 0, self._ended

    def lost(self, node: int) -> None:
        """Stop if it was this node."""
        if node == self._node:
            self._node = None

    def fileno(self) -> int:
        """Give our stdin."""
        return self._descriptor

    @property
    def wants_more(self) -> bool:
        """Tell whether more may be read."""
        return self._node is not None and not self._ended and self._under_way < _WINDOW_BYTES

    def taken(self, node: int, message: r.Fed) -> None:
        """Take in that rank 0 has read so much."""
        self.unread += max(0, message.unread)
        if node == self._node:
            self._under_way = max(0, self._under_way - max(0, message.size))
            if message.closed:
                self._node = None

    def ready(self) -> list[tuple[int, r.Feed]]:
        """Read what is there; give what is to be sent."""
        if self._node is None:
            return []
        if self._tell_end:
            self._tell_end = False
            return [(self._node, r.Feed(data=b""))]
        if not self.wants_more or not _has_data(self._descriptor):
            return []
        try:
            data = os.read(self._descriptor, _CHUNK_BYTES)
        except OSError:
            data = b""
        self._ended = not data
        self._under_way += len(data)
        return [(self._node, r.Feed(data=data))]


def _has_data(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0)[0])
