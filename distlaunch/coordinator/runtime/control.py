"""The control server: answers other processes of the user about the job, at a Unix socket.

A thread serves the socket. Clients cannot harm the job: the number of connections, the length of
requests and the unread answers are bounded, and only processes of the same user are served.
"""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from distlaunch.coordinator.policy.advisory import Advisory, AdvisoryPart
from distlaunch.coordinator.runtime.main_loop_calls import MainLoopCalls, MainLoopClosedError
from distlaunch.core.errors import LaunchError
from distlaunch.core.model.record import plain
from distlaunch.core.private_files import make_private_dir
from distlaunch.core.protocol.control_messages import (
    LONGEST_REQUEST,
    ControlError,
    ControlRefusal,
    control_directories,
    is_private,
    is_socket_name,
    read_request,
    refusal_line,
    remove_socket,
    result_line,
    socket_name,
)

Handler = Callable[[Mapping[str, Any]], object]
"""Answers one kind of request. Runs in the main loop, and must not wait.

The argument has the fields of the request. The result is a record or plain data, or a
``concurrent.futures.Future`` that will have it. A ``LaunchError`` refuses the request.
"""
CONNECTIONS = 64
_ANSWER_BYTES = 16 << 20
"""The answers that a client has not read may have this size."""
_IDLE_S = 30.0
"""A connection without a request, and one that does not read its answer, is closed after this
time."""
_ANSWER_S = 120.0
"""How long a handler may take."""
_CHECK_S = 300.0
"""How often the server checks that its socket still exists: cleaners remove old files from
directories for temporary files."""
_CLOSE_S = 2.0
_TRIES = 5
_BLOCK = 64 << 10
_BACKLOG = 128
_MOST_SOCKETS = 256
"""This many sockets of other launchers are looked at."""
_CREDENTIALS = struct.Struct("3i")


