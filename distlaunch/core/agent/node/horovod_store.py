"""The HTTP key-value store in which Horovod's workers find each other, served in a thread.

The client (Horovod 0.21 to 0.28) speaks HTTP over IPv4 and opens a connection for each request to
``/<scope>/<key>``. ``Store`` says how requests are answered and ``Scopes`` which values are kept.
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
"""How long a question for what is not there yet stays open."""
_HEAD_BYTES = 8192
_VALUE_BYTES = 1 << 20
_MOST_CONNECTIONS = 8192
_LEAST_CONNECTIONS = 16
_ACCEPTED_AT_ONCE = 256
_CLIENT_BYTES = 1024
"""What Python takes for each beside what it says."""
_IDLE_S = 60.0
_LOOK_S = 1.0
_NO_ROOM_S = 0.05
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
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
"""What Python takes for each beside its name and value."""
_NAME = "rank_"


class Store:
    """Serves one attempt's workers from ``start`` to ``close``.

    A rank stores its host's name as ``rank_<rank>`` and its addresses as ``<rank>`` (PUT), and asks
    for those of all others (GET). The client takes 404 for "not yet" and asks again after 10 ms,
    except for names, which it asks for once. A GET for a value that is not there yet is therefore
    held for a while: n ranks that wait for each other would ask n² times every 10 ms.

    The server closes each connection first, as Horovod's own server does. The ports of the side
    that closes stay in use for a minute, and n² requests would use up the ports of a node.

    Anybody who reaches the port may ask, so one limit (``Room``) holds for all that the store keeps
    for others: values, names, and unsent bytes.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        only_here: bool = False,
        failed: Callable[[str], None] | None = None,
        hold_s: float = HOLD_S,
    ) -> None:
        """Take over ``listener``, which does not block. ``only_here``: nobody of another machine is
        served.

        ``failed`` is told, by the thread, why it has ended before ``close``.
        """
        self._listener = listener
        self._only_here = only_here
        self._failed = failed
        self._hold_s = hold_s
        self._is_closing = False
        self._most = _most_connections()
        self._room = Room()
        self._scopes = Scopes(self._room)
        self._clients: dict[int, _Client] = {}
        self._waiting: dict[tuple[str, str], dict[int, _Client]] = {}
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
            os.close(self._wake)
            raise

    def close(self) -> None:
        """End the thread, which ends every connection; wait for that, bounded."""
        self._is_closing = True
        with suppress(OSError):  # it has ended
            os.write(self._wake, b"x")
        self._thread.join(_CLOSE_S)
        os.close(self._wake)

    def _free(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        os.close(self._end)

    # --- the thread

    def _serve(self) -> None:
        try:
            self._serve_all()
        except Exception as exc:  # noqa: BLE001 - workers would wait for answers that nobody gives
            if self._failed is not None:
                self._failed(f"{type(exc).__name__}: {exc}")
        finally:
            self._free()

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
                self._give_up(now)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._is_closing:
                return
            try:
                connection, address = self._listener.accept()
            except OSError as exc:  # nobody is there any more, or no descriptor is left
                if exc.errno in _NO_ROOM:
                    time.sleep(_NO_ROOM_S)
                return
            if len(self._clients) >= self._most or (self._only_here and not is_here(address[0])):
                connection.close()
                continue
            connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            client = _Client(connection, time.monotonic())
            try:
                self._selector.register(connection, selectors.EVENT_READ)
            except OSError:  # no memory for it
                connection.close()
                continue
            self._clients[client.number] = client
            if self._charge(client, _CLIENT_BYTES):
                self._on_ready(client)  # mostly the question has come with the connection

    def _charge(self, client: _Client, size: int) -> bool:
        """Take room for what a client sends; it is turned away if there is none."""
        if not self._room.take(size):
            self._answer(client, 507)
            return False
        client.taken += size
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
            self._take(client)

    def _take(self, client: _Client) -> None:
        """Answer the question once it is there as a whole."""
        if client.question is None and not self._take_head(client):
            return
        if client.question is not None and len(client.received) >= client.question[3]:
            method, scope, key, length = client.question
            value = bytes(memoryview(client.received)[:length])
            client.received = bytearray()
            self._room.give(client.taken)  # what is kept of it has room of its own
            client.taken = 0
            if self._charge(client, _CLIENT_BYTES + len(scope) + len(key)):
                self._do(client, method, scope, key, value)

    def _take_head(self, client: _Client) -> bool:
        """Read the question if it is there, and leave what follows it; tell whether it was, and is
        good."""
        head, found, rest = client.received.partition(b"\r\n\r\n")
        if len(head) > _HEAD_BYTES:
            self._answer(client, 400)
        if not found or len(head) > _HEAD_BYTES:
            return False
        first, *headers = bytes(head).decode("latin-1").split("\r\n")
        length = _length(headers)
        words = first.split(" ")
        path = words[1].split("/", 2) if len(words) == 3 else []
        if length is None or len(path) != 3 or path[0] or not path[1]:
            self._answer(client, 400)
        elif length > _VALUE_BYTES:
            self._answer(client, 413)
        else:
            client.question, client.received = (words[0], path[1], path[2], length), rest
            return True
        return False

    def _do(self, client: _Client, method: str, scope: str, key: str, value: bytes) -> None:
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
        body = b"" if value is None else value.data
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nConnection: close\r\nContent-Length: "
            f"{len(body)}\r\n\r\n"
        )
        if value is not None:
            value.use()
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

    def _give_up(self, now: float) -> None:
        """Say of what did not come in time that it is not there, and leave those who say
        nothing."""
        for client in [client for client in self._clients.values() if client.until <= now]:
            if client.waits_for is None:
                self._drop(client)
                continue
            self._forget(client)
            client.until = now + _IDLE_S
            self._answer(client, 404)

    def _forget(self, client: _Client) -> None:
        if client.waits_for is not None:
            waiting = self._waiting.get(client.waits_for, {})
            waiting.pop(client.number, None)
            if not waiting:
                self._waiting.pop(client.waits_for, None)
            client.waits_for = None

    def _drop(self, client: _Client) -> None:
        self._forget(client)
        if self._clients.pop(client.number, None) is not None:
            self._selector.unregister(client.socket)
            self._room.give(client.taken)
            if client.value is not None:
                client.value.let_go()
        client.socket.close()


