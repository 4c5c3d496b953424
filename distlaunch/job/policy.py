"""Layer job: the job policy, a pure state machine: ``step(event, now) -> actions``, no clock, no I/O.

It decides when an attempt starts, when all are told to stop, whether there is another attempt, and the exit code.
Work per event does not grow with the number of workers, except at the turns of an attempt.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from distlaunch.core.errors import EXIT_HANG, EXIT_SOFTWARE, EXIT_USAGE
from distlaunch.core.model.never import assert_never
from distlaunch.core.model.text import counted
from distlaunch.core.wire import messages as m
from distlaunch.job import restarts
from distlaunch.job.actions import (
    Action,
    Begin,
    Discovered,
    End,
    Entry,
    Event,
    Failed,
    FromNode,
    Hung,
    Joined,
    KeepStacks,
    Lost,
    Say,
    Signalled,
    StartAttempt,
    Suspend,
    Tick,
    ToNode,
    Unreachable,
)
from distlaunch.job.diagnose.model import WorkerEnd
from distlaunch.job.hangs import Watch
from distlaunch.job.progress import Progress
from distlaunch.job.settings import PolicySettings

if TYPE_CHECKING:
    from distlaunch.job.diagnose.hang import HangDiagnosis

CAUSE_S = 0.8
"""How long the others run on when the first failure looks like a consequence, so that its cause can show."""
SAME_S = 0.15
"""How long the others run on after a failure with words on stderr, so that the same one on all ranks is seen as one."""
DOUBLE_S = 0.1
"""Two signals closer than this are one: a wrapper that passes Ctrl-C on, or a scheduler that sends twice."""
TAILS_KEPT = 256
"""Of so many failed workers all last words are kept, of the rest what tells symptom from cause."""

_INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)

Phase = Literal["new", "preparing", "starting", "running", "stopping", "ended"]


class JobPolicy:
    """One job, from ``Begin`` to ``End``."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.phase: Phase = "new"
        self.attempt = 0
        self.up = 0
        """Workers of this attempt that have been started."""
        self.ended = 0
        self.told: int | None = None
        """The signal that told us to stop."""
        self._told_at = 0.0
        self._port: int | None = None
        self._failures: list[WorkerEnd] = []
        self._finished: list[WorkerEnd] = []
        """Workers that ended with 0, the first of them: a peer that waits for one of these failed by its absence."""
        self._left: list[int] = []
        self._first_failure: float | None = None
        self._others_until: float | None = None
        """Until when the others may run on after the first failure."""
        self._seeks_cause = False
        """They may because that failure looks like a consequence."""
        self._fault: str | None = None
        self._began = 0.0
        self._waiting: set[int] = set()  # nodes that owe Prepared or Gone
        self._restart_times: deque[float] = deque()
        self._previous: restarts.Outcome | None = None
        self.progress = Progress()
        self._watch = Watch(settings)
        self._hang: HangDiagnosis | None = None

    def deadline(self) -> float | None:
        """Give the time at which ``Tick`` is due."""
        times = [time for time in (self._others_until, self._watch.deadline()) if time is not None]
        return min(times, default=None)

    def step(self, event: Event, now: float) -> list[Action]:
        """Take in an event that happened at ``now``; give what is to be done, in order."""
        if self.phase == "ended":
            return []
        match event:
            case Begin():
                return self._prepare(now)
            case Signalled():
                return self._signalled(event, now)
            case Tick():
                return self._tick(now)
            case FromNode():
                return self._from_node(event.node, event.message, now)
            case Joined() | Unreachable() | Lost() | Discovered():
                return []
            case _:
                assert_never(event)

    def _from_node(self, node: int, message: m.FromAgent, now: float) -> list[Action]:
        match message:
            case m.Prepared():
                return self._prepared(node, message)
            case m.Started():
                return self._started(message, now)
            case m.WorkerExited():
                return self._exited(node, message, now)
            case m.WorkerHalted():
                return [Suspend()]
            case m.Alive():
                return self._alive(message, now)
            case m.Stacks():
                self._watch.answered(node, message)
                return self._hung(now)
            case m.Remark():
                return [Say(text=message.text, level="warning" if message.warning else "info")]
            case m.PreloadEnded():
                return [Entry(type="preload", fields=message.fields)]
            case m.Gone():
                return self._gone(node, message, now)
            case m.Fault():
                return self._faulted(node, message)
            case _:
                assert_never(message)

    # --- the turns of an attempt

    def _prepare(self, now: float) -> list[Action]:
        self.phase = "preparing"
        self._began = now
        self.up = self.ended = 0
        self._hang = None
        self.progress.begin()
        self._watch.begin(self.attempt)
        self._failures = []
        self._finished = []
        self._left = []
        self._first_failure = self._others_until = None
        self._waiting = set(range(len(self.settings.hosts)))
        return [
            ToNode(node=node, message=m.Prepare(attempt=self.attempt, port=None if node else self.settings.master_port))
            for node in range(len(self.settings.hosts))
        ]

    def _prepared(self, node: int, message: m.Prepared) -> list[Action]:
        if message.attempt != self.attempt or self.phase != "preparing":
            return []
        if message.problem is not None:
            text = f"error: {message.problem}" + (f"\n  hint: {message.hint}" if message.hint else "")
            return [Say(text=text, level="error"), *self._end(EXIT_USAGE)]
        if message.port is not None:
            self._port = message.port
        warned: list[Action] = [Say(text=message.warning, level="warning")] if message.warning else []
        self._waiting.discard(node)
        if self._waiting:
            return warned
        self.phase = "starting"
        self._waiting = set(range(len(self.settings.hosts)))
        return [
            *warned,
            Entry(type="attempt_started", fields={"attempt": self.attempt, "master_port": self._port}),
            StartAttempt(attempt=self.attempt, port=self._port),
        ]

    def _started(self, message: m.Started, now: float) -> list[Action]:
        if message.attempt != self.attempt:
            return []
        self.up += len(message.pids)
        actions: list[Action] = [
            Entry(type="workers_started", fields={"attempt": self.attempt, "pids": dict(message.pids)})
        ]
        if self.phase == "starting" and self.up == self.settings.world_size:
            self.phase = "running"
            if self.ended < self.up:
                self._watch.all_started(now)
        return actions

    def _exited(self, node: int, message: m.WorkerExited, now: float) -> list[Action]:
        if message.attempt != self.attempt:
            return []
        self.ended += 1
        actions: list[Action] = [
            Entry(
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
        if self.settings.terminal and self.told is None and message.returncode in _INTERRUPTED:
            self.told, self._told_at = signal.SIGINT, now
        if message.returncode != 0:
            actions += self._failed(node, message, now)
        else:
            actions += self._watch.worker_ended(message.rank, now)
            if len(self._finished) < TAILS_KEPT:
                self._finished.append(self._worker_end(node, message, now))
        if self.ended == self.settings.world_size:
            self._watch.stop()
        return actions

    def _failed(self, node: int, message: m.WorkerExited, now: float) -> list[Action]:
        end = self._worker_end(node, message, now)
        self._failures.append(end)
        if self.told is not None or message.told_to_stop or self.phase == "stopping":
            return []
        self._watch.stop()
        if self._first_failure is None:
            self._first_failure = now
            self._seeks_cause = restarts.looks_like_consequence(end)
            wait_s = CAUSE_S if self._seeks_cause else SAME_S if restarts.may_be_shared(end) else 0.0
            if wait_s and self.ended < self.settings.world_size:
                self._others_until = now + wait_s
                return []
        elif self._others_until is not None and (not self._seeks_cause or restarts.looks_like_consequence(end)):
            return []
        return self._stop_after_failure()

    def _worker_end(self, node: int, message: m.WorkerExited, now: float) -> WorkerEnd:
        return restarts.worker_end(
            message,
            host=self.settings.hosts[node],
            first_rank=self.settings.first_ranks[node],
            ended_s=now - self._began,
            whole=len(self._failures) < TAILS_KEPT,
        )

    def _stop_after_failure(self) -> list[Action]:
        self._others_until = None
        self._watch.stop()
        self.phase = "stopping"
        return self._stop_all(signal.SIGTERM, self.settings.failure_grace_s)

    def _stop_all(self, signum: int, grace_s: float) -> list[Action]:
        stop = m.Stop(attempt=self.attempt, signum=int(signum), grace_s=grace_s)
        return [ToNode(node=node, message=stop) for node in range(len(self.settings.hosts))]

    def _gone(self, node: int, message: m.Gone, now: float) -> list[Action]:
        if message.attempt != self.attempt:
            return []
        self._left += message.left
        self._waiting.discard(node)
        if self._waiting:
            return []
        actions: list[Action] = []
        if self._left:
            pids = ", ".join(map(str, self._left))
            actions.append(Say(text=f"not even KILL ended these processes: pid {pids}", level="warning"))
        return actions + self.progress.end(attempt=self.attempt, now=now) + self._conclude(now)

    def _conclude(self, now: float) -> list[Action]:
        if self._fault is not None:
            return self._end(EXIT_SOFTWARE)
        if self.told is not None and not self._failed_before_told():
            killed = sum(end.returncode == -signal.SIGKILL for end in self._failures)
            left = f", {killed} of them killed" if killed else ", none had to be killed"
            said = f"{counted(self.up, 'worker')} ended{left}" if self.up else "no worker had started"
            return [Say(text=f"stopped: {said}"), *self._end(128 + self.told)]
        if not self._failures and self._hang is None:
            return self._end(0)
        outcome, code, report = self._judge()
        why = "told to stop" if self.told is not None else self._why_not_again(outcome, now)
        if why is None and self._left:
            why = "not restarted: what is left of this attempt would meet the next one"
        if why is not None:
            why = self.settings.dialect.spelt(why)
            return [report(final=True, why_final=why), *self._end(code if self.told is None else 128 + self.told)]
        self._previous = outcome
        self._restart_times.append(now)
        self.attempt += 1
        return [
            report(final=False),
            Entry(type="restarting", fields={"attempt": self.attempt, "of": self.settings.max_restarts}),
            *self._prepare(now),
        ]

    def _judge(self) -> tuple[restarts.Outcome, int, Callable[..., Failed | Hung]]:
        """Sum up the attempt; give also the exit code if the job ends with it, and what makes the report."""
        settings, went_on = self.settings, self.progress.went_on()
        after_grace = restarts.after_grace(settings) if self.told is None else None
        if self._hang is not None:
            lived_s, min_uptime_s = self._watch.lived_s, settings.min_uptime_s
            outcome = restarts.Outcome.after(self._hang.signature, lived_s, min_uptime_s=min_uptime_s, went_on=went_on)
            killed = tuple(sorted(end.rank for end in self._failures if end.returncode == -signal.SIGKILL))
            hung = partial(Hung, diagnosis=self._hang, killed=killed, after_grace=after_grace, attempt=self.attempt)
            return outcome, EXIT_HANG, hung
        ends = [*self._failures, *self._finished]
        diagnosis = restarts.diagnose(ends, settings, after_grace=after_grace)
        outcome = restarts.Outcome.of(diagnosis, self._failures, min_uptime_s=settings.min_uptime_s, went_on=went_on)
        return outcome, diagnosis.exit_code, partial(Failed, diagnosis=diagnosis, attempt=self.attempt)

    def _failed_before_told(self) -> bool:
        return self._first_failure is not None and self._first_failure <= self._told_at

    def _why_not_again(self, outcome: restarts.Outcome, now: float) -> str | None:
        window = self.settings.restart_window_s
        while window is not None and self._restart_times and now - self._restart_times[0] > window:
            self._restart_times.popleft()
        return restarts.why_final(
            outcome, self._previous, used=len(self._restart_times), allowed=self.settings.max_restarts, window_s=window
        )

    # --- signals, time, faults

    def _signalled(self, event: Signalled, now: float) -> list[Action]:
        signum = event.signum
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            return [
                Entry(type="signal", fields={"signal": signal.Signals(signum).name}),
                *(ToNode(node=node, message=m.Forward(signum=signum)) for node in range(len(self.settings.hosts))),
            ]
        impatient = event.kill or signum == signal.SIGQUIT
        if self.told is not None and now - self._told_at < DOUBLE_S and not impatient:
            return []
        record = Entry(type="signal", fields={"signal": signal.Signals(signum).name})
        if self.told is not None:
            if signum == signal.SIGTERM and not self.settings.repeated_term_kills:
                return [record]
            return [record, *self._kill_all("")]
        self.told, self._told_at = signum, now
        self._watch.stop()
        if self.phase in ("new", "preparing"):
            return [record, *self._end(128 + signum)]
        name = signal.Signals(signum).name
        asked_already = self.phase == "stopping"
        self.phase = "stopping"
        self._others_until = None
        if asked_already and signum == signal.SIGTERM and not self.settings.repeated_term_kills:
            return [record]
        if asked_already or impatient:
            return [record, *self._kill_all(f"{name}: ")]
        grace_s = self.settings.grace_s
        ask = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        again = "; once more kills" if signum == signal.SIGINT else ""
        whom = counted(self.up - self.ended, "worker") if self.up > self.ended else "what is starting"
        text = f"{name}: asking {whom} to end, within {grace_s:,.10g} s{again}"
        return [record, Say(text=text), *self._stop_all(ask, grace_s)]

    def _kill_all(self, why: str) -> list[Action]:
        """Have all that runs killed; where nothing runs any more (a disk keeps the last output), wait no longer."""
        say = "killing all workers" if self.ended < self.up or not self.up else "not waiting for the last output"
        return [Say(text=why + say, level="warning"), *self._stop_all(signal.SIGKILL, 0)]

    def _tick(self, now: float) -> list[Action]:
        if self._others_until is not None and now >= self._others_until:
            return self._stop_after_failure()
        return self._watch.tick(now, running=self.up - self.ended) + self._hung(now)

    def _alive(self, message: m.Alive, now: float) -> list[Action]:
        if message.attempt != self.attempt:
            return []
        actions = self.progress.take(message.heartbeats, attempt=self.attempt, now=now)
        return actions + self._watch.heard(message, now)

    def _hung(self, now: float) -> list[Action]:
        """Once it is known where silent workers stand, say so and stop them all."""
        if not self._watch.found:
            return []
        self._hang = self._watch.diagnose(self.progress)
        self._first_failure = now
        return [
            Entry(type="hang", fields={"attempt": self.attempt, **self._hang.record}),
            KeepStacks(attempt=self.attempt, stacks=tuple(self._watch.stacks)),
            Say(text=f"hang: {self._hang.summary}; stopping all workers", level="warning"),
            *self._stop_after_failure(),
        ]

    def _faulted(self, node: int, message: m.Fault) -> list[Action]:
        self._fault = message.text
        self._watch.stop()
        host = self.settings.hosts[node]
        text = f"internal error on {host}: {message.text}; all workers have been killed"
        nothing_runs = self.phase in ("new", "preparing")
        self.phase = "stopping"
        self._waiting.discard(node)
        actions: list[Action] = [Say(text=text, level="error"), Entry(type="fault", fields={"text": message.text})]
        if self._waiting and not nothing_runs:
            return [*actions, *self._stop_all(signal.SIGTERM, self.settings.failure_grace_s)]
        return [*actions, *self._end(EXIT_SOFTWARE)]

    def _end(self, exit_code: int) -> list[Action]:
        self.phase = "ended"
        return [Entry(type="job_ended", fields={"exit_code": exit_code}), End(exit_code=exit_code)]