class ControlServer:
    """Serves the control socket of one job.

    Each request is passed to its handler in the main loop. A fault in the thread closes the
    connection alone.
    """

    def __init__(
        self,
        run_dir: str,
        calls: MainLoopCalls,
        handlers: Mapping[str, Handler],
        advisory: Advisory,
    ) -> None:
        self._run_dir = run_dir
        self._calls = calls
        self._handlers = handlers
        self._advisory = advisory
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._path = ""
        self._check_at = 0.0
        self._connections: dict[int, _Connection] = {}
        self._results: deque[tuple[_Connection, Future[object]]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        """Held while ``_wake_write`` is written or closed."""
        self._is_ending = False
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    @property
    def path(self) -> str:
        """The path of the socket; empty if there is none."""
        return self._path

    def start(self) -> None:
        """Open the socket, remove stale sockets of other launchers, and start the thread.

        If the socket cannot be opened, or no thread can be started, ``path`` is empty, and the
        commands only read the run directory.
        """
        self._open()
        if self._path:
            _remove_stale_sockets(os.path.dirname(self._path))
        try:
            self._thread.start()
        except RuntimeError:  # no further thread is allowed
            self.close()

    def close(self) -> None:
        """Remove the socket and end the thread. Waits at most ``_CLOSE_S``. May be called again."""
        self._is_ending = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=_CLOSE_S)
        elif self._wake_write >= 0:
            self._release()

    # --- the socket

    def _open(self) -> None:
        name = socket_name(self._run_dir)
        for directory in control_directories():
            for _ in range(_TRIES):  # the launcher of another job removes an empty directory
                try:
                    self._listener = _listen(directory, name)
                except FileNotFoundError:
                    continue
                except OSError:
                    break
                self._path = os.path.join(directory, name)
                self._selector.register(self._listener, selectors.EVENT_READ)
                return

    def _close_listener(self) -> None:
        if self._listener is None:
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None
        with suppress(OSError):
            os.unlink(self._path)
        with suppress(OSError):  # other jobs may use it
            os.rmdir(os.path.dirname(self._path))
        self._path = ""

    # --- the thread

    def _serve(self) -> None:
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._check_at = time.monotonic() + _CHECK_S
        while not self._is_ending:
            for key, events in self._selector.select(self._timeout_s()):
                try:
                    with self._advisory.watch(AdvisoryPart.CONTROL):
                        self._serve_one(key, events)
                except Exception:  # noqa: BLE001 - has been reported
                    if (connection := self._connections.get(key.fd)) is not None:
                        self._drop(connection)
            self._close_idle()
            self._check_socket()
        self._release()

    def _serve_one(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fd == self._wake_read:
            self._send_answers()
        elif (connection := self._connections.get(key.fd)) is not None:
            self._on_ready(connection, events)

    def _release(self) -> None:
        self._close_listener()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1

    def _timeout_s(self) -> float:
        times = [self._check_at, *(each.deadline for each in self._connections.values())]
        return max(0.0, min(times) - time.monotonic())

    def _wake(self) -> None:
        with self._lock:
            if self._wake_write >= 0:
                with suppress(BlockingIOError):
                    os.write(self._wake_write, b"\0")

    def _check_socket(self) -> None:
        """Open the socket again if its file is gone. Does so once in ``_CHECK_S``."""
        if time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + _CHECK_S
        if self._listener is None or not os.path.exists(self._path):
            self._close_listener()
            self._open()

    # --- connections

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            client, _ = self._listener.accept()
        except OSError:
            # Without descriptors, the connection stays in the queue: do not spin.
            time.sleep(0.05)
            return
        if _uid_of(client) != os.getuid():
            client.close()
            return
        client.settimeout(0)
        if len(self._connections) >= CONNECTIONS and not self._make_room():
            with suppress(OSError):
                client.send(refusal_line(ControlRefusal.BUSY, "there are too many connections"))
            client.close()
            return
        connection = _Connection(client)
        self._connections[client.fileno()] = connection
        self._selector.register(client, selectors.EVENT_READ)

    def _make_room(self) -> bool:
        """Close the connection that has been without a request for longest. Return False if each
        has a request."""
        idle = [each for each in self._connections.values() if each.is_idle]
        if idle:
            self._drop(min(idle, key=lambda each: each.deadline))
        return bool(idle)

    def _close_idle(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if now >= connection.deadline:
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        number = connection.socket.fileno()
        if number < 0:
            return
        del self._connections[number]
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _on_ready(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.write()
            if events & selectors.EVENT_READ and not connection.read():
                self._drop(connection)
                return
        except OSError:
            self._drop(connection)
            return
        self._go_on(connection)

    def _go_on(self, connection: _Connection) -> None:
        """Handle the next request of a connection, if a whole one has arrived, and refuse one that
        is too long.

        Then close the connection if its last answer is sent, else wait for what it needs next.
        """
        line = connection.next_request()
        if line is not None:
            self._handle(connection, line)
        elif connection.is_too_long:
            self._refuse(connection, ControlRefusal.MALFORMED, "the request is too long")
        if connection.is_finished:
            self._drop(connection)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, wanted)

    def _handle(self, connection: _Connection, line: bytes) -> None:
        try:
            request = read_request(line)
        except ControlError as exc:
            self._refuse(connection, exc.refusal, exc.message)
            return
        handler = self._handlers.get(request.kind)
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            self._refuse(connection, ControlRefusal.UNKNOWN, f"the launcher answers: {known}")
            return
        self._calls.call(partial(handler, request.fields)).add_done_callback(
            partial(self._on_result, connection)
        )

    def _refuse(self, connection: _Connection, refusal: ControlRefusal, text: str) -> None:
        """Answer with an error, and read no further request of the connection."""
        connection.answer(refusal_line(refusal, text), is_last=True)
        with suppress(OSError):
            connection.write()

    def _on_result(self, connection: _Connection, future: Future[object]) -> None:
        """Queue the answer. Called in the main loop, or in a thread of the handler."""
        has_failed = future.cancelled() or future.exception() is not None
        result = None if has_failed else future.result()
        if isinstance(result, Future):
            result.add_done_callback(partial(self._on_result, connection))
            return
        self._results.append((connection, future))
        self._wake()

    def _send_answers(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, _BLOCK)
        for _ in range(len(self._results)):
            connection, future = self._results.popleft()
            if connection.socket.fileno() < 0:
                continue
            connection.answer(_answer_line(future))
            try:
                connection.write()
            except OSError:
                self._drop(connection)
                continue
            self._go_on(connection)


class _Connection:
    """A client: what it has sent and not been answered, and answers that it has not read."""

    def __init__(self, client: socket.socket) -> None:
        self.socket = client
        self.unsent = bytearray()
        self.deadline = time.monotonic() + _IDLE_S
        self._received = bytearray()
        self._is_answering = False
        self._is_last = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return not self._is_answering and not self.unsent

    @property
    def is_too_long(self) -> bool:
        """Whether the client has sent more than the longest request."""
        return len(self._received) >= LONGEST_REQUEST

    @property
    def is_finished(self) -> bool:
        """Whether the connection is to be closed: its last answer has been sent, or the
        client does not read its answers."""
        return len(self.unsent) > _ANSWER_BYTES or (self._is_last and not self.unsent)

    def read(self) -> bool:
        """Read what has arrived. Return False if the client has closed the connection, or sends too
        much while a request is being answered."""
        try:
            block = self.socket.recv(_BLOCK)
        except BlockingIOError:  # the event was that of an earlier connection with this descriptor
            return True
        self._received += block
        return bool(block) and not (self._is_answering and self.is_too_long)

    def next_request(self) -> bytes | None:
        """Return the next whole request; None if there is none, or while one is being answered."""
        if self._is_answering or self._is_last:
            return None
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        self._is_answering = True
        self.deadline = time.monotonic() + _ANSWER_S
        return bytes(line)

    def answer(self, line: bytes, *, is_last: bool = False) -> None:
        """Queue an answer. With ``is_last``, no further request is read."""
        self.unsent += line
        self._is_answering = False
        self._is_last = self._is_last or is_last
        self.deadline = time.monotonic() + _IDLE_S

    def write(self) -> None:
        """Send what the socket takes. Raises OSError if the client is gone."""
        with suppress(BlockingIOError):
            while self.unsent:
                sent = self.socket.send(self.unsent[:_BLOCK])
                del self.unsent[:sent]
                self.deadline = time.monotonic() + _IDLE_S


def _listen(directory: str, name: str) -> socket.socket:
    """Return a socket that listens under this name.

    The socket gets its name when it already listens: clients remove a socket that refuses
    connections. Raises OSError if the directory cannot be used.
    """
    with suppress(FileExistsError):
        make_private_dir(directory)
    if not is_private(directory):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    path = os.path.join(directory, name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        new = f"{path}.{os.getpid()}"
        with suppress(FileNotFoundError):
            os.unlink(new)
        listener.bind(new)
        try:
            os.chmod(new, 0o600)
            listener.listen(_BACKLOG)
            listener.settimeout(0)
            os.rename(new, path)
        except OSError:
            os.unlink(new)
            raise
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale_sockets(directory: str) -> None:
    """Remove sockets that killed launchers have left."""
    with suppress(OSError):
        sockets = (entry for entry in os.scandir(directory) if is_socket_name(entry.name))
        for entry in itertools.islice(sockets, _MOST_SOCKETS):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(OSError):
                probe.settimeout(0)
                try:
                    probe.connect(entry.path)
                except ConnectionRefusedError:
                    remove_socket(entry.path)


def _uid_of(client: socket.socket) -> int:
    """Return the user id of the process that has connected."""
    packed = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(packed)[1]
    return uid


def _answer_line(future: Future[object]) -> bytes:
    """Return the line with the result, or with the error that its exception stands for."""
    try:
        return result_line(plain(future.result()))
    except MainLoopClosedError:
        return refusal_line(ControlRefusal.ENDING, "the job has ended")
    except ControlError as exc:
        return refusal_line(exc.refusal, exc.message)
    except LaunchError as exc:
        return refusal_line(ControlRefusal.FAILED, exc.message)
    except Exception as exc:  # noqa: BLE001 - the client gets it, and the thread goes on
        return refusal_line(ControlRefusal.FAILED, f"{type(exc).__name__}: {exc}")
