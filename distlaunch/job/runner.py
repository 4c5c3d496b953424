"""Layer job: the loop of the coordinator: events in, policy, actions out. All waiting of a job is in ``run``."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from distlaunch.core.model.ids import format_ranks
from distlaunch.core.model.plan import LaunchPlan, WorkerPlan
from distlaunch.core.model.record import replace
from distlaunch.core.wire import messages as m
from distlaunch.job import actions as a
from distlaunch.job import signals
from distlaunch.job.diagnose.model import Diagnosis
from distlaunch.job.policy import JobPolicy
from distlaunch.job.records import EventLog, OutputFiles, log_path
from distlaunch.job.rundir import REPORT
from distlaunch.job.sink import Sink, StatusView
from distlaunch.resolve.plan import attempt_dir, bind

INTERRUPTS_KILL = 3
INTERRUPTS_S = 1.5
"""With a pseudo-terminal Ctrl-C is the worker's own; so many within so many seconds kill it."""
_INTERRUPT = b"\x03"
_IGNORED = frozenset((signal.SIGCONT, signal.SIGWINCH, signal.SIGCHLD))


class Transport(Protocol):
    """How the coordinator reaches the agents."""

    def start(self) -> None:
        """Be ready for messages."""

    def send(self, node: int, message: m.ToAgent) -> None:
        """Send without waiting."""

    def descriptors(self) -> Mapping[int, int]:
        """Give what to poll, with the poll events."""

    def deadline(self) -> float | None:
        """Give when ``receive`` is due even if nothing is ready."""

    def receive(self) -> list[tuple[int, m.FromAgent]]:
        """Give what has come, without waiting, each with its node rank."""

    def close(self) -> None:
        """End all agents and what is left of their workers."""


class Terminal(Protocol):
    """The user's terminal, while one worker has it through a pseudo-terminal."""

    def fileno(self) -> int:
        """Give the descriptor to poll for keystrokes."""

    def keys(self) -> bytes:
        """Read what was typed."""

    def size(self) -> tuple[int, int]:
        """Give rows and columns."""

    def take(self) -> None:
        """Switch to passing every key on."""

    def give_back(self) -> None:
        """Restore the modes that it had."""


class Clock:
    """Monotonic seconds that stand still while the job is paused."""

    def __init__(self) -> None:
        self._paused_s = 0.0

    def __call__(self) -> float:
        """Give the time."""
        return time.monotonic() - self._paused_s

    def skip(self, seconds: float) -> None:
        """Leave out a pause that has just ended."""
        self._paused_s += seconds


