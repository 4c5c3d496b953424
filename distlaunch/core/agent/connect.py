"""Connect to the listener on the rendezvous port, and retry until it admits this launcher.

A host name may resolve late (the DNS of pods), the port may open later, and another program may
have the port. All of these are tried again until the deadline, and the error gives the last reason.
Only a final refusal by a listener of the same job ends the attempts sooner.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from distlaunch.core.errors import LaunchError, NodesError
from distlaunch.core.model.text import errno_clause, host_and_port
from distlaunch.core.probe.network import Address, resolve_host, resolve_in_thread
from distlaunch.core.protocol.handshake import (
    NONCE_BYTES,
    CallerHandshake,
    HandshakeError,
    JobIdentity,
)
from distlaunch.core.protocol.launcher_messages import Rejected, Welcome
from distlaunch.core.protocol.token_keys import CallerSecret

CONNECT_S = 5.0
ANSWER_S = 10.0
"""How long a listener may take to answer: its launcher may be busy."""
_UNDER_WAY = (errno.EINPROGRESS, errno.EINTR)
_NO_LAUNCHER = "what listens there is no launcher of distlaunch"
_SILENT = f"{_NO_LAUNCHER}, or it hangs: it says nothing"
_CLOSED = "it closed the connection"
_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 3
_UNANSWERED_MS = 30_000
"""Twice what the pings take to find a silent network: this only frees whoever is stuck in
``send``."""
TICK_S = 1.0
"""``progress`` hears of a wait at least so often."""
_STAGGER_S = 0.25
"""After so long the next address is tried beside the one that has not answered (RFC 8305)."""
_ACCEPTED_STAGGER_S = 1.0
"""The same once it has accepted: two addresses may be one launcher's, which is busy."""
_SOON_S, _LATER_S, _MUCH_LATER_S = 0.05, 0.25, 1.0
_LONG_S = 60.0
_REJECTED_RETRY_S = 0.5
_UNKNOWN_RETRY_S = 2.0
"""Before the next try at a listener that turns us away, and has not shown that it is one of our
job."""
_TOO_SHORT_S = 0.1
"""With no more time than this another try would only blur why the last one failed."""
_MOST_ADDRESSES = 64
FRESH_S = 2.0
"""Addresses are used for so long before they are looked up again."""
_LOOKUP_RETRY_S = 0.25


class RejectedError(LaunchError):
    """The listener does not let us take part, and that will not change."""

    def __init__(self, message: str, turned: Rejected) -> None:
        super().__init__(message, hint=turned.hint)
        self.exit_code = turned.exit_code


class ConnectInterrupted(Exception):  # noqa: N818 - an outcome
    """The watched descriptor has something: whoever called has other things to do."""


def connect_to_listener(
    host: str | Sequence[str],
    ports: Sequence[int],
    *,
    job_identity: JobIdentity,
    rank: int | None,
    own_host: str,
    instance: str,
    until: float,
    who: str = "node 0",
    progress: Callable[[float, str], None] | None = None,
    watched: int | None = None,
    stops: Callable[[], bool] = lambda: True,
    otherwise: Callable[[], Sequence[str]] | None = None,
) -> tuple[socket.socket, Welcome]:
    """Return the connection once we are welcome; not a byte that follows is read from it.

    ``until`` is monotonic time. ``progress`` gets the seconds since the beginning and why we still
    wait, as a clause, again and again. Of several ports, and hosts, each is tried: other jobs may
    have some of them. ``otherwise`` gives other addresses of the one host if its name cannot be
    resolved; it is called in a thread. Raises NodesError at the deadline, TurnedAwayError, Stopped
    as soon as ``watched`` can be read and ``stops()``, which reads it, is true.
    """
    secret = CallerSecret(job_identity.token, job_identity.munge)

    def side() -> CallerHandshake:
        nonce = os.urandom(NONCE_BYTES).hex()
        return CallerHandshake(
            job_identity, secret=secret, nonce=nonce, rank=rank, host=own_host, instance=instance
        )

    connector = _Connector(
        host,
        ports,
        side,
        until=until,
        who=who,
        progress=progress,
        watched=watched,
        stops=stops,
        otherwise=otherwise,
    )
    try:
        return connector.run()
    finally:
        connector.close()


