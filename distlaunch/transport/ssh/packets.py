"""A packetizer for paramiko that reads in large chunks, for speed. Imported only after
``load_paramiko``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paramiko import SSHException
from paramiko.message import Message
from paramiko.packet import Packetizer

_READ = 1 << 18
_LONGEST_LINE = 8 << 10


class Packets(Packetizer):
    """A packetizer for a socket without a timeout. Closing the stream wakes waiting threads."""

    def __init__(self, sock: Any) -> None:
        super().__init__(sock)
        self._source = sock
        self._ahead = b""
        self._at = 0
        self.writing = threading.Lock()
        # Held while a packet is written, which may wait for the network.

    def send_message(self, data: Message) -> None:
        """Write a packet, after the packets that other threads write."""
        with self.writing:
            super().send_message(data)

    def send_now(self, messages: list[Message], *, may: Callable[[], bool]) -> bool:
        """Write packets if no other thread is writing and ``may`` returns True. Return whether they
        were written."""
        if not self.writing.acquire(blocking=False):
            return False
        try:
            if not may():
                return False
            for message in messages:
                super().send_message(message)
            return True
        finally:
            self.writing.release()

    def start_handshake(self, timeout: float) -> None:
        """Do nothing: the connection has its own deadline."""

    def readline(self, timeout: float) -> str:
        """Return a line that the server sends before the packets. Raises SSHException if it is too
        long."""
        line = bytearray()
        while not line.endswith(b"\n"):
            if len(line) > _LONGEST_LINE:
                raise SSHException(
                    'Indecipherable protocol version "' + line[:80].decode(errors="replace") + '"'
                )
            line += self.read_all(1)
        return line.decode(errors="replace").rstrip("\r\n")

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:  # noqa: FBT001, FBT002 - paramiko's
        """Return exactly ``n`` bytes. Raises EOFError if the stream ends earlier.

        paramiko passes ``check_rekey``, which has no effect here.
        """
        end = self._at + n
        if end <= len(self._ahead):
            data = self._ahead[self._at : end]
            self._at = end
            return data
        parts = [self._ahead[self._at :]]
        missing = n - len(parts[0])
        self._ahead, self._at = b"", 0
        while True:
            data = self._receive_at_least(missing)
            if len(data) >= missing:
                break
            parts.append(data)
            missing -= len(data)
        parts.append(data[:missing])
        self._ahead, self._at = data, missing
        return b"".join(parts)

    def _receive_at_least(self, least: int) -> bytes:
        while True:
            try:
                data: bytes = self._source.recv(max(_READ, least))
            except TimeoutError:  # from a timeout that was set before it was removed
                if self.closed:
                    raise EOFError from None
                continue
            except OSError:
                if self.closed:
                    raise EOFError from None
                raise
            if not data:
                raise EOFError
            return data
