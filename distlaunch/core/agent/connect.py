"""Connect to the listener on the rendezvous port, and retry until it admits this launcher.

A host name may resolve late (the DNS of pods), the port may open later, and another program may
have the port. So connections are retried until the deadline; the error then has the last reason.
Only a final refusal by a listener of the same job ends the attempts earlier.
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
from distlaunch.core.model.option_names import Opt
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
_IN_PROGRESS = (errno.EINPROGRESS, errno.EINTR)
_NO_LAUNCHER = "what listens there is no launcher of distlaunch"
_SILENT = f"{_NO_LAUNCHER}, or it hangs: it sends nothing"
_CLOSED = "it closed the connection"
_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 3
_UNANSWERED_MS = 30_000
"""A blocked ``send`` fails after this time, twice that after which keepalive probes detect a silent
network."""
TICK_S = 1.0
"""Longest time between two calls of ``progress``."""
_STAGGER_S = 0.25
"""Delay before the next address is tried as well (RFC 8305)."""
_ACCEPTED_STAGGER_S = 1.0
"""The same delay after an accepted connection. Both addresses may lead to one launcher that is
busy."""
_SOON_S, _LATER_S, _MUCH_LATER_S = 0.05, 0.25, 1.0
_LONG_S = 60.0
_REJECTED_RETRY_S = 0.5
_UNKNOWN_RETRY_S = 2.0
"""Delay after a rejection by a listener that has not proved that it belongs to the job."""
_TOO_SHORT_S = 0.1
"""With less time left there is no retry: it would only replace the reason of the last failure."""
_MOST_ADDRESSES = 64
FRESH_S = 2.0
"""How long resolved addresses are used before the name is resolved again."""
_LOOKUP_RETRY_S = 0.25


class RejectedError(LaunchError):
    """The listener has refused this launcher for good."""

    def __init__(self, message: str, rejected: Rejected) -> None:
        super().__init__(message, hint=rejected.hint)
        self.exit_code = rejected.exit_code


class ConnectInterrupted(Exception):  # noqa: N818 - an outcome
    """The watched descriptor is readable."""


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
    other_addresses: Callable[[], Sequence[str]] | None = None,
    answer_s: float = ANSWER_S,
) -> tuple[socket.socket, Welcome]:
    """Return the connection after the listener has admitted this launcher. Only the handshake has
    been read.

    All hosts and ports are tried, because other jobs may use some of the ports. ``until`` is
    monotonic time. ``who`` names the listener in errors. ``progress`` gets the seconds since the
    beginning and the reason for waiting, as a clause. ``other_addresses`` returns other addresses
    of the host; a thread calls it if the only host name cannot be resolved. ``answer_s`` limits the
    wait for each message of a listener.

    Raises NodesError at the deadline, RejectedError for a final rejection, and ConnectInterrupted
    if ``watched`` is readable and ``stops()``, which reads from it, returns True.
    """
    secret = CallerSecret(job_identity.token, job_identity.munge)

    def make_handshake() -> CallerHandshake:
        nonce = os.urandom(NONCE_BYTES).hex()
        return CallerHandshake(
            job_identity, secret=secret, nonce=nonce, rank=rank, host=own_host, instance=instance
        )

    connector = _Connector(
        host,
        ports,
        make_handshake,
        until=until,
        who=who,
        progress=progress,
        watched=watched,
        stops=stops,
        other_addresses=other_addresses,
        answer_s=answer_s,
    )
    try:
        return connector.run()
    finally:
        connector.close()


class _Connector:
    """Tries all addresses at the same time, so that a silent address delays no other."""

    def __init__(
        self,
        host: str | Sequence[str],
        ports: Sequence[int],
        make_handshake: Callable[[], CallerHandshake],
        *,
        until: float,
        who: str,
        progress: Callable[[float, str], None] | None,
        watched: int | None,
        stops: Callable[[], bool],
        other_addresses: Callable[[], Sequence[str]] | None,
        answer_s: float,
    ) -> None:
        self._answer_s = answer_s
        self._host = host if isinstance(host, str) else ", ".join(host)
        self._ports = ports
        self._make_handshake = make_handshake
        self._until = until
        self._who = who
        self._progress = progress
        self._watched = watched
        self._stops = stops
        self._started_at = self._reported_at = time.monotonic()
        self._addresses = (
            HostAddresses(host, other_addresses)
            if isinstance(host, str)
            else SeveralHostAddresses(host)
        )
        self._endpoints: dict[Address, Endpoint] = {}
        self._next_at = 0.0
        """When an untried address may be tried in addition to those in progress."""

    def run(self) -> tuple[socket.socket, Welcome]:
        tries = 0
        while True:
            self._update_endpoints()
            left_s = self._until - time.monotonic()
            if left_s <= 0 or (left_s < _TOO_SHORT_S and not self._in_progress):
                raise self._timeout_error()
            if not self._endpoints:
                if self._addresses.settled.is_set():
                    self._report_progress()
                    self._pause(_pause_s(tries, time.monotonic() - self._started_at))
                    tries += 1
                continue
            if left_s >= _TOO_SHORT_S:
                self._begin_due(time.monotonic())
            found = self._poll_once()
            if found is not None:
                return found
            self._raise_if_refused()

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()

    @property
    def _in_progress(self) -> list[Endpoint]:
        return [
            endpoint for endpoint in self._endpoints.values() if endpoint.connection is not None
        ]

    @property
    def _is_proving(self) -> bool:
        return any(endpoint.is_proving for endpoint in self._endpoints.values())

    def _update_endpoints(self) -> None:
        """Add newly resolved addresses. Remove old ones unless they have a connection."""
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
                self._endpoints[address] = Endpoint(
                    address, self._make_handshake, answer_s=self._answer_s
                )

    def _begin_due(self, now: float) -> None:
        """Start the connections that are due; those to addresses that have not been tried one at a
        time."""
        if self._is_proving:
            return
        for endpoint in self._endpoints.values():
            if (
                endpoint.connection is not None
                or endpoint.refusal is not None
                or now < endpoint.retry_at
            ):
                continue
            if not endpoint.why:
                if self._in_progress and now < self._next_at:
                    continue
                self._next_at = now + _STAGGER_S
            endpoint.begin(now)
            self._schedule_retry(endpoint, now)

    def _poll_once(self) -> tuple[socket.socket, Welcome] | None:
        """Wait for the next event and handle it. Return the connection if the listener has admitted
        this launcher."""
        poll = self._new_poll()
        by_number = {}
        for endpoint in self._in_progress:
            if endpoint.connection is not None:
                poll.register(endpoint.connection, endpoint.poll_events)
                by_number[endpoint.connection.fileno()] = endpoint
        for number in self._wait(poll, self._deadline() - time.monotonic()):
            endpoint = by_number[number]
            now = time.monotonic()
            has_sent_call = endpoint.has_sent_call
            outcome = endpoint.on_ready(now)
            if isinstance(outcome, Welcome) and (connection := endpoint.detach()) is not None:
                connection.setblocking(True)  # noqa: FBT003 - the standard library's signature
                return connection, outcome
            if isinstance(outcome, Rejected):
                self._on_rejected(endpoint, outcome)
            elif not has_sent_call and endpoint.has_sent_call:
                self._next_at = now + _ACCEPTED_STAGGER_S
            self._schedule_retry(endpoint, now)
        now = time.monotonic()
        for endpoint in self._in_progress:
            if now >= endpoint.until:
                endpoint.on_timeout()
                self._schedule_retry(endpoint, now)
        ready = next(
            (endpoint for endpoint in self._endpoints.values() if endpoint.wants_proof), None
        )
        if ready is not None and not self._is_proving:
            ready.prove(now)
            self._schedule_retry(ready, now)
        return None

    def _on_rejected(self, endpoint: Endpoint, rejected: Rejected) -> None:
        """Record a rejection: try again later, or never if it is final."""
        endpoint.fail(rejected.text)
        endpoint.hint = rejected.hint
        if not endpoint.is_final:  # another program may have the port for now
            endpoint.retry_at = time.monotonic() + _UNKNOWN_RETRY_S
        elif rejected.again:
            endpoint.retry_at = time.monotonic() + _REJECTED_RETRY_S
        else:
            endpoint.refusal = rejected

    def _schedule_retry(self, endpoint: Endpoint, now: float) -> None:
        """Schedule the next try of this address, and start the next address now."""
        if endpoint.connection is not None:
            return
        endpoint.retry_at = max(
            endpoint.retry_at, now + _pause_s(endpoint.tries, now - self._started_at)
        )
        self._next_at = now
        if all(each.why for each in self._endpoints.values()):
            self._report_progress()

    def _raise_if_refused(self) -> None:
        """Raise RejectedError if a listener has refused for good and no other address can
        succeed."""
        endpoints = self._endpoints.values()
        refused = next((endpoint for endpoint in endpoints if endpoint.refusal is not None), None)
        if (
            refused is None
            or refused.refusal is None
            or self._is_proving
            or not all(endpoint.why for endpoint in endpoints)
        ):
            return
        text = f"{self._who} at {self._address_text(refused.port)}: {refused.refusal.text}"
        raise RejectedError(text, refused.refusal)

    def _deadline(self) -> float:
        times = [self._until, *(endpoint.until for endpoint in self._in_progress)]
        if not self._is_proving:  # otherwise nothing is started
            idle = [
                each
                for each in self._endpoints.values()
                if each.connection is None and each.refusal is None
            ]
            times += [endpoint.retry_at if endpoint.why else self._next_at for endpoint in idle]
        return min(times)

    def _timeout_error(self) -> NodesError:
        given_s = self._until - self._started_at
        hint = f"is {self._who} running, and does every node have the same {Opt.RENDEZVOUS}?"
        if (
            given_hint := next(
                (endpoint.hint for endpoint in self._endpoints.values() if endpoint.hint), None
            )
        ) is not None:
            hint = given_hint
        elif not self._endpoints:
            hint = (
                f"{Opt.RENDEZVOUS('ADDRESS:PORT')}, an address of {self._who} instead of its "
                "name, on "
                "every node"
            )
        return NodesError(
            f"{self._who} has not answered at {self._address_text()} within {given_s:.0f} s: "
            f"{self._describe_problem}",
            hint=hint,
        )

    # --- waiting

    def _new_poll(self) -> select.poll:
        poll = select.poll()
        if self._watched is not None:
            poll.register(self._watched, select.POLLIN)
        return poll

    def _wait(self, poll: select.poll, within_s: float) -> list[int]:
        """Return the ready descriptors. Wait at most ``within_s`` or ``TICK_S``.

        Raises ConnectInterrupted if the watched descriptor is readable and ``stops()`` returns
        True.
        """
        ready = [number for number, _ in poll.poll(max(0.0, min(within_s, TICK_S)) * 1000 + 1)]
        if self._watched in ready:
            if self._stops():
                raise ConnectInterrupted
            ready.remove(self._watched)
        if not ready:
            self._report_if_due()
        return ready

    def _pause(self, pause_s: float) -> None:
        """Wait, while signals are watched and progress is reported."""
        until = min(self._until, time.monotonic() + pause_s)
        poll = self._new_poll()
        while True:
            left_s = until - time.monotonic()
            self._wait(poll, left_s)
            if left_s <= 0:
                return

    @property
    def _describe_problem(self) -> str:
        return (
            describe_failures([*self._endpoints.values()])
            if self._endpoints
            else self._addresses.problem
        )

    def _report_progress(self) -> None:
        self._reported_at = time.monotonic()
        if self._progress is not None:
            self._progress(self._reported_at - self._started_at, self._describe_problem)

    def _report_if_due(self) -> None:
        if time.monotonic() - self._reported_at >= TICK_S:
            self._report_progress()

    def _address_text(self, port: int | None = None) -> str:
        host = f"[{self._host}]" if ":" in self._host and ", " not in self._host else self._host
        if port is None and len(self._ports) > 1:
            return f"{host}, ports {', '.join(map(str, self._ports))}"
        return f"{host}:{self._ports[0] if port is None else port}"


def _pause_s(tries: int, waited_s: float) -> float:
    """Return a random delay, so that the nodes of a job do not all try at once."""
    most_s = _LATER_S if waited_s < _LONG_S else _MUCH_LATER_S
    return random.uniform(0.5, 1.0) * min(most_s, _SOON_S * 1.5 ** min(tries, 20))


class Endpoint:
    """The connection to one address, and its retries. Times are monotonic seconds."""

    def __init__(
        self,
        address: Address,
        make_handshake: Callable[[], CallerHandshake],
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._answer_s = answer_s
        self._family, self._to = address
        self._make_handshake = make_handshake
        self.text = host_and_port(str(self._to[0]), self._to[1])
        self.port = int(self.text.rpartition(":")[2])
        self.connection: socket.socket | None = None
        self.until = 0.0
        self.retry_at = 0.0
        self.tries = 0
        self.why = ""
        """Why the last try failed."""
        self.hint: str | None = None
        self.refusal: Rejected | None = None
        self.is_final = False
        """Whether the last answer was from a listener of this job."""
        self.is_proving = False
        """The proof was sent: the listener may be admitting this launcher."""
        self._handshake: CallerHandshake | None = None
        self._proof = b""

    @property
    def reason(self) -> str:
        """Why there is no connection yet, as a clause."""
        return self.why or ("no answer" if self._handshake is None else _SILENT)

    @property
    def poll_events(self) -> int:
        """The events to poll for."""
        return select.POLLOUT if self._handshake is None else select.POLLIN

    @property
    def has_sent_call(self) -> bool:
        """Whether the listener has accepted the connection and got ``Call``."""
        return self._handshake is not None

    @property
    def wants_proof(self) -> bool:
        """Whether this launcher must now send its proof (``prove``)."""
        return bool(self._proof)

    def begin(self, now: float) -> None:
        """Start to connect without blocking. A failure is recorded in ``why``."""
        self.until = now + CONNECT_S
        try:
            self.connection = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as exc:
            self.fail(errno_clause(exc.errno))
            return
        number = self.connection.connect_ex(self._to)
        if number != 0 and number not in _IN_PROGRESS:
            self.fail(errno_clause(number))

    def prove(self, now: float) -> None:
        """Send the proof that this launcher knows the job's secret.

        Only one endpoint at a time may do so, because two may lead to the same listener.
        """
        self.is_proving, self.until = True, now + self._answer_s
        proof, self._proof = self._proof, b""
        try:
            self._send(proof)
        except OSError as exc:
            self.fail(errno_clause(exc.errno))

    def on_ready(self, now: float) -> Welcome | Rejected | None:
        """Continue when the connection is ready. Return the listener's final answer, if it has
        arrived."""
        try:
            if self._handshake is not None:
                return self._on_data(self._handshake)
            self._on_connected(now)
        except OSError as exc:
            self.fail(errno_clause(exc.errno))
        except HandshakeError as exc:
            self.fail(f"{_NO_LAUNCHER}: {exc.text}")
        return None

    def on_timeout(self) -> None:
        """Record that the try has timed out."""
        self.fail("no answer" if self._handshake is None else _SILENT)

    def fail(self, why: str) -> None:
        """Record why the try failed, and close the connection."""
        self.why = why
        self.hint = None
        self.tries += 1
        self.close()

    def detach(self) -> socket.socket | None:
        """Return the connection, which the caller then owns, and forget it."""
        connection, self.connection = self.connection, None
        return connection

    def close(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            self.connection.close()
        self.connection = self._handshake = None
        self.is_proving, self._proof = False, b""

    def _on_connected(self, now: float) -> None:
        """Send ``Call``, the request to join the job. Raises OSError if the connection failed."""
        if self.connection is None:
            return
        error = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # A connection to a local port without a listener may lead to the socket itself.
        if not error and self.connection.getpeername() == self.connection.getsockname():
            error = errno.ECONNREFUSED
        if error:
            raise OSError(error, os.strerror(error))
        set_socket_options(self.connection)
        self._handshake, self.until = self._make_handshake(), now + self._answer_s
        self._send(self._handshake.begin())

    def _on_data(self, handshake: CallerHandshake) -> Welcome | Rejected | None:
        """Read and process received bytes. Return the listener's final answer, if it has arrived.

        Raises OSError, and HandshakeError if the other side is no launcher of this job.
        """
        if self.connection is None:
            return None
        try:
            data = self.connection.recv(handshake.missing)
        except BlockingIOError:
            return None
        if not data:
            self.fail(_CLOSED)
            return None
        answer = handshake.feed(data)
        self.is_final = handshake.is_final
        if handshake.outcome is None:
            self._proof = self._proof or answer
        elif answer:
            with suppress(OSError):  # the listener's answer counts, even if it has left
                self._send(answer)
        return handshake.outcome

    def _send(self, data: bytes) -> None:
        if self.connection is not None:
            self.connection.send(
                data, socket.MSG_NOSIGNAL
            )  # a new connection always accepts this little data


def describe_failures(endpoints: Sequence[Endpoint]) -> str:
    """Return why all endpoints failed, by address if the reasons differ."""
    by_reason: dict[str, list[str]] = {}
    for endpoint in endpoints:
        by_reason.setdefault(endpoint.reason, []).append(endpoint.text)
    if len(by_reason) == 1:
        return next(iter(by_reason))
    return "; ".join(f"{_shortened(texts)}: {reason}" for reason, texts in by_reason.items())


def _shortened(texts: Sequence[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if texts[4:] else "")


def set_socket_options(connection: socket.socket) -> None:
    """Send small messages at once, and detect a silent network."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


