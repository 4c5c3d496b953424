"""A link to a child process: its stdin and stdout are the stream, its stderr is kept aside."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Mapping, Sequence

from distlaunch.transport.bootstrap import quoted_lines
from distlaunch.transport.child_process import Child, Leash
from distlaunch.transport.patience import patience

_CHUNK = 1 << 18
_END_S = 2.0


class ProcessLink:
    """Starts a program, whose stdin and stdout are the stream.

    ``close`` kills a mere carrier of bytes (``ssh``), which hangs on a leash; an agent ends by the closed stream.
    """

    def __init__(self, argv: Sequence[str], *, environ: Mapping[str, str], leash: Leash | None) -> None:
        self._child = Child(argv, environ=environ, leash=leash)
        self._socket = self._child.stream
        self.is_polled = False
        """A main loop has it, which is not to be held up by asking how the program has ended."""
        self._pending = b""
        self._always = -1
        self._ended = False
        self._closed = False
        self._closed_here = False
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._epoll.register(self._child.words_end, select.EPOLLIN)  # until it is closed

    def fileno(self) -> int:
        """Give a descriptor that is ready for stream and stderr alike, so that neither fills up."""
        return self._epoll.fileno()

    def receive(self) -> bytes | None:
        """Give what has come; see ``Link``."""
        with self._lock:
            return None if self._closed else self._received()

    def _received(self) -> bytes | None:
        self._child.said()
        if self._pending:
            data, self._pending = self._pending, b""
            self._epoll.unregister(self._always)
            os.close(self._always)
            self._always = -1
            return data
        if self._ended:
            return None
        try:
            data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self._ended = True
            return None
        return data

    def unread(self, data: bytes) -> None:
        """Have ``receive`` give this first, and ``fileno`` be ready for it."""
        self._pending = data
        self._always = os.eventfd(1, os.EFD_CLOEXEC)
        self._epoll.register(self._always, select.EPOLLIN)

    def send(self, data: bytes) -> None:
        """Send all of it; see ``Link``."""
        self._socket.sendall(data)

    def last_words(self) -> bytes:
        """Give the last of what it wrote to stderr."""
        with self._lock:
            return self._child.said()

    def returncode(self, within_s: float = 0.0) -> int | None:
        """Give how the program ended, waiting so long for that; None if it has not."""
        return self._child.returncode(within_s)

    def close(self) -> None:
        """Close the stream; see ``Link``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._child.close()
        self._closed_here = not self._ended
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a sender
        except OSError:
            pass  # it had ended
        self._epoll.close()
        self._socket.close()
        if self._always >= 0:
            os.close(self._always)

    def forget_words(self) -> None:
        """Have no last words but those that come from now on."""
        with self._lock:
            self._child.forget()

    def why_closed(self) -> str:
        """Say how the program ended, and what it said last; see ``Link``."""
        return self.how_ended() + quoted_lines(self.last_words(), 1)

    def how_ended(self) -> str:
        """Say how the program ended."""
        if self._closed_here:
            return "the link was closed here"
        code = self.returncode()
        if code is None and self._ended:
            code = patience.spend(self.returncode) if self.is_polled else self.returncode(_END_S)
        if code is None:
            return "it closed its output"
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with status {code}"
