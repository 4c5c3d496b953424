"""Joined launcher: a launcher that carries out the coordinator's decisions on its node.

The launcher plans its workers from its own command line, writes and shows their output, reports
their events to the coordinator, and exits with the job's result. If the coordinator is lost, the
launcher stops its workers. It then connects again, as long as the job has restarts left. A launcher
that cannot take part reports the reason to the coordinator (``decline``), so that the other
launchers do not wait for it.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from distlaunch.coordinator.joined.local_node import FromNode, LocalNode
from distlaunch.coordinator.policy.events_and_actions import Signalled
from distlaunch.coordinator.policy.job import PRESS_AGAIN
from distlaunch.coordinator.policy.restarts import Restart, RestartRule, text_of
from distlaunch.coordinator.policy.signals import Signals, StopSignal, StopSignalCounter
from distlaunch.coordinator.policy.start_messages import Streams, start_of
from distlaunch.coordinator.runtime import signal_pipe as signals
from distlaunch.coordinator.runtime.connections import NodeConnection, ReadEnd, SendThread
from distlaunch.coordinator.runtime.error_file import ErrorFile
from distlaunch.coordinator.runtime.message_budget import CoordinatorBudget
from distlaunch.coordinator.runtime.message_checks import PASSED_ON, CoordinatorMessageCheck
from distlaunch.coordinator.runtime.records import EventLog, OutputFiles
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.agent import connect
from distlaunch.core.agent.liveness import SilenceMonitor
from distlaunch.core.agent.remote_agent import PausableClock
from distlaunch.core.errors import (
    EXIT_SOFTWARE,
    EXIT_UNAVAILABLE,
    ConfigError,
    LaunchError,
    ProtocolError,
)
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import printable
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.private_files import make_private_dirs
from distlaunch.core.probe.process_limits import explain_refusal
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import launcher_messages as p
from distlaunch.core.protocol.codec import encode
from distlaunch.core.protocol.handshake import JobIdentity
from distlaunch.planning.rendezvous import Rendezvous
from distlaunch.transport.connection import Connection, describe_end
from distlaunch.transport.tcp_connection import TcpConnection

_LONGEST_TEXT = 1 << 18
END_S = 10.0
"""How long workers may take to end beyond their grace."""
SIGNALS_LEAVE = 4
"""The first signal asks all workers to end, and the second kills them. After this number of
signals, the launcher ends without the coordinator."""
AGAIN_S = 0.5
"""Shortest time between joining a coordinator and connecting again after the coordinator was
lost."""
_LAST_S = 2.0
"""Longest time for sending the last messages."""
BOUND_S = 2.0
"""Longest time for reporting to node 0 why this launcher ends. Node 0 may never start."""
_LONGEST = 4000
_CLOSED_SOON_S = 5.0
"""After a pause of this process, the end of its connection is noticed within this time."""


class JoinedSettings(Record):
    """Settings of a joined launcher."""

    coordinator: str
    """The coordinator's name in messages: ``node 0 at n1:29400``."""
    job_id: str
    """The job id that the coordinator has sent."""
    max_restarts: int
    failure_grace_s: float
    lost_after_s: float
    """How long the coordinator may be silent, unless its pings set another limit."""
    flexible: bool
    """Whether the job continues without a lost node, and accepts the node again later."""
    leaves: bool = False
    """TERM ends only this launcher, because its node is drained. If False, a scheduler signals all
    launchers to end the job."""
    grace_s: float = 25.0
    """How long workers may take to end after TERM."""
    speaks: bool = True
    """Whether this launcher shows the coordinator's notices."""


