"""The coordinator's transport if each node runs its own launcher, as with torchrun.

The transport connects the policy to the launchers of the other nodes and to the agent of this node.
A launcher gets a node rank only if no live launcher holds that rank. A launcher is reported to the
policy only after the policy has called ``connect`` for its node.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Protocol

from distlaunch.coordinator.joined.local_node import LocalNode
from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.policy.job_nodes import printable_short
from distlaunch.coordinator.runtime.connections import (
    Connections,
    NodeConnection,
    SendThread,
    StartBound,
)
from distlaunch.coordinator.runtime.message_budget import NodeBudget
from distlaunch.coordinator.runtime.message_checks import NodeMessageCheck
from distlaunch.coordinator.runtime.signal_pipe import FOR_THE_JOB, LOOK_S
from distlaunch.core.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE, ProtocolError
from distlaunch.core.model.record import replace
from distlaunch.core.model.text import printable
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.planning.joined_plan import LauncherRecord
from distlaunch.transport.connect_errors import ConnectFailure
from distlaunch.transport.connection import Connection, ConnectionEnd, describe_end
from distlaunch.transport.tcp_listener import RepeatedNotices

HURRIED_LEAVE_S = 0.5
"""How long the other launchers may take to end after the user has asked for a quick end."""
LEAVE_S = 9.0
"""How long the other launchers, and the processes on their nodes, may take to end after they got
the job's result."""
PING_TIMEOUT_S = 3.0
"""How long the launcher of a node may take to answer a ping if another launcher asks for its node
rank."""
_REQUEST_S = 15.0
"""A rejected launcher asks again within this time, or not at all."""
_LONGEST_WHY = 2000


class _NoteKind(Enum):
    """Kinds of notices about other launchers. The user gets each at most once a minute."""

    RANK_TAKEN = "two launchers have one rank"
    CONFLICT = "a launcher was told something else"
    CLOCK = "the clock of a node is far off"
    UNFIT = "a launcher cannot take part"


class RendezvousListener(Protocol):
    """The listener on the rendezvous port. ``transport.tcp_listener`` implements it."""

    def descriptors(self) -> dict[int, int]:
        """Return the descriptors to poll, with the poll events."""

    def deadline(self) -> float | None:
        """Return when ``ready`` is due even if nothing is ready."""

    def ready(self) -> Sequence[tuple[p.Call, Connection]]:
        """Return the launchers that were admitted since the last call."""

    def close(self) -> None:
        """Stop listening."""


class Liveness(Enum):
    """Result of checking whether the connected launcher of a node still answers."""

    PING = auto()
    """Unknown: send a ping to the launcher."""
    WAIT = auto()
    """Unknown: a ping has been sent."""
    ALIVE = auto()
    DEAD = auto()


class Rules(Protocol):
    """Checks that the launchers of a job agree. ``planning.joined_plan`` implements it."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of nodes of an attempt."""

    @property
    def max_restarts(self) -> int:
        """How many restarts the job may have."""

    def conflict(self, number: int, host: str, info: p.LauncherInfo) -> str | None:
        """Return how the options of launcher ``number`` differ from the coordinator's; None if they
        agree."""

    def clock_note(
        self, number: int, host: str, info: p.LauncherInfo, *, wall: float
    ) -> str | None:
        """Return a notice if the clock of launcher ``number`` differs much from the coordinator's;
        otherwise None."""


