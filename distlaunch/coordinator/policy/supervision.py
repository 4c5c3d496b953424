"""The job policy's part from the start of an attempt's workers to the end of the last. Pure.

It decides when all are told to stop. Work per event does not grow with the number of workers, except at those turns.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from typing import Literal

from distlaunch.coordinator.policy.attempt import Attempt
from distlaunch.coordinator.policy.cast import Cast
from distlaunch.coordinator.policy.events_and_actions import Action, End, Entry, KeepStacks, Say, Signalled, ToNode
from distlaunch.coordinator.policy.hang_detection import Watch
from distlaunch.coordinator.policy.job_progress import Progress
from distlaunch.coordinator.policy.job_settings import PolicySettings
from distlaunch.coordinator.policy.signals import Request, Signals, StopRequests
from distlaunch.core.errors import EXIT_SOFTWARE
from distlaunch.core.model.text import counted
from distlaunch.core.protocol import agent_messages as m

PRESS_AGAIN = "; press Ctrl-C again after 1 s to kill all workers now"
"""Ends the line that answers the first Ctrl-C."""
KILLS_S = 5.0
"""So long before a scheduler kills all, we kill workers that have not ended, and can still tell of it."""
NOTICE_S = 1.0
"""So long after the last worker's end the user hears that the launcher waits for processes that workers have left."""
_INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)

Phase = Literal["new", "gathering", "preparing", "starting", "running", "lingering", "stopping", "ended"]
"""``lingering``: all workers have ended with 0, and processes that they have left may run on for a while."""


