"""One address at which a listener may be: connected to, spoken with, and tried again."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from distlaunch.core.agent.tcp import tune
from distlaunch.core.probe.lookup import Address
from distlaunch.core.protocol.handshake import CallerSide, Stranger
from distlaunch.core.protocol.launcher_messages import Turned, Welcome

CONNECT_S = 5.0
ANSWER_S = 10.0
"""How long a listener may take to answer: its launcher may be busy."""

_UNDER_WAY = (errno.EINPROGRESS, errno.EINTR)
_NO_LAUNCHER = "what listens there is no launcher of distlaunch"
_SILENT = f"{_NO_LAUNCHER}, or it hangs: it says nothing"
_CLOSED = "it closed the connection"


class Place:
    """One address. Times are monotonic seconds; ``make_side`` is called for each connection that stands."""

    def __init__(self, address: Address, make_side: Callable[[], CallerSide]) -> None:
        self._family, self._to = address
        self._make_side = make_side
        self.text = _text(self._to)
        self.port = int(self.text.rpartition(":")[2])
        self.connection: socket.socket | None = None
        self.until = 0.0
        """When the try that is under way has taken too long."""
        self.retry_at = 0.0
        """When the next one is due."""
        self.tries = 0
        self.why = ""
        """Why the last one came to nothing; empty before the first has."""
        self.hint: str | None = None
        """How that may be helped, if the listener has said."""
        self.refusal: Turned | None = None
        """The word of a listener of our job that there is no use in trying again."""
        self.is_final = False
        """The listener's last word was one of our job."""
        self.proves = False
        """The listener has our proof, and may be letting us in."""
        self._side: CallerSide | None = None
        self._proof = b""

    @property
    def reason(self) -> str:
        """Say why nothing has come of it so far, as a clause."""
        return self.why or ("no answer" if self._side is None else _SILENT)

    @property
    def wanted(self) -> int:
        """Give the events to poll for."""
        return select.POLLOUT if self._side is None else select.POLLIN

    @property
    def speaks(self) -> bool:
        """Tell whether the connection stands, and we have called."""
        return self._side is not None

    @property
    def may_prove(self) -> bool:
        """Tell whether the listener waits for our proof."""
        return bool(self._proof)

    def begin(self, now: float) -> None:
        """Connect, if that can be begun."""
        self.until = now + CONNECT_S
        try:
            self.connection = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as exc:
            self.fail(_clause(exc.errno))
            return
        number = self.connection.connect_ex(self._to)
        if number != 0 and number not in _UNDER_WAY:
            self.fail(_clause(number))

    def prove(self, now: float) -> None:
        """Send the proof: not beside that of another place, as both may lead to the same listener."""
        self.proves, self.until = True, now + ANSWER_S
        proof, self._proof = self._proof, b""
        try:
            self._send(proof)
        except OSError as exc:
            self.fail(_clause(exc.errno))

    def on_ready(self, now: float) -> Welcome | Turned | None:
        """Go on with a connection that can be read or written; give the listener's last word once it is there."""
        try:
            if self._side is not None:
                return self._hear(self._side)
            self._speak(now)
        except OSError as exc:
            self.fail(_clause(exc.errno))
        except Stranger as exc:
            self.fail(f"{_NO_LAUNCHER}: {exc.text}")
        return None

    def late(self) -> None:
        """Take in that the try has taken too long."""
        self.fail("no answer" if self._side is None else _SILENT)

    def fail(self, why: str) -> None:
        """Close the connection; the try has come to nothing."""
        self.why = why
        self.hint = None
        self.tries += 1
        self.close()

    def taken(self) -> socket.socket | None:
        """Give the connection away."""
        connection, self.connection = self.connection, None
        return connection

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.close()
        self.connection = self._side = None
        self.proves, self._proof = False, b""

    def _speak(self, now: float) -> None:
        """Begin the call if the connection stands. Raises OSError."""
        if self.connection is None:
            return
        error = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # A port that nobody listens on, on this machine, may be the one that the kernel gives to our own end.
        if not error and self.connection.getpeername() == self.connection.getsockname():
            error = errno.ECONNREFUSED
        if error:
            raise OSError(error, os.strerror(error))
        tune(self.connection)
        self._side, self.until = self._make_side(), now + ANSWER_S
        self._send(self._side.begin())

    def _hear(self, side: CallerSide) -> Welcome | Turned | None:
        """Read what has come. Raises OSError, Stranger."""
        if self.connection is None:
            return None
        try:
            data = self.connection.recv(side.missing)
        except BlockingIOError:
            return None
        if not data:
            self.fail(_CLOSED)
            return None
        answer = side.feed(data)
        self.is_final = side.is_final
        if side.outcome is None:
            self._proof = self._proof or answer
        elif answer:
            with suppress(OSError):  # what we have been told counts
                self._send(answer)
        return side.outcome

    def _send(self, data: bytes) -> None:
        if self.connection is not None:
            self.connection.send(data, socket.MSG_NOSIGNAL)  # a new connection takes so little at once


def together(places: Sequence[Place]) -> str:
    """Say of all why nothing has come of them: once where it is the same, else with their addresses."""
    by_reason: dict[str, list[str]] = {}
    for place in places:
        by_reason.setdefault(place.reason, []).append(place.text)
    if len(by_reason) == 1:
        return next(iter(by_reason))
    return "; ".join(f"{_folded(texts)}: {reason}" for reason, texts in by_reason.items())


def _folded(texts: Sequence[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if texts[4:] else "")


def _text(to: Sequence[object]) -> str:
    host, port = to[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _clause(number: int | None) -> str:
    text = os.strerror(number or 0)
    return text[:1].lower() + text[1:]