class LauncherPlanner(Protocol):
    """Plans the workers of this launcher. ``planning.joined_plan`` implements it."""

    def survey(self, serial: int) -> m.Survey:
        """Return the survey of the launcher's own node."""

    def launcher_info(
        self, *, clock: float, wall: float, attempt: int, restarts: int
    ) -> p.LauncherInfo:
        """Return the message that describes this launcher's options and state to the
        coordinator."""

    def set_job_id(self, job_id: str) -> None:
        """Use this job id from now on."""

    def plan_start(self, start: p.StartWorkers, interfaces: list[str]) -> LaunchPlan:
        """Return the plan of this launcher's workers for an attempt.

        ``interfaces`` are the names of this node's network interfaces. Raises LaunchError, and
        ProtocolError if ``start`` is invalid.
        """


Call = Callable[[], tuple[Connection, p.Welcome]]
"""Connects to the coordinator and waits until the coordinator admits this launcher.

Raises LaunchError if that fails, and ConnectInterrupted after a signal that ends the launcher.
"""


class JoinedRunner:
    """Runs the workers of one node until the coordinator has sent the job's exit code."""

    def __init__(
        self,
        *,
        settings: JoinedSettings,
        planner: LauncherPlanner,
        own: LocalNode,
        files: OutputFiles,
        sink: Sink,
        events: EventLog,
        signal_pipe: signals.SignalPipe,
        clock: PausableClock,
        call: Call,
        count_from: Callable[[int], None],
        error_file: ErrorFile | None = None,
    ) -> None:
        """``count_from`` is called with the lowest rank of this node, for a console that shows
        local ranks."""
        self._settings = settings
        self._planner = planner
        self._own = own
        self._files = files
        self._sink = sink
        self._events = events
        self._signals = signal_pipe
        self._repeated_signals = Signals(holds=False)
        self._clock = clock
        self._connect = call
        self._count_from = count_from
        self._error_file = error_file or ErrorFile(None)
        self._job_id = settings.job_id
        self._coordinator = CoordinatorConnection()
        self._silence = SilenceMonitor(settings.lost_after_s)
        self._long_poll_s = 0.0
        """Duration of the last poll that was as long as --lost-after."""
        self._long_poll_ended_at = -math.inf
        self._joined_at = 0.0
        self._loss = ""
        """Why the coordinator is lost, or why this launcher leaves the job. Empty if neither is the
        case."""
        self._is_odd = False
        """The coordinator has sent an invalid message. Connecting again would not help."""
        self._is_coordinator_silent = False
        """The coordinator has been silent for too long."""
        self._leaves = False
        """Whether this launcher leaves the job although the coordinator is not lost."""
        self._exit_code: int | None = None
        self._message_check = CoordinatorMessageCheck()
        self._log_requests: set[int] = set()
        """Serial numbers of this connection's requests for logs that are not answered."""
        self._restart_rule = RestartRule(allowed=settings.max_restarts)
        self._running: int | None = None
        """The attempt whose workers run on this node."""
        self._asked = False
        """Whether the current workers have been asked to end."""
        self._stop_signal: int | None = None
        """The first signal that ends this launcher."""
        self._stop_count = 0
        self._requests = StopSignalCounter()
        self._noted: set[str] = set()

    def run(self, connection: Connection) -> int:
        """Run the workers. Return the exit code of the coordinator, or this launcher's own if it
        ends without the coordinator.

        Connects again after a loss while the job has restarts left. Raises LaunchError if the
        workers cannot be run, and all errors of ``connect_to_listener``.
        """
        self._use_connection(connection)
        try:
            self._own.start()
        except LaunchError as exc:
            self._refuse(exc)
            raise
        while True:
            self._send_launcher_info()
            while not self._is_over():
                self._run_once()
            if self._exit_code is None:
                self._stop_own_workers()
            if self._exit_code is None:
                self._exit_code = self._end_of_job()
            if self._exit_code is not None:
                self._events.write("job_ended", {"exit_code": self._exit_code})
                return self._exit_code
            self._events.write(
                "calling_again",
                {"attempt": self._message_check.attempt, "restarts": self._restart_rule.count},
            )
            connection, welcome = self._connect()
            self._use_connection(connection)
            self._on_rejoin(welcome)

    def close(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """End all processes of this node, then disconnect from the coordinator."""
        self._own.close(hurried)
        self._coordinator.close()

    def _is_over(self) -> bool:
        """Return whether the job has ended or the coordinator is lost."""
        return self._exit_code is not None or bool(self._loss)

    def _end_of_job(self) -> int | None:
        """Return the exit code if this launcher does not connect again after the coordinator was
        lost or this launcher has left.

        Otherwise wait until it may connect again, and return None.
        """
        decision = self._restart_rule.after_coordinator_loss(
            has_begun=self._message_check.attempt >= 0, flexible=self._settings.flexible
        )
        if isinstance(decision, Restart) and not self._is_odd:
            self._wait_before_connecting()
        if self._exit_code is not None or self._own.is_broken:
            return EXIT_SOFTWARE  # the spawner is not started again
        if self._stop_signal is not None:
            return 128 + self._stop_signal
        if self._is_odd:
            return EXIT_UNAVAILABLE
        if isinstance(decision, Restart):
            return None
        self._sink.say(text_of(decision), level="error")
        return EXIT_UNAVAILABLE

    @property
    def _has_workers(self) -> bool:
        return self._running is not None and not self._own.is_broken

    # --- the coordinator

    def _use_connection(self, connection: Connection) -> None:
        """Use a new connection to the coordinator. Raises ConfigError if no thread can be started
        for it."""
        self._loss = ""
        self._is_coordinator_silent = False
        self._joined_at = time.monotonic()
        self._silence.reset()
        self._message_check.joined()
        self._log_requests.clear()
        self._coordinator.open(connection)

    def _send_launcher_info(self) -> None:
        attempt, restarts = self._message_check.attempt, self._restart_rule.count
        self._send(
            self._planner.launcher_info(
                clock=self._clock(), wall=time.time(), attempt=attempt, restarts=restarts
            )
        )

    def _on_rejoin(self, welcome: p.Welcome) -> None:
        """Continue after this launcher has connected again.

        The coordinator may be another process with another job id. The run directory does not
        change.
        """
        self._events.write("rejoined", {"job_id": welcome.job_id})
        if welcome.job_id != self._job_id:
            self._job_id = welcome.job_id
            self._planner.set_job_id(welcome.job_id)
            self._sink.say(
                f"the job is called {welcome.job_id} now; this node's logs stay where they are"
            )

    def _send(self, message: Record) -> None:
        self._coordinator.send(message)

    def _run_once(self) -> None:
        """Wait for one event, then handle signals and the messages of the coordinator and of this
        node's agent.

        Record the coordinator as lost if it has been silent for too long.
        """
        self._wait([] if self._clock.paused else [self._silence.left_s])
        self._receive()
        for message in self._own.receive():
            self._on_own_message(message)
        silent_s = self._silence.silent_s()
        if silent_s is not None and not self._clock.paused:
            self._is_coordinator_silent = not self._loss
            self._loss = self._loss or f"no word from it for {silent_s:.0f} s"

    def _wait(self, waits_s: Iterable[float]) -> None:
        poll = select.poll()
        for descriptor, wanted in self._own.descriptors().items():
            poll.register(descriptor, wanted)
        poll.register(self._signals.fileno(), select.POLLIN)
        if (connection := self._coordinator.connection) is not None:
            poll.register(connection.fileno(), select.POLLIN)
        waits_s = [*waits_s]
        if not self._clock.paused and (deadline := self._own.deadline()) is not None:
            waits_s.append(deadline - self._clock())
        if self._coordinator.has_unread:
            waits_s.append(0.0)
        for descriptor, _ in poll.poll(self._silence.poll_ms(waits_s)):
            if descriptor == self._signals.fileno():
                for signum in self._signals.read():
                    self._take_signal(signum, spawner=False)
        if (polled_s := self._silence.polled_s) >= self._settings.lost_after_s - m.LATE_S:
            self._long_poll_s, self._long_poll_ended_at = polled_s, time.monotonic()

    def _receive(self) -> None:
        connection = self._coordinator.connection
        if connection is None or self._is_over():
            return
        try:
            for message in self._coordinator.receive():
                if message is ReadEnd.CLOSED:
                    self._loss = self._own_fault() or describe_end(connection.end())
                if isinstance(message, ReadEnd):
                    return
                self._silence.reset()
                self._handle(message)
                if self._is_over():  # later messages do not count
                    return
        except ProtocolError as exc:
            self._is_odd, self._loss = True, exc.message

    def _own_fault(self) -> str:
        """Return a clause if this launcher was itself suspended just before the coordinator closed
        the connection.

        Otherwise return an empty string.
        """
        # Messages that arrived before the end of the connection may have ended polls since.
        if time.monotonic() - self._long_poll_ended_at > _CLOSED_SOON_S:
            return ""
        return (
            f"this launcher, its machine or the network stood still for {self._long_poll_s:.0f} s, and "
            "it was taken for lost"
        )

    def _handle(self, message: p.ToLauncher) -> None:
        """Check a message of the coordinator and carry it out."""
        own = self._own
        self._message_check.check(message, running=self._running is not None)
        match message:
            case m.Ping():
                self._silence.on_ping(message)
                self._send(m.Pong(serial=message.serial, clock=self._clock()))
            case p.SurveyNode():
                own.handle(self._planner.survey(message.serial))
            case p.StartWorkers():
                self._start_workers(message)
            case p.ExitLauncher():
                self._on_verdict(message)
            case p.Notice() if self._settings.speaks:
                text = message.text[:_LONGEST_TEXT]
                self._sink.say(text, level="warning" if message.level == "warning" else "info")
            case m.Pause():
                self._clock.pause(paused=message.paused)
                self._silence.reset()
                own.handle(message)
            case m.Stop() if message.attempt == self._running:
                self._asked = True
                self._clock.pause(
                    paused=False
                )  # Stop resumes paused workers, and its grace must pass
                own.handle(message)
            case (
                m.WaitForLeftovers()
                | m.ForwardSignal()
                | m.Prepare()
                | m.CollectStacks()
                | m.ReadUsage()
                | m.Reach()
            ):
                own.handle(message)
            case m.ListLogs() | m.ReadLog():
                self._log_requests.add(message.serial)
                own.handle(message)
            case _:
                pass

    def _start_workers(self, start: p.StartWorkers) -> None:
        """Plan and start the workers of an attempt.

        An attempt that this launcher has had counts as a loss of the coordinator. If planning
        fails, this launcher ends.
        """
        if 0 <= start.attempt <= self._message_check.attempt:
            # The coordinator took over with launchers that knew of fewer attempts. It learns of this
            # one when this launcher connects again.
            self._loss = f"it starts attempt {start.attempt}, which this launcher has had"
            return
        try:
            plan = self._planner.plan_start(start, [name for _, name in socket.if_nameindex()])
        except ProtocolError:
            raise
        except LaunchError as exc:
            self._sink.say(f"error: {exc.message}", level="error")
            self._refuse(exc)
            self._exit_code = exc.exit_code
            return
        self._message_check.attempt, self._restart_rule.count = start.attempt, start.restarts
        for number, note in enumerate((*plan.warnings, *plan.notes)):
            if note not in self._noted:
                self._noted.add(note)
                self._sink.say(note, level="warning" if number < len(plan.warnings) else "info")
        with suppress(OSError):  # reported when there is output to file
            make_private_dirs(plan.layout.attempt_dir(plan.run_dir, plan.attempt))
        ranks = [worker.rank for worker in plan.workers]
        self._files.ranks = ranks
        self._count_from(min(ranks))
        self._files.begin_attempt(plan.attempt)
        fields = {"attempt": plan.attempt, "ranks": ranks, "master_addr": start.master_addr}
        fields |= {"master_port": start.master_port, "host": os.uname().nodename}
        fields["coordinator"] = self._settings.coordinator
        self._events.write("attempt_started", fields)
        streams = Streams(terminal=None, stdin=False, is_remote=False)
        self._running, self._asked = plan.attempt, False
        self._own.handle(start_of(plan, start.node_rank, plan.workers, streams, plan.shared_env))

    def _on_verdict(self, verdict: p.ExitLauncher) -> None:
        """End with the job's exit code, and show the job's errors."""
        code, text = verdict.exit_code, verdict.text[:_LONGEST_TEXT]
        if text and self._settings.speaks:
            self._sink.say(text, level="error" if verdict.is_error else "info")
        if verdict.summary and code > 0:
            self._error_file.write(verdict.summary[:_LONGEST_TEXT], text, code)
        self._exit_code = code

    def _refuse(self, exc: LaunchError) -> None:
        """Send the coordinator an error with which this launcher ends."""
        self._end_part(exc.message)

    def _end_part(self, why: str, *, coordinator_silent: bool = False) -> None:
        """Send the coordinator the reason why this launcher ends."""
        self._send(m.AgentEnding(why=why, coordinator_silent=coordinator_silent))
        self._coordinator.flush()

    # --- our own node

    def _on_own_message(self, message: FromNode) -> None:
        if isinstance(message, m.SpawnerSignalled):
            self._take_signal(message.signum, spawner=True)
            return
        if isinstance(message, (m.LogList, m.LogPart)):
            if message.serial not in self._log_requests:
                return  # it was asked for on an earlier connection
            self._log_requests.discard(message.serial)
        self._send(message)
        self._note(message)
        if isinstance(message, m.AgentFailed):
            self._coordinator.flush()

    def _note(self, message: FromNode) -> None:
        """Record a message of this node's agent that the coordinator gets."""
        match message:
            case m.AttemptEnded():
                self._running = None
            case WorkerExit():
                fields = {
                    "attempt": message.attempt,
                    "rank": message.rank,
                    "pid": message.pid,
                    "returncode": message.returncode,
                    "uptime_s": round(message.uptime_s, 3),
                    "told_to_stop": message.told_to_stop,
                }
                self._events.write("worker_exited", fields)
            case m.AgentFailed():
                self._sink.say(
                    f"internal error: {message.text}; all workers here have been killed",
                    level="error",
                )
                self._exit_code = EXIT_SOFTWARE
            case _:
                pass

    # --- signals

    def _take_signal(self, signum: int, *, spawner: bool) -> None:
        """Handle a signal of this launcher or of its spawner.

        If both receive a signal, it is handled once.
        """
        signal_event = self._repeated_signals.on_signal(
            Signalled(signum=signum, spawner=spawner), time.monotonic()
        )
        if signal_event is not None:
            self._on_signal(signum)

    def _on_signal(self, signum: int) -> None:
        """Pass a signal on to the coordinator, which decides. Merged repetitions are dropped, and
        Ctrl-Z only gets a notice."""
        if signum == signal.SIGTSTP:
            self._sink.say(
                f"Ctrl-Z: only {self._settings.coordinator} can stop the job for a while",
                level="warning",
            )
        elif signum in PASSED_ON:
            self._send(p.LauncherSignalled(signum=signum))
        elif signum in signals.ENDING:
            request = self._requests.classify(time.monotonic())
            if request is StopSignal.EARLY and signum != signal.SIGQUIT:
                self._send(
                    p.LauncherSignalled(signum=signum)
                )  # the coordinator counts signals, too
            elif request is not StopSignal.MERGED or signum == signal.SIGQUIT:
                self._on_ending(signum)

    def _on_ending(self, signum: int) -> None:
        """Pass a signal that ends the job to the coordinator, and count it.

        If this node alone is drained, leave the job instead. End without the coordinator after
        ``SIGNALS_LEAVE`` signals.
        """
        is_first, is_alone = self._stop_signal is None, self._coordinator.connection is None
        self._stop_signal = self._stop_signal or signum
        self._stop_count += 1
        if signum == signal.SIGTERM and self._settings.leaves and is_first and not is_alone:
            self._leaves, self._loss = True, "its launcher was told to end by SIGTERM"
            self._end_part(self._loss)
            return
        self._send(p.LauncherSignalled(signum=signum))
        if self._stop_count >= SIGNALS_LEAVE:
            self._leave(signum)
            return
        alone = "ending" if is_first else "killing the workers of this node"
        what = alone if is_alone else f"telling {self._settings.coordinator}"
        again = PRESS_AGAIN if is_first and signum == signal.SIGINT else ""
        self._sink.say(f"{signal.Signals(signum).name}: {what}{again}")

    def _leave(self, signum: int) -> None:
        """End with a signal's exit code and without the coordinator, after the user has repeated
        the signal. Closing kills the workers."""
        self._end_part(
            f"its launcher was told to end by {signal.Signals(signum).name} {SIGNALS_LEAVE} times"
        )
        self._sink.say("killing the workers of this node", level="warning")
        self._exit_code = 128 + signum

    # --- without the coordinator

    def _stop_own_workers(self) -> None:
        """Close the connection, report the loss, and stop the workers of this node without the
        coordinator.

        Returns early after a further signal; closing then kills the workers.
        """
        if self._is_odd:
            self._end_part(f"the coordinator broke the protocol: {self._loss}")
        elif (
            self._is_coordinator_silent
        ):  # the coordinator may have been suspended, and reads this later
            self._end_part(
                f"its launcher heard nothing of this one: {self._loss}", coordinator_silent=True
            )
        self._coordinator.close()
        self._report_loss()
        grace_s = self._settings.grace_s if self._leaves else self._settings.failure_grace_s
        until = time.monotonic() + grace_s + END_S
        if self._has_workers:
            if self._clock.paused:
                self._clock.pause(paused=False)
                self._own.handle(m.Pause(paused=False))
            ask = (
                0
                if self._asked
                else signal.SIGINT
                if self._stop_signal == signal.SIGINT
                else signal.SIGTERM
            )
            self._own.handle(
                m.Stop(attempt=self._message_check.attempt, signum=ask, grace_s=grace_s)
            )
        enough = max(1, self._stop_count) + 1
        while self._has_workers and (left_s := until - time.monotonic()) > 0:
            if self._stop_count >= enough:
                return  # closing kills the remaining processes
            self._work_alone(left_s)
        if self._has_workers:
            self._exit_code = EXIT_SOFTWARE
            self._sink.say("not even KILL ended the workers of this node", level="error")

    def _report_loss(self) -> None:
        what = "; stopping the workers of this node" if self._running is not None else ""
        how = "does not speak as it should" if self._is_odd else "is lost"
        text = f"{self._settings.coordinator} {how}: {printable(self._loss)}"
        text = "SIGTERM: leaving the job, which goes on without this node" if self._leaves else text
        self._sink.say(text + what, level="error" if self._is_odd else "warning")
        if self._leaves:
            self._events.write("left", {"why": self._loss})
            return
        kind = "odd" if self._is_odd else "silent" if self._is_coordinator_silent else "gone"
        self._events.write("coordinator_lost", {"why": self._loss, "kind": kind})

    def _work_alone(self, within_s: float) -> None:
        """Handle signals and messages of this node's agent, for at most ``within_s``."""
        self._wait([within_s])
        for message in self._own.receive():
            self._note(message)

    def _wait_before_connecting(self) -> None:
        """Wait before this launcher connects again. A signal ends the wait.

        A coordinator that was lost soon after this launcher joined may be lost again soon.
        """
        until = self._joined_at + AGAIN_S
        while (
            self._stop_signal is None
            and self._exit_code is None
            and (left_s := until - time.monotonic()) > 0
        ):
            self._work_alone(left_s)


class CoordinatorConnection:
    """The connection to the coordinator. Without a connection, messages to the coordinator are
    dropped."""

    def __init__(self) -> None:
        self._node_connection: NodeConnection[p.ToLauncher] | None = None
        self.has_unread = False
        """Whether messages may be left that were received but not processed. No descriptor becomes
        readable for them."""

    @property
    def connection(self) -> Connection | None:
        """The open connection; None if there is none."""
        return None if self._node_connection is None else self._node_connection.connection

    def open(self, connection: Connection) -> None:
        """Use a new connection, and start the thread that writes to it. Raises ConfigError if no
        thread can be started."""
        budget = CoordinatorBudget(time.monotonic())
        self._node_connection = node_connection = NodeConnection[p.ToLauncher](
            0, p.TO_LAUNCHER, m.REMOTE_NESTED_TYPES, budget
        )
        node_connection.open(connection, now=0.0)
        node_connection.writer = SendThread(
            node_connection, lambda: connection, name="to the coordinator"
        )
        try:
            node_connection.writer.start()
        except RuntimeError as exc:
            raise ConfigError("no thread can be started", hint=explain_refusal()) from exc

    def receive(self) -> Iterator[p.ToLauncher | ReadEnd]:
        """Yield the messages of one turn, then the reason why the turn ends, if more may follow or
        the connection has ended.

        A turn is limited in messages and time. Raises ProtocolError for an invalid message, after
        the messages before it.
        """
        if self._node_connection is None:
            return
        self._node_connection.begin_turn(time.monotonic())
        self.has_unread = False
        while (message := self._node_connection.next_message()) is not ReadEnd.EMPTY:
            self.has_unread = message is ReadEnd.TURN_OVER
            yield message
            if isinstance(message, ReadEnd):
                return

    def send(self, message: Record) -> None:
        """Queue a message to be sent."""
        if self._node_connection is not None:
            self._node_connection.write(encode(message))

    def flush(self) -> None:
        """Wait at most ``_LAST_S`` until the queued messages are sent."""
        until = time.monotonic() + _LAST_S
        while (
            self._node_connection is not None
            and self._node_connection.has_unsent
            and time.monotonic() < until
        ):
            time.sleep(0.01)

    def close(self) -> None:
        """Close the connection."""
        if self._node_connection is not None:
            self._node_connection.close()
            self._node_connection = None


def decline(
    rendezvous: Rendezvous,
    job_identity: JobIdentity,
    *,
    host: str,
    why: str,
    other_addresses: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Report to node 0 that this launcher, on ``host``, ends, with the reason ``why``. Give up
    after ``BOUND_S``.

    Does nothing on node 0 itself, and in a launcher without a rank. ``other_addresses`` returns
    other addresses of node 0; it is called if node 0's name cannot be resolved.
    """
    if not rendezvous.rank:
        return
    try:
        connection, _ = connect.connect_to_listener(
            rendezvous.host,
            rendezvous.ports,
            job_identity=job_identity,
            rank=rendezvous.rank,
            own_host=host,
            instance=os.urandom(16).hex(),
            until=time.monotonic() + BOUND_S,
            other_addresses=other_addresses,
        )
    except LaunchError:
        return
    leave(TcpConnection(connection, "node 0"), why)


def leave(connection: Connection, why: str) -> None:
    """Report to node 0 that this launcher, which was admitted, ends, with the reason ``why``.

    Closes the connection when node 0 has read the message, or after ``BOUND_S``.
    """
    until = time.monotonic() + BOUND_S
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    with suppress(OSError):
        connection.send(encode(m.AgentEnding(why=why[:_LONGEST])))
        while connection.receive() is not None and (left_s := until - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
    connection.close()
