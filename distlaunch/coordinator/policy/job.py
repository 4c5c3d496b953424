"""The job policy, a state machine without clock and I/O: ``step(event, now) -> actions``.

It decides which nodes take part in an attempt, when all workers are stopped, whether another
attempt follows, and the exit code. The work per event does not depend on the number of workers,
except when an attempt starts or stops.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

from distlaunch.coordinator.policy import failures
from distlaunch.coordinator.policy.advisory import Advisory, AdvisoryFault, AdvisoryPart
from distlaunch.coordinator.policy.attempt import Attempt, AttemptNodes, Verdict
from distlaunch.coordinator.policy.events_and_actions import (
    Action,
    AttemptsKnown,
    Begin,
    Discovered,
    EndJob,
    Event,
    FromNode,
    JobError,
    JobRefused,
    Joined,
    LauncherFailed,
    LinePrinted,
    LoggedIn,
    Lost,
    RecordEvent,
    ReportFailure,
    SendToNode,
    ShowMessage,
    Signalled,
    StartAttempt,
    Suspend,
    Tick,
    Unreachable,
    WriteStacks,
)
from distlaunch.coordinator.policy.hang_detection import HangDetector
from distlaunch.coordinator.policy.job_progress import Progress
from distlaunch.coordinator.policy.job_settings import PolicySettings
from distlaunch.coordinator.policy.restarts import (
    Final,
    FinalReason,
    Outcome,
    Restart,
    RestartDecision,
    RestartRule,
)
from distlaunch.coordinator.policy.signals import Signals, StopSignal, StopSignalCounter
from distlaunch.core.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import assert_never
from distlaunch.core.model.text import counted, name_ranks
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m

if TYPE_CHECKING:
    from distlaunch.coordinator.policy.attempt_start import AttemptStart
    from distlaunch.diagnosis.model import Diagnosis
    from distlaunch.planning.master_address import MasterChoice

P = ParamSpec("P")
T = TypeVar("T")
PRESS_AGAIN = "; press Ctrl-C again after 1 s to kill all workers now"
"""The end of the line that is printed after the first Ctrl-C."""
_STACKS_POLL_S = 0.1
"""How often the job looks whether late stacks have arrived."""
KILLS_S = 5.0
"""How long before the scheduler's KILL running workers are killed, to leave time for the report."""
NOTICE_S = 1.0
"""How long after the last worker's end the user gets a notice about processes for which the
launcher waits."""
_INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)
Phase = Literal[
    "new",
    "connecting",
    "preparing",
    "starting",
    "running",
    "lingering",
    "stopping",
    "waiting",
    "ended",
]
"""``lingering``: all workers have ended with 0, and the launcher waits for processes that they have
left. ``waiting``: the delay after a failed attempt has not passed."""
_WITHOUT_ATTEMPT = ("new", "connecting", "waiting")
"""Phases in which no node takes part in an attempt."""


