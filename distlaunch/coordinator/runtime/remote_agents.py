"""The agents of other machines. Connections are opened in threads and read by the main loop.

Each node has one thread. The thread opens the connection and then writes to it, so that ``send``
never waits for the network. The main loop reads all connections.

``Feeder`` sends the launcher's stdin to rank 0 if rank 0 runs on another machine.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.runtime.connections import (
    Connections,
    NodeConnection,
    SendThread,
    StartBound,
    loss_kind,
)
from distlaunch.coordinator.runtime.message_budget import NodeBudget
from distlaunch.coordinator.runtime.message_checks import NodeMessageCheck
from distlaunch.coordinator.runtime.records import DiskWork
from distlaunch.coordinator.runtime.remote_output import OutputThread
from distlaunch.coordinator.runtime.signal_pipe import LOOK_S
from distlaunch.core.errors import LaunchError
from distlaunch.core.model.record import replace
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.transport.connect_errors import ConnectFailure
from distlaunch.transport.connection import (
    ConnectError,
    Connection,
    ConnectionEnd,
    Open,
    Target,
    behind_shell,
    describe_end,
)

LEAVE_S = 8.0
"""How long agents may take to end at the end of the job."""
HURRIED_LEAVE_S = 0.5
"""How long agents may take to exit after the user has asked for a quick end. Agents that are left
end because their connection closes."""
_OUTPUT_S = 10.0


class RemoteAgents(Connections[m.FromRemote]):
    """Connections to the agents on all remote nodes, as a ``Transport``.

    ``targets`` has the address of each node, by number. ``clock`` is the job's clock. ``find`` runs
    the --discover command in a thread and returns its output. ``read`` converts the output to
    targets in the main loop; new hosts are added to ``targets``. Both raise LaunchError if the
    command or its output is wrong.
    """

    reports_signals = False
    """Whether agents report signals that a scheduler sends to them."""

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        open_connection: Open,
        fanout: int,
        connect_s: float,
        output_thread: Callable[[Callable[[int, int], None]], OutputThread],
        clock: Callable[[], float],
        feeder: Feeder | None = None,
        find: Callable[[], str] | None = None,
        read: Callable[[str], Sequence[Target]] = lambda _: (),
        end_opening: Callable[[], None] | None = None,
        cut_off: Callable[[], ConnectionEnd | None] = lambda: None,
    ) -> None:
        """``end_opening`` aborts connections that ``open_connection`` is opening. It is called
        once, at the end.

        ``cut_off`` returns how the connection to all nodes ended; None while it is open.
        """
        super().__init__(clock)
        self.targets = list(targets)
        self._open = open_connection
        self._connect_s = connect_s
        self._gate = threading.BoundedSemaphore(fanout)
        self._opened: deque[tuple[NodeConnection[m.FromRemote], Connection | ConnectFailure]] = (
            deque()
        )
        self._output_thread = output_thread(self._grant_credit)
        self._feeder = feeder
        self._find = find
        self._end_opening = end_opening
        self._cut_off = cut_off
        self._read_found = read
        self._finding = False
        self._found: deque[str | LaunchError] = deque()
        self._noted: deque[str] = deque()
        self._logged_in: deque[Target] = deque()
        self._faulted = False
        self._message_checks: dict[int, NodeMessageCheck] = {}
        self._starts: dict[int, StartBound] = {}
        """The starts of nodes that have not started all their workers."""

    # --- the runner's side

    @property
    def disk_work(self) -> DiskWork:
        """The thread that runs work that may wait for a disk."""
        return self._output_thread

    def note(self, text: str) -> None:
        """Queue the notice ``text`` for the user. May be called from any thread."""
        self._noted.append(text)
        self._notify()

    def logged_in(self, target: Target) -> None:
        """Record that the login on a node has succeeded and its agent is being started.

        May be called from any thread.
        """
        self._logged_in.append(target)
        self._notify()

    def start(self) -> None:
        """Start the output thread."""
        self._output_thread.start()

    def begin_attempt(self, attempt: int) -> None:
        """Write output to this attempt's directory from now on."""
        for message_check in self._message_checks.values():
            message_check.begin_attempt()
        self._output_thread.begin_attempt(attempt)

    def connect(self, node: int, delay_s: float) -> None:
        """Open a connection to a node in its own thread, after ``delay_s``. Close an earlier one.

        ``receive`` returns ``Joined`` or ``Unreachable``.
        """
        self.disconnect(node)
        budget = NodeBudget(time.monotonic())
        node_connection: NodeConnection[m.FromRemote]
        node_connection = self._node_connections[node] = NodeConnection(
            node, m.FROM_REMOTE, m.REMOTE_NESTED_TYPES, budget
        )
        node_connection.writer = SendThread(
            node_connection,
            self._make_opener(node_connection, delay_s),
            name=f"to {self.targets[node].host}",
        )
        try:
            node_connection.writer.start()
        except RuntimeError:
            text = f"no thread can be started for it here: {explain_refusal()}"
            failure = ConnectFailure(host=self.targets[node].host, step="connect", text=text)
            self._opened.append((node_connection, failure))
            self._notify()

    def discover(self) -> None:
        """Run the command of --discover in a thread, unless it already runs or there is none.

        ``receive`` returns the result.
        """
        find = self._find
        if find is None or self._finding:
            return

        def look() -> None:
            try:
                self._found.append(find())
            except LaunchError as exc:
                self._found.append(exc)
            self._notify()

        with suppress(RuntimeError):  # no thread can be started, so no hosts are discovered
            threading.Thread(target=look, name="discover", daemon=True).start()
            self._finding = True

    def send(self, node: int, message: m.ToRemote | p.StartWorkers) -> None:
        """Send a message to a node. A message to a lost node is dropped."""
        if (message_check := self._message_checks.get(node)) is not None:
            message_check.on_send(message)
            if isinstance(message, m.Start):
                self._starts.setdefault(node, StartBound()).begin(
                    len(message.workers), self._clock()
                )
            elif isinstance(message, m.Stop) and node in self._starts:
                self._starts[node].stop(message.grace_s)
        self._send_to(node, message)

    def broadcast(self, message: m.ToAgent) -> None:
        """Send a message to all nodes that are connected or being connected."""
        for node in list(self._node_connections):
            self.send(node, message)

    def descriptors(self) -> dict[int, int]:
        """Return the descriptors to poll. One epoll descriptor covers all connections."""
        wanted = {self._epoll.fileno(): select.POLLIN}
        if self._feeder is not None and self._feeder.wants_more:
            wanted[self._feeder.fileno()] = select.POLLIN
        return wanted

    def deadline(self) -> float | None:
        """Return when ``receive`` is due even if nothing is ready."""
        dues = (self._ping_at, self._read_at, *(start.until for start in self._starts.values()))
        return min((due for due in dues if due is not None), default=None)

    def receive(self) -> list[a.Event]:
        """Handle everything that has arrived or is due, without waiting. Return the events since
        the last call.

        Sends pings and stdin, and loses nodes that are silent or do not start their workers.
        """
        self._read_all()
        while self._noted:
            self._events.append(a.LinePrinted(text=self._noted.popleft()))
        while self._logged_in:
            self._report_logged_in(self._logged_in.popleft())
        while self._opened:
            self._on_opened(*self._opened.popleft())
        while self._found:
            self._on_hosts_found(self._found.popleft())
        if self._output_thread.fault is not None and not self._faulted:
            self._faulted = True
            self._events.append(
                a.LauncherFailed(text=f"the output thread failed\n{self._output_thread.fault}")
            )
        self._send_stdin()
        self._tick()
        self._end_late_starts()
        return self._pop_events()

    def close(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """End all agents, wait for them for a limited time, then end the threads."""
        for node, node_connection in list(self._node_connections.items()):
            if node_connection.connection is None:
                self.disconnect(node)
            else:
                self.send(node, m.ExitAgent())
        until = time.monotonic() + LEAVE_S
        while self._node_connections and (left_s := until - time.monotonic()) > 0:
            if left_s > HURRIED_LEAVE_S and hurried():
                until = time.monotonic() + HURRIED_LEAVE_S
            self._epoll.poll(0.0 if self._read_at is not None else min(left_s, LOOK_S))
            self.receive()
        for node in list(self._node_connections):
            self.disconnect(node)
        if self._end_opening is not None:
            self._end_opening()
        while self._opened:
            self._on_opened(*self._opened.popleft())
        self._output_thread.finish(bound_s=_OUTPUT_S, hurried=hurried)
        self._close()

    # --- opening

    def _make_opener(
        self, node_connection: NodeConnection[m.FromRemote], delay_s: float
    ) -> Callable[[], Connection | None]:
        """Return the function that the node's thread runs to open its connection. It returns None
        if that fails or the node was disconnected."""
        target = self.targets[node_connection.node]

        def open_connection() -> Connection | None:
            if node_connection.is_closed.wait(delay_s):
                return None
            with self._gate:
                if node_connection.is_closed.is_set():
                    return None
                found: Connection | ConnectFailure
                try:
                    found = self._open(target, self._connect_s)
                except ConnectError as exc:
                    found = exc.failure
                except Exception as exc:  # noqa: BLE001 - one node's trouble, and nobody above this thread would tell
                    text = f"{type(exc).__name__}: {exc}"
                    found = ConnectFailure(
                        host=target.host, step="connect", text=text, passing=False
                    )
            if node_connection.is_closed.is_set() and not isinstance(
                found, ConnectFailure
            ):  # the node was disconnected meanwhile
                found.close()
                return None
            self._opened.append((node_connection, found))
            self._notify()
            return None if isinstance(found, ConnectFailure) else found

        return open_connection

    def _on_opened(
        self, node_connection: NodeConnection[m.FromRemote], found: Connection | ConnectFailure
    ) -> None:
        if node_connection.is_closed.is_set():
            if not isinstance(found, ConnectFailure):
                node_connection.open(found, now=self._clock())
                node_connection.close()
        elif isinstance(found, ConnectFailure):
            del self._node_connections[node_connection.node]
            self._events.append(a.Unreachable(node=node_connection.node, failure=found))
        else:
            self._use(node_connection, found)

    def _report_logged_in(self, target: Target) -> None:
        for node, node_connection in self._node_connections.items():
            if self.targets[node] == target and node_connection.connection is None:
                self._events.append(a.LoggedIn(node=node))

    def _on_hosts_found(self, output: str | LaunchError) -> None:
        """Add new hosts to ``targets``, and queue the hosts or the error as ``Discovered``."""
        self._finding = False
        try:
            if isinstance(output, LaunchError):
                raise output
            found = self._read_found(output)
        except LaunchError as exc:
            self._events.append(a.Discovered(hosts=None, problem=exc.message))
            return
        known = {target.host for target in self.targets}
        new = {target.host: target for target in reversed(found) if target.host not in known}
        self.targets += [target for target in found if new.pop(target.host, None) is not None]
        self._events.append(a.Discovered(hosts=tuple(target.host for target in found)))

    # --- reading

    def _on_message(
        self, node_connection: NodeConnection[m.FromRemote], message: m.FromRemote
    ) -> None:
        """Check a message of a node, and handle it or queue it as an event. Before ``Hello`` all
        messages are ignored."""
        if not node_connection.greeted:
            if isinstance(message, m.Hello):
                node_connection.on_greeting(message.clock, self._clock())
                self._message_checks[node_connection.node] = NodeMessageCheck(
                    self._output_thread.window, reports_signals=self.reports_signals
                )
                self._send_to(node_connection.node, m.Credit(size=self._output_thread.window))
                self._ping(node_connection)
                self._events.append(a.Joined(node=node_connection.node))
            return
        if not self._message_checks[node_connection.node].check(message):
            if isinstance(message, m.Output):
                self._output_thread.drop(node_connection.node, len(message.data))
            return
        self._note_start(node_connection.node, message)
        match message:
            case m.Output() | m.RankEnded():
                self._output_thread.take(node_connection.node, message)
            case m.Pong():
                node_connection.on_pong(message, self._clock())
            case m.StdinConsumed():
                if self._feeder is not None:
                    self._feeder.taken(node_connection.node, message)
            case m.AgentEnding():
                self._lose(
                    node_connection,
                    message.why,
                    a.LossKind.UNHEARD if message.coordinator_silent else a.LossKind.GONE,
                )
            case m.Hello() | m.AgentSignalled():
                pass
            case WorkerExit():
                ended = replace(
                    message,
                    ended=min(self._clock(), message.ended + node_connection.clock_offset_s),
                )
                self._events.append(a.FromNode(node=node_connection.node, message=ended))
            case _:
                self._events.append(a.FromNode(node=node_connection.node, message=message))

    def _note_start(self, node: int, message: m.FromRemote) -> None:
        if (start := self._starts.get(node)) is not None:
            start.on_message(message, self._clock())
            if start.until is None:
                del self._starts[node]

    def _end_late_starts(self) -> None:
        """Disconnect each node whose workers have not started in time, and report the node as
        lost."""
        now = self._clock()
        for node, start in list(self._starts.items()):
            if (why := start.why_late(now)) is not None:
                self._lose(self._node_connections[node], why)

    def _lose(
        self,
        node_connection: NodeConnection[m.FromRemote],
        why: str,
        kind: a.LossKind = a.LossKind.GONE,
    ) -> None:
        """Drop a node's connection. Queue ``Lost`` if its agent has greeted, else
        ``Unreachable``."""
        self._node_connections.pop(node_connection.node, None)
        greeted = node_connection.greeted
        self._drop(node_connection)
        cut_off = self._cut_off()
        if greeted:
            if cut_off is not None:
                why, kind = self._describe_end(cut_off), loss_kind(cut_off)
            self._events.append(
                a.Lost(node=node_connection.node, why=why, final=cut_off is not None, kind=kind)
            )
        else:
            failure = ConnectFailure(
                host=self.targets[node_connection.node].host, step="agent", text=why
            )
            self._events.append(a.Unreachable(node=node_connection.node, failure=failure))

    def _describe_end(self, end: ConnectionEnd) -> str:
        return describe_end(behind_shell(end), "its agent")

    def _drop(self, node_connection: NodeConnection[m.FromRemote]) -> None:
        self._message_checks.pop(node_connection.node, None)
        self._starts.pop(node_connection.node, None)
        if node_connection.connection is not None:
            self._output_thread.forget(node_connection.node)
        super()._drop(node_connection)
        if self._feeder is not None:
            self._feeder.lost(node_connection.node)

    def _grant_credit(self, node: int, size: int) -> None:
        if (message_check := self._message_checks.get(node)) is not None:
            message_check.grant(size)
        self._send_to(node, m.Credit(size=size))

    def _send_stdin(self) -> None:
        if self._feeder is not None:
            for node, message in self._feeder.ready():
                self.send(node, message)


_CHUNK_BYTES = 64 << 10
_WINDOW_BYTES = 256 << 10


class Feeder:
    """Reads the launcher's stdin as fast as rank 0 reads it.

    The main loop polls ``fileno`` while ``wants_more``.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._node: int | None = None
        self._under_way = 0
        self._ended = False
        self._tell_end = False
        self.unread = 0
        """Bytes of stdin that rank 0 never read."""

    @staticmethod
    def is_worth_it(descriptor: int = 0) -> bool:
        """Return whether stdin can have data: stdin is a pipe, a file or a socket.

        A terminal is not read for a worker on another machine.
        """
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            return False
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)

    def begin(self, node: int) -> None:
        """Send stdin to this node from now on. Data that an earlier attempt has read is not sent
        again."""
        self._node, self._under_way, self._tell_end = node, 0, self._ended

    def lost(self, node: int) -> None:
        """Stop sending if the lost node has rank 0."""
        if node == self._node:
            self._node = None

    def fileno(self) -> int:
        """Return the descriptor of stdin."""
        return self._descriptor

    @property
    def wants_more(self) -> bool:
        """Whether more of stdin may be read."""
        return self._node is not None and not self._ended and self._under_way < _WINDOW_BYTES

    def taken(self, node: int, message: m.StdinConsumed) -> None:
        """Record how many bytes rank 0 has read. Stop sending if it has closed its stdin."""
        self.unread += max(0, message.unread)
        if node == self._node:
            self._under_way = max(0, self._under_way - max(0, message.size))
            if message.closed:
                self._node = None

    def ready(self) -> list[tuple[int, m.StdinData]]:
        """Read from stdin if it has data and rank 0's node may get more. Return the messages to
        send, each with its node."""
        if self._node is None:
            return []
        if self._tell_end:
            self._tell_end = False
            return [(self._node, m.StdinData(data=b""))]
        if not self.wants_more or not _has_data(self._descriptor):
            return []
        try:
            data = os.read(self._descriptor, _CHUNK_BYTES)
        except OSError:
            data = b""
        self._ended = not data
        self._under_way += len(data)
        return [(self._node, m.StdinData(data=data))]


def _has_data(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0)[0])