class Runner:
    """Runs one job to its exit code."""

    def __init__(
        self,
        *,
        plan: LaunchPlan,
        policy: JobPolicy,
        transport: Transport,
        files: OutputFiles,
        sink: Sink,
        events: EventLog,
        signal_pipe: signals.SignalPipe,
        clock: Clock,
        terminal: Terminal | None,
    ) -> None:
        self._plan = plan
        self._policy = policy
        self._transport = transport
        self._files = files
        self._sink = sink
        self._events = events
        self._signals = signal_pipe
        self._clock = clock
        self._terminal = terminal
        self._interrupts: deque[float] = deque(maxlen=INTERRUPTS_KILL)
        self._exit_code: int | None = None
        self._started_s = time.monotonic()

    def run(self) -> int:
        """Run the job; give the exit code."""
        self._transport.start()
        self._feed(a.Begin())
        while True:
            while not self._is_over() and (received := self._transport.receive()):
                for node, message in received:  # on one machine, feeding one may bring the next
                    self._feed(a.FromNode(node=node, message=message))
            deadline = self._policy.deadline()
            if deadline is not None and self._clock() >= deadline:
                self._feed(a.Tick())
            if self._exit_code is not None:
                return self._exit_code
            self._wait()

    def _is_over(self) -> bool:
        return self._exit_code is not None

    def _wait(self) -> None:
        poll = select.poll()
        for descriptor, wanted in self._transport.descriptors().items():
            poll.register(descriptor, wanted)
        poll.register(self._signals.fileno(), select.POLLIN)
        if self._terminal is not None:
            poll.register(self._terminal.fileno(), select.POLLIN)
        deadlines = [time for time in (self._policy.deadline(), self._transport.deadline()) if time is not None]
        timeout_ms = max(0.0, min(deadlines) - self._clock()) * 1000 + 1 if deadlines else None
        for descriptor, _ in poll.poll(timeout_ms):
            if descriptor == self._signals.fileno():
                for signum in self._signals.read():
                    self._on_signal(signum)
            elif self._terminal is not None and descriptor == self._terminal.fileno():
                self._on_keys(self._terminal)

    def _feed(self, event: a.Event) -> None:
        before = (self._policy.phase, self._policy.up, self._policy.ended)
        for action in self._policy.step(event, self._clock()):
            self._act(action)
        if before != (self._policy.phase, self._policy.up, self._policy.ended):
            self._show_status()

    def _act(self, action: a.Action) -> None:
        match action:
            case a.ToNode():
                self._transport.send(action.node, action.message)
            case a.StartAttempt():
                self._start_attempt(action.attempt, action.port)
            case a.Say():
                self._sink.say(action.text, level=action.level)
            case a.Entry():
                self._events.write(action.type, action.fields)
            case a.Failed():
                self._report(action)
            case a.Suspend():
                self._pause()
            case a.End():
                self._exit_code = action.exit_code

    def _show_status(self) -> None:
        policy = self._policy
        phases = {"new": "starting", "preparing": "restarting" if policy.attempt else "starting"}
        self._sink.status(
            StatusView(
                phase=phases.get(policy.phase, policy.phase),  # type: ignore[arg-type]  # the rest have the same names
                workers_up=max(0, policy.up - policy.ended),
                workers_total=policy.settings.world_size,
                attempt=policy.attempt,
                max_restarts=policy.settings.max_restarts,
                started_s=self._started_s,
                log_dir=self._plan.run_dir,
            )
        )

    # --- attempts

    def _start_attempt(self, attempt: int, port: int | None) -> None:
        self._plan = bind(self._plan, attempt=attempt, master_port=port)
        self._write_plan(attempt)
        self._files.begin_attempt(attempt)
        env = self._plan.shared_env
        rows, columns = self._terminal.size() if self._terminal else (0, 0)
        by_node: dict[int, list[m.WorkerSpec]] = {}
        for worker in self._plan.workers:
            by_node.setdefault(worker.node_rank, []).append(_spec(worker))
        for node, workers in by_node.items():
            start = m.Start(
                attempt=attempt,
                argv=self._plan.argv,
                env=env,
                cwd=self._plan.workdir,
                workers=tuple(workers),
                uses_gpus=bool(self._plan.nodes[node].devices),
                signal_group=self._plan.signal_group,
                terminal=self._terminal is not None,
                rows=rows,
                columns=columns,
                stdin_rank=0 if node == 0 and not os.isatty(0) else None,
            )
            self._transport.send(node, start)

    def _write_plan(self, attempt: int) -> None:
        try:
            os.mkdir(attempt_dir(self._plan.run_dir, attempt), 0o700)
            with open(os.path.join(self._plan.run_dir, f"plan-{attempt}.json"), "x", encoding="utf-8") as file:
                file.write(json.dumps(self._plan.record(), indent=1) + "\n")
        except OSError as exc:
            self._sink.say(f"the plan was not written: {os.strerror(exc.errno or 0)}", level="warning")

    def _report(self, failed: a.Failed) -> None:
        from distlaunch.job.diagnose.report import diagnosis_record, render_report

        cause = failed.diagnosis.cause
        path = log_path(self._plan.run_dir, failed.attempt, cause.ranks[0])
        diagnosis = replace(failed.diagnosis, cause=replace(cause, log_path=path))
        fields = {"attempt": failed.attempt, "final": failed.final, "diagnosis": diagnosis_record(diagnosis)}
        self._events.write("failure", fields)
        policy = self._policy
        if not failed.final:
            again = f"restart {policy.attempt} of {policy.settings.max_restarts}"
            self._sink.say(f"attempt {failed.attempt} failed: {one_line(diagnosis)}; {again}", level="warning")
            return
        text = render_report(
            diagnosis,
            job_id=self._plan.job_id,
            world_size=policy.settings.world_size,
            attempt=failed.attempt,
            max_restarts=policy.settings.max_restarts,
            elapsed_s=time.monotonic() - self._started_s,
            run_dir=self._plan.run_dir,
            many_hosts=len(self._plan.nodes) > 1,
        )
        if failed.why_final:
            text = f"{text.rstrip()}\n{failed.why_final}\n"
        try:
            with open(os.path.join(self._plan.run_dir, REPORT), "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            pass  # the console and the exit code still tell
        self._sink.say(text.rstrip(), level="error")

    # --- signals and keys

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGTSTP:
            self._pause()
        elif signum == signal.SIGWINCH:
            if self._terminal is not None:
                rows, columns = self._terminal.size()
                self._transport.send(0, m.Resize(rows=rows, columns=columns))
        elif signum not in _IGNORED:
            self._feed(a.Signalled(signum=signum))

    def _on_keys(self, terminal: Terminal) -> None:
        data = terminal.keys()
        if not data:  # the terminal has gone away
            self._terminal = None
            if not self._signals.ignores(signal.SIGHUP):
                self._feed(a.Signalled(signum=signal.SIGHUP))
            return
        self._transport.send(0, m.Input(data=data))
        now = time.monotonic()
        self._interrupts.extend([now] * data.count(_INTERRUPT))
        if len(self._interrupts) == INTERRUPTS_KILL and now - self._interrupts[0] < INTERRUPTS_S:
            self._interrupts.clear()
            self._feed(a.Signalled(signum=signal.SIGQUIT))

    def _pause(self) -> None:
        """Stop the workers' trees, then the launcher; go on with both when it is continued."""
        self._sink.suspend()
        if self._terminal is not None:
            self._terminal.give_back()
        for node in range(len(self._plan.nodes)):
            self._transport.send(node, m.Pause(paused=True))
        began = time.monotonic()
        signals.stop_self()
        self._clock.skip(time.monotonic() - began)
        for node in range(len(self._plan.nodes)):
            self._transport.send(node, m.Pause(paused=False))
        if self._terminal is not None:
            self._terminal.take()
            self._on_signal(signal.SIGWINCH)
        self._sink.resume()


def _spec(worker: WorkerPlan) -> m.WorkerSpec:
    return m.WorkerSpec(
        rank=worker.rank,
        local_rank=worker.local_rank,
        argv=None,
        env=worker.env,
        cpus=worker.cpus,
        error_file=worker.env["TORCHELASTIC_ERROR_FILE"],
    )


def one_line(diagnosis: Diagnosis) -> str:
    """Say a cause in one line."""
    cause = diagnosis.cause
    who = f"rank{'s' if len(cause.ranks) > 1 else ''} {format_ranks(cause.ranks)}"
    what = f"{cause.exception_type}: {cause.message}" if cause.exception_type else cause.summary
    where = f" ({cause.frame})" if cause.frame else ""
    return f"{who}: {what[:160]}{where}"