class JoinedLauncher:
    """The coordinator's record of the launcher of one node.

    The record outlives the connection, so that a launcher that reconnects gets its rank back.
    Times are seconds on the job's clock.
    """

    __slots__ = (
        "_pinged_at",
        "attempt",
        "host",
        "info",
        "instance",
        "joined",
        "message_check",
        "node_connection",
        "refused",
        "report_at",
        "start",
    )

    def __init__(self) -> None:
        self.host = ""
        self.instance = ""
        self.report_at: float | None = None
        """When to report the launcher to the policy. None if the policy has not called ``connect``,
        or the launcher has been reported."""
        self.joined = False
        self.start = StartBound()
        self.on_connect(None)

    def on_connect(self, node_connection: NodeConnection[p.FromLauncher] | None) -> None:
        """Use a new connection. Drop everything that the previous launcher of this node has sent.

        ``node_connection`` is None before the first launcher of the node connects.
        """
        self.node_connection = node_connection
        self.info: p.LauncherInfo | None = None
        self.refused = False
        """Whether the launcher cannot take part. Its messages are then ignored."""
        self.message_check = NodeMessageCheck(0)
        """Checks the launcher's messages about attempts. The launcher writes its workers' output
        itself."""
        self.start.end()
        self.attempt = -1
        """The latest attempt that was sent to the launcher; -1: none."""
        self._pinged_at: float | None = None

    def on_disconnect(self) -> None:
        """Forget the connection. Keep host and instance until another launcher connects."""
        self.node_connection = None
        self.start.end()

    def unreachable(self, number: int, rank_name: str, why: str) -> a.Unreachable:
        """Return the event for a launcher that has connected but cannot take part, with the reason
        ``why``.

        ``number`` is its rank, and ``rank_name`` is ``node rank`` or ``rank``.
        """
        failure = ConnectFailure(
            host=f"{rank_name} {number} ({self.host})", step="call", text=printable_short(why)
        )
        return a.Unreachable(node=number, failure=failure)

    def check_alive(self, node_connection: NodeConnection[p.FromLauncher], now: float) -> Liveness:
        """Return whether the connected launcher still answers.

        Called when another launcher has asked for its node rank. The first call returns ``PING``,
        and the caller sends a ping. Later calls return ``WAIT``; ``ALIVE`` after an answer; or
        ``DEAD`` if no answer came within ``PING_TIMEOUT_S``.
        """
        pinged_at = self._pinged_at
        if pinged_at is None or now - pinged_at > _REQUEST_S:
            self._pinged_at = now
            return Liveness.PING
        if node_connection.received_at > pinged_at:
            self._pinged_at = None  # the answer holds for this request only
            return Liveness.ALIVE
        return Liveness.DEAD if now - pinged_at >= PING_TIMEOUT_S else Liveness.WAIT

    def on_start(self, attempt: int, workers: int, now: float) -> None:
        """Record that the launcher was sent the start of this many workers."""
        self.attempt = attempt
        self.start.begin(workers, now)


def choose_node_rank(
    call: p.Call, launchers: Sequence[JoinedLauncher], admitted: Mapping[str, int]
) -> int | None:
    """Choose the node rank for a launcher that was started without a rank.

    In order of preference: the rank that it had before, a free rank on the same host, a rank never
    used, any free rank. Return None if all ranks are in use. Rank 0 is never free. ``admitted`` has
    ranks of launchers whose connections are not open yet, by instance.
    """
    others = list(enumerate(launchers))[1:]
    known = [number for number, launcher in others if launcher.instance == call.instance]
    free = [
        number
        for number, launcher in others
        if launcher.node_connection is None and launcher.instance not in admitted
    ]
    same = [number for number in free if launchers[number].host == call.host]
    fresh = [number for number in free if not launchers[number].host]
    return next(iter((*known, *same, *fresh, *free)), None)


