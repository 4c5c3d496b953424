"""Layer core.agent: the store in which Horovod's workers find each other, on the master's port, in a thread.

What its client speaks: HTTP, ``/<scope>/<rank>``. PUT stores a rank's addresses; GET gives them, or 404 as long as they
are not there, and is then tried again after 10 ms; DELETE says that the rank has shut down. Ranks shut down and
initialise again at their own pace, so a fast one must not see what a slow one has stored before: a rank's turn is how
often it has shut down, and as soon as one has stored something in the next turn, nothing of the last one is given out.
A GET for what is not there yet is held for a while, as n ranks that wait for each other would ask n² times every 10 ms.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from contextlib import suppress

HOLD_S = 2.0
"""How long a question for what is not there yet stays open."""
_HEAD_BYTES = 8192
_VALUE_BYTES = 1 << 20
_ALL_BYTES = 256 << 20
_MOST_CONNECTIONS = 8192
_MOST_RANKS = 1 << 20
"""Over all scopes: each worker is in three."""
_IDLE_S = 60.0
_CHUNK = 65536
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Payload Too Large", 507: "Insufficient Storage"}


class _Scope:
    """What the ranks of one scope have stored."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[int, bytes]] = {}
        """By rank, with the turn in which it was stored."""
        self.turns: dict[str, int] = {}
        """How often each rank has shut down; of one that has not, nothing."""
        self.newest = 0
        """The newest turn in which something was stored."""


class Scopes:
    """Values by scope and rank, of the newest turn."""

    def __init__(self) -> None:
        self._scopes: dict[str, _Scope] = {}
        self._size = 0
        self._ranks = 0

    def put(self, scope: str, rank: str, value: bytes) -> bool:
        """Store a value; False if there is no room for it."""
        found = self._scopes.get(scope) or _Scope()
        size = self._size + len(value) - len(found.values.get(rank, (0, b""))[1])
        is_new = rank not in found.values
        if size > _ALL_BYTES or (is_new and self._ranks >= _MOST_RANKS):
            return False
        self._size, self._ranks = size, self._ranks + is_new
        self._scopes[scope] = found
        turn = found.turns.get(rank, 0)
        found.values[rank] = turn, value
        found.newest = max(found.newest, turn)
        return True

    def get(self, scope: str, rank: str) -> bytes | None:
        """Give a value; None if it is not there, or its rank has yet to come up again where others are."""
        found = self._scopes.get(scope)
        turn, value = found.values.get(rank, (-1, b"")) if found is not None else (-1, b"")
        return value if found is not None and turn == found.newest else None

    def finish(self, scope: str, rank: str) -> None:
        """Take in that a rank has shut down; others may still want what it has stored."""
        found = self._scopes.get(scope)
        if found is not None and rank in found.values:
            found.turns[rank] = found.turns.get(rank, 0) + 1


