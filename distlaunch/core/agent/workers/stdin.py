"""Write data from the coordinator to a worker's stdin, through a pipe that never blocks the
agent."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress

from distlaunch.core.errors import ProtocolError
from distlaunch.core.protocol import agent_messages as m

_MOST_BYTES = 4 << 20
"""Largest number of bytes that may wait here. The coordinator sends more only after
``StdinConsumed``."""


class StdinPipe:
    """The stdin pipe of one attempt's worker, and the data that is queued for the pipe."""

    def __init__(self, send: Callable[[m.StdinConsumed], None]) -> None:
        self._send = send
        self._pipe = -1
        self._rest = -1
        """Read end of a pipe whose write end is closed, needed to count unread bytes."""
        self._waiting = bytearray()
        self._ends = False

    def open(self) -> int:
        """Create a new pipe and return the worker's end. Raises OSError."""
        self.close()
        theirs, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        return theirs

    def write(self, data: bytes) -> None:
        """Queue bytes for the worker's stdin and write as many as fit. Empty bytes close the pipe.

        Without a pipe, reports the bytes as unread. Raises ProtocolError if more than _MOST_BYTES
        are queued.
        """
        if self._pipe < 0:
            self._send(m.StdinConsumed(size=0, closed=True, unread=len(data)))
            return
        if not data:
            self._ends = True
        self._waiting += data
        if len(self._waiting) > _MOST_BYTES:
            raise ProtocolError(f"over {_MOST_BYTES} bytes of stdin wait to be taken")
        self.on_ready()

    def descriptors(self) -> dict[int, int]:
        """Return the poll events by descriptor.

        The pipe is polled for writing while data waits, and always for a hang-up of the worker.
        """
        return {} if self._pipe < 0 else {self._pipe: select.POLLOUT if self._waiting else 0}

    def on_ready(self) -> None:
        """Write as many bytes as fit, and report how many were written."""
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
            self._on_reader_gone(written)
            return
        if written:
            self._send(m.StdinConsumed(size=written, closed=False))
        if self._ends and not self._waiting:
            self._end_input()

    def on_hangup(self) -> None:
        """Report that the worker has closed its stdin, and close the pipe."""
        self._on_reader_gone(0)

    def _on_reader_gone(self, written: int) -> None:
        if self._pipe >= 0:
            unread = self._count_unread()
            self.close()
            self._send(m.StdinConsumed(size=written, closed=True, unread=unread))

    def _end_input(self) -> None:
        with suppress(OSError):  # without /proc, unread bytes are not counted
            self._rest = os.open(
                f"/proc/self/fd/{self._pipe}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )
        os.close(self._pipe)
        self._pipe = -1

    def finish(self) -> None:
        """Report how many bytes an exited worker has not read, if any, and close the pipe."""
        unread = self._count_unread()
        self.close()
        if unread:
            self._send(m.StdinConsumed(size=0, closed=True, unread=unread))

    def _count_unread(self) -> int:
        descriptor = max(self._pipe, self._rest)
        if descriptor < 0:
            return 0
        import fcntl
        import termios

        try:
            found = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
        except OSError:
            found = bytes(4)
        return len(self._waiting) + int.from_bytes(found, sys.byteorder)

    def close(self) -> None:
        """Close the pipe and drop waiting data."""
        for descriptor in (self._pipe, self._rest):
            if descriptor >= 0:
                os.close(descriptor)
        self._pipe = self._rest = -1
        self._waiting.clear()
        self._ends = False
