"""Connect to jump hosts (ProxyJump). The nodes behind a jump host share one connection.

A jump host drops logins if too many arrive at once (MaxStartups). Channels through one connection
do not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from distlaunch.core.model.record import replace
from distlaunch.core.model.text import printable, quoted
from distlaunch.transport.connect_errors import ConnectStepError
from distlaunch.transport.ssh.client import SshConnection
from distlaunch.transport.ssh.config import HostSettings, SshOptions, read_settings
from distlaunch.transport.ssh.stream import JumpStream

_MOST_HOPS = 8
_FORWARD_S = 15.0

Reach = Callable[[HostSettings, tuple[str, ...], float], SshConnection]
"""Connects to a host. The strings are the jump hosts that are already being connected to for it."""


class _Gateway:
    """One jump host and the number of users of its connection."""

    def __init__(self) -> None:
        self.connecting = threading.Lock()
        # Held by the thread that connects, possibly for long. Jumps._lock guards the other fields.
        self.connection: SshConnection | None = None
        self.users = 0
        self.failed: tuple[float, ConnectStepError] | None = None

    def can_write(self) -> bool:
        connection = self.connection
        if connection is None or not connection.transport.clear_to_send.is_set():
            return False
        packets: Any = connection.transport.packetizer
        return not packets.writing.locked() and connection.stream.can_write()


class Jumps:
    """Opens channels to hosts through jump hosts. A connection to a jump host stays open while it
    has users."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._lock = threading.Lock()
        self._gateways: dict[str, _Gateway] = {}

    def open_stream(
        self,
        settings: HostSettings,
        before: tuple[str, ...],
        until: float,
        *,
        options: SshOptions,
        environ: Mapping[str, str],
    ) -> JumpStream:
        """Open a channel to a host through the jump hosts in its settings, before the monotonic
        time ``until``.

        ``before`` are the jump hosts that are already being connected to, to detect circles. Raises
        ConnectStepError if a jump host cannot be reached.
        """
        hops = (settings.jumps or "").replace(" ", "")
        if hops in before or len(before) >= _MOST_HOPS:
            raise ConnectStepError(
                "connect", f"ProxyJump {quoted(hops)} leads in a circle", passing=False
            )
        with self._lock:
            gateway = self._gateways.setdefault(hops, _Gateway())
        first, _, last = hops.rpartition(",")
        try:
            connection = self._shared_connection(
                gateway,
                lambda: self._connect(
                    gateway, first, last, (*before, hops), until, options, environ
                ),
                until=until,
            )
        except ConnectStepError as error:
            text = f"jump host {printable(last)}: {error.text}"
            raise ConnectStepError(
                error.step, text, hint=error.hint, passing=error.passing
            ) from error
        try:
            channel = _open_channel(connection, settings, last, until)
        except BaseException:
            self._release(gateway)
            raise
        return JumpStream(channel, gateway.can_write, lambda: self._release(gateway))

    def _shared_connection(
        self, gateway: _Gateway, connect: Callable[[], SshConnection], *, until: float
    ) -> SshConnection:
        """Return the jump host's connection, for one more user. Open it by ``connect`` if there is
        none.

        Raises ConnectStepError if another thread does not open it before the time ``until``. An
        error of ``connect`` is also raised in the threads that have waited for it.
        """
        came = time.monotonic()
        if not gateway.connecting.acquire(timeout=max(0.0, until - came)):
            raise ConnectStepError("connect", "it was not reached in time")
        try:
            if gateway.failed is not None and gateway.failed[0] >= came:
                raise gateway.failed[1]  # it failed for another thread while this one waited
            with self._lock:
                connection = gateway.connection
                if connection is not None and connection.transport.is_active():
                    gateway.users += 1
                    return connection
                gateway.connection = None
            if connection is not None:
                connection.close()  # it was broken
            connection = connect()
            with self._lock:
                gateway.connection = connection
                gateway.users += 1
            return connection
        finally:
            gateway.connecting.release()

    def _connect(
        self,
        gateway: _Gateway,
        first: str,
        last: str,
        before: tuple[str, ...],
        until: float,
        options: SshOptions,
        environ: Mapping[str, str],
    ) -> SshConnection:
        """Connect to the last of the jump hosts, through the ones before. Raise
        ConnectStepError."""
        try:
            user, host, port = hop_of(last)
            # As with OpenSSH, user, port and key of the command line are not for jump hosts.
            settings = read_settings(
                host,
                user=user,
                port=port,
                options=SshOptions(config=options.config),
                environ=environ,
            )
            if first:
                settings = replace(settings, jumps=first, command=None)
            return self._reach(settings, before, until)
        except ConnectStepError as error:
            gateway.failed = (time.monotonic(), error)
            raise

    def _release(self, gateway: _Gateway) -> None:
        """Subtract a user. Close the connection after the last one, without waiting."""
        with self._lock:
            gateway.users -= 1
            left = None if gateway.users else gateway.connection
            if left is not None:
                gateway.connection = None
        if left is not None:
            left.close_soon()


def _open_channel(
    connection: SshConnection, settings: HostSettings, last: str, until: float
) -> Any:
    import paramiko

    try:
        return connection.transport.open_channel(
            "direct-tcpip",
            (settings.hostname, settings.port),
            ("127.0.0.1", 0),
            timeout=max(0.1, min(_FORWARD_S, until - time.monotonic())),
        )
    except paramiko.ChannelException as exc:
        reason = printable(exc.text or "").lower()
        raise ConnectStepError(
            "connect", f"jump host {printable(last)} does not connect to it: {reason}"
        ) from exc
    except (paramiko.SSHException, EOFError, OSError) as exc:
        raise ConnectStepError(
            "connect", f"jump host {printable(last)} does not connect to it: {exc}"
        ) from exc


def hop_of(text: str) -> tuple[str | None, str, int | None]:
    """Return user, host and port of ``user@host:port``, also of ``ssh://…`` and ``[address]``.
    Raises ConnectStepError."""
    user, _, place = text.removeprefix("ssh://").rstrip("/").rpartition("@")
    host, port = place, ""
    if place.startswith("["):
        host, _, rest = place[1:].partition("]")
        port = rest.removeprefix(":")
    elif place.count(":") == 1:
        host, _, port = place.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit())):
        raise ConnectStepError(
            "resolve", f"ProxyJump {quoted(text)} is not [user@]host[:port]", passing=False
        )
    return user or None, host, int(port) if port else None
