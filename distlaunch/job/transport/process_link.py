"""Layer job.transport: a link to a child process: its stdin and stdout are the stream, its stderr is kept aside."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

from distlaunch.job.transport.bootstrap import quoted_lines

_CHUNK = 1 << 18
_MOST_WORDS = 16 << 10
_REAP_S = 2.0
PATIENCE_S = 0.1
"""What a main loop may wait for the exit status of a program whose output has ended."""

_unreaped: list[subprocess.Popen[bytes]] = []
"""Agents of this machine whose links are closed: they end when their workers have."""


class ProcessLink:
    """Starts a program in a session of its own, where a terminal's Ctrl-C does not reach it.

    ``close`` kills a mere carrier of bytes (``ssh``); an agent ends by itself, by the closed stream.
    """

    def __init__(self, argv: Sequence[str], *, environ: Mapping[str, str], killed: bool) -> None:
        reap()
        ours, theirs = socket.socketpair()
        words_end, their_words = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(their_words, True)
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=their_words,
                env=dict(environ),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(words_end)
            raise
        finally:
            theirs.close()
            os.close(their_words)
        self._socket = ours
        self._words_end: int | None = words_end
        self._words = bytearray()
        self._killed = killed
        self.patience_s = _REAP_S
        """How long ``why_closed`` waits for the program to end after its output."""
        self._pending = b""
        self._always = -1
        self._ended = False
        self._closed = False
        self._closed_here = False
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(ours, select.EPOLLIN)
        self._epoll.register(words_end, select.EPOLLIN)

    def fileno(self) -> int:
        """Give a descriptor that is ready for stream and stderr alike, so that neither fills up."""
        return self._epoll.fileno()

    def receive(self) -> bytes | None:
        """Give what has come; see ``Link``."""
        with self._lock:
            return None if self._closed else self._received()

    def _received(self) -> bytes | None:
        self._take_words()
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

    def _take_words(self) -> None:
        while self._words_end is not None:
            try:
                words = os.read(self._words_end, _CHUNK)
            except BlockingIOError:
                return
            self._words += words
            del self._words[:-_MOST_WORDS]
            if not words:
                self._epoll.unregister(self._words_end)
                os.close(self._words_end)
                self._words_end = None

    def send(self, data: bytes) -> None:
        """Send all of it; see ``Link``."""
        self._socket.sendall(data)

    def last_words(self) -> bytes:
        """Give the last of what it wrote to stderr."""
        with self._lock:
            if not self._closed:
                self._take_words()
            return bytes(self._words)

    def returncode(self, within_s: float = 0.0) -> int | None:
        """Give how the program ended, waiting a little for that; None if it has not."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Close the stream; see ``Link``."""
        with self._lock:
            if self._closed:
                return
            self._take_words()
            self._closed = True
        self._closed_here = not self._ended
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a sender
        except OSError:
            pass  # it had ended
        if self._killed and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self.returncode(_REAP_S)
        if self._process.poll() is None:
            _unreaped.append(self._process)
        self._epoll.close()
        self._socket.close()
        for descriptor in (self._words_end, self._always if self._always >= 0 else None):
            if descriptor is not None:
                os.close(descriptor)

    def forget_words(self) -> None:
        """Have no last words but those that come from now on."""
        self.last_words()
        self._words.clear()

    def why_closed(self) -> str:
        """Say how the program ended, and what it said last; see ``Link``."""
        return self.how_ended() + quoted_lines(self.last_words(), 1)

    def how_ended(self) -> str:
        """Say how the program ended."""
        if self._closed_here:
            return "the link was closed here"
        code = self.returncode(self.patience_s if self._ended else 0.0)
        if code is None:
            return "it closed its output"
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with status {code}"


def reap() -> None:
    """Collect the agents of this machine that have ended since their links were closed."""
    for process in list(_unreaped):
        if process.poll() is not None:
            _unreaped.remove(process)
