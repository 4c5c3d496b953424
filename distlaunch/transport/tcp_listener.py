"""The listener on the rendezvous port, to which launchers and agents connect, and possibly
strangers.

The number of connections that have not finished the handshake is limited. Each may use a few
kilobytes, for a few seconds. At the limit, the listener selects the stage of the handshake with the
most connections, and closes the connection of this stage that was idle for longest. Launchers and
agents send their first message at once, so they are in another stage than a flood of strangers.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Sequence
from enum import Enum

from distlaunch.core.agent.node.ports import hold_port
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt, option_names
from distlaunch.core.model.text import host_and_port, printable
from distlaunch.core.protocol.handshake import (
    NONCE_BYTES,
    HandshakeError,
    JobIdentity,
    ListenerHandshake,
    RefusalReason,
)
from distlaunch.core.protocol.launcher_messages import Call, Rejected, Welcome
from distlaunch.core.protocol.token_keys import ListenerSecret, token_hint
from distlaunch.transport import open_files
from distlaunch.transport.tcp_connection import TcpConnection

MOST_PENDING = 512
"""Largest number of open connections before their handshake is complete."""
HANDSHAKE_S = 5.0
ACCEPTED_PER_S = 2500
"""Limit of accepted connections in the long run, to save CPU in a flood. Others wait in the
kernel."""
_BURST = 4096
_STEP = 64
_MOST_EVENTS = 128
_CHUNK = 4096
_FEWEST_PENDING = 16
_PAUSE_S = 0.5
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SILENT, _SPEAKING, _CALLED = 0, 1, 2
Admit = Callable[[Call], Welcome | Rejected]
_BACKLOG = 4096
_WILDCARD = ("::", "0.0.0.0")  # noqa: S104 - other nodes connect to addresses that are not known here
_LOOPBACK = ("127.0.0.1", "::1")
_TRIES = 8
_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
NOTICE_PERIOD_S = 60.0


class Listener:
    """Accepts connections and returns those that ``admit`` accepts. Used by the main loop; never
    blocks.

    ``admit`` is called only for callers with the right release, job and token, and must not raise.
    ``log`` is called with lines for the user. ``expected_callers`` is how many callers are
    expected, and ``burst`` how many connections are accepted at once after a quiet time.
    ``raise_limit`` raises the limit of open files.

    Raises PortTakenError if another process uses the port; ConfigError if no port can be used for
    another reason, or if munge fails.
    """

    def __init__(
        self,
        host: str,
        ports: Sequence[int],
        *,
        job_identity: JobIdentity,
        owner: str,
        admit: Admit,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        expected_callers: int = 0,
        burst: int = _BURST,
        raise_limit: Callable[[int], bool] = open_files.raise_limit,
    ) -> None:
        try:
            self._secret = ListenerSecret(job_identity.token, job_identity.munge)
        except OSError as exc:
            raise ConfigError(f"munge cannot be used: {exc}", hint=token_hint()) from exc
        self._listening = {one.fileno(): one for one in open_port(host, ports, owner=owner)}
        self.port: int = next(iter(self._listening.values())).getsockname()[1]
        self._job_identity = job_identity
        self._admit = admit
        self._clock = clock
        self._notices = RepeatedNotices(log, clock)
        self._epoll = select.epoll()
        self._pending: dict[int, _Pending] = {}
        # By descriptor, the oldest first.
        self._stages: tuple[dict[int, _Pending], ...] = ({}, {}, {})
        # By stage of the handshake, the one that was idle for longest first.
        self._admitted: list[tuple[Call, TcpConnection]] = []
        self._raise_limit = raise_limit
        self._most = _most_pending(expected_callers, raise_limit)
        self._burst = float(burst)
        self._allowed = self._burst
        self._allowed_at = clock()
        self._resume_at: float | None = None
        self._resume()

    @property
    def is_reachable(self) -> bool:
        """Whether other machines can connect: the address is not loopback."""
        hosts = [str(one.getsockname()[0]) for one in self._listening.values()]
        return not all(host == "::1" or host.startswith("127.") for host in hosts)

    def descriptors(self) -> dict[int, int]:
        """Return the descriptors to poll, each with the events to wait for."""
        return {self._epoll.fileno(): select.POLLIN}

    def deadline(self) -> float | None:
        """Return when ``ready`` must be called even if no descriptor is ready."""
        first = next(iter(self._pending.values()), None)
        times = (None if first is None else first.until, self._resume_at, self._notices.deadline())
        return min((one for one in times if one is not None), default=None)

    def ready(self) -> list[tuple[Call, TcpConnection]]:
        """Accept and read without waiting, and close what is late. Return the callers that got a
        ``Welcome`` since the last call, with their connections."""
        if self._resume_at is not None and self._clock() >= self._resume_at:
            self._resume()
        called: list[socket.socket] = []
        for number, _ in self._epoll.poll(0, _MOST_EVENTS):
            if (pending := self._pending.get(number)) is not None:
                self._read(pending)
            elif (listening := self._listening.get(number)) is not None:
                called.append(listening)
        for listening in called:  # those that are here already come first
            self._accept(listening)
        now = self._clock()
        while self._pending and (oldest := next(iter(self._pending.values()))).until <= now:
            reason, text = (
                (RefusalReason.SILENT, "it sent nothing")
                if not oldest.stage
                else (RefusalReason.TIMED_OUT, "it did not finish its call")
            )
            self._refuse(oldest, reason, f"{text} within {HANDSHAKE_S:.0f} s")
        self._notices.tick()
        admitted, self._admitted = self._admitted, []
        return admitted

    def close(self) -> None:
        """Stop listening, and close admitted connections that ``ready`` has not returned."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        for _, connection in self._admitted:
            connection.close()
        self._epoll.close()
        for listening in self._listening.values():
            listening.close()
        self._listening.clear()

    # --- new connections

    def _accept(self, listening: socket.socket) -> None:
        now = self._clock()
        self._allowed = min(
            self._burst, self._allowed + max(0.0, now - self._allowed_at) * ACCEPTED_PER_S
        )
        self._allowed_at = now
        for _ in range(_STEP):
            if self._allowed < 1:
                self._suspend(_STEP / ACCEPTED_PER_S)
                return
            try:
                connection, address = listening.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in _NO_DESCRIPTOR and not self._make_room(exc.errno):
                    return
                continue  # the caller has disconnected already
            self._allowed -= 1
            if len(self._pending) >= self._most:
                self._refuse(
                    self._longest_pending(),
                    RefusalReason.TOO_MANY_CONNECTIONS,
                    "too many are open whose callers are not known yet",
                )
            connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            nonce = os.urandom(NONCE_BYTES).hex()
            side = ListenerHandshake(
                self._job_identity, secret=self._secret, nonce=nonce, admit=self._admit
            )
            pending = _Pending(connection, _address_text(address), side, until=now + HANDSHAKE_S)
            number = connection.fileno()
            self._pending[number] = self._stages[_SILENT][number] = pending
            self._epoll.register(number, select.EPOLLIN)
            self._read(pending)  # a launcher or agent has sent its call already

    def _make_room(self, number: int | None) -> bool:
        """Return whether to go on accepting after an error for lack of descriptors.

        True after the limit of open files was raised, or another connection was closed. Else
        accepting pauses.
        """
        if number == errno.EMFILE and self._raise_limit(
            2 * resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        ):
            return True
        if self._pending:
            self._refuse(
                self._longest_pending(),
                RefusalReason.TOO_MANY_FILES,
                f"no more files can be open here ({os.strerror(number or 0)})",
            )
            return True
        self._suspend(_PAUSE_S)
        return False

    def _suspend(self, pause_s: float) -> None:
        if self._resume_at is None:
            self._resume_at = self._clock() + pause_s
            for number in self._listening:
                self._epoll.unregister(number)

    def _resume(self) -> None:
        self._resume_at = None
        for number in self._listening:
            self._epoll.register(number, select.EPOLLIN)

    # --- connections before their handshake is complete

    def _read(self, pending: _Pending) -> None:
        """Read from a connection, and answer, admit or close it."""
        try:
            data = pending.connection.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # A port scan is harmless. A caller of this job connects again, or has already
            # connected to another address.
            if pending.stage in (_SILENT, _CALLED):
                self._drop(pending)
            else:
                self._refuse(
                    pending, RefusalReason.DISCONNECTED, "its caller left in the middle of the call"
                )
            return
        side = pending.side
        try:
            answer = side.feed(data)
            sent = not answer or pending.connection.send(answer, socket.MSG_NOSIGNAL) == len(answer)
        except HandshakeError as exc:
            self._refuse(pending, exc.reason, exc.text)
            return
        except OSError:
            sent = False
        match side.outcome:
            case Welcome() if side.call is not None:
                # Even if it has just disconnected: the connection will report that.
                self._forget(pending)
                self._admitted.append(
                    (side.call, TcpConnection(pending.connection, pending.address))
                )
            case Rejected():
                if side.rejected_for is not None:
                    host = f" ({printable(side.call.host[:80])})" if side.call is not None else ""
                    self._note_refusal(
                        side.rejected_for, f"{pending.address}{host}", side.rejection
                    )
                self._drop(pending)
            case _ if not sent:
                self._refuse(
                    pending, RefusalReason.DISCONNECTED, "its caller left in the middle of the call"
                )
            case _:
                self._stages[pending.stage].pop(pending.number)
                pending.stage = _SPEAKING if side.call is None else _CALLED
                self._stages[pending.stage][pending.number] = pending

    def _longest_pending(self) -> _Pending:
        return next(iter(max(self._stages, key=len).values()))

    def _refuse(self, pending: _Pending, reason: RefusalReason, text: str) -> None:
        self._drop(pending)
        self._note_refusal(reason, pending.address, text)

    def _note_refusal(self, reason: RefusalReason, address: str, text: str) -> None:
        self._notices.note(
            reason, f"a connection from {address} to port {self.port} was closed: {text}"
        )

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.connection.close()

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.number]
        del self._stages[pending.stage][pending.number]
        self._epoll.unregister(
            pending.number
        )  # close() does not do that while a forked child has the descriptor


