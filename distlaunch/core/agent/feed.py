"""Layer core.agent: the stdin of a worker that the coordinator feeds, through a pipe that never blocks us."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from distlaunch.core.errors import ProtocolError
from distlaunch.core.wire import remote as r

_MOST_BYTES = 4 << 20
"""What may wait here: a coordinator feeds on only as it is told of what was taken."""


class Feed:
    """The pipe of one attempt's worker, and what waits to be written to it."""

    def __init__(self, send: Callable[[r.Fed], None]) -> None:
        self._send = send
        self._pipe = -1
        self._waiting = bytearray()
        self._ends = False

    def open(self) -> int:
        """Make the pipe anew; give the worker's end of it. Raises OSError."""
        self.close()
        theirs, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        return theirs

    def take(self, data: bytes) -> None:
        """Have bytes written; none: the end of what there is. Raises ProtocolError for far too many."""
        if self._pipe < 0:
            self._send(r.Fed(size=0, closed=True))
            return
        if not data:
            self._ends = True
        self._waiting += data
        if len(self._waiting) > _MOST_BYTES:
            raise ProtocolError(f"over {_MOST_BYTES} bytes of stdin wait to be taken")
        self.on_ready()

    def descriptors(self) -> dict[int, int]:
        """Give what to poll: for writing while something waits, and for the reader's end at all times."""
        return {} if self._pipe < 0 else {self._pipe: select.POLLOUT if self._waiting else 0}

    def on_ready(self) -> None:
        """Write what the worker takes now; tell of it."""
        if self._pipe < 0:
            return
        written = 0
        try:
            while self._waiting:
                size = os.write(self._pipe, self._waiting)
                del self._waiting[:size]
                written += size
        except BlockingIOError:
            pass
        except OSError:
            self._reader_gone(written)
            return
        if written:
            self._send(r.Fed(size=written, closed=False))
        if self._ends and not self._waiting:
            self.close()

    def on_hangup(self) -> None:
        """Know that the worker reads no more."""
        self._reader_gone(0)

    def _reader_gone(self, written: int) -> None:
        if self._pipe >= 0:
            self.close()
            self._send(r.Fed(size=written, closed=True))

    def close(self) -> None:
        """Close the pipe and drop what waits."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        self._waiting.clear()
        self._ends = False
