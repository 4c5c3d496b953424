"""The main loop of the coordinator: it passes events to the policy and executes the policy's
actions.

While a job runs, the coordinator waits only in ``run``.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, Protocol

from distlaunch.coordinator.policy import events_and_actions as a
from distlaunch.coordinator.policy.advisory import Advisory, AdvisoryFault, AdvisoryPart, loss_of
from distlaunch.coordinator.policy.job import JobPolicy
from distlaunch.coordinator.policy.start_messages import Streams, starts
from distlaunch.coordinator.runtime import signal_pipe as signals
from distlaunch.coordinator.runtime.error_file import ErrorFile
from distlaunch.coordinator.runtime.keyboard import Keyboard, Terminal
from distlaunch.coordinator.runtime.main_loop_calls import MainLoopCalls
from distlaunch.coordinator.runtime.records import DiskWork, EventLog, GuardedDiskWork
from distlaunch.coordinator.runtime.reports import Reporter
from distlaunch.coordinator.runtime.run_directory import RunDir
from distlaunch.coordinator.runtime.sink import Sink, StatusView
from distlaunch.core.agent.workers.log_files import open_to_append
from distlaunch.core.agent.workers.pseudo_terminal import in_foreground
from distlaunch.core.errors import ConfigError, LaunchError
from distlaunch.core.model.launcher_process import this_process
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.core.model.run_files import FAULTS, SERIES, plan_path
from distlaunch.core.model.text import counted, printable
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.private_files import make_private_dir, open_private
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol.control_messages import control_directories
from distlaunch.planning.build_plan import bind

if TYPE_CHECKING:
    from concurrent.futures import Future

    from distlaunch.coordinator.policy.attempt import AttemptNodes
    from distlaunch.coordinator.runtime.control import Handler
    from distlaunch.coordinator.runtime.node_logs import NodeLogs
    from distlaunch.coordinator.runtime.node_questions import Answers, AskedNodes, NodeQuestions
    from distlaunch.coordinator.runtime.remote_agents import Feeder
    from distlaunch.coordinator.runtime.series_file import SeriesFile
    from distlaunch.coordinator.runtime.snapshot import JobSnapshot, Snapshots
    from distlaunch.core.protocol import launcher_messages as p
    from distlaunch.planning.backend import PlannedBackend

P = ParamSpec("P")
_FAULT = object()
PAUSE_S = 1.0
"""How long the spawner may take to receive the request to suspend all workers (Ctrl-Z)."""
_FLUSH_STEP_S = 0.02
_MOST_LOG_NODES = 256
"""The nodes of older attempts are forgotten."""
_EVENTS_S = 0.05
"""After this time the loop handles signals and deadlines, before it processes further events."""
_TSTP = bytes([signal.SIGTSTP])
_LONGEST_POLL_MS = 3_600_000  # poll takes a C int, so longer waits wake up in between


class Transport(Protocol):
    """The coordinator's connection to the agents."""

    def start(self) -> None:
        """Start the agents of this machine and the transport's threads."""

    def connect(self, node: int, delay_s: float) -> None:
        """Connect to a node, after ``delay_s``. ``receive`` returns the result."""

    def disconnect(self, node: int) -> None:
        """Disconnect a node."""

    def discover(self) -> None:
        """Run the --discover command again. ``receive`` returns the result."""

    def send(self, node: int, message: m.ToAgent | m.Survey | m.Reach | p.StartWorkers) -> None:
        """Send a message without waiting."""

    def broadcast(self, message: m.ToAgent) -> None:
        """Send a message to all connected nodes."""

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait to be sent."""

    def descriptors(self) -> Mapping[int, int]:
        """Return the descriptors to poll, with the poll events."""

    def deadline(self) -> float | None:
        """Return when ``receive`` is due even if nothing is ready."""

    def receive(self) -> list[a.Event]:
        """Return the events since the last call, without waiting.

        Called when a descriptor is ready or ``deadline`` has come: it also does the transport's own
        work.
        """

    def close(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """End all agents and the processes of their workers.

        ``hurried`` returns True if the user wants a quick end.
        """


class AttemptFiles(Protocol):
    """Writes the workers' output."""

    def begin_attempt(self, attempt: int) -> None:
        """Write to this attempt's directory from now on."""