class JoinedLaunchers(Connections[p.FromLauncher]):
    """The launchers of a job as a ``Transport``.

    ``own`` is the agent of node 0. ``RendezvousListener`` supplies the connections of the other
    nodes.
    """

    def __init__(
        self,
        *,
        own: LocalNode,
        host: str,
        size: int,
        rank_name: str,
        job_id: str,
        folder: str,
        rules: Rules,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Create a record for each node.

        ``rank_name`` is ``node rank`` or ``rank``. ``say`` is called with warnings for the user.
        """
        super().__init__(clock)
        self._own = own
        self._host = host
        self._rank_name = rank_name
        self._job_id, self._folder = job_id, folder
        self._rules = rules
        self._say = say
        self._notices = RepeatedNotices(say, clock)
        self._launchers = [JoinedLauncher() for _ in range(size)]
        self._admitted: dict[str, int] = {}  # by instance; not connected yet
        self._awaited: set[int] = set()  # nodes that the policy waits for
        self._starting: set[int] = set()  # nodes whose workers are to start
        self._listener: RendezvousListener | None = None
        self._has_begun = False
        self.verdict = p.ExitLauncher(
            exit_code=EXIT_SOFTWARE,
            text="the coordinator has failed",
            summary="the coordinator has failed",
            is_error=True,
        )
        """The message with the job's result, which ends the other launchers."""

    def listen(self, listener: RendezvousListener) -> None:
        """Use this listener for connections of the other launchers."""
        self._listener = listener

    @property
    def records(self) -> dict[int, LauncherRecord]:
        """The launchers that have joined, by node."""
        return {
            number: LauncherRecord(host=launcher.host, info=launcher.info)
            for number, launcher in enumerate(self._launchers)
            if launcher.info is not None
        }

    # --- the runner's side

    def start(self) -> None:
        """Start the agent of this node and prepare to receive messages."""
        self._own.start()

    def connect(self, node: int, delay_s: float) -> None:
        """Report the launcher of a node to the policy once the launcher has joined, but not before
        ``delay_s``.

        Node 0 is this launcher, and is reported at once. A launcher that was reported before is
        disconnected, and has to join again.
        """
        if node == 0:
            self._events.append(a.Joined(node=0, host=self._host))
            return
        launcher = self._launchers[node]
        if launcher.joined:
            self.disconnect(node)
        launcher.report_at = self._clock() + delay_s
        self._awaited.add(node)
        self._report_if_due(node)

    def disconnect(self, node: int) -> None:
        """Disconnect the launcher of a node. It may connect again."""
        launcher = self._launchers[node]
        launcher.joined, launcher.report_at = False, None
        launcher.on_disconnect()
        self._awaited.discard(node)
        self._starting.discard(node)
        super().disconnect(node)

    def discover(self) -> None:
        """Do nothing: launchers connect by themselves."""

    def send(self, node: int, message: m.ToAgent | m.Survey | m.Reach | p.StartWorkers) -> None:
        """Send a message to a node. A message to a lost node is dropped."""
        self._has_begun = self._has_begun or isinstance(message, m.Prepare)
        self._launchers[node].message_check.on_send(message)
        if isinstance(message, p.StartWorkers):
            self._launchers[node].on_start(message.attempt, len(message.local_ranks), self._clock())
            self._starting.add(node)
        elif isinstance(message, m.Stop):
            self._launchers[node].start.stop(message.grace_s)
        if isinstance(message, m.Survey) and node:
            self._send_to(node, p.SurveyNode(serial=message.serial))
        elif isinstance(message, p.StartWorkers) or node:
            self._send_to(node, message)
        else:
            self._own.handle(message)

    def broadcast(self, message: m.ToAgent) -> None:
        """Send a message to all connected nodes, including this one."""
        self._own.handle(message)
        for node in list(self._node_connections):
            self._send_to(node, message)

    def notice(self, text: str, level: str) -> None:
        """Show ``text`` on all other nodes, with this level."""
        for node in list(self._node_connections):
            self._send_to(node, p.Notice(text=text, level=level))

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait to be sent."""
        return self._own.has_unsent or super().has_unsent

    def descriptors(self) -> dict[int, int]:
        """Return the descriptors to poll, with the poll events."""
        called = {} if self._listener is None else self._listener.descriptors()
        return {self._epoll.fileno(): select.POLLIN, **called, **self._own.descriptors()}

    def deadline(self) -> float | None:
        """Return when ``receive`` is due even if nothing is ready."""
        dues = [
            self._ping_at,
            self._read_at,
            self._own.deadline(),
            None if self._listener is None else self._listener.deadline(),
        ]
        awaited = [self._launchers[node] for node in self._awaited]
        dues += [
            launcher.report_at
            for launcher in awaited
            if launcher.info is not None and launcher.node_connection is not None
        ]
        dues += [self._launchers[node].start.until for node in self._starting]
        dues.append(self._notices.deadline())
        return min((due for due in dues if due is not None), default=None)

    def receive(self) -> list[a.Event]:
        """Return the events since the last call, without waiting."""
        for message in self._own.receive():
            # This node cannot start workers again without its spawner, so it is no loss that a
            # restart could replace.
            if isinstance(message, m.AgentFailed):
                self._events.append(a.LauncherFailed(text=message.text, without=0))
            else:
                self._events.append(a.FromNode(node=0, message=message))
        self._read_all()
        self._accept_launchers()
        for node in list(self._awaited):
            self._report_if_due(node)
        self._end_late_starts()
        self._notices.tick()
        self._tick()
        return self._pop_events()

    def close(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Send the job's result to the other launchers and stop this node's agent.

        Then wait at most ``LEAVE_S`` for the other launchers to disconnect. If ``hurried`` returns
        True, the user wants a quick end, and the wait ends after at most ``HURRIED_LEAVE_S``.
        """
        for node in list(self._node_connections):
            self._send_to(node, self.verdict)
        self._own.close(hurried)
        until = time.monotonic() + LEAVE_S
        while self._node_connections and (left_s := until - time.monotonic()) > 0:
            if left_s > HURRIED_LEAVE_S and hurried():
                until = time.monotonic() + HURRIED_LEAVE_S
            self._read_all(min(left_s, LOOK_S))
        for node in list(self._node_connections):
            self.disconnect(node)
        if self._listener is not None:
            self._listener.close()
        self._close()

    # --- callers

    def admit(self, call: p.Call) -> p.Welcome | p.Rejected:
        """Decide whether a launcher may join: return ``Welcome`` with its node rank, or a
        rejection.

        With ``Welcome`` the rank is reserved, and an earlier connection for this rank is dropped.
        If another launcher has the rank, that one gets a ping, and the new one is to ask again.
        """
        number = (
            call.rank
            if call.rank is not None
            else choose_node_rank(call, self._launchers, self._admitted)
        )
        if number is None:
            return _rejection("all ranks of the job are taken", code=EXIT_UNAVAILABLE, again=True)
        who = printable(call.host[:80])
        if number >= len(self._launchers):
            return _rejection(
                f"{self._rank_name} {number}: {self._rank_name}s of this job go to {len(self._launchers) - 1}"
            )
        if number == 0:
            return self._reject_taken_rank(0, self._host, who)
        launcher = self._launchers[number]
        if launcher.node_connection is not None and launcher.refused:
            self._lose(launcher.node_connection, "it cannot take part")
        if launcher.node_connection is not None and launcher.instance != call.instance:
            if (rejection := self._reject_if_alive(number, launcher, who)) is not None:
                return rejection
            self._lose(launcher.node_connection, f"a launcher on {who} has taken its place")
        elif launcher.node_connection is not None:
            self._lose(launcher.node_connection, "its launcher has called again")
        elif number in self._admitted.values():
            return _rejection(
                f"another launcher has just called for {self._rank_name} {number}", again=True
            )
        self._admitted[call.instance] = number
        launcher.instance, launcher.host = call.instance, who
        return p.Welcome(job_id=self._job_id, rank=number, folder=self._folder)

    def _reject_if_alive(
        self, number: int, launcher: JoinedLauncher, who: str
    ) -> p.Rejected | None:
        """Return the rejection of a second launcher for a node; None if there is no first launcher
        or it is dead.

        While that is unknown, the second launcher is to ask again.
        """
        if launcher.node_connection is None:
            return None
        match launcher.check_alive(launcher.node_connection, self._clock()):
            case Liveness.DEAD:
                return None
            case Liveness.ALIVE:
                return self._reject_taken_rank(number, launcher.host, who)
            case Liveness.PING:
                self._ping(launcher.node_connection)
            case Liveness.WAIT:
                pass
        return _rejection(
            f"{self._rank_name} {number} belongs to the launcher on {launcher.host}, which is asked",
            again=True,
        )

    def _reject_taken_rank(self, number: int, host: str, who: str) -> p.Rejected:
        text = f"two launchers have {self._rank_name} {number}: on {host}, and on {who}"
        self._notices.note(_NoteKind.RANK_TAKEN, f"{text}; the second is turned away")
        return _rejection(text, hint=f"each launcher needs a {self._rank_name} of its own")

    def _accept_launchers(self) -> None:
        """Use the connections of admitted launchers, and close those whose rank has another
        launcher by now."""
        for call, connection in () if self._listener is None else self._listener.ready():
            number = self._admitted.pop(call.instance, None)
            if number is None or self._launchers[number].instance != call.instance:
                connection.close()
                continue
            launcher = self._launchers[number]
            node_connection: NodeConnection[p.FromLauncher]
            node_connection = NodeConnection(
                number, p.FROM_LAUNCHER, m.REMOTE_NESTED_TYPES, NodeBudget(time.monotonic())
            )
            node_connection.writer = SendThread(
                node_connection, partial(_opened, connection), name=f"to {launcher.host}"
            )
            launcher.on_connect(node_connection)
            self._node_connections[number] = node_connection
            try:
                node_connection.writer.start()
            except RuntimeError:
                node_connection.connection = connection
                self._lose(node_connection, f"no thread can be started for it: {explain_refusal()}")
                continue
            self._use(node_connection, connection)

    def _report_if_due(self, number: int) -> None:
        """Report a launcher to the policy if the launcher has joined and the policy waits for
        it."""
        launcher = self._launchers[number]
        awaited = launcher.report_at is not None and self._clock() >= launcher.report_at
        if awaited and launcher.node_connection is not None and launcher.info is not None:
            launcher.report_at, launcher.joined = None, True
            self._awaited.discard(number)
            self._events.append(a.Joined(node=number, host=launcher.host))

    # --- messages of launchers

    def _on_message(
        self, node_connection: NodeConnection[p.FromLauncher], message: p.FromLauncher
    ) -> None:
        launcher = self._launchers[node_connection.node]
        if launcher.refused:
            return
        if not node_connection.greeted:
            if isinstance(message, p.LauncherInfo):
                self._on_info(node_connection, launcher, message)
            elif isinstance(message, m.AgentEnding):
                self._reject_unfit(node_connection, launcher, message.why)
            return
        match message:
            case m.Pong():
                node_connection.on_pong(message, self._clock())
            case m.AgentEnding():
                self._lose(
                    node_connection,
                    message.why,
                    a.LossKind.UNHEARD if message.coordinator_silent else a.LossKind.GONE,
                )
            case p.LauncherSignalled():
                if message.signum in FOR_THE_JOB:
                    self._events.append(
                        a.Signalled(signum=message.signum, node=node_connection.node)
                    )
            case p.LauncherInfo() | p.Call() | p.Proof():
                pass
            case _ if not launcher.joined or not self._is_current(
                node_connection, launcher, message
            ):
                pass
            case WorkerExit():
                ended = replace(
                    message,
                    ended=min(self._clock(), message.ended + node_connection.clock_offset_s),
                )
                self._events.append(a.FromNode(node=node_connection.node, message=ended))
            case _:
                self._events.append(a.FromNode(node=node_connection.node, message=message))

    def _is_current(
        self,
        node_connection: NodeConnection[p.FromLauncher],
        launcher: JoinedLauncher,
        message: p.FromLauncher,
    ) -> bool:
        """Check a message, and return whether it belongs to the current attempt.

        A launcher that sends an invalid message about the current attempt is dropped as lost. Other
        messages about attempts are ignored. The message may also extend or end the limit for the
        start.
        """
        try:
            counts = launcher.message_check.check(message)
        except ProtocolError as exc:
            if getattr(message, "attempt", launcher.attempt) == launcher.attempt:
                self._lose(node_connection, exc.message)
            return False
        launcher.start.on_message(message, self._clock())
        if launcher.start.until is None:
            self._starting.discard(node_connection.node)
        return counts

    def _on_info(
        self,
        node_connection: NodeConnection[p.FromLauncher],
        launcher: JoinedLauncher,
        info: p.LauncherInfo,
    ) -> None:
        """Check a launcher's options and clock. Report the launcher to the policy, or turn it away
        if its options differ."""
        node_connection.on_greeting(info.clock, self._clock())
        wall = time.time()
        conflict = self._rules.conflict(node_connection.node, launcher.host, info)
        if conflict is not None:
            launcher.refused = True
            hint = "all launchers of a job get the same command line"
            if not self._has_begun:
                self._events.append(a.JobRefused(text=conflict, hint=hint))
                return
            self._notices.note(_NoteKind.CONFLICT, f"a launcher was turned away: {conflict}")
            self._send_to(
                node_connection.node,
                p.ExitLauncher(
                    exit_code=EXIT_USAGE,
                    text=f"error: {conflict}\n  hint: {hint}",
                    summary=conflict,
                    is_error=True,
                ),
            )
            return
        if (
            note := self._rules.clock_note(node_connection.node, launcher.host, info, wall=wall)
        ) is not None:
            self._notices.note(_NoteKind.CLOCK, note)
        launcher.info = info
        if info.attempt >= 0 and not self._has_begun:
            self._events.append(
                a.AttemptsKnown(
                    attempt=info.attempt, restarts=min(info.restarts, self._rules.max_restarts)
                )
            )
        self._ping(node_connection)
        self._report_if_due(node_connection.node)

    def _reject_unfit(
        self, node_connection: NodeConnection[p.FromLauncher], launcher: JoinedLauncher, why: str
    ) -> None:
        """Handle the loss of a launcher that failed before it had sent its ``LauncherInfo``.

        A job of fixed size that has not begun is refused.
        """
        text = (
            f"{self._rank_name} {node_connection.node} ({launcher.host}) cannot take part: "
            f"{printable(why[:_LONGEST_WHY])}"
        )
        fewest, most = self._rules.bounds
        if fewest == most and not self._has_begun:
            self._events.append(a.JobRefused(text=text))
        else:
            self._notices.note(_NoteKind.UNFIT, text)
        self._lose(node_connection, why)

    def _end_late_starts(self) -> None:
        """Drop each launcher whose workers have not started in time, and report its node as
        lost."""
        now = self._clock()
        for node in list(self._starting):
            launcher = self._launchers[node]
            if (
                launcher.node_connection is not None
                and (why := launcher.start.why_late(now)) is not None
            ):
                self._lose(launcher.node_connection, why)

    def _lose(
        self,
        node_connection: NodeConnection[p.FromLauncher],
        why: str,
        kind: a.LossKind = a.LossKind.GONE,
    ) -> None:
        """Drop a launcher's connection. Report its node as lost if the policy knows of the
        launcher, or as unreachable if the policy waits for it and it never sent its options."""
        self._node_connections.pop(node_connection.node, None)
        self._drop(node_connection)
        launcher = self._launchers[node_connection.node]
        if launcher.node_connection is not node_connection:
            return
        launcher.on_disconnect()
        self._starting.discard(node_connection.node)
        if launcher.joined:
            launcher.joined = False
            self._events.append(a.Lost(node=node_connection.node, why=why, kind=kind))
        elif node_connection.node in self._awaited and not node_connection.greeted:
            self._awaited.discard(node_connection.node)
            self._events.append(launcher.unreachable(node_connection.node, self._rank_name, why))

    def _describe_end(self, end: ConnectionEnd) -> str:
        return f"its launcher is gone: {describe_end(end)}"


def _opened(connection: Connection) -> Connection:
    """Return the connection that is open already. ``SendThread`` expects a function that opens
    it."""
    return connection


def _rejection(
    text: str, *, hint: str | None = None, code: int = EXIT_USAGE, again: bool = False
) -> p.Rejected:
    return p.Rejected(text=text, hint=hint, exit_code=code, again=again)