class _Connector:
    """Tries all places, each on its own: one that says nothing holds up no other."""

    def __init__(
        self,
        host: str | Sequence[str],
        ports: Sequence[int],
        side: Callable[[], CallerHandshake],
        *,
        until: float,
        who: str,
        progress: Callable[[float, str], None] | None,
        watched: int | None,
        stops: Callable[[], bool],
        otherwise: Callable[[], Sequence[str]] | None,
    ) -> None:
        self._host = host if isinstance(host, str) else ", ".join(host)
        self._ports = ports
        self._side = side
        self._until = until
        self._who = who
        self._progress = progress
        self._watched = watched
        self._stops = stops
        self._started_at = self._reported_at = time.monotonic()
        self._addresses = (
            HostAddresses(host, otherwise) if isinstance(host, str) else SeveralHostAddresses(host)
        )
        self._endpoints: dict[Address, Endpoint] = {}
        self._next_at = 0.0
        """When a place that was never tried may be begun beside those that are under way."""

    def run(self) -> tuple[socket.socket, Welcome]:
        tries = 0
        while True:
            self._update_endpoints()
            left_s = self._until - time.monotonic()
            if left_s <= 0 or (left_s < _TOO_SHORT_S and not self._under_way):
                raise self._timeout_error()
            if not self._endpoints:
                if self._addresses.settled.is_set():
                    self._report()
                    self._pause(_pause_s(tries, time.monotonic() - self._started_at))
                    tries += 1
                continue
            if left_s >= _TOO_SHORT_S:
                self._begin(time.monotonic())
            found = self._poll_once()
            if found is not None:
                return found
            self._raise_if_refused()

    def close(self) -> None:
        """Close what is left."""
        for endpoint in self._endpoints.values():
            endpoint.close()

    @property
    def _under_way(self) -> list[Endpoint]:
        return [
            endpoint for endpoint in self._endpoints.values() if endpoint.connection is not None
        ]

    @property
    def _proving(self) -> bool:
        return any(endpoint.proves for endpoint in self._endpoints.values())

    def _update_endpoints(self) -> None:
        """Have the places that the name stands for now, and those that still may turn out to be
        right."""
        self._addresses.refresh()
        if not self._addresses.known and not self._addresses.settled.wait(0.05):
            self._report_if_due()
            self._pause(0.0)
        known = [
            (family, (to[0], port, *to[2:]))
            for port in self._ports
            for family, to in self._addresses.known
        ]
        wanted = dict.fromkeys(known[:_MOST_ADDRESSES])
        for address in [
            each for each, endpoint in self._endpoints.items() if endpoint.connection is None
        ]:
            if address not in wanted:
                del self._endpoints[address]
        for address in wanted:
            if address not in self._endpoints:
                self._endpoints[address] = Endpoint(address, self._side)

    def _begin(self, now: float) -> None:
        """Begin what is due: places that are new one after the other, the first that answers being
        the first used."""
        if self._proving:
            return
        for endpoint in self._endpoints.values():
            if (
                endpoint.connection is not None
                or endpoint.refusal is not None
                or now < endpoint.retry_at
            ):
                continue
            if not endpoint.why:
                if self._under_way and now < self._next_at:
                    continue
                self._next_at = now + _STAGGER_S
            endpoint.begin(now)
            self._schedule_retry(endpoint, now)

    def _poll_once(self) -> tuple[socket.socket, Welcome] | None:
        """Wait for what comes next, and take it in."""
        poll = self._poll()
        by_number = {}
        for endpoint in self._under_way:
            if endpoint.connection is not None:
                poll.register(endpoint.connection, endpoint.poll_events)
                by_number[endpoint.connection.fileno()] = endpoint
        for number in self._wait(poll, self._deadline() - time.monotonic()):
            endpoint = by_number[number]
            now = time.monotonic()
            has_called = endpoint.has_called
            outcome = endpoint.on_ready(now)
            if isinstance(outcome, Welcome) and (connection := endpoint.detach()) is not None:
                connection.setblocking(True)  # noqa: FBT003 - the standard library's signature
                return connection, outcome
            if isinstance(outcome, Rejected):
                self._on_rejected(endpoint, outcome)
            elif not has_called and endpoint.has_called:
                self._next_at = now + _ACCEPTED_STAGGER_S
            self._schedule_retry(endpoint, now)
        now = time.monotonic()
        for endpoint in self._under_way:
            if now >= endpoint.until:
                endpoint.on_timeout()
                self._schedule_retry(endpoint, now)
        ready = next(
            (endpoint for endpoint in self._endpoints.values() if endpoint.may_prove), None
        )
        if ready is not None and not self._proving:
            ready.prove(now)
            self._schedule_retry(ready, now)
        return None

    def _on_rejected(self, endpoint: Endpoint, turned: Rejected) -> None:
        endpoint.fail(turned.text)
        endpoint.hint = turned.hint
        if not endpoint.is_final:  # anybody may have the port, for now
            endpoint.retry_at = time.monotonic() + _UNKNOWN_RETRY_S
        elif turned.again:
            endpoint.retry_at = time.monotonic() + _REJECTED_RETRY_S
        else:
            endpoint.refusal = turned

    def _schedule_retry(self, endpoint: Endpoint, now: float) -> None:
        """Have a place that has failed tried again later, and the next one now."""
        if endpoint.connection is not None:
            return
        endpoint.retry_at = max(
            endpoint.retry_at, now + _pause_s(endpoint.tries, now - self._started_at)
        )
        self._next_at = now
        if all(each.why for each in self._endpoints.values()):
            self._report()

    def _raise_if_refused(self) -> None:
        """Give up once a listener wants us to, and no other place may turn out to be right. Raises
        TurnedAwayError."""
        endpoints = self._endpoints.values()
        refused = next((endpoint for endpoint in endpoints if endpoint.refusal is not None), None)
        if (
            refused is None
            or refused.refusal is None
            or self._proving
            or not all(endpoint.why for endpoint in endpoints)
        ):
            return
        text = f"{self._who} at {self._address_text(refused.port)}: {refused.refusal.text}"
        raise RejectedError(text, refused.refusal)

    def _deadline(self) -> float:
        times = [self._until, *(endpoint.until for endpoint in self._under_way)]
        if not self._proving:  # else nothing is begun
            idle = [
                each
                for each in self._endpoints.values()
                if each.connection is None and each.refusal is None
            ]
            times += [endpoint.retry_at if endpoint.why else self._next_at for endpoint in idle]
        return min(times)

    def _timeout_error(self) -> NodesError:
        given_s = self._until - self._started_at
        hint = f"is {self._who} running, and does every node have the same --rendezvous?"
        if (
            told := next(
                (endpoint.hint for endpoint in self._endpoints.values() if endpoint.hint), None
            )
        ) is not None:
            hint = told
        elif not self._endpoints:
            hint = (
                f"--rendezvous ADDRESS:PORT, an address of {self._who} instead of its name, on "
                "every node"
            )
        return NodesError(
            f"{self._who} has not answered at {self._address_text()} within {given_s:.0f} s: "
            f"{self._why}",
            hint=hint,
        )

    # --- waiting

    def _poll(self) -> select.poll:
        poll = select.poll()
        if self._watched is not None:
            poll.register(self._watched, select.POLLIN)
        return poll

    def _wait(self, poll: select.poll, within_s: float) -> list[int]:
        """Return what is ready; nothing when ``within_s`` is over, or sooner if that is long. Raises
        Stopped."""
        ready = [number for number, _ in poll.poll(max(0.0, min(within_s, TICK_S)) * 1000 + 1)]
        if self._watched in ready:
            if self._stops():
                raise ConnectInterrupted
            ready.remove(self._watched)
        if not ready:
            self._report_if_due()
        return ready

    def _pause(self, pause_s: float) -> None:
        until = min(self._until, time.monotonic() + pause_s)
        poll = self._poll()
        while True:
            left_s = until - time.monotonic()
            self._wait(poll, left_s)
            if left_s <= 0:
                return

    @property
    def _why(self) -> str:
        return (
            describe_failures([*self._endpoints.values()])
            if self._endpoints
            else self._addresses.problem
        )

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        if self._progress is not None:
            self._progress(self._reported_at - self._started_at, self._why)

    def _report_if_due(self) -> None:
        if time.monotonic() - self._reported_at >= TICK_S:
            self._report()

    def _address_text(self, port: int | None = None) -> str:
        host = f"[{self._host}]" if ":" in self._host and ", " not in self._host else self._host
        if port is None and len(self._ports) > 1:
            return f"{host}, ports {', '.join(map(str, self._ports))}"
        return f"{host}:{self._ports[0] if port is None else port}"