class JobPolicy:
    """One job, from ``Begin`` to ``EndJob``."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        scheduler = settings.scheduler
        self.phase: Phase = "new"
        self.attempt = 0 if scheduler is None else scheduler.attempt
        self.stop_signal: int | None = None
        """The signal that ended the job."""
        self.progress = Progress()
        self._faults: list[AdvisoryFault] = []
        """Faults in code that only observes the job, which have not been reported."""
        self._advisory = Advisory(self._faults.append)
        self.warned: int | None = None
        """The last signal that was passed on to the workers. Schedulers warn of a time limit so."""
        self.since_warned_s = 0.0
        """How long the last attempt ran after that signal."""
        self._attempt_start: AttemptStart | None = None
        """Sets up the nodes, of a job on several nodes or another machine."""
        if settings.node_setup is not None:
            from distlaunch.coordinator.policy.attempt_start import AttemptStart

            self._attempt_start = AttemptStart(settings.node_setup, settings)
        self._run = Attempt(0, AttemptNodes.fixed(settings), began=0.0)
        """The current attempt, or the last one."""
        self._hang_detector = HangDetector(settings, self._run)
        self._stop_after_stacks: list[Action] | None = None
        """The actions that stop the workers once their stacks have come, after Ctrl-C."""
        self._port: int | None = None
        """The master port of the current attempt."""
        self._all_ended_at: float | None = None
        """When the last worker of this attempt ended."""
        self._fault: str | None = None
        self._nodes_lost = 0
        """How many nodes were lost in all ended attempts."""
        self.failed_workers = 0
        """How many workers failed by themselves, in all attempts."""
        self._restart_rule = RestartRule(
            allowed=settings.max_restarts,
            window_s=settings.restart_window_s,
            delay_s=settings.restart_delay_s,
        )
        self._restart_at: float | None = None
        """When the delay before the next attempt ends, if there is one."""
        self._signals = Signals(
            holds=scheduler is not None
            and scheduler.signals_all
            and settings.node_setup is not None
        )
        self._requests = StopSignalCounter()
        self._stop_signal_at = 0.0
        self._late_stop_signal: int | None = None
        """The first signal after all workers had ended, which only prevents a restart."""
        self._warned_at = 0.0

    @property
    def up(self) -> int:
        """How many workers of this attempt have been started."""
        return self._run.up

    @property
    def ended(self) -> int:
        """How many workers of this attempt have ended."""
        return self._run.ended

    @property
    def world_size(self) -> int:
        """The number of workers of this attempt; 0 before its nodes are known."""
        return self._run.nodes.world_size

    @property
    def restarts(self) -> int:
        """The number of restarts, without attempts after lost nodes."""
        return self._restart_rule.count

    @property
    def newest_attempt(self) -> Attempt:
        """The current attempt, or the last one."""
        return self._run

    def is_connected(self, node: int) -> bool:
        """Return whether a node is connected, even if it takes no part in the attempt."""
        return self._attempt_start is None or self._attempt_start.is_connected(node)

    @property
    def node_losses(self) -> int:
        """How many nodes with workers were lost, in all attempts."""
        is_counted = self.phase in ("ended", *_WITHOUT_ATTEMPT)
        return self._nodes_lost + (0 if is_counted else len(self._run.losses))

    def deadline(self) -> float | None:
        """Return when the event ``Tick`` is due, if a deadline is set."""
        times = [
            self._run.others_until,
            self._run.notice_at,
            self._of_hangs(None, self._hang_detector.deadline),
            self._signals.deadline(),
            self._restart_at,
        ]
        if self._attempt_start is not None and self.phase in ("connecting", "preparing"):
            times.append(self._attempt_start.deadline())
        if self._faults:
            return float("-inf")
        return min((time for time in times if time is not None), default=None)

    def step(self, event: Event, now: float) -> list[Action]:
        """Handle an event of the time ``now``. Return the actions to carry out, in order.

        After ``EndJob`` all events are ignored.
        """
        actions = self._step(event, now)
        return [*self._take_faults(), *actions, *self._stop_without_stacks()]

    def _step(self, event: Event, now: float) -> list[Action]:
        if self.phase == "ended":
            return []
        match event:
            case FromNode():
                return self._on_message(event.node, event.message, now)
            case Begin():
                return self._begin_attempt(now)
            case Signalled():
                signal_event = self._signals.on_signal(event, now)
                return [] if signal_event is None else self._on_signal(signal_event, now)
            case Tick():
                held = [
                    action
                    for each in self._signals.due(now)
                    for action in self._on_signal(each, now)
                ]
                return held + self._tick(now)
            case LoggedIn():
                if self._attempt_start is not None:
                    self._attempt_start.logged_in(event.node)
                return []
            case LinePrinted():
                return [ShowMessage(text=event.text, level="warning" if event.warning else "info")]
            case LauncherFailed():
                return self._end_by_fault(
                    event.text, f"internal error: {event.text}", without=event.without
                )
            case AttemptsKnown():
                return self._on_known(event, now)
            case JobRefused():
                hints = (event.hint,) if event.hint else ()
                return self._end_with_error(
                    JobError(exit_code=EXIT_USAGE, message=event.text, hints=hints)
                )
            case Joined() | Unreachable() | Lost() | Discovered():
                return (
                    []
                    if self._attempt_start is None
                    else self._on_node_event(self._attempt_start, event, now)
                )
            case _:
                assert_never(event)

    # --- faults in code that only observes the job

    def _of_hangs(
        self, instead: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the hang detector. Return ``instead`` after a fault in it."""
        return self._advisory.call(AdvisoryPart.HANG_DETECTION, instead, function, *args, **kwargs)

    def _stop_watching(self) -> None:
        """Stop looking for hangs: the attempt ends."""
        self._stop_after_stacks = None
        self._of_hangs(None, self._hang_detector.stop)

    def _of_progress(
        self, instead: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a function of ``progress``. After a fault there, the restart rule uses --min-uptime,
        as for workers that report nothing."""
        result = self._advisory.call(AdvisoryPart.PROGRESS, instead, function, *args, **kwargs)
        if self._advisory.is_off(AdvisoryPart.PROGRESS):
            self.progress = Progress()
        return result

    def _take_faults(self) -> list[Action]:
        """Return the faults since the last call."""
        faults: list[Action] = [*self._faults]
        self._faults.clear()
        return faults

    def _stop_without_stacks(self) -> list[Action]:
        """Return the actions that stop the workers, if a fault prevents that their stacks come."""
        if not self._advisory.is_off(AdvisoryPart.HANG_DETECTION):
            return []
        stop, self._stop_after_stacks = self._stop_after_stacks, None
        return stop or []

    # --- events

    def _on_message(
        self, node: int, message: m.FromAgent | m.Surveyed | m.Reached, now: float
    ) -> list[Action]:
        attempt_start = self._attempt_start
        match message:
            case m.Surveyed():
                return (
                    []
                    if attempt_start is None
                    else self._on_surveyed(attempt_start, node, message, now)
                )
            case m.SpawnerSignalled():
                return self._step(Signalled(signum=message.signum, node=node, spawner=True), now)
            case m.WorkerHalted():
                return [Suspend()] if self.settings.terminal else []
            case m.Stacks():
                self._of_hangs(None, self._hang_detector.on_stacks, node, message)
                return self._stop_if_hung(now)
            case m.Usage() | m.LogList() | m.LogPart():
                return []  # an answer for another shell
            case m.AgentNotice():
                return self._on_agent_notice(node, message.text, warning=message.warning)
            case m.PreloadEnded():
                host = {} if attempt_start is None else {"host": attempt_start.host(node)}
                return [RecordEvent(type="preload", fields={**message.fields, **host})]
            case m.AgentFailed():
                return self._on_fault(node, message, now)
            case _ if not self._is_current(node, message.attempt):
                return []
            case m.Prepared():
                return self._on_prepared(node, message, now)
            case m.Reached():
                return (
                    []
                    if attempt_start is None
                    else self._on_reached(attempt_start, node, message, now)
                )
            case m.Started():
                return self._on_started(node, message, now)
            case m.Alive():
                return self._on_alive(message, now)
            case WorkerExit():
                return self._on_worker_exited(node, message, now)
            case m.LeftoversRunning():
                return self._on_lingering(node, message, now)
            case m.AttemptEnded():
                return self._on_gone(node, message, now)
            case _:
                assert_never(message)

    def _is_current(self, node: int, attempt: int) -> bool:
        """Return whether a message is about this attempt, and its node still takes part."""
        return attempt == self.attempt == self._run.number and node in self._run.alive

    def _on_agent_notice(self, node: int, text: str, *, warning: bool) -> list[Action]:
        said = text if self._attempt_start is None else self._attempt_start.notice(node, text)
        return (
            [] if said is None else [ShowMessage(text=said, level="warning" if warning else "info")]
        )

    def _tick(self, now: float) -> list[Action]:
        attempt_start = self._attempt_start
        if self._restart_at is not None:
            return self._begin_attempt(now) if now >= self._restart_at else []
        if attempt_start is None or self.phase not in ("connecting", "preparing"):
            return self._tick_running(now)
        if self.phase == "connecting":
            return self._continue_node_setup(attempt_start, attempt_start.tick(now), now)
        if now < attempt_start.deadline():
            return []
        refusal = attempt_start.late(self._run.owing)
        return (
            self._choose_master(attempt_start, now)
            if refusal is None
            else self._end_with_error(refusal)
        )

    def _tick_running(self, now: float) -> list[Action]:
        """Return the due actions outside of the node setup."""
        if self._run.notice_at is not None and now >= self._run.notice_at:
            return self._print_waiting_notice()
        until = self._run.others_until
        if until is not None and now >= until:
            awaits = self._of_hangs(
                False,  # noqa: FBT003 - the result after a fault
                self._hang_detector.awaits_stacks_at_failure,
                now,
            )
            if awaits:
                self._run.others_until = now + _STACKS_POLL_S
                return []
            return self._stop_after_failure()
        return self._of_hangs([], self._hang_detector.tick, now) + self._stop_if_hung(now)

    # --- nodes come together

    def _begin_attempt(self, now: float, *, fresh: bool = True) -> list[Action]:
        self._all_ended_at = self._restart_at = None
        attempt_start = self._attempt_start
        if attempt_start is None:
            return self._prepare(self._run.nodes, now)
        self.phase = "connecting"
        return self._continue_node_setup(attempt_start, attempt_start.begin(now, fresh=fresh), now)

    def _on_node_event(
        self,
        attempt_start: AttemptStart,
        event: Joined | Unreachable | Lost | Discovered,
        now: float,
    ) -> list[Action]:
        match event:
            case Joined():
                return self._continue_node_setup(
                    attempt_start, attempt_start.joined(event, now), now
                )
            case Unreachable():
                return self._continue_node_setup(
                    attempt_start, attempt_start.unreachable(event, now), now
                )
            case Discovered():
                return self._continue_node_setup(
                    attempt_start, attempt_start.discovered(event, now), now
                )
            case Lost():
                return self._on_lost(attempt_start, event, now)

    def _on_known(self, known: AttemptsKnown, now: float) -> list[Action]:
        """Continue the job of a lost coordinator. The attempt that follows is a restart.

        Does nothing once nodes prepare, or if this coordinator knows of a newer attempt.
        """
        if self.phase not in ("new", "connecting") or known.attempt < self.attempt:
            return []
        self.attempt = known.attempt + 1
        self._restart_rule.on_takeover(known.restarts, now)
        return [
            RecordEvent(
                type="taken_over", fields={"attempt": self.attempt, "restarts": self.restarts}
            )
        ]

    def _on_surveyed(
        self, attempt_start: AttemptStart, node: int, message: m.Surveyed, now: float
    ) -> list[Action]:
        return self._continue_node_setup(
            attempt_start, attempt_start.surveyed(node, message, now), now
        )

    def _continue_node_setup(
        self, attempt_start: AttemptStart, actions: list[Action], now: float
    ) -> list[Action]:
        """Return ``actions`` and the actions that the node setup requires: prepare the attempt, or
        report an error and end the job."""
        found = attempt_start.settle(self.attempt, now) if self.phase == "connecting" else None
        if found is None:
            return actions
        if isinstance(found, tuple):
            nodes, notices = found
            return [*actions, *notices, *self._prepare(nodes, now)]
        return actions + self._end_with_error(found)

    def _repeat_node_setup(self, now: float) -> list[Action]:
        """Set up the nodes again: the previous attempt ended before any worker was started."""
        self.attempt += 1
        return self._begin_attempt(now, fresh=False)

    def _end_with_error(self, error: JobError) -> list[Action]:
        return [error, *self._end(error.exit_code)]

    # --- an attempt is prepared and started

    def _prepare(self, nodes: AttemptNodes, now: float) -> list[Action]:
        self.phase = "preparing"
        self._run = Attempt(self.attempt, nodes, began=now)
        self._of_progress(None, self.progress.begin)
        self._of_hangs(None, self._hang_detector.begin, self._run)
        if self._attempt_start is not None:
            return self._attempt_start.prepare(nodes, self.attempt, now)
        settings = self.settings
        return [
            SendToNode(
                node=node,
                message=m.Prepare(
                    attempt=self.attempt,
                    port=None if node else settings.master_port,
                    ports=settings.worker_ports * len(nodes.ranks(node)),
                ),
            )
            for node in nodes.numbers
        ]

    def _on_prepared(self, node: int, message: m.Prepared, now: float) -> list[Action]:
        run, attempt_start = self._run, self._attempt_start
        if self.phase != "preparing" or (attempt_start is not None and attempt_start.reaches):
            return []
        if message.problem is not None:
            if attempt_start is not None and attempt_start.can_spare(1):
                return attempt_start.continue_without(
                    [(node, message.problem)], now
                ) + self._repeat_node_setup(now)
            problem = (
                message.problem
                if attempt_start is None
                else attempt_start.quote(node, message.problem)
            )
            hint = message.hint
            if hint is None and self.settings.master_port:
                hint = f"leave {Opt.MASTER_PORT} out: each job then gets a free port of its own"
            hints = (hint,) if hint else ()
            return self._end_with_error(
                JobError(exit_code=EXIT_USAGE, message=problem, hints=hints)
            )
        if message.port is not None and node == run.nodes.numbers[0]:
            self._port = message.port
        run.ports[node] = message.ports
        warned = (
            self._on_agent_notice(node, message.warning, warning=True) if message.warning else []
        )
        run.owing.discard(node)
        if run.owing:
            return warned
        if attempt_start is None or len(run.nodes.numbers) == 1:
            return warned + self._start(None)
        run.owing = set(run.nodes.numbers[1:])
        asked = attempt_start.reach(self._port or 0, now)
        return warned + (asked if isinstance(asked, list) else self._end_with_error(asked))

    def _on_reached(
        self, attempt_start: AttemptStart, node: int, message: m.Reached, now: float
    ) -> list[Action]:
        run = self._run
        if self.phase != "preparing" or not attempt_start.reaches or node not in run.owing:
            return []
        attempt_start.reached(node, message)
        run.owing.discard(node)
        return [] if run.owing else self._choose_master(attempt_start, now)

    def _choose_master(self, attempt_start: AttemptStart, now: float) -> list[Action]:
        from distlaunch.planning.master_address import MasterChoice

        found = attempt_start.choose_master(now)
        if isinstance(found, list):
            return found + self._repeat_node_setup(now)
        return (
            self._start(found) if isinstance(found, MasterChoice) else self._end_with_error(found)
        )

    def _start(self, master: MasterChoice | None) -> list[Action]:
        run = self._run
        self.phase = "starting"
        run.owing = set(run.nodes.numbers)
        fields: dict[str, object] = {"attempt": self.attempt, "master_port": self._port}
        if master is not None:
            fields["master_addr"] = master.address
        attempt_plan = run.nodes.attempt_plan
        ports = tuple(port for node in run.nodes.numbers for port in run.ports[node])
        start = StartAttempt(
            attempt=self.attempt,
            port=self._port,
            attempt_plan=attempt_plan,
            master=master,
            ports=ports,
        )
        return [RecordEvent(type="attempt_started", fields=fields), start]

    # --- workers run

    def _on_started(self, node: int, message: m.Started, now: float) -> list[Action]:
        run = self._run
        run.started(node, message, now)
        if self.phase == "starting" and run.is_full:
            self.phase = "running"
            if not run.has_ended:
                self._of_hangs(None, self._hang_detector.all_started, now)
        return [
            RecordEvent(
                type="workers_started", fields={"attempt": self.attempt, "pids": dict(message.pids)}
            )
        ]

    def _on_worker_exited(self, node: int, message: WorkerExit, now: float) -> list[Action]:
        run = self._run
        if not run.is_news(node, message.rank):
            return []
        failure = run.exited(node, message)
        if failure is not None and not message.told_to_stop:
            self.failed_workers += 1
        actions: list[Action] = [
            RecordEvent(
                type="worker_exited",
                fields={
                    "attempt": self.attempt,
                    "rank": message.rank,
                    "pid": message.pid,
                    "returncode": message.returncode,
                    "uptime_s": round(message.uptime_s, 3),
                    "told_to_stop": message.told_to_stop,
                },
            )
        ]
        if (
            self.settings.terminal
            and self.stop_signal is None
            and message.returncode in _INTERRUPTED
        ):
            self.stop_signal, self._stop_signal_at = signal.SIGINT, now
        if failure is None:
            actions += self._of_hangs([], self._hang_detector.on_worker_finished, message.rank, now)
        elif self.stop_signal is None and not message.told_to_stop and self.phase != "stopping":
            self._stop_watching()
            reaction = run.first_reaction(failure, now, self._advisory)
            if reaction == "stop":
                actions += self._stop_after_failure()
            elif reaction == "wait" and run.seeks_cause:
                actions += self._of_hangs([], self._hang_detector.collect_stacks_at_failure)
        if run.has_ended:
            self._stop_watching()
            self._all_ended_at = now
            actions += self._on_all_ended(now)
        return actions

    def _on_all_ended(self, now: float) -> list[Action]:
        """Begin the end of an attempt after all its workers have exited.

        If all exited with 0, the nodes wait for leftover processes. Otherwise they stop them.
        """
        run = self._run
        if self.phase == "stopping":
            return []
        # The user typed the signal's key into the worker's terminal.
        if self.stop_signal is not None:
            self.phase = "stopping"
            return self._stop_all(signal.SIGTERM, self.settings.grace_s)
        if not run.went_well:
            return self._stop_after_failure()
        self.phase = "lingering"
        linger = m.WaitForLeftovers(
            attempt=self.attempt,
            linger_s=self.settings.linger_s,
            grace_s=self.settings.failure_grace_s,
        )
        return [
            SendToNode(node=node, message=linger) for node in run.live_nodes() if node in run.owing
        ]

    def _on_alive(self, message: m.Alive, now: float) -> list[Action]:
        if message.wrote:
            self._run.signs.update(dict.fromkeys(message.wrote, now))
        actions = self._of_progress(
            [],
            self.progress.on_heartbeats,
            message.heartbeats,
            attempt=self.attempt,
            now=now,
        )
        saved: list[Action] = [
            RecordEvent(
                type="checkpoint",
                fields={
                    "attempt": self.attempt,
                    "rank": each.rank,
                    "step": each.step,
                    "seconds": round(each.seconds, 3),
                    "bytes": each.bytes,
                },
            )
            for each in message.checkpoints
        ]
        return actions + saved + self._of_hangs([], self._hang_detector.on_alive, message, now)

    def _stop_if_hung(self, now: float) -> list[Action]:
        """Decide on a hang when all requested stacks have arrived; before that, do nothing."""
        decision = self._of_hangs([], self._hang_detector.decide, self.progress, now)
        if isinstance(decision, list):
            stop: list[Action] = []
            if self._stop_after_stacks is not None and not self._hang_detector.is_sampling:
                stop, self._stop_after_stacks = self._stop_after_stacks, None
            return decision + stop
        action = self.settings.hang_action
        fields = {"attempt": self.attempt, "action": action, **decision.record}
        kept: list[Action] = [
            RecordEvent(type="hang", fields=fields),
            WriteStacks(attempt=self.attempt, stacks=tuple(self._hang_detector.stacks)),
        ]
        if action == "report":
            text = f"{decision.text.rstrip()}\n  the job goes on ({Opt.HANG_ACTION('report')})"
            return [*kept, ShowMessage(text=text, level="warning")]
        self._run.hang = decision
        self._run.first_failure = now
        said = ShowMessage(text=f"hang: {decision.summary}; stopping all workers", level="warning")
        return [*kept, said, *self._stop_after_failure()]

    # --- an attempt ends

    def _stop_after_failure(self) -> list[Action]:
        self._run.others_until = None
        self._stop_watching()
        self.phase = "stopping"
        kept: list[Action] = []
        if self._hang_detector.at_failure:
            stacks = tuple(self._hang_detector.at_failure)
            kept.append(WriteStacks(attempt=self.attempt, stacks=stacks))
        return [*kept, *self._stop_all(signal.SIGTERM, self.settings.failure_grace_s)]

    def _stop_all(self, signum: int, grace_s: float) -> list[Action]:
        stop = m.Stop(attempt=self.attempt, signum=int(signum), grace_s=grace_s)
        return [SendToNode(node=node, message=stop) for node in self._run.live_nodes()]

    def _on_gone(self, node: int, message: m.AttemptEnded, now: float) -> list[Action]:
        """Record that no process remains on a node.

        If the node has not reported the exit of one of its workers, it counts as lost, unless it
        was asked to stop. A job without node setup then ends with an internal error.
        """
        missing = self._run.unaccounted(node) if self.phase in ("starting", "running") else []
        if not missing:
            return self._accept_gone(node, message, now)
        why = f"it says that nothing is left, but not how {name_ranks(missing)} ended"
        attempt_start = self._attempt_start
        if attempt_start is None:
            return self._on_fault(node, m.AgentFailed(text=why), now)
        return [
            attempt_start.leave(node),
            *self._on_lost(attempt_start, Lost(node=node, why=why), now),
        ]

    def _accept_gone(self, node: int, message: m.AttemptEnded, now: float) -> list[Action]:
        run = self._run
        if node not in run.owing or self.phase == "preparing":
            return []
        run.gone(node, message)
        return [] if run.owing else self._on_all_gone(now)

    def _on_all_gone(self, now: float) -> list[Action]:
        run = self._run
        run.others_until = run.notice_at = None
        self._stop_watching()
        self.since_warned_s = now - self._warned_at
        actions = self._report_ended_leftovers() if run.ended_leftovers else []
        if run.left:
            pids = ", ".join(map(str, run.left))
            actions.append(
                ShowMessage(
                    text=f"not even KILL ended these processes: pid {pids}", level="warning"
                )
            )
        actions += self._of_progress([], self.progress.end, attempt=self.attempt, now=now)
        return actions + self._conclude(now)

    # --- nodes are lost, agents and the launcher fail

    def _on_lost(
        self, attempt_start: AttemptStart, event: Lost, now: float, *, code: int = EXIT_UNAVAILABLE
    ) -> list[Action]:
        """Handle the loss of a node in any phase. ``code`` is the exit code of a job that the loss
        ends.

        Before the workers start, repeat the node setup, or end the job if no node can be reached.
        Later, the loss fails the attempt, unless all workers of the node had ended with 0.
        """
        run, node = self._run, event.node
        took_part = self.phase not in _WITHOUT_ATTEMPT and node in run.alive
        about = (self.attempt, run.nodes.ranks(node)) if took_part else None
        reconnect = self.stop_signal is None and self._fault is None
        actions = attempt_start.lost(event, about, now, reconnect=reconnect)
        if event.final and self.phase in ("connecting", "preparing", "waiting"):
            return actions + self._end_with_error(attempt_start.refuse(event))
        if not actions or not took_part:
            return self._continue_node_setup(attempt_start, actions, now)
        if self.phase == "preparing":
            return actions + self._repeat_node_setup(now)
        owed = node in run.owing
        kind = attempt_start.kind_lost(node)
        loss = run.lost(node, attempt_start.why_lost(node), now, exit_code=code, kind=kind)
        self._of_hangs(None, self._hang_detector.on_node_lost, node)
        if run.has_ended:
            self._stop_watching()
            self._all_ended_at = self._all_ended_at or now
        if loss is not None and self.phase != "stopping":
            run.first_failure = now if run.first_failure is None else run.first_failure
            actions += self._stop_after_failure()
        elif loss is None and owed:
            text = (
                f"node {attempt_start.host(node)} left ({attempt_start.why_lost(node)}); its workers "
                "had all ended with 0"
            )
            actions.append(ShowMessage(text=text))
        return actions + (
            self._stop_if_hung(now) if run.owing or not owed else self._on_all_gone(now)
        )

    def _on_fault(self, node: int, message: m.AgentFailed, now: float) -> list[Action]:
        """Handle an agent's internal error: a lost node, or without node setup the end of the
        job."""
        attempt_start, text = self._attempt_start, message.text
        if attempt_start is None:
            host = self._run.nodes.host(node)
            say = f"internal error on {host}: {text}; all workers have been killed"
            return self._end_by_fault(text, say, without=node)
        lost = Lost(node=node, why=f"internal error: {text}")
        fields = {"text": text, "node": node, "host": attempt_start.host(node)}
        actions: list[Action] = [
            RecordEvent(type="fault", fields=fields),
            attempt_start.leave(node),
        ]
        return actions + self._on_lost(attempt_start, lost, now, code=EXIT_SOFTWARE)

    def _end_by_fault(self, text: str, say: str, *, without: int | None = None) -> list[Action]:
        """End the job after an internal error. Node ``without`` has no workers left to stop."""
        self._fault = text
        self._stop_watching()
        nothing_runs = self.phase in (*_WITHOUT_ATTEMPT, "preparing")
        self.phase = "stopping"
        self._run.owing.discard(-1 if without is None else without)
        first_line, _, details = say.partition("\n")
        actions: list[Action] = [
            JobError(exit_code=EXIT_SOFTWARE, message=first_line, table=details, prefix=""),
            RecordEvent(type="fault", fields={"text": text}),
        ]
        if self._run.owing and not nothing_runs:
            return [*actions, *self._stop_all(signal.SIGTERM, self.settings.failure_grace_s)]
        return [*actions, *self._end(EXIT_SOFTWARE)]

    # --- processes that workers have left

    def _on_lingering(self, node: int, message: m.LeftoversRunning, now: float) -> list[Action]:
        """Record the processes that workers have left on a node.

        The user gets one notice per attempt, at the earliest ``NOTICE_S`` after the last worker's
        end.
        """
        run = self._run
        run.remaining[node] = message.processes
        if (
            self.phase == "lingering"
            and not run.is_cut_short
            and not run.has_notice
            and run.notice_at is None
        ):
            run.notice_at = (
                now if self._all_ended_at is None else max(now, self._all_ended_at + NOTICE_S)
            )
        return []

    def _print_waiting_notice(self) -> list[Action]:
        from distlaunch.coordinator.policy.remaining_processes import count_of, waiting_line

        run = self._run
        run.notice_at = None
        found = run.by_host(
            {node: left for node, left in run.remaining.items() if node in run.owing}
        )
        if not count_of(found):
            return []
        run.has_notice = True
        text = waiting_line(found, linger_s=self.settings.linger_s, many_hosts=run.many_hosts)
        return [ShowMessage(text=text, level="warning")]

    def _report_ended_leftovers(self) -> list[Action]:
        """Return the event about ended leftover processes, and after a success a warning.

        After a stop or a failure, the last line or the report names them.
        """
        from distlaunch.coordinator.policy.remaining_processes import ended_line, record_of

        run = self._run
        ended, killed = run.by_host(run.ended_leftovers), run.by_host(run.killed_leftovers)
        actions: list[Action] = [
            RecordEvent(
                type="leftovers_ended", fields={"attempt": self.attempt, **record_of(ended, killed)}
            )
        ]
        if self.phase == "lingering":
            actions.append(
                ShowMessage(
                    text=ended_line(ended, killed, many_hosts=run.many_hosts), level="warning"
                )
            )
        return actions

    def _end_leftovers(self, name: str, *, impatient: bool) -> list[Action]:
        """End the leftover processes after a signal: first with TERM, then with KILL.

        All workers have ended with 0, so the signal has no other effect.
        """
        run = self._run
        first = not run.is_cut_short and not impatient
        run.is_cut_short, run.notice_at = True, None
        say = ShowMessage(
            text=f"{name}: {'ending' if first else 'killing'} what workers have left",
            level="warning",
        )
        if first:
            return [say, *self._stop_all(signal.SIGTERM, self.settings.failure_grace_s)]
        return [say, *self._stop_all(signal.SIGKILL, 0)]

    # --- signals

    def _on_signal(self, event: Signalled, now: float) -> list[Action]:
        """Pass USR1 and USR2 on to the workers. On any other signal ask them to stop, and kill them
        if it is repeated."""
        signum = event.signum
        record = RecordEvent(type="signal", fields={"signal": signal.Signals(signum).name})
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            self.warned, self._warned_at = signum, now
            forward = m.ForwardSignal(signum=signum)
            whom = (
                self._run.live_nodes()
                if self.phase not in _WITHOUT_ATTEMPT and not event.reached
                else []
            )
            return [record, *(SendToNode(node=node, message=forward) for node in whom)]
        impatient = event.kill or signum == signal.SIGQUIT
        name = signal.Signals(signum).name
        came = now if event.came is None else event.came
        is_late = self._all_ended_at is not None and came >= self._all_ended_at
        is_stopping = self.stop_signal is not None or self._run.is_cut_short
        if is_stopping and signum == signal.SIGTERM and not self.settings.repeated_term_kills:
            return [record]
        request = self._requests.classify(now)
        if request is StopSignal.MERGED and not impatient:
            return []
        if request is StopSignal.EARLY and not impatient:
            return [record]
        if self.stop_signal is not None:
            return [record, *self._kill_all("")]
        if is_late and self.phase == "lingering":
            return [record, *self._end_leftovers(name, impatient=impatient)]
        if is_late:
            self._late_stop_signal = self._late_stop_signal or signum
            if signum == signal.SIGTERM and not self.settings.repeated_term_kills:
                return [record]  # a program whose wrapper has ended may be saving
            return [record, *self._kill_all(f"{name}: ")]
        self.stop_signal, self._stop_signal_at = signum, now
        silent_since = self._of_hangs(None, self._hang_detector.silent_since, now)
        self._stop_watching()
        if self.phase == "waiting":
            said = f"{name}: stopped; the restart had not begun"
            return [record, ShowMessage(text=said, level="warning"), *self._end(128 + signum)]
        if self.phase in ("new", "connecting", "preparing"):
            waited = (
                []
                if self.settings.node_setup is None
                else [ShowMessage(text=f"{name}: stopped; no worker had started")]
            )
            return [record, *waited, *self._end(128 + signum)]
        asked_already = self.phase == "stopping"
        self.phase = "stopping"
        self._run.others_until = None
        if asked_already and signum == signal.SIGTERM and not self.settings.repeated_term_kills:
            return [record]
        if asked_already or impatient:
            return [record, *self._kill_all(f"{name}: ")]
        grace_s, scheduler = self.settings.grace_s, self.settings.scheduler
        if scheduler is not None and signum == signal.SIGTERM:
            grace_s = min(grace_s, max(1.0, scheduler.kill_after_s - KILLS_S))
        ask = 0 if event.reached else signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        again = PRESS_AGAIN if signum == signal.SIGINT else ""
        whom_asked = (
            counted(self.up - self.ended, "worker") if self.up > self.ended else "what is starting"
        )
        text = (
            f"{name}: {'told' if event.reached else 'asking'} {whom_asked} to end, within "
            f"{grace_s:,.10g} s{again}"
        )
        # The user who presses Ctrl-C waits for an answer, even with --quiet and `torchrun`.
        say = ShowMessage(text=text, level="warning" if signum == signal.SIGINT else "info")
        stop = self._stop_all(ask, grace_s)
        if silent_since is not None and signum == signal.SIGINT and not event.reached:
            self._stop_after_stacks = stop
            asked = self._of_hangs([], self._hang_detector.collect_before_stop, silent_since, now)
            return [record, say, *asked]
        return [record, say, *stop]

    def _kill_all(self, why: str) -> list[Action]:
        self._stop_watching()
        runs = self.ended < self.up or not self.up
        say = (
            "killing all workers"
            if runs
            else "killing what workers have left, not waiting for the last output"
        )
        return [ShowMessage(text=why + say, level="warning"), *self._stop_all(signal.SIGKILL, 0)]

    # --- after an attempt: another one, or the end of the job

    def _conclude(self, now: float) -> list[Action]:
        """Return the actions that follow an attempt without any process left: another attempt, or
        the end of the job."""
        run, settings = self._run, self.settings
        if self._fault is not None:
            return self._end(EXIT_SOFTWARE)
        if self.stop_signal is not None and not self._failed_before_stop_signal():
            return self._end_stopped(self.stop_signal)
        self._nodes_lost += len(run.losses)
        if run.went_well:
            return [*self._warn_if_apart(), *self._success_notices(), *self._end(0)]
        verdict = run.judge(
            settings,
            self.progress,
            lived_s=self._hang_detector.lived_s,
            is_stopped=self.stop_signal is not None,
            port=self._port,
            stacks=self._hang_detector.at_failure,
            advisory=self._advisory,
        )
        replaced = (
            verdict.by_loss and self._attempt_start is not None and self._attempt_start.replaces()
        )
        stop_signal = self._late_stop_signal if self.stop_signal is None else self.stop_signal
        if replaced and stop_signal is not None:
            return self._end_stopped(stop_signal)
        if replaced and not run.left:
            return self._go_on_without(now)
        decision = self._decide_on_restart(verdict.outcome, now)
        if isinstance(decision, Restart):
            return self._restart(verdict, decision, now)
        report = verdict.report(decision=decision, restarts=self.restarts)
        if stop_signal is not None and decision.reason is FinalReason.STOPPED:
            return [report, *self._end(128 + stop_signal)]
        return [report, *self._end(verdict.exit_code)]

    def _failed_before_stop_signal(self) -> bool:
        first = self._run.first_failure
        return first is not None and first <= self._stop_signal_at

    def _decide_on_restart(self, outcome: Outcome, now: float) -> RestartDecision:
        if self.stop_signal is not None:
            return Final(reason=FinalReason.STOPPED)
        if (
            self._run.hang is not None
            and self.settings.hang_action == "stop"
            and self.settings.max_restarts
        ):
            return Final(reason=FinalReason.HUNG)
        decision = self._restart_rule.after_failure(
            outcome,
            now,
            cut_off=self._attempt_start is not None and self._attempt_start.is_cut_off,
            processes_left=bool(self._run.left),
        )
        if isinstance(decision, Restart) and self._late_stop_signal is not None:
            return Final(reason=FinalReason.STOPPED)
        return decision

    def _restart(self, verdict: Verdict, decision: Restart, now: float) -> list[Action]:
        report = verdict.report(decision=decision, restarts=self.restarts)
        self._restart_rule.on_restart(verdict.outcome, now)
        self.attempt += 1
        fields: dict[str, object] = {"attempt": self.attempt, "of": self.settings.max_restarts}
        killed = self._run.killed_text(failures.after_grace(self.settings))
        warned = [] if killed is None else [ShowMessage(text=killed, level="warning")]
        if not decision.delay_s:
            entry = RecordEvent(type="restarting", fields=fields)
            return [*warned, report, entry, *self._begin_attempt(now)]
        self.phase = "waiting"
        self._all_ended_at = None
        self._restart_at = now + decision.delay_s
        entry = RecordEvent(type="restarting", fields={**fields, "delay_s": decision.delay_s})
        wait = ShowMessage(text=f"restarting in {decision.delay_s:,.10g} s ...", level="warning")
        return [*warned, report, entry, wait]

    def _go_on_without(self, now: float) -> list[Action]:
        """Begin an attempt with the remaining and the newly connected nodes, which is no restart:
        no worker failed."""
        losses = self._run.losses
        self.attempt += 1
        if self._attempt_start is not None:
            self._attempt_start.note(losses)
        fields = {"attempt": self.attempt, "lost": len(losses)}
        return [RecordEvent(type="reforming", fields=fields), *self._begin_attempt(now)]

    def _end_stopped(self, signum: int) -> list[Action]:
        run = self._run
        killed = sum(end.returncode == -signal.SIGKILL for end in run.failures)
        left = f", {killed} of them killed" if killed else ", none had to be killed"
        if (leftovers := run.killed_text()) is not None:
            left = f"{left if killed else ', none of them killed'}; {leftovers}"
        if run.losses:
            left += f"; {counted(len(run.losses), 'node')} had been lost"
        said = f"{counted(run.up, 'worker')} ended{left}" if run.up else "no worker had started"
        found = self._advisory.call(AdvisoryPart.FIRST_CAUSE, None, self._diagnose_stop)
        if found is None:
            return [ShowMessage(text=f"stopped: {said}"), *self._end(128 + signum)]
        diagnosis, why = found
        failed = ReportFailure(
            diagnosis=diagnosis,
            attempt=self.attempt,
            decision=Final(reason=FinalReason.STOPPED),
            restarts=self.restarts,
            while_stopping=True,
        )
        return [failed, ShowMessage(text=f"stopped: {said}; {why}"), *self._end(128 + signum)]

    def _diagnose_stop(self) -> tuple[Diagnosis, str] | None:
        """Return how workers failed after a request to stop, and as text; None if none did."""
        run = self._run
        diagnosis = failures.diagnose_stop(
            [*run.failures, *run.finished], self.settings, world_size=run.nodes.world_size
        )
        if diagnosis is None:
            return None
        from distlaunch.diagnosis.report import failed_in_stop

        return diagnosis, failed_in_stop(
            diagnosis, world_size=run.nodes.world_size, many_hosts=run.many_hosts
        )

    def _success_notices(self) -> list[Action]:
        """Return a notice if the job succeeded only after a restart or a lost node."""
        mishaps = [
            counted(number, noun)
            for number, noun in ((self.restarts, "restart"), (self._nodes_lost, "lost node"))
            if number
        ]
        if not mishaps:
            return []
        return [
            ShowMessage(
                text=f"the job succeeded in attempt {self.attempt}, after {' and '.join(mishaps)}"
            )
        ]

    def _warn_if_apart(self) -> list[Action]:
        """Return a warning if the workers never used MASTER_PORT, although the job ran for some
        time."""
        run, settings = self._run, self.settings
        lived_s = max((end.uptime_s for end in run.finished), default=0.0)
        if not settings.uses_master_port or run.port_used is not False or run.nodes.world_size < 2:
            return []
        if lived_s < settings.min_uptime_s:  # too short for a training
            return []
        text = (
            f"MASTER_PORT was never used: the {counted(run.nodes.world_size, 'worker')} did not "
            "communicate, so each may"
            " have trained on its own (on CPUs Lightning and Accelerate do that unless they are "
            "told otherwise)"
        )
        return [ShowMessage(text=text, level="warning")]

    def _end(self, exit_code: int) -> list[Action]:
        self.phase, self._restart_at = "ended", None
        exit_code = (
            exit_code if 0 <= exit_code <= 255 else 255
        )  # a node's invalid exit code must not become 0
        fields: dict[str, object] = {"exit_code": exit_code}
        stop_signal = self.stop_signal or self._late_stop_signal
        if stop_signal is not None and exit_code == 128 + stop_signal:
            fields["signal"] = signal.Signals(stop_signal).name
        return [RecordEvent(type="job_ended", fields=fields), EndJob(exit_code=exit_code)]