class _Pending:
    __slots__ = ("address", "connection", "number", "side", "stage", "until")

    def __init__(
        self, connection: socket.socket, address: str, side: ListenerHandshake, *, until: float
    ) -> None:
        self.connection = connection
        self.number = connection.fileno()
        self.address = address
        self.side = side
        self.stage = _SILENT
        self.until = until


def _most_pending(expected_callers: int, raise_limit: Callable[[int], bool]) -> int:
    """Raise the limit of open files for the listener. Return how many connections may be pending at
    once."""
    used = len(os.listdir("/proc/self/fd")) + expected_callers
    raise_limit(used + 2 * MOST_PENDING)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_PENDING
    return max(_FEWEST_PENDING, min(MOST_PENDING, (soft - used) // 2))


def _address_text(address: Sequence[object]) -> str:
    return host_and_port(str(address[0]).removeprefix("::ffff:"), address[1])


class PortTakenError(ConfigError):
    """Another process listens on the port."""


def open_port(host: str, ports: Sequence[int], *, owner: str) -> list[socket.socket]:
    """Return sockets that listen on the first free port, all on the same. Port 0 means any.

    If ``host`` is an address of this machine, the sockets listen on it; for ``localhost``, on both
    loopback addresses. For a name they listen on all addresses, because other machines may resolve
    it differently. Raises PortTakenError that names the process if a port is in use; ConfigError if
    no port can be used for another reason.
    """
    problems: list[ConfigError] = []
    for port in ports:
        try:
            return _listen(host, port)
        except OSError as exc:
            problems.append(_port_error(port, exc, owner))
    if len(problems) == 1:
        raise problems[0]
    numbers = ", ".join(map(str, ports))
    kind = (
        PortTakenError if any(isinstance(one, PortTakenError) for one in problems) else ConfigError
    )
    raise kind(
        f"none of the ports {numbers} can be used: {'; '.join(one.message for one in problems[:4])}"
    )


def _listen(host: str, port: int) -> list[socket.socket]:
    """Return the listening sockets for ``host`` and ``port``. Raise OSError."""
    if host == "localhost":
        return _listen_on_loopback(port)
    if _is_address(host) and host not in _WILDCARD:
        try:
            return [_listening_socket(host, port)]
        except OSError as exc:
            if exc.errno not in _NO_SUCH_FAMILY:
                raise  # otherwise the address is translated on the way (NAT)
    try:
        return [_listening_socket(_WILDCARD[0], port)]
    except OSError as exc:
        if exc.errno not in _NO_SUCH_FAMILY:
            raise
        return [_listening_socket(_WILDCARD[1], port)]


def _listen_on_loopback(port: int) -> list[socket.socket]:
    for tries in range(_TRIES):
        first = _listening_socket(_LOOPBACK[0], port)
        try:
            return [first, _listening_socket(_LOOPBACK[1], first.getsockname()[1])]
        except OSError as exc:
            if exc.errno in _NO_SUCH_FAMILY:
                return [first]
            first.close()
            if port or tries == _TRIES - 1:
                raise
    raise AssertionError


def _listening_socket(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # Closed connections of an earlier launcher do not matter. Linux still refuses a second
        # listener.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != _WILDCARD[0])
            )
        listening.bind((address, port))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):  # ValueError: a NUL in the text
            continue
        return True
    return False


def _port_error(port: int, exc: OSError, owner: str) -> ConfigError:
    """Return the error for a port that cannot be used, which names the process that has it."""
    hint = (
        option_names().port_in_use
        or f"use another port: {Opt.RENDEZVOUS('HOST:PORT')}, on all nodes"
    )
    if exc.errno in (errno.EADDRINUSE, errno.EACCES):
        kind = PortTakenError if exc.errno == errno.EADDRINUSE else ConfigError
        try:
            hold_port(port, owner=owner).release()
        except ConfigError as found:  # it names the process that has the port
            return kind(found.message, hint=hint)
        return kind(f"port {port} is in use", hint=hint)
    return ConfigError(
        f"cannot listen on port {port} here: {os.strerror(exc.errno or 0)}", hint=hint
    )


class RepeatedNotices:
    """Limits similar notices: ``log`` gets the first of each kind, then once a minute a count."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._kinds: dict[Enum, _NoticeKind] = {}

    def note(self, kind: Enum, line: str) -> None:
        """Log the line, or count it if one of the same ``kind`` was logged less than
        ``NOTICE_PERIOD_S`` ago."""
        known = self._kinds.get(kind)
        if known is None:
            self._kinds[kind] = _NoticeKind(self._clock())
            self._log(line)
        else:
            known.more += 1
            known.last = line

    def deadline(self) -> float | None:
        """Return when ``tick`` has a line to log."""
        return min(
            (kind.since + NOTICE_PERIOD_S for kind in self._kinds.values() if kind.more),
            default=None,
        )

    def tick(self) -> None:
        """Log the counts that are due."""
        now = self._clock()
        for kind in self._kinds.values():
            if kind.more and now >= kind.since + NOTICE_PERIOD_S:
                self._log(
                    kind.last
                    if kind.more == 1
                    else f"{kind.more:,} more like it, the last: {kind.last}"
                )
                kind.since, kind.more = now, 0


class _NoticeKind:
    def __init__(self, since: float) -> None:
        self.since = since
        self.more = 0
        self.last = ""