class Supervision(ABC):
    """The workers of one attempt after the other; what comes between is the subclass's."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.phase: Phase = "new"
        self.attempt = 0
        self.told: int | None = None
        """The signal that told us to stop."""
        self.progress = Progress()
        self._told_at = 0.0
        self._requests = StopRequests()
        self._told_late: int | None = None
        """The first signal that came when all workers had ended: it prevents a restart, and changes nothing else."""
        self._all_ended_at: float | None = None
        """When the last worker of this attempt had ended."""
        self._fault: str | None = None
        self._run = Attempt(0, Cast.fixed(settings), began=0.0)
        self._watch = Watch(settings, self._run)
        scheduler = settings.scheduler
        self._signals = Signals(
            holds=scheduler is not None and scheduler.signals_all and settings.gathering is not None
        )
        self.warned: int | None = None
        """The last signal that was passed on to the workers: a scheduler warns so of its time limit."""
        self.since_warned_s = 0.0
        """How long the last attempt then went on."""
        self._warned_at = 0.0

    @abstractmethod
    def _conclude(self, now: float) -> list[Action]:
        """Go on after an attempt of which nothing is left."""

    @property
    def up(self) -> int:
        """Workers of this attempt that have been started."""
        return self._run.up

    @property
    def ended(self) -> int:
        """Of those, how many have ended."""
        return self._run.ended

    @property
    def world_size(self) -> int:
        """Workers of this attempt; 0 before it is known who takes part."""
        return self._run.cast.world_size

    def _is_of(self, node: int, attempt: int) -> bool:
        """Tell whether a message is of this attempt, and of a node that takes part in it and has not been lost."""
        return attempt == self.attempt == self._run.number and node in self._run.alive

    # --- workers

    def _started(self, node: int, message: m.Started, now: float) -> list[Action]:
        run = self._run
        run.started(node, message)
        if self.phase == "starting" and run.is_full:
            self.phase = "running"
            if not run.has_ended:
                self._watch.all_started(now)
        return [Entry(type="workers_started", fields={"attempt": self.attempt, "pids": dict(message.pids)})]

    def _exited(self, node: int, message: m.WorkerExited, now: float) -> list[Action]:
        run = self._run
        if not run.is_news(node, message.rank):
            return []
        failure = run.exited(node, message)
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
        if failure is None:
            actions += self._watch.worker_ended(message.rank, now)
        elif self.told is None and not message.told_to_stop and self.phase != "stopping":
            self._watch.stop()
            if run.first_reaction(failure, now) == "stop":
                actions += self._stop_after_failure()
        if run.has_ended:
            self._watch.stop()
            self._all_ended_at = now
            actions += self._all_ended(now)
        return actions

    def _all_ended(self, now: float) -> list[Action]:
        """Have the nodes wait for what workers have left, or end it, now that the last worker has ended."""
        run = self._run
        if self.phase == "stopping":
            return []
        if self.told is not None:  # typed into the worker's terminal
            self.phase = "stopping"
            return self._stop_all(signal.SIGTERM, self.settings.grace_s)
        if not run.went_well:
            return self._stop_after_failure()
        self.phase = "lingering"
        linger = m.Linger(attempt=self.attempt, linger_s=self.settings.linger_s, grace_s=self.settings.failure_grace_s)
        return [ToNode(node=node, message=linger) for node in run.members() if node in run.owing]

    def _stop_after_failure(self) -> list[Action]:
        self._run.others_until = None
        self._watch.stop()
        self.phase = "stopping"
        return self._stop_all(signal.SIGTERM, self.settings.failure_grace_s)

    def _stop_all(self, signum: int, grace_s: float) -> list[Action]:
        stop = m.Stop(attempt=self.attempt, signum=int(signum), grace_s=grace_s)
        return [ToNode(node=node, message=stop) for node in self._run.members()]

    def _gone(self, node: int, message: m.Gone, now: float) -> list[Action]:
        run = self._run
        if node not in run.owing or self.phase == "preparing":
            return []
        run.gone(node, message)
        return [] if run.owing else self._all_gone(now)

    def _all_gone(self, now: float) -> list[Action]:
        run = self._run
        run.others_until = run.notice_at = None
        self._watch.stop()
        self.since_warned_s = now - self._warned_at
        actions = self._leftovers_ended() if run.ended_leftovers else []
        if run.left:
            pids = ", ".join(map(str, run.left))
            actions.append(Say(text=f"not even KILL ended these processes: pid {pids}", level="warning"))
        return actions + self.progress.end(attempt=self.attempt, now=now) + self._conclude(now)

    # --- what workers have left

    def _leftovers_ended(self) -> list[Action]:
        """Say what had to be ended after a success; of a stop only the last line or the report tells."""
        from distlaunch.coordinator.policy.remaining_processes import ended_line, record_of

        run = self._run
        ended, killed = run.by_host(run.ended_leftovers), run.by_host(run.killed_leftovers)
        actions: list[Action] = [
            Entry(type="leftovers_ended", fields={"attempt": self.attempt, **record_of(ended, killed)})
        ]
        if self.phase == "lingering":
            actions.append(Say(text=ended_line(ended, killed, many_hosts=run.many_hosts), level="warning"))
        return actions

    def _lingering(self, node: int, message: m.Lingering, now: float) -> list[Action]:
        """Record what workers have left on a node.

        The user gets one notice per attempt, not before ``NOTICE_S`` after the last worker's end.
        """
        run = self._run
        run.remaining[node] = message.processes
        if self.phase == "lingering" and not run.is_cut_short and not run.has_notice and run.notice_at is None:
            run.notice_at = now if self._all_ended_at is None else max(now, self._all_ended_at + NOTICE_S)
        return []

    def _waiting_notice(self) -> list[Action]:
        from distlaunch.coordinator.policy.remaining_processes import count_of, waiting_line

        run = self._run
        run.notice_at = None
        found = run.by_host({node: left for node, left in run.remaining.items() if node in run.owing})
        if not count_of(found):
            return []
        run.has_notice = True
        text = waiting_line(found, linger_s=self.settings.linger_s, many_hosts=run.many_hosts)
        return [Say(text=self.settings.dialect.spelt(text), level="warning")]

    def _cut_short(self, name: str, *, impatient: bool) -> list[Action]:
        """End what workers have left, as a signal has come: by TERM, and at the second one by KILL.

        All workers have ended with 0, so the signal changes nothing else.
        """
        run = self._run
        first = not run.is_cut_short and not impatient
        run.is_cut_short, run.notice_at = True, None
        say = Say(text=f"{name}: {'ending' if first else 'killing'} what workers have left", level="warning")
        if first:
            return [say, *self._stop_all(signal.SIGTERM, self.settings.failure_grace_s)]
        return [say, *self._stop_all(signal.SIGKILL, 0)]

    # --- signs of life

    def _tick_of_run(self, now: float) -> list[Action]:
        if self._run.notice_at is not None and now >= self._run.notice_at:
            return self._waiting_notice()
        until = self._run.others_until
        if until is not None and now >= until:
            return self._stop_after_failure()
        return self._watch.tick(now) + self._hung(now)

    def _alive(self, message: m.Alive, now: float) -> list[Action]:
        actions = self.progress.take(message.heartbeats, attempt=self.attempt, now=now)
        return actions + self._watch.heard(message, now)

    def _hung(self, now: float) -> list[Action]:
        """Once it is known where silent workers stand, decide whether they hang; stop them all if they do."""
        if not self._watch.found:
            return []
        decision = self._watch.decide(self.progress, now)
        if isinstance(decision, list):
            return decision
        hang = self._run.hang = decision
        self._run.first_failure = now
        return [
            Entry(type="hang", fields={"attempt": self.attempt, **hang.record}),
            KeepStacks(attempt=self.attempt, stacks=tuple(self._watch.stacks)),
            Say(text=f"hang: {hang.summary}; stopping all workers", level="warning"),
            *self._stop_after_failure(),
        ]

    # --- signals, faults

    def _signalled(self, event: Signalled, now: float) -> list[Action]:
        signum = event.signum
        record = Entry(type="signal", fields={"signal": signal.Signals(signum).name})
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            self.warned, self._warned_at = signum, now
            forward = m.Forward(signum=signum)
            whom = self._run.members() if self.phase not in ("new", "gathering") and not event.reached else []
            return [record, *(ToNode(node=node, message=forward) for node in whom)]
        impatient = event.kill or signum == signal.SIGQUIT
        name = signal.Signals(signum).name
        came = now if event.came is None else event.came
        is_late = self._all_ended_at is not None and came >= self._all_ended_at
        is_told = self.told is not None or self._run.is_cut_short
        if is_told and signum == signal.SIGTERM and not self.settings.repeated_term_kills:
            return [record]
        request = self._requests.take(now)
        if request is Request.MERGED and not impatient:
            return []
        if request is Request.EARLY and not impatient:
            return [record]
        if self.told is not None:
            return [record, *self._kill_all("")]
        if is_late and self.phase == "lingering":
            return [record, *self._cut_short(name, impatient=impatient)]
        if is_late:
            self._told_late = self._told_late or signum
            if signum == signal.SIGTERM and not self.settings.repeated_term_kills:
                return [record]  # a program whose wrapper has ended may be saving
            return [record, *self._kill_all(f"{name}: ")]
        self.told, self._told_at = signum, now
        silent_since = self._watch.silent_since(now)
        self._watch.stop()
        if self.phase in ("new", "gathering", "preparing"):
            waited = [] if self.settings.gathering is None else [Say(text=f"{name}: stopped; no worker had started")]
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
        whom_asked = counted(self.up - self.ended, "worker") if self.up > self.ended else "what is starting"
        text = f"{name}: {'told' if event.reached else 'asking'} {whom_asked} to end, within {grace_s:,.10g} s{again}"
        # Whoever presses Ctrl-C sits there and waits, with --quiet and under `torchrun`, too.
        say = Say(text=text, level="warning" if signum == signal.SIGINT else "info")
        stop = self._stop_all(ask, grace_s)
        if silent_since is not None and signum == signal.SIGINT and not event.reached:
            return [record, say, *self._watch.ask_before(stop, silent_since, now)]
        return [record, say, *stop]

    def _kill_all(self, why: str) -> list[Action]:
        """Have all that runs killed. If all workers have ended, that is what they have left; output waits no longer."""
        self._watch.stop()
        runs = self.ended < self.up or not self.up
        say = "killing all workers" if runs else "killing what workers have left, not waiting for the last output"
        return [Say(text=why + say, level="warning"), *self._stop_all(signal.SIGKILL, 0)]

    def _broken(self, text: str, say: str, *, without: int | None = None) -> list[Action]:
        """End the job for a fault of ours; node ``without`` has nothing left to stop."""
        self._fault = text
        self._watch.stop()
        nothing_runs = self.phase in ("new", "gathering", "preparing")
        self.phase = "stopping"
        self._run.owing.discard(-1 if without is None else without)
        actions: list[Action] = [Say(text=say, level="error"), Entry(type="fault", fields={"text": text})]
        if self._run.owing and not nothing_runs:
            return [*actions, *self._stop_all(signal.SIGTERM, self.settings.failure_grace_s)]
        return [*actions, *self._end(EXIT_SOFTWARE)]

    def _end(self, exit_code: int) -> list[Action]:
        self.phase = "ended"
        exit_code = exit_code if 0 <= exit_code <= 255 else 255  # what a node says is no reason to end with 0
        return [Entry(type="job_ended", fields={"exit_code": exit_code}), End(exit_code=exit_code)]
