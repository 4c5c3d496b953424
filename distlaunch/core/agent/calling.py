"""Layer core.agent: call the listener on the rendezvous port, until it is there and lets us in.

A name may be known late (the DNS of pods), the port open later, and what answers first be somebody else: all of that is
tried again until the deadline, and its last reason told. Only what cannot mend itself ends the calling sooner.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import time
from collections.abc import Callable, Sequence

from distlaunch.core.agent.naming import FRESH_S, Names, Several
from distlaunch.core.agent.tcp import tune
from distlaunch.core.errors import LaunchError, NodesError
from distlaunch.core.probe.lookup import Address
from distlaunch.core.wire.handshake import NONCE_BYTES, CallerSide, Party, Stranger, is_of_another_job
from distlaunch.core.wire.peers import Turned, Welcome

CONNECT_S = 5.0
ANSWER_S = 10.0
"""How long a listener may take to answer: its launcher may be busy."""
TICK_S = 1.0
"""``progress`` hears of a wait at least so often."""

_STAGGER_S = 0.25
"""After so long the next address is tried beside the one that has not answered (RFC 8305)."""
_SOON_S, _LATER_S, _MUCH_LATER_S = 0.05, 0.25, 1.0
_LONG_S = 60.0
_TURNED_S = 0.5
_TOO_SHORT_S = 0.1
"""With no more time than this another try would only blur why the last one failed."""
_MOST_ADDRESSES = 64
_UNDER_WAY = (errno.EINPROGRESS, errno.EINTR)
_NO_LAUNCHER = "what listens there is no launcher of distlaunch"


class TurnedAwayError(LaunchError):
    """The listener does not let us take part, and that will not change."""

    def __init__(self, message: str, turned: Turned) -> None:
        super().__init__(message, hint=turned.hint)
        self.exit_code = turned.exit_code


class Stopped(Exception):  # noqa: N818 - an outcome
    """The watched descriptor has something: whoever called has other things to do."""


def call(
    host: str | Sequence[str],
    ports: Sequence[int],
    *,
    party: Party,
    rank: int | None,
    own_host: str,
    instance: str,
    until: float,
    who: str = "node 0",
    progress: Callable[[float, str], None] | None = None,
    watched: int | None = None,
) -> tuple[socket.socket, Welcome]:
    """Give the connection once we are welcome; not a byte that follows is read from it.

    ``until`` is monotonic time. ``progress`` gets the seconds since the beginning and why we still wait, as a clause,
    again and again. Of several ports, and hosts, each is tried: other jobs may have some of them. Raises NodesError at
    the deadline, TurnedAwayError, Stopped as soon as ``watched`` can be read.
    """
    calling = _Calling(host, ports, until=until, who=who, progress=progress, watched=watched)

    def side() -> CallerSide:
        nonce = os.urandom(NONCE_BYTES).hex()
        return CallerSide(party, nonce=nonce, rank=rank, host=own_host, instance=instance)

    return calling.run(side)


class _Calling:
    def __init__(
        self,
        host: str | Sequence[str],
        ports: Sequence[int],
        *,
        until: float,
        who: str,
        progress: Callable[[float, str], None] | None,
        watched: int | None,
    ) -> None:
        self._host = host if isinstance(host, str) else ", ".join(host)
        self._ports = ports
        self._until = until
        self._who = who
        self._progress = progress
        self._watched = watched
        self._begun = time.monotonic()
        self._names = Names(host) if isinstance(host, str) else Several(host)
        self._why = "no answer yet"
        self._turned = False

    def run(self, side: Callable[[], CallerSide]) -> tuple[socket.socket, Welcome]:
        tries = 0
        while True:
            self._turned = False
            joined = self._try_all(side)
            if joined is not None:
                return joined
            waited_s = time.monotonic() - self._begun
            self._tell()
            most_s = _LATER_S if waited_s < _LONG_S else _MUCH_LATER_S
            pause_s = random.uniform(0.5, 1.0) * min(most_s, _SOON_S * 1.5 ** min(tries, 20))
            tries += 1
            self._pause(_TURNED_S if self._turned else pause_s)
            if self._until - time.monotonic() < _TOO_SHORT_S:
                given_s = self._until - self._begun
                raise NodesError(
                    f"{self._who} has not answered at {self._place()} within {given_s:.0f} s: {self._why}",
                    hint=f"is {self._who} running, and does every node have the same --rendezvous?",
                )

    def _try_all(self, side: Callable[[], CallerSide]) -> tuple[socket.socket, Welcome] | None:
        """Try each address and port once. ``_why`` is set if that was in vain."""
        addresses = self._resolve()
        if not addresses:
            return None
        wanted = [(family, (to[0], port, *to[2:])) for port in self._ports for family, to in addresses]
        attempts = _Attempts(wanted[:_MOST_ADDRESSES])
        whys: list[tuple[str, str]] = []
        final: TurnedAwayError | None = None
        until = min(self._until, time.monotonic() + CONNECT_S + _STAGGER_S * (len(wanted) - 1))
        try:
            while (stands := self._next(attempts, until)) is not None:
                connection, place = stands
                outcome: Welcome | Turned | str = "it closed the connection"
                try:
                    outcome = self._shake_hands(connection, side())
                except OSError as exc:
                    outcome = _clause(exc.errno)
                finally:
                    if not isinstance(outcome, Welcome):
                        connection.close()
                if isinstance(outcome, Welcome):
                    connection.setblocking(True)  # noqa: FBT003 - the standard library's signature
                    return connection, outcome
                if isinstance(outcome, str):
                    whys.append((place, outcome))
                    continue
                whys.append((place, outcome.text))
                if outcome.again:
                    self._turned = True
                elif not (is_of_another_job(outcome) and len(wanted) > 1):
                    port = int(place.rpartition(":")[2])
                    final = TurnedAwayError(f"{self._who} at {self._place(port)}: {outcome.text}", outcome)
        finally:
            whys += attempts.close()
        if final is not None:
            raise final
        self._why = _together(whys)
        return None

    def _resolve(self) -> list[Address]:
        self._names.refresh()
        until = min(self._until, time.monotonic() + FRESH_S) if self._names.known else self._until
        while not self._names.settled.wait(0.05) and time.monotonic() < until:
            self._pause(0.0)
            self._tell_at_times("its name has not been resolved yet")
        if not self._names.known:
            self._why = self._names.problem
        return self._names.known

    def _next(self, attempts: _Attempts, until: float) -> tuple[socket.socket, str] | None:
        """Wait for the next connection; None when there is none to come."""
        poll = self._poll()
        for number in attempts.begin():
            poll.register(number, select.POLLOUT)
        while True:
            if attempts.connected:
                return attempts.connected.pop(0)
            now = time.monotonic()
            if attempts.is_over or now >= until:
                return None
            step_s = until - now if attempts.has_begun_all else min(until - now, _STAGGER_S)
            for number in self._wait(poll, step_s):
                poll.unregister(number)
                attempts.settle(number)
            for number in attempts.begin(next_one=not attempts.connected):
                poll.register(number, select.POLLOUT)

    def _shake_hands(self, connection: socket.socket, side: CallerSide) -> Welcome | Turned | str:
        """Give what the listener says, or why that is nothing. Raises OSError."""
        tune(connection)
        connection.send(side.begin(), socket.MSG_NOSIGNAL)  # a new connection takes so little at once
        poll = self._poll()
        poll.register(connection, select.POLLIN)
        until = min(self._until, time.monotonic() + ANSWER_S)
        while side.outcome is None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return f"{_NO_LAUNCHER}, or it hangs: it says nothing"
            if not self._wait(poll, left_s):
                continue
            data = connection.recv(side.missing)
            if not data:
                return "it closed the connection"
            try:
                if answer := side.feed(data):
                    connection.send(answer, socket.MSG_NOSIGNAL)
            except Stranger as exc:
                return f"{_NO_LAUNCHER}: {exc.text}"
        return side.outcome

    # --- waiting

    def _poll(self) -> select.poll:
        poll = select.poll()
        if self._watched is not None:
            poll.register(self._watched, select.POLLIN)
        return poll

    def _wait(self, poll: select.poll, within_s: float) -> list[int]:
        """Give what is ready; nothing when ``within_s`` is over, or sooner if that is long. Raises Stopped."""
        ready = [number for number, _ in poll.poll(max(0.0, min(within_s, TICK_S)) * 1000)]
        if self._watched in ready:
            raise Stopped
        if not ready and within_s >= TICK_S:
            self._tell_at_times("no answer")
        return ready

    def _pause(self, pause_s: float) -> None:
        until = min(self._until, time.monotonic() + pause_s)
        poll = self._poll()
        while True:
            left_s = until - time.monotonic()
            self._wait(poll, left_s)
            if left_s <= 0:
                return

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._progress is not None:
            self._progress(self._told - self._begun, self._why)

    _told = 0.0

    def _tell_at_times(self, why: str) -> None:
        if time.monotonic() - self._told >= TICK_S:
            self._why = why
            self._tell()

    def _place(self, port: int | None = None) -> str:
        host = f"[{self._host}]" if ":" in self._host and ", " not in self._host else self._host
        if port is None and len(self._ports) > 1:
            return f"{host}, ports {', '.join(map(str, self._ports))}"
        return f"{host}:{self._ports[0] if port is None else port}"


class _Attempts:
    """Connections to several addresses, begun one after the other; the first that stands is the first to be used."""

    def __init__(self, wanted: Sequence[Address]) -> None:
        self.connected: list[tuple[socket.socket, str]] = []
        self._wanted = list(wanted)
        self._open: dict[int, tuple[socket.socket, str]] = {}
        self._whys: list[tuple[str, str]] = []

    @property
    def has_begun_all(self) -> bool:
        return not self._wanted

    @property
    def is_over(self) -> bool:
        return not (self._wanted or self._open or self.connected)

    def begin(self, *, next_one: bool = False) -> list[int]:
        """Begin the next one if none is under way, or asked to; give what to poll for writing."""
        while self._wanted and (next_one or not (self._open or self.connected)):
            next_one = False
            self._begin(*self._wanted.pop(0))
        return list(self._open)

    def _begin(self, family: int, to: tuple[object, ...]) -> None:
        place = _text(to)
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as exc:
            self._whys.append((place, _clause(exc.errno)))
            return
        number = connection.connect_ex(to)
        if number == 0 or number in _UNDER_WAY:
            self._open[connection.fileno()] = connection, place
        else:
            connection.close()
            self._whys.append((place, _clause(number)))

    def settle(self, number: int) -> None:
        """Take in that a connection stands, or has failed."""
        connection, place = self._open.pop(number)
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            # A port that nobody listens on, on this machine, may be the one that the kernel gives to our own end.
            if not error and connection.getpeername() == connection.getsockname():
                error = errno.ECONNREFUSED
        except OSError as exc:
            error = exc.errno or errno.ECONNRESET
        if error:
            connection.close()
            self._whys.append((place, _clause(error)))
        else:
            self.connected.append((connection, place))

    def close(self) -> list[tuple[str, str]]:
        """Close what was not used; give why the others came to nothing."""
        for connection, _ in self.connected:
            connection.close()
        for connection, place in self._open.values():
            connection.close()
            self._whys.append((place, "no answer"))
        return self._whys


def _text(to: Sequence[object]) -> str:
    host, port = to[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _clause(number: int | None) -> str:
    text = os.strerror(number or 0)
    return text[:1].lower() + text[1:]


def _together(whys: Sequence[tuple[str, str]]) -> str:
    if len({why for _, why in whys}) == 1:
        return whys[0][1]
    return "; ".join(f"{place}: {why}" for place, why in whys[:4]) or "no answer"
