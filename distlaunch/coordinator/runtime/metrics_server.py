"""Serve the metrics of a job over HTTP (--metrics).

A thread serves them. Clients cannot harm the job: connections, their number per second, the length
of requests and the time that each may take are bounded, and the job is asked at most once a second.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import host_and_port, quoted

PATH = "/metrics"
CONNECTIONS = 32
"""Number of open connections. If another client connects, the oldest is closed."""
PER_S = 50.0
"""Number of connections per second that are accepted in the long run."""
REQUEST_S, ANSWER_S = 5.0, 15.0
_REQUEST_BYTES = 8192
_DRAIN_S = 1.0
"""How long a connection stays open after the answer, so that the client can read it."""
_CACHED_S = 1.0
_JOIN_S = 2.0
_BACKLOG = 64
_BLOCK = 1 << 16
_WILDCARD = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_PAGE = f'<a href="{PATH}">Metrics</a> of a distlaunch job\n'.encode()
_TEXT = "text/plain; charset=utf-8"


class NoMetricsError(Exception):
    """The metrics cannot be read now. The argument says why."""


def open_listener(where: str, *, who: str | None = None) -> socket.socket:
    """Return a listening socket for ``[ADDRESS:]PORT``. Without ADDRESS, it listens at 127.0.0.1.

    ``who`` is the option or variable, for errors. Raises ConfigError for another form, and if the
    port cannot be used.
    """
    who = who or str(Opt.METRICS)
    host, port = _host_and_port(where, who)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise ConfigError(
            f"{who} {quoted(where)}: the address of {quoted(host)} is not known",
            hint="0.0.0.0 listens at all addresses of this machine",
        ) from exc
    family, _, _, _, address = found[0]
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise _listen_error(who, host, port, exc) from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise _listen_error(who, host, port, exc) from exc
    listener.settimeout(0)
    return listener


def _host_and_port(where: str, who: str) -> tuple[str, int]:
    host, colon, number = where.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise _address_error(where, who)
    is_port = number.isascii() and number.isdecimal() and len(number) <= 5
    if not is_port or int(number) > 65535 or (colon and not host):
        raise _address_error(where, who)
    return host or "127.0.0.1", int(number)


def _address_error(where: str, who: str) -> ConfigError:
    return ConfigError(
        f"{who} {quoted(where)}: expected PORT or ADDRESS:PORT, with a port from 0 to 65535",
        hint="9400 serves this machine alone, 0.0.0.0:9400 other machines, too; port 0 is a free one",
    )


def _listen_error(who: str, host: str, port: int, exc: OSError) -> ConfigError:
    at = host_and_port(host, port)
    if exc.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{who}: another process uses {at}", hint="port 0 is a free one, which is printed"
        )
    return ConfigError(f"{who}: cannot listen at {at}: {os.strerror(exc.errno or 0)}")


def url_of(listener: socket.socket) -> str:
    """Return the URL of the metrics. If the socket listens at all addresses, it has the name of
    this host."""
    host, port, *_ = listener.getsockname()
    if host in _WILDCARD:
        host = os.uname().nodename
    return f"http://{host_and_port(host, port)}{PATH}"


class MetricsServer(threading.Thread):
    """Answers ``GET /metrics`` with the text that ``read`` returns.

    ``read`` is called by this thread. It may raise NoMetricsError, which the client gets as 503.
    Other exceptions give 500.
    """

    def __init__(
        self,
        listener: socket.socket,
        read: Callable[[], str],
        *,
        content_type: str,
        request_s: float = REQUEST_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        super().__init__(name="dl-metrics", daemon=True)
        self._listener = listener
        self._read = read
        self._content_type = content_type
        self._request_s, self._answer_s = request_s, answer_s
        self._selector = selectors.DefaultSelector()
        self._connections: dict[socket.socket, _Connection] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_ending = False
        self._allowed, self._allowed_at = PER_S, time.monotonic()
        self._accepts = False
        self._text = b""
        self._read_at = float("-inf")

    def start(self) -> None:
        """Start the thread. Raises ConfigError if no thread can be started."""
        try:
            super().start()
        except RuntimeError as exc:
            raise ConfigError(f"{Opt.METRICS}: no thread can be started") from exc

    def close(self) -> None:
        """End the thread and close all connections. Waits at most ``_JOIN_S``."""
        self._is_ending = True
        os.write(self._wake_write, b"\0")
        if self.ident is not None:
            self.join(timeout=_JOIN_S)
        if not self.is_alive():
            self._listener.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def run(self) -> None:
        """Serve until ``close``."""
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        try:
            while not self._is_ending:
                self._set_accepting(self._may_accept())
                for key, _ in self._selector.select(self._wait_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._serve(key.fileobj)
                self._close_late()
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._selector.close()

    # --- connections

    def _may_accept(self) -> bool:
        now = time.monotonic()
        self._allowed = min(PER_S, self._allowed + (now - self._allowed_at) * PER_S)
        self._allowed_at = now
        return self._allowed >= 1.0

    def _set_accepting(self, accepts: bool) -> None:  # noqa: FBT001 - named by the method
        if accepts == self._accepts:
            return
        self._accepts = accepts
        if accepts:
            self._selector.register(self._listener, selectors.EVENT_READ)
        else:
            self._selector.unregister(self._listener)

    def _wait_s(self) -> float | None:
        now = time.monotonic()
        times = [connection.until - now for connection in self._connections.values()]
        if not self._accepts:
            times.append((1.0 - self._allowed) / PER_S)
        return max(0.0, min(times)) if times else None

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone, or this process has no descriptor left
            self._allowed = 0.0
            return
        self._allowed -= 1.0
        client.settimeout(0)
        if len(self._connections) >= CONNECTIONS:
            self._drop(next(iter(self._connections)))
        self._connections[client] = _Connection(time.monotonic() + self._request_s)
        self._selector.register(client, selectors.EVENT_READ)

    def _serve(self, client: socket.socket) -> None:
        connection = self._connections.get(client)
        if connection is None:  # closed for another one a moment ago
            return
        try:
            if connection.answer:
                self._send(client, connection)
            elif not connection.is_answered:
                self._receive(client, connection)
            elif not client.recv(_BLOCK):
                self._drop(client)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)

    def _receive(self, client: socket.socket, connection: _Connection) -> None:
        data = client.recv(_REQUEST_BYTES)
        if not data:
            self._drop(client)
            return
        connection.request += data
        head, end, _ = connection.request.partition(b"\r\n\r\n")
        if not end:
            head, end, _ = connection.request.partition(b"\n\n")
        if not end and len(connection.request) < _REQUEST_BYTES:
            return
        connection.answer = (
            memoryview(self._answer(bytes(head)))
            if end
            else memoryview(_response("431 Request Header Fields Too Large", b""))
        )
        connection.request.clear()
        connection.is_answered = True
        connection.until = time.monotonic() + self._answer_s
        self._selector.modify(client, selectors.EVENT_WRITE)

    def _send(self, client: socket.socket, connection: _Connection) -> None:
        sent = client.send(connection.answer[:_BLOCK])
        connection.answer = connection.answer[sent:]
        if connection.answer:
            return
        client.shutdown(socket.SHUT_WR)
        connection.until = time.monotonic() + _DRAIN_S
        self._selector.modify(client, selectors.EVENT_READ)

    def _close_late(self) -> None:
        now = time.monotonic()
        for client, connection in list(self._connections.items()):
            if now >= connection.until:
                self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        del self._connections[client]
        with suppress(KeyError, ValueError):
            self._selector.unregister(client)
        client.close()

    # --- answers

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):
            return _response("400 Bad Request", b"not an HTTP request\n")
        method, path = words[0], words[1].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"", "Allow: GET, HEAD\r\n")
        if path == b"/":
            answer = _response("200 OK", _PAGE, content_type="text/html; charset=utf-8")
        elif path != PATH.encode():
            answer = _response("404 Not Found", f"the metrics are at {PATH}\n".encode())
        else:
            answer = self._metrics()
        return answer if method == b"GET" else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    def _metrics(self) -> bytes:
        if time.monotonic() >= self._read_at + _CACHED_S:
            try:
                self._text = self._read().encode()
            except NoMetricsError as exc:
                return _response("503 Service Unavailable", f"{exc}\n".encode())
            except Exception as exc:  # noqa: BLE001 - the client gets it, and the thread goes on
                text = f"{type(exc).__name__}: {exc}\n"
                return _response("500 Internal Server Error", text.encode(errors="replace"))
            self._read_at = time.monotonic()
        return _response("200 OK", self._text, content_type=self._content_type)


class _Connection:
    """A client. ``until``: when it is closed, on the monotonic clock."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.request = bytearray()
        self.answer = memoryview(b"")
        self.is_answered = False


def _response(status: str, body: bytes, more: str = "", *, content_type: str = _TEXT) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"Cache-Control: no-store\r\nConnection: close\r\n{more}\r\n"
    )
    return head.encode() + body
