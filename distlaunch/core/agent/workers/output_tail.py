"""Keep the end of a worker's output, and what explains a failure although more output followed."""

from __future__ import annotations

from collections import deque

LEFT_OUT = b" [...] "
"""Replaces the middle of a line, or lines."""
_TRACEBACK = b"Traceback (most recent call last)"
RECENT_S = 120.0
"""A traceback older than this at the exit did not cause it."""
_ABOVE_BYTES = 256
"""The line above a traceback may name the thread or process."""
_TRACEBACK_SHARE = 4
_LINE_SHARE = 16
"""Shares of the kept bytes: for the beginnings of the last traceback and of a long line."""


class OutputTail:
    """The last ``most`` bytes of a stream.

    The beginnings of the last traceback and of a cut line replace some of these bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self.traceback_at: float | None = None
        """When the last traceback was read."""
        self._read_before = b""
        """The last bytes read: the first word of a traceback may come in two chunks."""
        self._dropped = 0
        """How many bytes are no longer in ``_chunks``. The next three fields are about them."""
        self._dropped_end = b""
        self._traceback = b""
        """The beginning of the last traceback that began there."""
        self._traceback_from = 0
        self._line = b""
        """The beginning of the last line there."""
        self._line_from = 0

    def add(self, data: bytes, now: float) -> None:
        """Add bytes that were read at ``now``."""
        if _TRACEBACK in data or _TRACEBACK in self._read_before + data[: len(_TRACEBACK)]:
            self.traceback_at = now
        self._read_before = (self._read_before + data[-len(_TRACEBACK) :])[1 - len(_TRACEBACK) :]
        self._chunks.append(data)
        self._size += len(data)
        while self._size - len(self._chunks[0]) >= self._most:
            self._drop(self._chunks.popleft())

    def text(self, now: float) -> bytes:
        """Return the kept bytes, with a mark where others are missing. The worker has exited at
        ``now``."""
        data = b"".join(self._chunks)
        if not self._dropped and len(data) <= self._most:
            return data
        most = self._most - self._most // _TRACEBACK_SHARE - self._most // _LINE_SHARE
        most -= 2 * len(LEFT_OUT) + 2
        text = data[-most:]
        self._chunks = deque([text])
        self._drop(data[:-most])
        traceback = self._traceback if self._is_recent(now) else b""
        told_until = self._traceback_from + len(traceback) if traceback else 0
        if traceback and told_until == self._dropped:
            return traceback + text
        if self._line_from < told_until:  # one line, from the traceback to the end that is kept
            return traceback + LEFT_OUT + text
        cut = self._line_from + len(self._line) < self._dropped
        text = self._line + (LEFT_OUT if cut else b"") + text
        return traceback + b"\n" + LEFT_OUT.strip() + b"\n" + text if traceback else text

    def _is_recent(self, now: float) -> bool:
        return self.traceback_at is not None and now - self.traceback_at <= RECENT_S

    def _drop(self, chunk: bytes) -> None:
        """Drop a chunk, but keep the beginning of a traceback and of the last line in it."""
        start = self._dropped
        self._dropped += len(chunk)
        self._size -= len(chunk)
        most = self._most // _TRACEBACK_SHARE
        whole = self._dropped_end + chunk
        at = whole.rfind(_TRACEBACK)
        begin = start - len(self._dropped_end) + at
        if at >= 0 and (not self._traceback or begin >= self._traceback_from + most):
            above = whole.rfind(b"\n", max(0, at - _ABOVE_BYTES), at)
            above = whole.rfind(b"\n", max(0, at - _ABOVE_BYTES), max(0, above))
            first = above + 1 if above >= 0 else at
            self._traceback = whole[first : first + most]
            self._traceback_from = begin - at + first
        elif self._traceback:
            self._traceback += chunk[: most - len(self._traceback)]
        self._dropped_end = whole[-_ABOVE_BYTES:]
        most = self._most // _LINE_SHARE
        newline = chunk.rfind(b"\n")
        if newline >= 0:
            self._line = chunk[newline + 1 : newline + 1 + most]
            self._line_from = start + newline + 1
        else:
            self._line += chunk[: most - len(self._line)]
