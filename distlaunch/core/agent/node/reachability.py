"""Find out which of the master's addresses this node can reach, all at the same time.

A connection alone proves nothing, because another machine may have the same address (as with
container bridges). The right listener sends a token.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from distlaunch.core.model.text import printable
from distlaunch.core.probe.network import Address, resolve_host, resolve_in_thread
from distlaunch.core.protocol import agent_messages as m

SETTLE_S = 1.0
"""How long to wait for other addresses after one address has answered."""
_MOST_ADDRESSES = 64
_IN_PROGRESS = (errno.EINPROGRESS, errno.EINTR)

Resolved = tuple["AddressTest", list[Address], str]
"""A name with its addresses, or with the reason why it has none."""


class AddressTest:
    """The connections for one address in a ``Reach`` message. A name may have several addresses."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.open: dict[int, tuple[socket.socket, bytearray]] = {}
        self.resolving = False
        self.route: m.Route | None = None
        self.problem = ""

    @property
    def is_settled(self) -> bool:
        """Whether the test of this address has ended."""
        return self.route is not None or not (self.open or self.resolving)

    def close(self) -> None:
        """Close open connections."""
        for connection, _ in self.open.values():
            connection.close()
        self.open.clear()


class ReachabilityTest:
    """Handles one ``Reach`` message at a time, and passes the answer to ``send``. ``wake`` is
    called from other threads."""

    def __init__(self, send: Callable[[m.Reached], None], wake: Callable[[], None]) -> None:
        self._send = send
        self._wake = wake
        self._order: m.Reach | None = None
        self._tests: list[AddressTest] = []
        self._until = 0.0
        self._resolved: deque[Resolved] = deque()

    def begin(self, order: m.Reach) -> None:
        """Connect to all addresses, and resolve names in threads. A running test is aborted."""
        self.close()
        self._order = order
        self._until = time.monotonic() + order.bound_s
        self._tests = [AddressTest(address) for address in order.addresses[:_MOST_ADDRESSES]]
        for test in self._tests:
            try:
                targets = resolve_host(test.address, order.port, numeric=True)
            except (OSError, UnicodeError):
                test.resolving = True
                self._resolve(test, order.port)
            else:
                self._connect(test, targets)
        self.on_ready()

    def _resolve(self, test: AddressTest, port: int) -> None:
        def take(found: list[Address] | OSError | UnicodeError) -> None:
            if isinstance(found, list):
                self._resolved.append((test, found, ""))
            else:
                why = found.strerror if isinstance(found, OSError) else None
                self._resolved.append(
                    (test, [], f"the name cannot be resolved ({why or 'it is no valid name'})")
                )
            self._wake()

        try:
            resolve_in_thread(test.address, port, take)
        except RuntimeError:
            test.resolving = False
            test.problem = "the name cannot be looked up: no thread can be started"

    def _connect(self, test: AddressTest, targets: list[Address]) -> None:
        for family, target in targets:
            try:
                connection = socket.socket(family, socket.SOCK_STREAM)
            except OSError as exc:
                test.problem = os.strerror(exc.errno or 0)
                continue
            connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            number = connection.connect_ex(target)
            if number in _IN_PROGRESS or number == 0:
                test.open[connection.fileno()] = connection, bytearray()
            else:
                connection.close()
                test.problem = os.strerror(number)

    # --- for the loop

    def descriptors(self) -> dict[int, int]:
        """Return the poll events by descriptor, only for reading: the right listener sends
        first."""
        return {number: select.POLLIN for test in self._tests for number in test.open}

    def deadline(self) -> float | None:
        """Return when the answer must be sent, in monotonic seconds; None if no test runs."""
        return None if self._order is None else self._until

    def on_ready(self) -> None:
        """Read from the connections. Send the answer when all addresses have succeeded or failed,
        or time is up."""
        order = self._order
        if order is None:
            self._resolved.clear()
            return
        while self._resolved:
            test, targets, problem = self._resolved.popleft()
            if test in self._tests:
                test.resolving = False
                test.problem = problem
                self._connect(test, targets)
        expected = order.token.encode() + b"\n"
        for test in self._tests:
            for number in list(test.open):
                self._read(test, number, expected)
        if any(test.route for test in self._tests):
            self._until = min(self._until, time.monotonic() + SETTLE_S)
        if time.monotonic() >= self._until or all(test.is_settled for test in self._tests):
            self._answer(order)

    def _read(self, test: AddressTest, number: int, expected: bytes) -> None:
        connection, received = test.open[number]
        try:
            data = connection.recv(len(expected) - len(received))
            received += data
            problem = "" if data else "another program listens there"
        except BlockingIOError:
            return
        except OSError as exc:
            problem = os.strerror(exc.errno or 0)
        if bytes(received) == expected:
            test.route = _make_route(test.address, connection)
            test.close()
            return
        if problem or not expected.startswith(bytes(received)):
            del test.open[number]
            connection.close()
            test.problem = problem or "another program listens there"

    def _answer(self, order: m.Reach) -> None:
        routes = tuple(test.route for test in self._tests if test.route)
        problem = None
        if not routes:
            problem = "; ".join(
                f"{printable(test.address)}: {test.problem if test.is_settled else 'no answer'}"
                for test in self._tests
            )
        self.close()
        self._send(
            m.Reached(
                attempt=order.attempt,
                routes=routes,
                problem=problem or (None if routes else "no address"),
            )
        )

    def close(self) -> None:
        """Abort the test without an answer."""
        for test in self._tests:
            test.close()
        self._tests = []
        self._order = None


def _make_route(address: str, connection: socket.socket) -> m.Route:
    from distlaunch.core.probe.network import probe_interfaces

    local = ""
    with suppress(OSError):
        local = str(connection.getsockname()[0]).partition("%")[0]
    interface = next((name for name, own, _ in probe_interfaces() if own == local), "")
    return m.Route(address=address, local=local, interface=interface)