class HostAddresses:
    """The addresses of a host name.

    Lookups run in a thread, because a lookup cannot be interrupted. If the name is unknown, the
    thread calls ``other_addresses``, which returns other names or addresses.
    """

    def __init__(
        self, host: str, other_addresses: Callable[[], Sequence[str]] | None = None
    ) -> None:
        self.known: list[Address] = []
        self.problem = "its name has not been resolved yet"
        self.settled = threading.Event()
        """Set while no lookup is running."""
        self.settled.set()
        self._host = host
        self._other_addresses = other_addresses
        self._until = 0.0
        self._numeric = False

    def refresh(self) -> None:
        """Start a lookup if the addresses are older than ``FRESH_S`` and none is running. An
        address needs no lookup."""
        if self._numeric or not self.settled.is_set() or time.monotonic() < self._until:
            return
        try:
            self.known = resolve_host(self._host, 0, numeric=True)
        except (OSError, UnicodeError):
            pass  # usually a name
        else:
            self._numeric = True
            return
        self.settled.clear()
        try:
            resolve_in_thread(
                self._host, 0, self._on_resolved, other_addresses=self._other_addresses
            )
        except RuntimeError:
            self.problem = "its name cannot be looked up: no thread can be started"
            self.settled.set()

    def _on_resolved(self, found: list[Address] | OSError | UnicodeError) -> None:
        if isinstance(found, list):
            self.known = found
        else:
            self.known = []
            why = (found.strerror if isinstance(found, OSError) else None) or found
            self.problem = f"its name cannot be resolved: {why}"
        self._until = time.monotonic() + (FRESH_S if self.known else _LOOKUP_RETRY_S)
        self.settled.set()


class SeveralHostAddresses:
    """The addresses of several names of one host, with the interface of ``HostAddresses``."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._each = [HostAddresses(host) for host in hosts]
        self._nothing_to_wait_for = threading.Event()
        self._nothing_to_wait_for.set()

    @property
    def known(self) -> list[Address]:
        """The known addresses of all names."""
        return list(dict.fromkeys(address for one in self._each for address in one.known))

    @property
    def problem(self) -> str:
        """Why no address is known, for the last of the names."""
        return self._each[-1].problem

    @property
    def settled(self) -> threading.Event:
        """An event that is set if an address is known or no lookup is running; otherwise when one
        of the running lookups ends. Get it again after each wait."""
        awaited = (
            [] if self.known else [one.settled for one in self._each if not one.settled.is_set()]
        )
        return awaited[0] if awaited else self._nothing_to_wait_for

    def refresh(self) -> None:
        """Start the lookups that are due."""
        for one in self._each:
            one.refresh()
