"""Exchange messages and descriptors over a Unix socket without blocking."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from distlaunch.core.protocol.codec import Decoder, encode

_READ_BYTES = 1 << 18
_MAX_DESCRIPTORS = 32

M = TypeVar("M")


class Channel(Generic[M]):
    """One end of a Unix socket pair. Descriptors passed to ``send`` are closed once they have been
    sent."""

    def __init__(self, end: socket.socket, decoder: Decoder[M]) -> None:
        end.setblocking(False)  # noqa: FBT003 - the standard library's signature
        self._socket = end
        self._decoder = decoder
        self._out: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.received: deque[int] = deque()
        """Received descriptors, in the order of their messages."""

    def fileno(self) -> int:
        """Return the descriptor to poll for reading, and for writing while ``has_unsent``."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether messages are queued."""
        return bool(self._out)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Queue a message and send as much as possible. Raises OSError (EPIPE) if the other process
        has ended."""
        self._out.append((encode(message), tuple(descriptors)))
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as possible."""
        while self._out:
            data, descriptors = self._out[0]
            rights = (
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                if descriptors
                else []
            )
            try:
                sent = self._socket.sendmsg([data], rights)
            except BlockingIOError:
                return
            for descriptor in descriptors:
                os.close(descriptor)
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], ())

    def receive(self) -> list[M] | None:
        """Return the messages that have arrived; None at the end of the stream."""
        messages: list[M] = []
        while True:
            try:
                data, rights, _, _ = self._socket.recvmsg(
                    _READ_BYTES, socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return messages
            except ConnectionError:
                return None
            for _, _, payload in rights:
                descriptors = array.array("i")
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
                self.received.extend(descriptors)
            if not data:
                return messages or None
            messages += self._decoder.feed(data)

    def close(self) -> None:
        """Close this end and all queued descriptors."""
        for _, descriptors in self._out:
            for descriptor in descriptors:
                os.close(descriptor)
        self._out.clear()
        self._socket.close()
