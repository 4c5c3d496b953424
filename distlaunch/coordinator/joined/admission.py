"""The coordinator's door, and how the other launchers of a job come to it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from distlaunch.coordinator.joined.launchers import JoinedLaunchers
from distlaunch.coordinator.runtime.signal_pipe import ENDING, SignalPipe
from distlaunch.core.agent import connect
from distlaunch.core.errors import LaunchError
from distlaunch.core.model.text import printable
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.planning.joined_plan import JoinedPlanner
from distlaunch.planning.rendezvous import Rendezvous
from distlaunch.transport.tcp_connection import TcpConnection
from distlaunch.transport.tcp_listener import Listener

_TELL_S = 5.0
"""After so long in vain the user hears whom we wait for."""
_TELL_AGAIN_S = 60.0
_REFUSE_S = 2.0
"""So long the others may call, and hear why there is no job; who waits for the port calls more
often."""


class Door:
    """The rendezvous port, held before anything else is made; callers wait until the joined_launchers is
    there."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        job_identity: JobIdentity,
        *,
        members: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Have the port, on which so many members may call. Raises ConfigError if it cannot be
        had."""
        self._joined_launchers: JoinedLaunchers
        """Admits callers and polls the listener. Set by `open`."""
        self._refusal: p.Rejected | None = None
        self._job_identity = job_identity
        self.listener = Listener(
            rendezvous.host,
            rendezvous.ports,
            job_identity=job_identity,
            owner=rendezvous.job_key or "a job",
            admit=self._admit,
            log=say,
            clock=clock,
            members=members,
        )

    @property
    def is_open_to_all(self) -> bool:
        """Return whether other machines can call, and need no secret."""
        return not self._job_identity.has_secret and self.listener.is_reachable

    def open(self, joined_launchers: JoinedLaunchers) -> None:
        """Let callers in."""
        self._joined_launchers = joined_launchers
        joined_launchers.listen(self.listener)

    def refuse(self, why: LaunchError) -> None:
        """Tell whoever calls within 2 s why this launcher, the coordinator, cannot start the job;
        then be closed."""
        text = f"it cannot start the job: {why.message}"
        self._refusal = p.Rejected(text=text, hint=why.hint, exit_code=why.exit_code, again=False)
        until = time.monotonic() + _REFUSE_S
        poll = select.poll()
        for descriptor, wanted in self.listener.descriptors().items():
            poll.register(descriptor, wanted)
        while (left_s := until - time.monotonic()) > 0:
            self.listener.ready()
            poll.poll(min(left_s, 0.5) * 1000)
        self.listener.close()

    def _admit(self, call: p.Call) -> p.Welcome | p.Rejected:
        return self._refusal or self._joined_launchers.admit(call)


class Caller:
    """Calls the coordinator, each time in the same name."""

    def __init__(
        self,
        joiner: JoinedPlanner,
        job_identity: JobIdentity,
        *,
        join_timeout_s: float,
        say: Callable[..., None],
        signals: SignalPipe,
        otherwise: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """Be ready. Calling is given up for signals that end us, and for no other.

        ``otherwise``: see ``connect.connect_to_listener``.
        """
        self._joiner, self._job_identity, self._join_timeout_s = (
            joiner,
            job_identity,
            join_timeout_s,
        )
        self._otherwise = otherwise
        self._say, self._signals = say, signals
        self.told: int | None = None
        """The signal for which calling was given up."""
        self._until = 0.0
        self._instance = os.urandom(16).hex()
        self._rank = joiner.rendezvous.rank
        self._port = joiner.rendezvous.ports[0]
        self._tell_at = _TELL_S

    @property
    def what(self) -> str:
        """Return what our number is called."""
        return "rank" if self._joiner.by_worker else "node"

    @property
    def where(self) -> str:
        """Say whom we call, for people; of several ports the one that has answered last."""
        host = printable(self._joiner.rendezvous.host)
        return f"node 0 ({f'[{host}]' if ':' in host else host}:{self._port})"

    def __call__(self) -> tuple[TcpConnection, p.Welcome]:
        """Call until we are let in, or the time is up. Raises LaunchError, and
        ``connect.ConnectInterrupted``."""
        self._tell_at = _TELL_S
        self._until = time.monotonic() + self._join_timeout_s
        rendezvous = self._joiner.rendezvous
        connection, welcome = connect.connect_to_listener(
            rendezvous.host,
            rendezvous.ports,
            job_identity=self._job_identity,
            rank=self._rank,
            own_host=self._joiner.hostname,
            instance=self._instance,
            until=self._until,
            progress=self._progress,
            watched=self._signals.fileno(),
            stops=self._is_told,
            otherwise=self._otherwise,
        )
        self._rank = welcome.rank
        with suppress(OSError):  # it has been reset already
            self._port = connection.getpeername()[1]
        return TcpConnection(connection, self.where), welcome

    def _is_told(self) -> bool:
        """Take the signals that have come; return whether one of them ends us."""
        self.told = next((number for number in self._signals.read() if number in ENDING), None)
        return self.told is not None

    def _progress(self, elapsed_s: float, why: str) -> None:
        if elapsed_s >= self._tell_at:
            self._tell_at = elapsed_s + _TELL_AGAIN_S
            left_s = max(0.0, self._until - time.monotonic())
            self._say(
                f"waiting up to {left_s:.0f} s more for {self.where}: {why}", level="warning"
            )  # under --quiet too