class _Client:
    """One connection."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.socket = connection
        self.received = bytearray()
        self.unsent = b""
        self.ends = False
        """It is closed as soon as all is sent."""
        self.waits_for: tuple[str, str] | None = None
        self.until = now + _IDLE_S


class Store:
    """Serves one attempt's workers from ``start`` to ``close``."""

    def __init__(self, listener: socket.socket) -> None:
        """Take over ``listener``, which does not block."""
        self._listener = listener
        self._scopes = Scopes()
        self._clients: dict[int, _Client] = {}
        self._waiting: dict[tuple[str, str], list[_Client]] = {}
        self._selector = selectors.DefaultSelector()
        self._end, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="dl-store", daemon=True)

    def start(self) -> None:
        """Serve from now on. Raises RuntimeError if no thread can be started."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._end, selectors.EVENT_READ)
        try:
            self._thread.start()
        except RuntimeError:
            self._free()
            raise

    def close(self) -> None:
        """End the thread and every connection."""
        os.write(self._wake, b"x")
        self._thread.join()
        self._free()

    def _free(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        os.close(self._end)
        os.close(self._wake)

    # --- the thread

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select(self._patience_s()):
                if key.fd == self._end:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif (client := self._clients.get(key.fd)) is not None:
                    self._on_ready(client, events)
            self._give_up(time.monotonic())

    def _patience_s(self) -> float | None:
        return HOLD_S / 2 if self._clients else None

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody is there any more, or no descriptor is left: the rest is tried again
                return
            if len(self._clients) >= _MOST_CONNECTIONS:
                connection.close()
                continue
            connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._clients[connection.fileno()] = _Client(connection, time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ)

    def _on_ready(self, client: _Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(client)
        if events & selectors.EVENT_READ and client.socket.fileno() >= 0:
            try:
                data = client.socket.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(client)
                return
            client.until = time.monotonic() + _IDLE_S
            client.received += data
            self._take(client)

    def _take(self, client: _Client) -> None:
        """Answer what has come whole; one question after the other."""
        while client.waits_for is None and not client.ends:
            head, found, _ = client.received.partition(b"\r\n\r\n")
            if not found:
                if len(client.received) > _HEAD_BYTES:
                    self._answer(client, 400, ends=True)
                return
            lines = bytes(head).decode("latin-1").split("\r\n")
            length = _length(lines[1:])
            words = lines[0].split(" ")
            path = words[1].split("/", 2) if len(words) == 3 else []
            if length is None or len(path) != 3 or path[0] or not path[1]:
                self._answer(client, 400, ends=True)
                return
            if length > _VALUE_BYTES:
                self._answer(client, 413, ends=True)
                return
            whole = len(head) + 4 + length
            if len(client.received) < whole:
                return
            value = bytes(client.received[len(head) + 4 : whole])
            del client.received[:whole]
            client.ends = any(line.lower().replace(" ", "") == "connection:close" for line in lines[1:])
            self._do(client, words[0], path[1], path[2], value)

    def _do(self, client: _Client, method: str, scope: str, key: str, value: bytes) -> None:
        ends = client.ends
        client.ends = False
        if method == "PUT":
            stored = self._scopes.put(scope, key, value)
            self._answer(client, 200 if stored else 507, ends=ends)
            there = self._scopes.get(scope, key)
            if there is not None:
                for waiting in self._waiting.pop((scope, key), []):
                    waiting.waits_for = None
                    self._answer(waiting, 200, there, ends=waiting.ends)
                    self._take(waiting)
        elif method == "GET":
            there = self._scopes.get(scope, key)
            if there is not None:
                self._answer(client, 200, there, ends=ends)
                return
            client.waits_for, client.ends = (scope, key), ends
            client.until = time.monotonic() + HOLD_S
            self._waiting.setdefault((scope, key), []).append(client)
        elif method == "DELETE":
            self._scopes.finish(scope, key)
            self._answer(client, 200, ends=ends)
        else:
            self._answer(client, 400, ends=True)

    def _answer(self, client: _Client, status: int, body: bytes = b"", *, ends: bool) -> None:
        how = "Connection: close\r\n" if ends else ""
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\n{how}Content-Length: {len(body)}\r\n\r\n"
        client.ends = ends
        client.unsent += head.encode() + body
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            client.unsent = client.unsent[client.socket.send(client.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        if not client.unsent and client.ends and client.waits_for is None:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.socket, events)

    def _give_up(self, now: float) -> None:
        """Say of what did not come in time that it is not there, and leave those who say nothing."""
        for client in [client for client in self._clients.values() if client.until <= now]:
            if client.waits_for is None:
                self._drop(client)
                continue
            self._forget(client)
            client.until = now + _IDLE_S
            self._answer(client, 404, ends=client.ends)
            if client.socket.fileno() >= 0:
                self._take(client)

    def _forget(self, client: _Client) -> None:
        if client.waits_for is not None:
            others = [other for other in self._waiting.get(client.waits_for, []) if other is not client]
            if others:
                self._waiting[client.waits_for] = others
            else:
                self._waiting.pop(client.waits_for, None)
            client.waits_for = None

    def _drop(self, client: _Client) -> None:
        self._forget(client)
        if self._clients.pop(client.socket.fileno(), None) is not None:
            self._selector.unregister(client.socket)
        client.socket.close()


def _length(headers: list[str]) -> int | None:
    """Give how many bytes follow the head; None for what is no number."""
    for line in headers:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            value = value.strip()
            return int(value) if value.isascii() and value.isdigit() and len(value) < 12 else None
    return 0