class _Client:
    """One connection, for one question."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.socket = connection
        self.number = connection.fileno()
        self.received = bytearray()
        self.question: tuple[str, str, str, int] | None = None
        """Method, scope, key and the length of what follows, once they are there; ``received`` is
        what follows."""
        self.unsent: list[memoryview] = []
        self.value: Value | None = None
        """It is being sent."""
        self.taken = 0
        """Of the room."""
        self.waits_for: tuple[str, str] | None = None
        self.until = now + _IDLE_S


class Scopes:
    """Values by scope and key, of the newest turn.

    When all ranks of a scope have met, each sends ``DELETE /<scope>/<rank>``, long before it shuts
    down. Initialising again uses the same scopes, at each rank's own pace, and a fast rank must not
    see what a slow one stored before. A rank's turn is how often it has sent DELETE. As soon as one
    rank has stored a value in the next turn, no value of the last turn is returned.
    """

    def __init__(self, room: Room | None = None) -> None:
        self._scopes: dict[str, _Scope] = {}
        self._room = room or Room()

    def put(self, scope: str, key: str, value: bytes) -> bool:
        """Store a value; False if there is no room for it."""
        found = self._scopes.get(scope)
        old = found.values.get(key) if found is not None else None
        size = len(value)
        if found is None:
            size += _SCOPE_BYTES + len(scope)
        if old is None and (found is None or key not in found.turns):
            size += _KEY_BYTES + len(key)
        if size > self._room.left + (0 if old is None else old.held_back):
            return False
        if found is None:
            found = self._scopes[scope] = _Scope()
        if old is not None:
            old.let_go()
        self._room.take(size)
        found.values[key] = Value(value, self._room)
        found.turn = max(found.turn, found.turns.get(key.removeprefix(_NAME), 0))
        return True

    def get(self, scope: str, key: str) -> Value | None:
        """Return a value; None if it is not there, or was stored before others have begun anew."""
        found = self._scopes.get(scope)
        if found is None or found.turns.get(key.removeprefix(_NAME), 0) != found.turn:
            return None
        return found.values.get(key)

    def finish(self, scope: str, rank: str) -> None:
        """Take in that a rank has met all others: none needs its values any more. Saying so again
        changes nothing."""
        found = self._scopes.get(scope)
        if found is None or rank not in found.values:
            return
        found.turns[rank] = found.turns.get(rank, 0) + 1  # has the room of its key from now on
        for key in (rank, _NAME + rank):
            if key in found.values:
                found.values.pop(key).let_go()
                if key not in found.turns:
                    self._room.give(_KEY_BYTES + len(key))


class _Scope:
    """What the ranks of one scope have stored."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.turns: dict[str, int] = {}
        """How often each rank has met all others; of one that has not, nothing."""
        self.turn = 0
        """The newest turn in which something was stored."""


class Value:
    """What was stored; its room is taken until nobody is being sent it, either."""

    def __init__(self, data: bytes, room: Room) -> None:
        self.data = data
        self._room = room
        self._users = 1

    @property
    def held_back(self) -> int:
        """Return how much room there will be once it is replaced."""
        return len(self.data) if self._users == 1 else 0

    def use(self) -> None:
        """Have one more who needs it."""
        self._users += 1

    def let_go(self) -> None:
        """Have one less."""
        self._users -= 1
        if not self._users:
            self._room.give(len(self.data))


class Room:
    """The bytes that all together may take."""

    def __init__(self, size: int = _ALL_BYTES) -> None:
        self.left = size

    def take(self, size: int) -> bool:
        """Take so many; False if there are not."""
        if size > self.left:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> None:
        """Give so many back."""
        self.left += size


def is_here(address: str) -> bool:
    """Return whether an address is one of this machine's own ends of its loopback."""
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


def _most_connections() -> int:
    """Return how many the limit of open files leaves: half of what is free, as workers need
    theirs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    free = soft - len(os.listdir("/proc/self/fd"))
    return min(_MOST_CONNECTIONS, max(_LEAST_CONNECTIONS, free // 2))


def _length(headers: list[str]) -> int | None:
    """Return how many bytes follow the head; None for what is no number."""
    for line in headers:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            value = value.strip()
            return int(value) if value.isascii() and value.isdigit() and len(value) < 12 else None
    return 0
