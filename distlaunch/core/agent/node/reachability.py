"""To which of the master's addresses this node has a way, found by connecting to all at once.

That a connection comes about proves nothing: another machine may have the same address (a container
bridge's, say). The right listener says a word that only it knows.
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
"""How long the other addresses may still take when one has answered: a route that drops packets
never does."""
_MOST_ADDRESSES = 64
_UNDER_WAY = (errno.EINPROGRESS, errno.EINTR)

Found = tuple["Attempt", list[Address], str]
"""What a name stands for: (family, socket address), or why it is not known."""


class Attempt:
    """One address as it was given, and how far the connections to it are."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.open: dict[int, tuple[socket.socket, bytearray]] = {}
        self.resolving = False
        self.route: m.Route | None = None
        self.problem = ""

    @property
    def is_settled(self) -> bool:
        """Return whether nothing more will come."""
        return self.route is not None or not (self.open or self.resolving)

    def close(self) -> None:
        """Close what is still open."""
        for connection, _ in self.open.values():
            connection.close()
        self.open.clear()


class ReachabilityTest:
    """Carries out one ``Reach`` at a time; ``send`` gets the answer. ``wake`` is called from other
    threads."""

    def __init__(self, send: Callable[[m.Reached], None], wake: Callable[[], None]) -> None:
        self._send = send
        self._wake = wake
        self._order: m.Reach | None = None
        self._attempts: list[Attempt] = []
        self._until = 0.0
        self._found: deque[Found] = deque()

    def begin(self, order: m.Reach) -> None:
        """Connect to all addresses; an order that was under way is given up."""
        self.close()
        self._order = order
        self._until = time.monotonic() + order.bound_s
        self._attempts = [Attempt(address) for address in order.addresses[:_MOST_ADDRESSES]]
        for attempt in self._attempts:
            try:
                targets = resolve_host(attempt.address, order.port, numeric=True)
            except (OSError, UnicodeError):
                attempt.resolving = True
                self._resolve(attempt, order.port)
            else:
                self._connect(attempt, targets)
        self.on_ready()

    def _resolve(self, attempt: Attempt, port: int) -> None:
        """Ask for a name's addresses in a thread: the resolver may take its time."""

        def take(found: list[Address] | OSError | UnicodeError) -> None:
            if isinstance(found, list):
                self._found.append((attempt, found, ""))
            else:
                why = found.strerror if isinstance(found, OSError) else None
                self._found.append(
                    (attempt, [], f"the name is not known here ({why or 'it is no name'})")
                )
            self._wake()

        try:
            resolve_in_thread(attempt.address, port, take)
        except RuntimeError:
            attempt.resolving = False
            attempt.problem = "the name cannot be looked up: no thread can be started"

    def _connect(self, attempt: Attempt, targets: list[Address]) -> None:
        for family, target in targets:
            try:
                connection = socket.socket(family, socket.SOCK_STREAM)
            except OSError as exc:
                attempt.problem = os.strerror(exc.errno or 0)
                continue
            connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            number = connection.connect_ex(target)
            if number in _UNDER_WAY or number == 0:
                attempt.open[connection.fileno()] = connection, bytearray()
            else:
                connection.close()
                attempt.problem = os.strerror(number)

    # --- the loop's

    def descriptors(self) -> dict[int, int]:
        """Return what to poll, with the events: the right listener speaks at once, so that reading is
        enough."""
        return {number: select.POLLIN for attempt in self._attempts for number in attempt.open}

    def deadline(self) -> float | None:
        """Return when the answer is due (monotonic seconds)."""
        return None if self._order is None else self._until

    def on_ready(self) -> None:
        """Take what has come; answer when all is known, or when it is time."""
        order = self._order
        if order is None:
            self._found.clear()
            return
        while self._found:
            attempt, targets, problem = self._found.popleft()
            if attempt in self._attempts:
                attempt.resolving = False
                attempt.problem = problem
                self._connect(attempt, targets)
        expected = order.token.encode() + b"\n"
        for attempt in self._attempts:
            for number in list(attempt.open):
                self._read(attempt, number, expected)
        if any(attempt.route for attempt in self._attempts):
            self._until = min(self._until, time.monotonic() + SETTLE_S)
        if time.monotonic() >= self._until or all(attempt.is_settled for attempt in self._attempts):
            self._answer(order)

    def _read(self, attempt: Attempt, number: int, expected: bytes) -> None:
        connection, said = attempt.open[number]
        try:
            data = connection.recv(len(expected) - len(said))
            said += data
            problem = "" if data else "whoever listens there is somebody else"
        except BlockingIOError:
            return
        except OSError as exc:
            problem = os.strerror(exc.errno or 0)
        if bytes(said) == expected:
            attempt.route = _route(attempt.address, connection)
            attempt.close()
            return
        if problem or not expected.startswith(bytes(said)):
            del attempt.open[number]
            connection.close()
            attempt.problem = problem or "whoever listens there is somebody else"

    def _answer(self, order: m.Reach) -> None:
        routes = tuple(attempt.route for attempt in self._attempts if attempt.route)
        problem = None
        if not routes:
            problem = "; ".join(
                f"{printable(attempt.address)}: "
                f"{attempt.problem if attempt.is_settled else 'no answer'}"
                for attempt in self._attempts
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
        """Give up what is under way."""
        for attempt in self._attempts:
            attempt.close()
        self._attempts = []
        self._order = None


def _route(address: str, connection: socket.socket) -> m.Route:
    from distlaunch.core.probe.network import probe_interfaces

    local = ""
    with suppress(OSError):
        local = str(connection.getsockname()[0]).partition("%")[0]
    interface = next((name for name, own, _ in probe_interfaces() if own == local), "")
    return m.Route(address=address, local=local, interface=interface)
