"""Layer core.agent: the store in which Horovod's workers find each other, on the master's port, in a thread.

What its client (0.21 to 0.28) speaks: HTTP by IPv4, a connection for each question, ``/<scope>/<key>``. A rank stores
its host's name as ``rank_<rank>`` and its addresses as ``<rank>`` (PUT), and asks for those of all others (GET): 404 is
"not yet", asked again after 10 ms, but for names, which are asked for once. When all of a scope have met, each says so
(``DELETE /<scope>/<rank>``), long before it shuts down. Initialising again uses the same scopes, at each rank's own
pace: a fast one must not see what a slow one has stored before. So a rank's turn is how often it has said that all have
met, and as soon as one has stored something in the next turn, nothing of the last one is given out.
A GET for what is not there yet is held for a while, as n ranks that wait for each other would ask n² times every 10 ms.
We close first, as Horovod's own server does: the ports of those who close stay taken for a minute, and n² questions
would use up a node's.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time

HOLD_S = 2.0
"""How long a question for what is not there yet stays open."""
_HEAD_BYTES = 8192
_VALUE_BYTES = 1 << 20
_ALL_BYTES = 256 << 20
_MOST_CONNECTIONS = 8192
_MOST_KEYS = 1 << 21
"""Over all scopes: each worker has two in each of its six."""
_IDLE_S = 60.0
_LOOK_S = 1.0
_NO_ROOM_S = 0.05
_NAME = "rank_"
_CHUNK = 65536
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Payload Too Large", 507: "Insufficient Storage"}


class _Scope:
    """What the ranks of one scope have stored."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.turns: dict[str, int] = {}
        """How often each rank has met all others; of one that has not, nothing."""
        self.turn = 0
        """The newest turn in which something was stored."""


class Scopes:
    """Values by scope and key, of the newest turn."""

    def __init__(self) -> None:
        self._scopes: dict[str, _Scope] = {}
        self._size = 0
        self._keys = 0

    def put(self, scope: str, key: str, value: bytes) -> bool:
        """Store a value; False if there is no room for it."""
        found = self._scopes.get(scope) or _Scope()
        size = self._size + len(value) - len(found.values.get(key, b""))
        if size > _ALL_BYTES or (key not in found.values and self._keys >= _MOST_KEYS):
            return False
        self._keys += key not in found.values
        self._scopes[scope] = found
        found.values[key] = value
        found.turn = max(found.turn, found.turns.get(key.removeprefix(_NAME), 0))
        self._size = size
        return True

    def get(self, scope: str, key: str) -> bytes | None:
        """Give a value; None if it is not there, or was stored before others have begun anew."""
        found = self._scopes.get(scope)
        if found is None or found.turns.get(key.removeprefix(_NAME), 0) != found.turn:
            return None
        return found.values.get(key)

    def finish(self, scope: str, rank: str) -> None:
        """Take in that a rank has met all others: none needs its values any more. Saying so again changes nothing."""
        found = self._scopes.get(scope)
        if found is None or rank not in found.values:
            return
        for key in (rank, _NAME + rank):
            if key in found.values:
                self._size -= len(found.values.pop(key))
                self._keys -= 1
        found.turns[rank] = found.turns.get(rank, 0) + 1


class _Client:
    """One connection, for one question."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.socket = connection
        self.received = bytearray()
        self.unsent = b""
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
        look_again = time.monotonic()
        while True:
            for key, _ in self._selector.select(_LOOK_S if self._clients else None):
                if key.fd == self._end:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif (client := self._clients.get(key.fd)) is not None:
                    self._on_ready(client)
            if (now := time.monotonic()) >= look_again:
                look_again = now + _LOOK_S
                self._give_up(now)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as exc:  # nobody is there any more, or no descriptor is left
                if exc.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(_NO_ROOM_S)
                return
            if len(self._clients) >= _MOST_CONNECTIONS:
                connection.close()
                continue
            connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            client = self._clients[connection.fileno()] = _Client(connection, time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ)
            self._on_ready(client)  # mostly the question has come with the connection

    def _on_ready(self, client: _Client) -> None:
        if client.unsent:
            self._flush(client)
            return
        try:
            data = client.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
        elif client.waits_for is None:
            client.received += data
            self._take(client)

    def _take(self, client: _Client) -> None:
        """Answer the question once it is there as a whole."""
        head, found, _ = client.received.partition(b"\r\n\r\n")
        if not found:
            if len(client.received) > _HEAD_BYTES:
                self._answer(client, 400)
            return
        first, *headers = bytes(head).decode("latin-1").split("\r\n")
        length = _length(headers)
        words = first.split(" ")
        path = words[1].split("/", 2) if len(words) == 3 else []
        if length is None or len(path) != 3 or path[0] or not path[1]:
            self._answer(client, 400)
        elif length > _VALUE_BYTES:
            self._answer(client, 413)
        elif len(client.received) >= (begin := len(head) + 4) + length:
            self._do(client, words[0], path[1], path[2], bytes(client.received[begin : begin + length]))

    def _do(self, client: _Client, method: str, scope: str, key: str, value: bytes) -> None:
        if method == "PUT":
            self._answer(client, 200 if self._scopes.put(scope, key, value) else 507)
            there = self._scopes.get(scope, key)
            if there is None:
                return
            for waiting in self._waiting.pop((scope, key), []):
                waiting.waits_for = None
                self._answer(waiting, 200, there)
        elif method == "GET":
            there = self._scopes.get(scope, key)
            if there is not None:
                self._answer(client, 200, there)
                return
            client.waits_for = (scope, key)
            client.until = time.monotonic() + HOLD_S
            self._waiting.setdefault((scope, key), []).append(client)
        elif method == "DELETE":
            self._scopes.finish(scope, key)
            self._answer(client, 200)
        else:
            self._answer(client, 400)

    def _answer(self, client: _Client, status: int, body: bytes = b"") -> None:
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        client.unsent = head.encode() + body
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            client.unsent = client.unsent[client.socket.send(client.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            client.unsent = b""
        if client.unsent:
            self._selector.modify(client.socket, selectors.EVENT_WRITE)
        else:
            self._drop(client)

    def _give_up(self, now: float) -> None:
        """Say of what did not come in time that it is not there, and leave those who say nothing."""
        for client in [client for client in self._clients.values() if client.until <= now]:
            if client.waits_for is None:
                self._drop(client)
                continue
            self._forget(client)
            client.until = now + _IDLE_S
            self._answer(client, 404)

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
