"""A connection over TCP that the other end has opened to this process."""

from __future__ import annotations

import os
import socket
import threading

from distlaunch.core.agent.connect import set_socket_options
from distlaunch.transport.connection import ConnectionEnd, EndKind

_CHUNK = 1 << 18
_MOST_DRAINED = 1 << 20


class TcpConnection:
    """Owns a connected socket. ``address`` is the other end's, for messages."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(True)  # noqa: FBT003 - the standard library's signature
        try:
            set_socket_options(connection)
        except OSError:  # it has been reset already
            pass
        self.address = address
        self._socket = connection
        self._ended: ConnectionEnd | None = None
        self._closed = False
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._socket.fileno()

    def receive(self) -> bytes | None:
        """Return the bytes that have arrived, perhaps none; None after the end."""
        if self._closed or self._ended:
            return None
        try:
            data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError as exc:
            text = os.strerror(exc.errno or 0).lower()
            self._ended = ConnectionEnd(kind=EndKind.LOST, text=text)
            return None
        if not data:
            self._ended = ConnectionEnd(kind=EndKind.CLOSED_BY_PEER)
            return None
        return data

    def send(self, data: bytes) -> None:
        """Send all bytes. Blocks while the network is busy. Raises OSError if the connection is
        closed."""
        self._socket.sendall(data, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Close the connection, which wakes a thread that sends. Can be called again.

        Sent bytes still arrive, unless the other end keeps sending.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a sender
            for _ in range(
                _MOST_DRAINED // _CHUNK
            ):  # close() with unread bytes would drop bytes that are being sent
                if not self._socket.recv(_CHUNK, socket.MSG_DONTWAIT):
                    break
        except OSError:
            pass  # it had ended
        self._socket.close()

    def end(self) -> ConnectionEnd:
        """Return how the connection ended; ``CLOSED`` if this side has closed it."""
        return self._ended or ConnectionEnd(kind=EndKind.CLOSED)
