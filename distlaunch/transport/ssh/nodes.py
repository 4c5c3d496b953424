"""Reach nodes by SSH with paramiko: one connection for each node, through jump hosts if
configured."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

from distlaunch.core.model.text import printable
from distlaunch.transport.bootstrap import remote_command, start_agent
from distlaunch.transport.child_process import KillSwitch
from distlaunch.transport.connect_errors import ConnectStepError
from distlaunch.transport.connection import ConnectError, Connection, Target
from distlaunch.transport.ssh.client import SshConnection, connect, load_paramiko
from distlaunch.transport.ssh.config import HostSettings, SshOptions, read_settings
from distlaunch.transport.ssh.exec_channel import PACKET, WINDOW, ChannelConnection
from distlaunch.transport.ssh.host_keys import HostKeyCheck
from distlaunch.transport.ssh.jumps import Jumps
from distlaunch.transport.ssh.login import KeyRing
from distlaunch.transport.ssh.stream import (
    JumpStream,
    ProxyCommandStream,
    SocketStream,
    dial,
    resolve,
)

START_S = 30.0
"""For login shell and Python to start on a busy node."""
_CHANNEL_S = 15.0


class SshConnector:
    """Opens connections to nodes. ``open`` may be called by several threads."""

    def __init__(
        self,
        *,
        options: SshOptions,
        check: HostKeyCheck,
        code: bytes,
        pythons: Sequence[str],
        environ: Mapping[str, str],
        kill_switch: KillSwitch | None = None,
        logged_in: Callable[[Target], None] = lambda _: None,
    ) -> None:
        """``kill_switch`` ends the programs that the connector starts (ProxyCommand). ``logged_in``
        gets a node after its login, when its agent is about to be started."""
        self._logged_in = logged_in
        self._options = options
        self._check = check
        self._code = code
        self._pythons = tuple(pythons)
        self._environ = environ
        self._kill_switch = kill_switch or KillSwitch()
        self._whole = shutil.which("ssh", path=environ.get("PATH")) is None
        self._ring = KeyRing()
        self._jumps = Jumps(
            lambda settings, before, until: self._reach(settings, before, until, _Place())
        )

    def open(self, target: Target, within_s: float) -> Connection:
        """Connect, log in and start the agent within ``within_s`` seconds. Return the connection.
        Raises ConnectError."""
        until = time.monotonic() + within_s
        place = _Place()
        load_paramiko(whole=self._whole)
        try:
            settings = read_settings(
                target.host,
                user=target.user,
                port=target.port,
                options=self._options,
                environ=self._environ,
            )
            place.of(settings)
            connection = self._reach(settings, (), until, place)
            self._logged_in(target)
            return self._start_agent(connection, target.host, until)
        except ConnectStepError as error:
            raise ConnectError(
                error.failure(target.host, address=place.address, user=place.user)
            ) from error

    def _reach(
        self, settings: HostSettings, before: tuple[str, ...], until: float, place: _Place
    ) -> SshConnection:
        stream = self._open_stream(settings, before, until, place)
        return connect(stream, settings, check=self._check, ring=self._ring, until=until)

    def _open_stream(
        self, settings: HostSettings, before: tuple[str, ...], until: float, place: _Place
    ) -> SocketStream | JumpStream:
        if settings.jumps is not None:
            return self._jumps.open_stream(
                settings, before, until, options=self._options, environ=self._environ
            )
        if settings.command is not None:
            return ProxyCommandStream(settings.command, self._environ, self._kill_switch)
        addresses = resolve(settings.hostname, settings.port, family=settings.family, until=until)
        place.address = addresses[0].text
        sock, address = dial(
            addresses, until=until, within_s=settings.connect_timeout_s, bind=settings.bind_address
        )
        place.address = address.text
        return SocketStream(sock)

    def _start_agent(self, connection: SshConnection, host: str, until: float) -> Connection:
        import paramiko

        try:
            try:
                channel = connection.transport.open_session(
                    window_size=WINDOW,
                    max_packet_size=PACKET,
                    timeout=max(0.1, min(_CHANNEL_S, until - time.monotonic())),
                )
            except (paramiko.SSHException, EOFError, OSError) as exc:
                reason = printable(
                    getattr(exc, "text", "") or str(exc) or "the connection was closed"
                )
                # The server has refused the session. Any other error means that the connection broke.
                refused = isinstance(exc, paramiko.ChannelException)
                raise ConnectStepError(
                    "agent", f"the server opens no session: {reason}", passing=not refused
                ) from exc
            agent = ChannelConnection(channel, connection.stream, connection.close_soon)
        except BaseException:
            connection.close()
            raise
        nonce = os.urandom(16).hex()
        try:
            agent.execute(remote_command(count=len(self._code), nonce=nonce, pythons=self._pythons))
        except OSError as exc:
            agent.close()
            raise ConnectStepError("agent", str(exc)) from exc
        start_agent(
            agent, self._code, nonce, until=min(until, time.monotonic() + START_S), where=host
        )
        return agent


class _Place:
    """Address and user of a connection, for messages."""

    address = ""
    user = ""

    def of(self, settings: HostSettings) -> None:
        self.user = settings.user
        self.address = f"{settings.hostname}:{settings.port}"