def _pause_s(tries: int, waited_s: float) -> float:
    """Return how long to wait after so many tries in vain; all nodes of a job call, and not at the
    same moment."""
    most_s = _LATER_S if waited_s < _LONG_S else _MUCH_LATER_S
    return random.uniform(0.5, 1.0) * min(most_s, _SOON_S * 1.5 ** min(tries, 20))


class Endpoint:
    """One address. Times are monotonic seconds; ``make_side`` is called for each connection that
    stands."""

    def __init__(self, address: Address, make_side: Callable[[], CallerHandshake]) -> None:
        self._family, self._to = address
        self._make_side = make_side
        self.text = host_and_port(str(self._to[0]), self._to[1])
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
        self.refusal: Rejected | None = None
        """The word of a listener of our job that there is no use in trying again."""
        self.is_final = False
        """The listener's last word was one of our job."""
        self.proves = False
        """The listener has our proof, and may be letting us in."""
        self._side: CallerHandshake | None = None
        self._proof = b""

    @property
    def reason(self) -> str:
        """Say why nothing has come of it so far, as a clause."""
        return self.why or ("no answer" if self._side is None else _SILENT)

    @property
    def poll_events(self) -> int:
        """Return the events to poll for."""
        return select.POLLOUT if self._side is None else select.POLLIN

    @property
    def has_called(self) -> bool:
        """Return whether the connection stands, and we have called."""
        return self._side is not None

    @property
    def may_prove(self) -> bool:
        """Return whether the listener waits for our proof."""
        return bool(self._proof)

    def begin(self, now: float) -> None:
        """Connect, if that can be begun."""
        self.until = now + CONNECT_S
        try:
            self.connection = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as exc:
            self.fail(errno_clause(exc.errno))
            return
        number = self.connection.connect_ex(self._to)
        if number != 0 and number not in _UNDER_WAY:
            self.fail(errno_clause(number))

    def prove(self, now: float) -> None:
        """Send the proof: not beside that of another place, as both may lead to the same
        listener."""
        self.proves, self.until = True, now + ANSWER_S
        proof, self._proof = self._proof, b""
        try:
            self._send(proof)
        except OSError as exc:
            self.fail(errno_clause(exc.errno))

    def on_ready(self, now: float) -> Welcome | Rejected | None:
        """Go on with a connection that can be read or written; give the listener's last word once
        it is there."""
        try:
            if self._side is not None:
                return self._on_data(self._side)
            self._on_connected(now)
        except OSError as exc:
            self.fail(errno_clause(exc.errno))
        except HandshakeError as exc:
            self.fail(f"{_NO_LAUNCHER}: {exc.text}")
        return None

    def on_timeout(self) -> None:
        """Take in that the try has taken too long."""
        self.fail("no answer" if self._side is None else _SILENT)

    def fail(self, why: str) -> None:
        """Close the connection; the try has come to nothing."""
        self.why = why
        self.hint = None
        self.tries += 1
        self.close()

    def detach(self) -> socket.socket | None:
        """Return the connection away."""
        connection, self.connection = self.connection, None
        return connection

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.close()
        self.connection = self._side = None
        self.proves, self._proof = False, b""

    def _on_connected(self, now: float) -> None:
        """Begin the call if the connection stands. Raises OSError."""
        if self.connection is None:
            return
        error = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # A port that nobody listens on, on this machine, may be the one that the kernel gives to
        # our own end.
        if not error and self.connection.getpeername() == self.connection.getsockname():
            error = errno.ECONNREFUSED
        if error:
            raise OSError(error, os.strerror(error))
        tune(self.connection)
        self._side, self.until = self._make_side(), now + ANSWER_S
        self._send(self._side.begin())

    def _on_data(self, side: CallerHandshake) -> Welcome | Rejected | None:
        """Read what has come. Raises OSError, HandshakeError."""
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
            self.connection.send(
                data, socket.MSG_NOSIGNAL
            )  # a new connection takes so little at once