class JobClock:
    """Monotonic seconds that do not advance while the job is paused."""

    def __init__(self) -> None:
        self._paused_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return time.monotonic() - self._paused_s

    def skip(self, seconds: float) -> None:
        """Set the clock back by ``seconds``, the length of a pause that has just ended."""
        self._paused_s += seconds


class Runner:
    """Runs one job and returns its exit code.

    ``takes_typed``: with several workers, rank 0 reads the launcher's stdin even if stdin is a
    terminal and the launcher is its foreground job. ``feeder`` sends stdin to rank 0 on another
    machine. ``launchers``: each other node has its own launcher. ``disk_work`` runs work that may
    wait for a disk. ``backend`` sets the variables for the addresses at which workers listen. The
    first failure is written to ``error_file``. ``output_bytes`` returns how much workers have
    written. ``on_started`` is called when all workers have started for the first time.
    """

    def __init__(
        self,
        *,
        plan: LaunchPlan,
        policy: JobPolicy,
        run_dir: RunDir,
        transport: Transport,
        files: AttemptFiles,
        sink: Sink,
        events: EventLog,
        signal_pipe: signals.SignalPipe,
        clock: JobClock,
        terminal: Terminal | None,
        takes_typed: bool = False,
        feeder: Feeder | None = None,
        node_logs: str = "",
        launchers: bool = False,
        disk_work: DiskWork | None = None,
        backend: PlannedBackend | None = None,
        error_file: ErrorFile | None = None,
        output_bytes: Callable[[], int] | None = None,
        on_started: Callable[[], None] | None = None,
    ) -> None:
        self._plan = plan
        self._output_bytes = output_bytes
        self._on_started = on_started
        self._policy = policy
        self._run_dir = run_dir
        self._transport = transport
        self._files = files
        self._sink = sink
        self._events = events
        self._signals = signal_pipe
        self._clock = clock
        self._keyboard = Keyboard(terminal, lambda message: transport.send(0, message))
        self._takes_typed = takes_typed
        self._feeder = feeder
        self._node_logs = node_logs
        self._launchers = launchers
        self._disk_work = disk_work or DiskWork()
        self._thread = threading.get_ident()
        """The thread of the main loop."""
        self.advisory = Advisory(self._on_fault)
        """Calls what only observes the job. May be used by any thread."""
        self._backend = backend
        self._noted: set[str] = set()
        self._has_said_unread = False
        self._exit_code: int | None = None
        self._series: SeriesFile | None = None
        """None until a worker has reported."""
        self._received: deque[a.Event] = deque()
        """Events that have not been passed to the policy."""
        self._started_s = time.monotonic()
        self._started = time.time()
        self._snapshots: Snapshots | None = None
        """None until another shell has asked."""
        self._questions: NodeQuestions | None = None
        """Questions of other shells to the nodes; None until there is one."""
        self._logs: NodeLogs | None = None
        """Requests of other shells for logs on the nodes; None until there is one."""
        self._log_nodes: dict[int, AttemptNodes] = {}
        """By attempt: the nodes whose logs other shells may read from them."""
        self.calls = MainLoopCalls()
        """Functions that other threads pass to the main loop."""
        self._reporter = Reporter(
            plan,
            max_restarts=policy.settings.max_restarts,
            run_dir=run_dir,
            sink=sink,
            events=events,
            disk_work=GuardedDiskWork(self._disk_work, self.advisory, AdvisoryPart.REPORT),
            started_s=self._started_s,
            launchers=launchers,
            error_file=error_file,
        )

    @property
    def summary(self) -> str:
        """Why the job has failed, in one sentence; empty if it has not failed."""
        return self._reporter.summary

    def snapshot(self) -> JobSnapshot:
        """Return what the job does now. Called in the main loop."""
        if self._snapshots is None:
            from distlaunch.coordinator.runtime.snapshot import Snapshots

            self._snapshots = Snapshots(self._run_dir.path, started=self._started)
        with self.advisory.watch(AdvisoryPart.SNAPSHOT):
            return self._snapshots.take(
                self._policy,
                self._plan,
                now=self._clock(),
                output_bytes=None if self._output_bytes is None else self._output_bytes(),
            )

    def warn_of_no_control_socket(self) -> None:
        """Warn that other commands cannot ask this launcher."""
        self._sink.say(
            "no control socket could be opened in "
            f"{' or '.join(control_directories())}: distlaunch top and stack do not work for this job",
            level="warning",
        )

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers of the control server, by the kind of the request."""
        return {
            "snapshot": lambda _: self.snapshot(),
            "stop": self._watched(self._on_stop_request),
            "usage": self._watched(lambda _: self.ask_usage()),
            "stacks": self._watched(self._on_stacks_request),
            "logs": self._watched(self._on_logs_request),
            "log_part": self._watched(self._on_log_part_request),
        }

    def _watched(self, handler: Handler) -> Handler:
        def handle(fields: Mapping[str, object]) -> object:
            with self.advisory.watch(AdvisoryPart.CONTROL, expected=(LaunchError,)):
                return handler(fields)

        return handle

    def ask_usage(self) -> Future[Answers]:
        """Ask the nodes what they and their workers use. Called in the main loop.

        Raises ConfigError if no worker runs.
        """
        return self._node_questions().ask_usage(self._asked_nodes())

    def _on_stacks_request(self, fields: Mapping[str, object]) -> object:
        """Return a future of the stacks of all workers. They do not count for hang detection."""
        return self._node_questions().ask_stacks(
            self._asked_nodes(), native=fields.get("native") is True
        )

    def _on_logs_request(self, fields: Mapping[str, object]) -> object:
        """Return a future of the log files that nodes have of ``ranks`` in ``attempt``.

        ``ranks`` has the first and the last rank of each range.
        """
        match fields:
            case {"attempt": int(attempt), "ranks": list(ranks)}:
                return self._read_node_logs().list(attempt, ranks)
        raise ConfigError("the request needs the fields attempt and ranks")

    def _on_log_part_request(self, fields: Mapping[str, object]) -> object:
        """Return a future of a part of a rank's log on its node."""
        match fields:
            case {
                "attempt": int(attempt),
                "rank": int(rank),
                "stream": int() | None as stream,
                "offset": int(offset),
                "size": int(size),
            }:
                return self._read_node_logs().read(attempt, rank, stream, offset, size)
        raise ConfigError("the request needs the fields attempt, rank, stream, offset and size")

    def _read_node_logs(self) -> NodeLogs:
        if self._logs is None:
            from distlaunch.coordinator.runtime.node_logs import LogPlace, NodeLogs

            plan = self._plan
            place = os.path.join(plan.workdir, self._node_logs, plan.job_id)
            self._logs = NodeLogs(
                send=self._transport.send,
                clock=self._clock,
                place=LogPlace(
                    directory=place if self._node_logs else "", log_bytes=plan.layout.log_bytes
                ),
                attempts=self._log_nodes,
                is_connected=self._policy.is_connected,
            )
        return self._logs

    def _keep_nodes(self, attempt: int) -> None:
        """Keep the nodes of an attempt if their logs may be read from them."""
        if not (self._launchers or self._node_logs):
            return
        nodes = replace(self._policy.newest_attempt.nodes, attempt_plan=None)
        before = next(reversed(self._log_nodes.values()), None)
        self._log_nodes[attempt] = before if before == nodes else nodes
        while len(self._log_nodes) > _MOST_LOG_NODES:
            del self._log_nodes[next(iter(self._log_nodes))]

    def _node_questions(self) -> NodeQuestions:
        if self._questions is None:
            from distlaunch.coordinator.runtime.node_questions import NodeQuestions

            self._questions = NodeQuestions(send=self._transport.send, clock=self._clock)
        return self._questions

    def _asked_nodes(self) -> AskedNodes:
        """Return the nodes with workers of this attempt that have started and not all ended."""
        from distlaunch.coordinator.runtime.node_questions import AskedNodes

        attempt = self._policy.newest_attempt
        nodes = sorted(attempt.owing) if self._policy.up > self._policy.ended else []
        return AskedNodes(
            attempt=attempt.number,
            hosts={node: attempt.nodes.host(node) for node in nodes},
            first_shown=self._plan.first_shown,
            script_dir=self._policy.settings.script_dir,
        )

    def _on_stop_request(self, fields: Mapping[str, object]) -> object:
        """Stop the job as SIGTERM does; with the field ``now``, kill the workers at once."""
        self._handle_event(a.Signalled(signum=signal.SIGTERM, kill=fields.get("now") is True))
        return {}

    def run(self) -> int:
        """Run the job. Return its exit code."""
        self._thread = threading.get_ident()
        try:
            return self._run()
        finally:
            self.calls.close()
            for asking in self._asking():
                asking.close()

    def _run(self) -> int:
        plan = self._plan
        if plan.first_shown == 0:  # an outer launcher's other workers show it already
            self._sink.say(f"job {plan.name}: {_what_where(plan)}; logs: {printable(plan.run_dir)}")
        if self._policy.settings.node_setup is None:
            self._say_notes(plan)
        self._write_event(
            "job_started",
            {
                "job_id": plan.job_id,
                "world_size": plan.world_size,
                "backend": plan.backend,
                **this_process().fields(),
                "argv": plan.argv,
                "cwd": plan.workdir,
                "grace_s": self._policy.settings.grace_s,
                **({"launchers": True} if self._launchers else {}),
                **({"node_logs": self._node_logs} if self._node_logs else {}),
                **({"log_max_size": plan.layout.log_bytes} if plan.layout.log_bytes else {}),
            },
        )
        self._transport.start()
        self._keyboard.start()
        self._handle_event(a.Begin())
        while (code := self._exit_code) is None:
            # Signals and deadlines are handled even if the nodes send many messages.
            is_busy = self._receive()
            deadline = self._policy.deadline()
            if not self._is_over() and deadline is not None and self._clock() >= deadline:
                self._handle_event(a.Tick())
                is_busy = True
            self._of_series(self._write_series)
            for asking in self._asking():
                self.advisory.call(AdvisoryPart.CONTROL, None, asking.tick)
            if not self._is_over():
                self._wait(is_busy=is_busy)
        self._of_series(self._close_series)
        self._of_report(self._reporter.ended, code)
        return code

    def _receive(self) -> bool:
        """Process events for at most ``_EVENTS_S``. Return whether there were any.

        An agent in the launcher's process answers at once, without a descriptor becoming readable.
        Therefore the caller must call this method again after an event, before it waits.
        """
        if not self._received:
            self._received.extend(self._transport.receive())
        found = bool(self._received)
        until = time.monotonic() + _EVENTS_S
        while self._received and not self._is_over():
            event = self._received.popleft()
            if isinstance(event, a.FromNode) and isinstance(event.message, WorkerExit):
                self._of_report(self._reporter.keep_error, event.message)
            if self.advisory.call(
                AdvisoryPart.CONTROL,
                False,  # noqa: FBT003 - the result after a fault
                self._is_answer,
                event,
            ):
                continue
            self._handle_event(event)
            if isinstance(event, a.FromNode) and isinstance(event.message, m.Alive):
                self._of_series(self._keep_series, event.message)
            if time.monotonic() >= until:
                break
        return found

    def _keep_series(self, message: m.Alive) -> None:
        """Keep the steps that workers report for the file of the run directory."""
        if message.attempt != self._policy.attempt or not message.heartbeats:
            return
        if self._series is None:
            from distlaunch.coordinator.runtime.series_file import SeriesFile

            self._series = SeriesFile(
                os.path.join(self._run_dir.path, SERIES),
                GuardedDiskWork(self._disk_work, self.advisory, AdvisoryPart.SERIES),
                first_rank=self._plan.first_shown,
            )
        self._series.add(message.attempt, message.heartbeats, now=self._clock(), time=time.time())

    def _write_series(self) -> None:
        """Write the steps that have been kept, if that is due."""
        series = self._series
        if series is not None and series.due is not None and self._clock() >= series.due:
            series.write(self._clock())

    def _close_series(self) -> None:
        if self._series is not None:
            self._series.write(self._clock())
            self._series.close()

    def _is_answer(self, event: a.Event) -> bool:
        """Return whether an event answers a question of another shell, so that the policy must not
        see it.

        A lost node also ends what it owed to such questions.
        """
        for asking in self._asking():
            if isinstance(event, a.Lost):
                asking.on_lost(event.node)
            elif isinstance(event, a.FromNode) and asking.on_message(event.node, event.message):
                return True
        return False

    def _asking(self) -> list[NodeQuestions | NodeLogs]:
        """Return what asks the nodes for other shells."""
        return [each for each in (self._questions, self._logs) if each is not None]

    def _is_over(self) -> bool:
        return self._exit_code is not None

    def _wait(self, *, is_busy: bool) -> None:
        """Wait for the next event, signal, key or call of another thread. Process all but events.

        If ``is_busy``, do not wait.
        """
        poll = select.poll()
        for descriptor, wanted in self._transport.descriptors().items():
            poll.register(descriptor, wanted)
        poll.register(self._signals.fileno(), select.POLLIN)
        poll.register(self.calls.fileno(), select.POLLIN)
        keys = self._keyboard.fileno()
        if keys >= 0:
            poll.register(keys, select.POLLIN)
        is_off = self.advisory.is_off(AdvisoryPart.SERIES)
        series_due = None if self._series is None or is_off else self._series.due
        deadlines = [
            time
            for time in (
                self._policy.deadline(),
                self._transport.deadline(),
                series_due,
                *(
                    self.advisory.call(AdvisoryPart.CONTROL, None, asking.deadline)
                    for asking in self._asking()
                ),
            )
            if time is not None
        ]
        left_ms = (min(deadlines) - self._clock()) * 1000 if deadlines else None
        if is_busy or (left_ms is not None and left_ms <= 0):
            timeout_ms: float | None = 0
        else:
            timeout_ms = None if left_ms is None else min(left_ms + 1, _LONGEST_POLL_MS)
        for descriptor, _ in poll.poll(timeout_ms):
            if descriptor == self._signals.fileno():
                self._on_signals(self._signals.read())
            elif descriptor == keys:
                self._on_keys()
            elif descriptor == self.calls.fileno():
                self.calls.run()

    def _handle_event(self, event: a.Event) -> None:
        """Pass an event to the policy, carry out its actions, and update the status line."""
        before = self._shown()
        for action in self._policy.step(event, self._clock()):
            self._execute_action(action)
        if before != self._shown():
            self._show_status()
            if self._on_started is not None and self._policy.phase == "running":
                self._on_started()
                self._on_started = None

    def _shown(self) -> tuple[object, ...]:
        """Return the values that the status line depends on."""
        policy = self._policy
        return policy.phase, policy.up, policy.ended, policy.progress.heartbeat_at

    def _execute_action(self, action: a.Action) -> None:
        match action:
            case a.SendToNode():
                self._transport.send(action.node, action.message)
            case a.Connect():
                self._transport.connect(action.node, action.delay_s)
            case a.Disconnect():
                self._transport.disconnect(action.node)
            case a.Discover():
                self._transport.discover()
            case a.StartAttempt():
                self._start_attempt(action)
            case a.ShowMessage():
                self._sink.say(action.text, level=action.level)
            case a.JobError():
                self._sink.say(action.text, level="error")
                self._of_report(self._reporter.keep_job_error, action)
            case a.RecordEvent():
                self._write_event(action.type, action.fields)
            case a.ReportFailure():
                self._say_unread()
                terminal = self._keyboard.has_terminal
                if not self._of_report(self._reporter.failed, action, terminal=terminal):
                    self._of_report(self._reporter.failed_briefly, action)
            case a.ReportHang():
                self._say_unread()
                if not self._of_report(self._reporter.hung, action):
                    self._of_report(self._reporter.hung_briefly, action)
            case a.WriteStacks():
                self._of_report(self._reporter.keep_stacks, action)
            case AdvisoryFault():
                self._report_fault(action)
            case a.Suspend():
                self._pause()
            case a.EndJob():
                self._say_unread()
                self._exit_code = action.exit_code

    # --- faults in code that only observes the job

    def _write_event(self, kind: str, fields: Mapping[str, object]) -> None:
        self.advisory.call(AdvisoryPart.EVENTS, None, self._events.write, kind, fields)

    def _of_series(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        self.advisory.call(AdvisoryPart.SERIES, None, function, *args, **kwargs)

    def _of_report(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Call the reporter. Return whether that succeeded."""
        done = self.advisory.call(AdvisoryPart.REPORT, _FAULT, function, *args, **kwargs)
        return done is not _FAULT

    def _on_fault(self, fault: AdvisoryFault) -> None:
        """Report a fault. Called in any thread."""
        if threading.get_ident() == self._thread:
            self._report_fault(fault)
        else:
            self.calls.call(lambda: self._report_fault(fault))

    def _report_fault(self, fault: AdvisoryFault) -> None:
        path = os.path.join(self._run_dir.path, FAULTS)
        is_kept = self._disk_work.ask(lambda: _keep_traceback(path, fault))
        where = (
            f"the traceback is in {printable(path)}"
            if is_kept
            else "its traceback could not be saved"
        )
        self._sink.say(f"{loss_of(fault.part)}: {fault.text}; {where}", level="warning")
        self._write_event(
            "fault",
            {
                "part": fault.part.value,
                "text": fault.text,
                "traceback": FAULTS if is_kept else None,
            },
        )

    def _say_unread(self) -> None:
        """Warn once if rank 0 has not read all of stdin. In a shell loop that reads the same input,
        the unread lines are lost."""
        if self._feeder is None or not self._feeder.unread or self._has_said_unread:
            return
        self._has_said_unread = True
        self._sink.say(
            f"rank 0 has not read {counted(self._feeder.unread, 'byte')} of the input that came on "
            "stdin; in a shell"
            " loop that reads the same input they are lost: start distlaunch with </dev/null there",
            level="warning",
        )

    def _show_status(self) -> None:
        policy = self._policy
        before = "restarting" if policy.attempt else "starting"
        phases = {
            "new": "starting",
            "connecting": before,
            "preparing": before,
            "waiting": "restarting",
        }
        self._sink.status(
            StatusView(
                phase=phases.get(policy.phase, policy.phase),  # type: ignore[arg-type]  # the rest have the same names
                workers_up=max(0, policy.up - policy.ended),
                workers_total=policy.world_size,
                attempt=policy.attempt,
                restarts=policy.restarts,
                max_restarts=policy.settings.max_restarts,
                started_s=self._started_s,
                log_dir=self._plan.run_dir,
                progress=policy.progress.summary,
                heard_s=time.monotonic() - (self._clock() - policy.progress.heartbeat_at),
            )
        )

    # --- attempts

    def _start_attempt(self, action: a.StartAttempt) -> None:
        """Complete the plan with port and master address, write it, and send the start messages.

        If the workers' addresses do not fit the backend, the policy gets ``JobRefused`` instead.
        """
        attempt_plan, attempt = action.attempt_plan, action.attempt
        plan = self._plan if attempt_plan is None else attempt_plan.plan
        self._plan = self._reporter.plan = plan = bind(
            plan, attempt=attempt, master_port=action.port, master=action.master
        )
        if action.ports and self._backend is not None:
            from distlaunch.planning.worker_addresses import cluster_of, with_cluster

            cluster = cluster_of(plan, action.ports, action.master)
            try:
                self._plan = self._reporter.plan = plan = with_cluster(plan, cluster, self._backend)
            except ConfigError as exc:
                self._handle_event(a.JobRefused(text=exc.message, hint=exc.hint))
                return
        self._say_notes(plan)
        disk_work = GuardedDiskWork(self._disk_work, self.advisory, AdvisoryPart.FILES)
        disk_work.do(lambda: self._write_plan(plan))
        self._files.begin_attempt(attempt)
        self._keep_nodes(attempt)
        is_remote = attempt_plan is not None and not self._launchers
        streams = Streams(
            terminal=self._keyboard.size(),
            stdin=self._feeder is not None if is_remote else self._passes_stdin(),
            is_remote=is_remote,
            node_logs=self._node_logs,
            orphan_grace_s=self._policy.settings.failure_grace_s if is_remote else None,
        )
        numbers = range(len(plan.nodes)) if attempt_plan is None else attempt_plan.node_numbers
        if self._feeder is not None:
            self._feeder.begin(numbers[0])
        if self._launchers and attempt_plan is not None:
            from distlaunch.coordinator.policy.start_messages import launcher_starts

            for node, message in launcher_starts(
                plan, attempt_plan, streams, restarts=self._policy.restarts
            ):
                self._transport.send(node, message)
            return
        for node_rank, start in starts(plan, streams):
            self._transport.send(numbers[node_rank], start)

    def _say_notes(self, plan: LaunchPlan) -> None:
        """Show the notices of a plan. Each is shown once in a job."""
        for number, note in enumerate((*plan.warnings, *plan.notes)):
            if note not in self._noted:
                self._noted.add(note)
                self._sink.say(note, level="warning" if number < len(plan.warnings) else "info")

    def _passes_stdin(self) -> bool:
        """Return whether rank 0 gets the launcher's stdin.

        A background job must not read the keys that the user types for the shell.
        """
        return not os.isatty(0) or (self._takes_typed and in_foreground(0))

    def _write_plan(self, plan: LaunchPlan) -> None:
        """Write ``plan-<attempt>.json``, or warn that it could not be written."""
        try:
            with suppress(FileExistsError):  # this or another launcher may have created it
                make_private_dir(plan.layout.attempt_dir(plan.run_dir, plan.attempt))
            descriptor = open_private(
                plan_path(plan.run_dir, plan.attempt), os.O_WRONLY | os.O_CREAT | os.O_EXCL
            )
            with open(descriptor, "w", encoding="utf-8") as file:
                file.writelines(plan.json_chunks())
        except OSError as exc:
            self._sink.say(
                f"the plan was not written: {os.strerror(exc.errno or 0)}", level="warning"
            )

    # --- signals and keys

    def _on_signals(self, numbers: bytes) -> None:
        for place, signum in enumerate(numbers, start=1):
            if (
                signum != signal.SIGTSTP or signal.SIGCONT not in numbers[place:]
            ):  # otherwise the launcher has been continued already
                self._on_signal(signum)

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGTSTP:
            self._pause()
        elif signum in (signal.SIGWINCH, signal.SIGCONT):
            self._keyboard.start()
            self._keyboard.resize()
        elif signum != signal.SIGCHLD:  # SIGCHLD only wakes the loop
            self._handle_event(a.Signalled(signum=signum))

    def _on_keys(self) -> None:
        event = self._keyboard.read(has_reader=self._policy.up > self._policy.ended)
        if event is not None and not (
            event.signum == signal.SIGHUP and self._signals.ignores(signal.SIGHUP)
        ):
            self._handle_event(event)

    def _pause(self) -> None:
        """Suspend the workers, then the launcher. Resume both when the launcher is continued."""
        self._sink.suspend()
        self._keyboard.stop()
        self._transport.broadcast(m.Pause(paused=True))
        began = time.monotonic()
        self._flush(until=began + PAUSE_S)
        meanwhile = self._signals.read()
        if signal.SIGCONT not in meanwhile:
            signals.stop_self()
        self._clock.skip(time.monotonic() - began)
        self._keyboard.start()
        self._transport.broadcast(m.Pause(paused=False))
        self._sink.resume()
        self._on_signals(meanwhile.replace(_TSTP, b""))

    def _flush(self, *, until: float) -> None:
        """Wait until all messages have been sent, at most until ``until`` (monotonic).

        Called before this process suspends itself. Events that arrive are handled.
        """
        while self._transport.has_unsent and (left_s := until - time.monotonic()) > 0:
            poll = select.poll()
            for number, wanted in self._transport.descriptors().items():
                if wanted & select.POLLOUT:
                    poll.register(number, wanted)
            poll.poll(min(left_s, _FLUSH_STEP_S) * 1000)
            self._receive()


def _keep_traceback(path: str, fault: AdvisoryFault) -> bool:
    """Append a traceback to a file. Return whether that was possible."""
    head = f"# {time.strftime('%Y-%m-%d %H:%M:%S')}: {fault.part.value}: {fault.text}\n"
    try:
        descriptor = open_to_append(path)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{head}{fault.traceback}\n")
    except OSError:
        return False
    return True


def _what_where(plan: LaunchPlan) -> str:
    """Return the number of workers and their hosts as text, as far as known."""
    if not all(node.known for node in plan.nodes):
        where = counted(len(plan.nodes), "node")
    elif len(plan.nodes) == 1:
        where = plan.nodes[0].host
    else:
        from distlaunch.core.model.host_list import name_hosts

        where = (
            f"{counted(len(plan.nodes), 'node')} ({name_hosts(node.host for node in plan.nodes)})"
        )
    size = plan.world_size
    return f"{counted(size, 'worker')} on {where}" if size is not None else where
