"""Serve the HTTP key-value store with which Horovod's workers find each other.

The client (Horovod 0.21 to 0.28) speaks HTTP over IPv4 and opens a connection for each request to
``/<scope>/<key>``.
"""

from __future__ import annotations

import errno
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

HOLD_S = 2.0
"""How long the reply to a GET for a missing value is delayed."""
_HEAD_BYTES = 8192
_VALUE_BYTES = 1 << 20
_MOST_CONNECTIONS = 8192
_LEAST_CONNECTIONS = 16
_ACCEPTED_AT_ONCE = 256
_CLIENT_BYTES = 1024
"""Memory of a client in Python, without its data."""
_IDLE_S = 60.0
_LOOK_S = 1.0
_NO_RESOURCES_S = 0.05
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CLOSE_S = 2.0
_CHUNK = 65536
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    413: "Payload Too Large",
    507: "Insufficient Storage",
}
_ALL_BYTES = 256 << 20
_SCOPE_BYTES, _KEY_BYTES = 1024, 256
"""Memory of a scope and of a key in Python, without names and values."""
_NAME = "rank_"


class HorovodStore:
    """Serves the workers of one attempt, in a thread, from ``start`` to ``close``.

    A rank stores its host's name as ``rank_<rank>`` and its addresses as ``<rank>`` (PUT), and asks
    for those of all others (GET). The client interprets 404 as "not yet" and asks again after 10
    ms, except for names, for which it asks once. Replies for missing values are delayed, because n
    waiting ranks would otherwise send n² requests every 10 ms.

    The server closes each connection first, as Horovod's own server does: the port of a connection
    remains in use for a minute on the side that closes, and n² requests would use up the ports of a
    client's node.

    Anybody who reaches the port may send requests. So ``MemoryBudget`` limits all memory of the
    store: values, names, and unsent bytes.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        loopback_only: bool = False,
        failed: Callable[[str], None] | None = None,
        hold_s: float = HOLD_S,
    ) -> None:
        """Own ``listener``, which must not block.

        With ``loopback_only``, clients on other machines are refused. ``failed`` gets the reason if
        the thread fails, in the thread.
        """
        self._listener = listener
        self._loopback_only = loopback_only
        self._failed = failed
        self._hold_s = hold_s
        self._is_closing = False
        self._most = _most_connections()
        self._budget = MemoryBudget()
        self._scopes = Scopes(self._budget)
        self._clients: dict[int, _Client] = {}
        self._waiting: dict[tuple[str, str], dict[int, _Client]] = {}
        self._selector = selectors.DefaultSelector()
        self._end, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="dl-store", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if no thread can be started."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._end, selectors.EVENT_READ)
        try:
            self._thread.start()
        except RuntimeError:
            self._close_all()
            os.close(self._wake)
            raise

    def close(self) -> None:
        """Stop the thread, which closes all connections. Wait up to ``_CLOSE_S``."""
        self._is_closing = True
        with suppress(OSError):  # the thread has ended
            os.write(self._wake, b"x")
        self._thread.join(_CLOSE_S)
        os.close(self._wake)

    def _close_all(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        os.close(self._end)

    # --- the thread

    def _serve(self) -> None:
        try:
            self._serve_all()
        except Exception as exc:  # noqa: BLE001 - workers would wait forever
            if self._failed is not None:
                self._failed(f"{type(exc).__name__}: {exc}")
        finally:
            self._close_all()

    def _serve_all(self) -> None:
        look_again = time.monotonic()
        while True:
            for key, _ in self._selector.select(_LOOK_S if self._clients else None):
                if self._is_closing:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif (client := self._clients.get(key.fd)) is not None:
                    self._on_ready(client)
            if (now := time.monotonic()) >= look_again:
                look_again = now + _LOOK_S
                self._expire(now)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._is_closing:
                return
            try:
                connection, address = self._listener.accept()
            except OSError as exc:  # the client has left, or there are no descriptors
                if exc.errno in _NO_RESOURCES:
                    time.sleep(_NO_RESOURCES_S)
                return
            if len(self._clients) >= self._most or (
                self._loopback_only and not is_loopback(address[0])
            ):
                connection.close()
                continue
            connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            client = _Client(connection, time.monotonic())
            try:
                self._selector.register(connection, selectors.EVENT_READ)
            except OSError:  # out of memory
                connection.close()
                continue
            self._clients[client.number] = client
            if self._charge(client, _CLIENT_BYTES):
                self._on_ready(client)  # usually the request has come with the connection

    def _charge(self, client: _Client, size: int) -> bool:
        """Reserve memory for a client's data. Return False, after an error to the client, if none
        is left."""
        if not self._budget.reserve(size):
            self._answer(client, 507)
            return False
        client.reserved += size
        return True

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
        elif client.waits_for is None and self._charge(client, len(data)):
            client.received += data
            self._on_data(client)

    def _on_data(self, client: _Client) -> None:
        """Handle the client's request once it is complete."""
        if client.request is None and not self._parse_head(client):
            return
        if client.request is not None and len(client.received) >= client.request[3]:
            method, scope, key, length = client.request
            value = bytes(memoryview(client.received)[:length])
            client.received = bytearray()
            self._budget.release(
                client.reserved
            )  # values that are kept have reserved their own memory
            client.reserved = 0
            if self._charge(client, _CLIENT_BYTES + len(scope) + len(key)):
                self._handle(client, method, scope, key, value)

    def _parse_head(self, client: _Client) -> bool:
        """Parse the request's head. Return whether it is complete and valid; an invalid one is
        answered with an HTTP error."""
        head, found, rest = client.received.partition(b"\r\n\r\n")
        if len(head) > _HEAD_BYTES:
            self._answer(client, 400)
        if not found or len(head) > _HEAD_BYTES:
            return False
        first, *headers = bytes(head).decode("latin-1").split("\r\n")
        length = _content_length(headers)
        parts = first.split(" ")
        path = parts[1].split("/", 2) if len(parts) == 3 else []
        if length is None or len(path) != 3 or path[0] or not path[1]:
            self._answer(client, 400)
        elif length > _VALUE_BYTES:
            self._answer(client, 413)
        else:
            client.request, client.received = (parts[0], path[1], path[2], length), rest
            return True
        return False

    def _handle(self, client: _Client, method: str, scope: str, key: str, value: bytes) -> None:
        """Answer a request. A GET for a missing value has to wait."""
        if method == "PUT":
            self._answer(client, 200 if self._scopes.put(scope, key, value) else 507)
            there = self._scopes.get(scope, key)
            if there is None:
                return
            for waiting in self._waiting.pop((scope, key), {}).values():
                waiting.waits_for = None
                self._answer(waiting, 200, there)
        elif method == "GET":
            there = self._scopes.get(scope, key)
            if there is not None:
                self._answer(client, 200, there)
                return
            client.waits_for = (scope, key)
            client.until = time.monotonic() + self._hold_s
            self._waiting.setdefault((scope, key), {})[client.number] = client
        elif method == "DELETE":
            self._scopes.finish(scope, key)
            self._answer(client, 200)
        else:
            self._answer(client, 400)

    def _answer(self, client: _Client, status: int, value: Value | None = None) -> None:
        """Send a reply, and then close the connection."""
        body = b"" if value is None else value.data
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nConnection: close\r\nContent-Length: "
            f"{len(body)}\r\n\r\n"
        )
        if value is not None:
            value.add_user()
            client.value = value
        client.received = bytearray()
        client.unsent = [memoryview(part) for part in (head.encode(), body) if part]
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            sent = client.socket.sendmsg(client.unsent)
            while client.unsent and sent >= len(client.unsent[0]):
                sent -= len(client.unsent.pop(0))
            if client.unsent:
                client.unsent[0] = client.unsent[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            client.unsent = []
        if client.unsent:
            self._selector.modify(client.socket, selectors.EVENT_WRITE)
        else:
            self._drop(client)

    def _expire(self, now: float) -> None:
        """Send 404 for requests that have waited too long, and drop idle clients."""
        for client in [client for client in self._clients.values() if client.until <= now]:
            if client.waits_for is None:
                self._drop(client)
                continue
            self._stop_waiting(client)
            client.until = now + _IDLE_S
            self._answer(client, 404)

    def _stop_waiting(self, client: _Client) -> None:
        if client.waits_for is not None:
            waiting = self._waiting.get(client.waits_for, {})
            waiting.pop(client.number, None)
            if not waiting:
                self._waiting.pop(client.waits_for, None)
            client.waits_for = None

    def _drop(self, client: _Client) -> None:
        self._stop_waiting(client)
        if self._clients.pop(client.number, None) is not None:
            self._selector.unregister(client.socket)
            self._budget.release(client.reserved)
            if client.value is not None:
                client.value.remove_user()
        client.socket.close()


class _Client:
    """A connection with one request."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.socket = connection
        self.number = connection.fileno()
        self.received = bytearray()
        self.request: tuple[str, str, str, int] | None = None
        """Method, scope, key and body length of the head. ``received`` is then the body."""
        self.unsent: list[memoryview] = []
        self.value: Value | None = None
        self.reserved = 0
        self.waits_for: tuple[str, str] | None = None
        self.until = now + _IDLE_S


class Scopes:
    """Values by scope and key, of the newest round.

    When a rank has the values of all others, it sends ``DELETE /<scope>/<rank>``. If Horovod is
    initialised again in the same processes, the ranks use the same scopes, each at its own pace,
    and a fast rank must not see old values of a slow one. A rank's round is the number of its
    DELETE requests. Once a rank has stored a value in the next round, values of the previous round
    are no longer returned.
    """

    def __init__(self, budget: MemoryBudget | None = None) -> None:
        self._scopes: dict[str, _Scope] = {}
        self._budget = budget or MemoryBudget()

    def put(self, scope: str, key: str, value: bytes) -> bool:
        """Store a value. Return False if the memory limit does not allow it."""
        found = self._scopes.get(scope)
        old = found.values.get(key) if found is not None else None
        size = len(value)
        if found is None:
            size += _SCOPE_BYTES + len(scope)
        if old is None and (found is None or key not in found.rounds):
            size += _KEY_BYTES + len(key)
        if size > self._budget.left + (0 if old is None else old.replaceable_bytes):
            return False
        if found is None:
            found = self._scopes[scope] = _Scope()
        if old is not None:
            old.remove_user()
        self._budget.reserve(size)
        found.values[key] = Value(value, self._budget)
        found.round = max(found.round, found.rounds.get(key.removeprefix(_NAME), 0))
        return True

    def get(self, scope: str, key: str) -> Value | None:
        """Return a value; None if it is missing or of an earlier round."""
        found = self._scopes.get(scope)
        if found is None or found.rounds.get(key.removeprefix(_NAME), 0) != found.round:
            return None
        return found.values.get(key)

    def finish(self, scope: str, rank: str) -> None:
        """Record that a rank has the values of all others. A repeated call has no effect."""
        found = self._scopes.get(scope)
        if found is None or rank not in found.values:
            return
        found.rounds[rank] = found.rounds.get(rank, 0) + 1  # uses the memory of its key from now on
        for key in (rank, _NAME + rank):
            if key in found.values:
                found.values.pop(key).remove_user()
                if key not in found.rounds:
                    self._budget.release(_KEY_BYTES + len(key))


class _Scope:
    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.rounds: dict[str, int] = {}
        """How often each rank has received the values of all others."""
        self.round = 0
        """The newest round in which a value was stored."""


class Value:
    """A stored value. Its memory is reserved until it has been replaced and sent to all clients
    that requested it."""

    def __init__(self, data: bytes, budget: MemoryBudget) -> None:
        self.data = data
        self._budget = budget
        self._users = 1

    @property
    def replaceable_bytes(self) -> int:
        """How many bytes a replacement would free now."""
        return len(self.data) if self._users == 1 else 0

    def add_user(self) -> None:
        """Add a client that is being sent the value."""
        self._users += 1

    def remove_user(self) -> None:
        """Remove a client, or the store after a replacement. Removing the last one releases the
        memory."""
        self._users -= 1
        if not self._users:
            self._budget.release(len(self.data))


class MemoryBudget:
    """The number of bytes that may still be reserved."""

    def __init__(self, size: int = _ALL_BYTES) -> None:
        self.left = size

    def reserve(self, size: int) -> bool:
        """Reserve ``size`` bytes. Return False if fewer are left."""
        if size > self.left:
            return False
        self.left -= size
        return True

    def release(self, size: int) -> None:
        """Release bytes."""
        self.left += size


def is_loopback(address: str) -> bool:
    """Return whether the address is a loopback address."""
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


def _most_connections() -> int:
    """Return the largest number of clients: half of the files that may still be open, because
    workers need files, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    free = soft - len(os.listdir("/proc/self/fd"))
    return min(_MOST_CONNECTIONS, max(_LEAST_CONNECTIONS, free // 2))


def _content_length(headers: list[str]) -> int | None:
    """Return the length of the request's body, 0 without a header; None if the header is no
    number."""
    for line in headers:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            value = value.strip()
            return int(value) if value.isascii() and value.isdigit() and len(value) < 12 else None
    return 0