def describe_failures(endpoints: Sequence[Endpoint]) -> str:
    """Say of all why nothing has come of them: once where it is the same, else with their
    addresses."""
    by_reason: dict[str, list[str]] = {}
    for endpoint in endpoints:
        by_reason.setdefault(endpoint.reason, []).append(endpoint.text)
    if len(by_reason) == 1:
        return next(iter(by_reason))
    return "; ".join(f"{_folded(texts)}: {reason}" for reason, texts in by_reason.items())


def _folded(texts: Sequence[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if texts[4:] else "")


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and let a network that has gone silent end the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


class HostAddresses:
    """The addresses that a name stands for. No lookup can be interrupted: one hangs at most, in a
    thread of its own.

    ``otherwise`` gives other names or addresses of the host if nobody knows the name; it is called
    in that thread.
    """

    def __init__(self, host: str, otherwise: Callable[[], Sequence[str]] | None = None) -> None:
        self.known: list[Address] = []
        self.problem = "its name has not been resolved yet"
        self.settled = threading.Event()
        """No lookup is under way."""
        self.settled.set()
        self._host = host
        self._otherwise = otherwise
        self._until = 0.0
        self._numeric = False

    def refresh(self) -> None:
        """Look the name up if what is known is no longer fresh."""
        if self._numeric or not self.settled.is_set() or time.monotonic() < self._until:
            return
        try:
            self.known = resolve_host(self._host, 0, numeric=True)
        except (OSError, UnicodeError):
            pass  # a name, as a rule
        else:
            self._numeric = True
            return
        self.settled.clear()
        try:
            resolve_in_thread(self._host, 0, self._take, otherwise=self._otherwise)
        except RuntimeError:
            self.problem = "its name cannot be looked up: no thread can be started"
            self.settled.set()

    def _take(self, found: list[Address] | OSError | UnicodeError) -> None:
        if isinstance(found, list):
            self.known = found
        else:
            self.known = []
            why = (found.strerror if isinstance(found, OSError) else None) or found
            self.problem = f"its name cannot be resolved: {why}"
        self._until = time.monotonic() + (FRESH_S if self.known else _LOOKUP_RETRY_S)
        self.settled.set()


class SeveralHostAddresses:
    """Several names of one host, any of which may lead to it; used as ``HostAddresses`` are."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._each = [HostAddresses(host) for host in hosts]
        self._nothing_to_wait_for = threading.Event()
        self._nothing_to_wait_for.set()

    @property
    def known(self) -> list[Address]:
        """All addresses that are known."""
        return list(dict.fromkeys(address for one in self._each for address in one.known))

    @property
    def problem(self) -> str:
        """Why none is known."""
        return self._each[-1].problem

    @property
    def settled(self) -> threading.Event:
        """What is set once an address is known, or no lookup is under way."""
        awaited = (
            [] if self.known else [one.settled for one in self._each if not one.settled.is_set()]
        )
        return awaited[0] if awaited else self._nothing_to_wait_for

    def refresh(self) -> None:
        """Look up what is no longer fresh."""
        for one in self._each:
            one.refresh()
