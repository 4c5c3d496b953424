"""The coordinator's rendezvous port, and how a joined launcher connects to it."""

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

_NOTICE_S = 5.0
"""Seconds without an answer after which the user gets a notice with the awaited host."""
_NEXT_NOTICE_S = 60.0
_REFUSE_S = 2.0
"""How long other launchers may connect to get the reason why there is no job. A launcher that waits
for the port connects more often than that."""


class RendezvousPort:
    """The port to which the other launchers connect.

    It is opened before the plan is made. Launchers that connect before ``open`` is called have to
    wait.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        job_identity: JobIdentity,
        *,
        num_launchers: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen for ``num_launchers`` launchers. Raises ConfigError if no port can be opened.

        ``say`` is called with notices for the user. Launchers that connect have to wait until
        ``open``.
        """
        self._joined_launchers: JoinedLaunchers
        """Admits launchers and polls the listener. Set by `open`."""
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
            expected_callers=num_launchers,
        )

    @property
    def is_open_to_all(self) -> bool:
        """Whether other machines can connect without a secret."""
        return not self._job_identity.has_secret and self.listener.is_reachable

    def open(self, joined_launchers: JoinedLaunchers) -> None:
        """Start to admit launchers. ``joined_launchers`` decides whether a launcher is admitted."""
        self._joined_launchers = joined_launchers
        joined_launchers.listen(self.listener)

    def refuse(self, why: LaunchError) -> None:
        """Reject all launchers that connect within 2 s, because the job does not start. Then close
        the port.

        The launchers get ``why`` as the reason.
        """
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


class CoordinatorConnector:
    """Connects this launcher to the coordinator, with the same instance id each time."""

    def __init__(
        self,
        joiner: JoinedPlanner,
        job_identity: JobIdentity,
        *,
        join_timeout_s: float,
        say: Callable[..., None],
        signals: SignalPipe,
        other_addresses: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """``signals``: the attempt to connect ends at a signal that ends the launcher, and at no
        other signal.

        ``other_addresses`` returns other addresses of the coordinator. It is called if the
        coordinator's name cannot be resolved.
        """
        self._joiner, self._job_identity, self._join_timeout_s = (
            joiner,
            job_identity,
            join_timeout_s,
        )
        self._other_addresses = other_addresses
        self._say, self._signals = say, signals
        self.ended_by: int | None = None
        """The signal that stopped connecting."""
        self._until = 0.0
        self._instance = os.urandom(16).hex()
        self._rank = joiner.rendezvous.rank
        self._port = joiner.rendezvous.ports[0]
        self._notice_at = _NOTICE_S

    @property
    def rank_name(self) -> str:
        """The noun for this launcher's number: ``node`` or ``rank``."""
        return "rank" if self._joiner.by_worker else "node"

    @property
    def coordinator(self) -> str:
        """The coordinator's name for messages: node 0 with its host and the port that
        answered last."""
        host = printable(self._joiner.rendezvous.host)
        return f"node 0 ({f'[{host}]' if ':' in host else host}:{self._port})"

    def __call__(self) -> tuple[TcpConnection, p.Welcome]:
        """Connect, and wait until the coordinator admits this launcher.

        Raises LaunchError after the join timeout, and ``connect.ConnectInterrupted`` for a signal.
        """
        self._notice_at = _NOTICE_S
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
            stops=self._is_ended,
            other_addresses=self._other_addresses,
        )
        self._rank = welcome.rank
        with suppress(OSError):  # it has been reset already
            self._port = connection.getpeername()[1]
        return TcpConnection(connection, self.coordinator), welcome

    def _is_ended(self) -> bool:
        """Read the pending signals. Return whether one of them ends the launcher, and store it in
        ``ended_by``."""
        self.ended_by = next((number for number in self._signals.read() if number in ENDING), None)
        return self.ended_by is not None

    def _progress(self, elapsed_s: float, why: str) -> None:
        """Show a notice of the wait, after 5 s and then once a minute."""
        if elapsed_s >= self._notice_at:
            self._notice_at = elapsed_s + _NEXT_NOTICE_S
            left_s = max(0.0, self._until - time.monotonic())
            self._say(
                f"waiting up to {left_s:.0f} s more for {self.coordinator}: {why}", level="warning"
            )  # under --quiet too
