"""Nodes by SSH, with paramiko: one connection each, through jump hosts where there are any."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

from distlaunch.core.model.text import printable
from distlaunch.transport.bootstrap import remote_command, start_agent
from distlaunch.transport.child_process import Leash
from distlaunch.transport.connect_errors import Trouble
from distlaunch.transport.connection import Link, Target, Unconnected
from distlaunch.transport.ssh.client import Connection, connect, load_paramiko
from distlaunch.transport.ssh.config import Asked, HostSettings, read_settings
from distlaunch.transport.ssh.exec_channel import PACKET, WINDOW, ChannelLink
from distlaunch.transport.ssh.host_keys import HostKeyCheck
from distlaunch.transport.ssh.jumps import Jumps
from distlaunch.transport.ssh.login import KeyRing
from distlaunch.transport.ssh.stream import CommandWire, JumpWire, SocketWire, dial, resolve

START_S = 30.0
"""For login shell and Python to come up on a loaded node."""
_CHANNEL_S = 15.0


class Ssh:
    """Opens links to nodes; ``open`` may be called from many threads at once."""

    def __init__(
        self,
        *,
        asked: Asked,
        check: HostKeyCheck,
        code: bytes,
        pythons: Sequence[str],
        environ: Mapping[str, str],
        leash: Leash | None = None,
        logged_in: Callable[[Target], None] = lambda _: None,
    ) -> None:
        """Have all that is started hang on the leash. ``logged_in`` gets a node whose agent is
        being started."""
        self._logged_in = logged_in
        self._asked = asked
        self._check = check
        self._code = code
        self._pythons = tuple(pythons)
        self._environ = environ
        self._leash = leash or Leash()
        self._whole = shutil.which("ssh", path=environ.get("PATH")) is None
        self._ring = KeyRing()
        self._jumps = Jumps(
            lambda settings, before, until: self._reach(settings, before, until, _Place())
        )

    def open(self, target: Target, within_s: float) -> Link:
        """Connect, log in and start the agent; see ``Open``."""
        until = time.monotonic() + within_s
        place = _Place()
        load_paramiko(whole=self._whole)
        try:
            settings = read_settings(
                target.host,
                user=target.user,
                port=target.port,
                asked=self._asked,
                environ=self._environ,
            )
            place.of(settings)
            connection = self._reach(settings, (), until, place)
            self._logged_in(target)
            return self._start(connection, target.host, until)
        except Trouble as trouble:
            raise Unconnected(
                trouble.failure(target.host, address=place.address, user=place.user)
            ) from trouble

    def _reach(
        self, settings: HostSettings, before: tuple[str, ...], until: float, place: _Place
    ) -> Connection:
        wire = self._wire(settings, before, until, place)
        return connect(wire, settings, check=self._check, ring=self._ring, until=until)

    def _wire(
        self, settings: HostSettings, before: tuple[str, ...], until: float, place: _Place
    ) -> SocketWire | JumpWire:
        if settings.jumps is not None:
            return self._jumps.wire(
                settings, before, until, asked=self._asked, environ=self._environ
            )
        if settings.command is not None:
            return CommandWire(settings.command, self._environ, self._leash)
        addresses = resolve(settings.hostname, settings.port, family=settings.family, until=until)
        place.address = addresses[0].text
        sock, address = dial(
            addresses, until=until, within_s=settings.connect_timeout_s, bind=settings.bind_address
        )
        place.address = address.text
        return SocketWire(sock)

    def _start(self, connection: Connection, host: str, until: float) -> Link:
        import paramiko

        try:
            try:
                channel = connection.transport.open_session(
                    window_size=WINDOW,
                    max_packet_size=PACKET,
                    timeout=max(0.1, min(_CHANNEL_S, until - time.monotonic())),
                )
            except (paramiko.SSHException, EOFError, OSError) as exc:
                said = printable(
                    getattr(exc, "text", "") or str(exc) or "the connection was closed"
                )
                refused = isinstance(exc, paramiko.ChannelException)  # else the connection broke
                raise Trouble(
                    "agent", f"the server opens no session: {said}", passing=not refused
                ) from exc
            link = ChannelLink(channel, connection.wire, connection.close_soon)
        except BaseException:
            connection.close()
            raise
        word = os.urandom(16).hex()
        try:
            link.execute(remote_command(count=len(self._code), word=word, pythons=self._pythons))
        except OSError as exc:
            link.close()
            raise Trouble("agent", str(exc)) from exc
        start_agent(
            link, self._code, word, until=min(until, time.monotonic() + START_S), where=host
        )
        return link


class _Place:
    """Where a connection has got to, for messages."""

    address = ""
    user = ""

    def of(self, settings: HostSettings) -> None:
        self.user = settings.user
        self.address = f"{settings.hostname}:{settings.port}"
