"""The job policy, a pure state machine: ``step(event, now) -> actions``, no clock, no I/O.

It decides who takes part in an attempt, whether there is another one, and the exit code; what happens while workers
run is ``supervision``'s.
"""

from __future__ import annotations

import signal
from collections import deque
from typing import TYPE_CHECKING

from distlaunch.coordinator.policy import restarts
from distlaunch.coordinator.policy.attempt import Attempt, Verdict
from distlaunch.coordinator.policy.cast import Cast
from distlaunch.coordinator.policy.events_and_actions import (
    Action,
    Begin,
    Broken,
    Discovered,
    Entry,
    Event,
    Failed,
    FromNode,
    Joined,
    Known,
    LoggedIn,
    Lost,
    Noted,
    Refused,
    Say,
    Signalled,
    StartAttempt,
    Suspend,
    Tick,
    ToNode,
    Unreachable,
)
from distlaunch.coordinator.policy.job_settings import PolicySettings
from distlaunch.coordinator.policy.supervision import Supervision
from distlaunch.core.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE
from distlaunch.core.model.ids import name_ranks
from distlaunch.core.model.never import assert_never
from distlaunch.core.model.text import counted
from distlaunch.core.protocol import agent_messages as m

if TYPE_CHECKING:
    from distlaunch.coordinator.policy.attempt_start import Convening
    from distlaunch.coordinator.policy.node_setup import Refusal
    from distlaunch.core.protocol import remote as r
    from distlaunch.planning.master_address import Meeting


class JobPolicy(Supervision):
    """One job, from ``Begin`` to ``End``."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self.attempt = 0 if settings.scheduler is None else settings.scheduler.attempt
        self.restarts = 0
        """How many there have been; attempts are more where nodes that were lost were replaced."""
        self._nodes_lost = 0
        """In all attempts that have ended."""
        self._port: int | None = None
        self._restart_times: deque[float] = deque()
        self._previous: restarts.Outcome | None = None
        self._retried_s: float | None = None
        """A failure that was the one before again has been retried, as it had so much uptime."""
        self._convening: Convening | None = None
        """Where there are several nodes, or one that is not this machine."""
        if settings.gathering is not None:
            from distlaunch.coordinator.policy.attempt_start import Convening

            self._convening = Convening(settings.gathering, settings)

    def deadline(self) -> float | None:
        """Give the time at which ``Tick`` is due."""
        times = [self._run.others_until, self._run.notice_at, self._watch.deadline(), self._signals.deadline()]
        if self._convening is not None and self.phase in ("gathering", "preparing"):
            times.append(self._convening.deadline())
        return min((time for time in times if time is not None), default=None)

    def step(self, event: Event, now: float) -> list[Action]:
        """Take in an event that happened at ``now``; give what is to be done, in order."""
        if self.phase == "ended":
            return []
        match event:
            case FromNode():
                return self._from_node(event.node, event.message, now)
            case Begin():
                return self._begin_attempt(now)
            case Signalled():
                heard = self._signals.take(event, now)
                return [] if heard is None else self._signalled(heard, now)
            case Tick():
                held = [action for each in self._signals.due(now) for action in self._signalled(each, now)]
                return held + self._tick(now)
            case LoggedIn():
                if self._convening is not None:
                    self._convening.logged_in(event.node)
                return []
            case Noted():
                return [Say(text=event.text, level="warning" if event.warning else "info")]
            case Broken():
                return self._broken(event.text, f"internal error: {event.text}", without=event.without)
            case Known():
                return self._go_on_from(event, now)
            case Refused():
                from distlaunch.coordinator.policy.node_setup import Refusal

                hint = f"\n  hint: {event.hint}" if event.hint else ""
                return self._refuse(Refusal(exit_code=EXIT_USAGE, text=f"error: {event.text}{hint}"))
            case Joined() | Unreachable() | Lost() | Discovered():
                return [] if self._convening is None else self._of_membership(self._convening, event, now)
            case _:
                assert_never(event)

    def _from_node(self, node: int, message: m.FromAgent | r.Surveyed | r.Reached, now: float) -> list[Action]:
        match message:
            case m.WorkerExited():
                return self._exited(node, message, now) if self._is_of(node, message.attempt) else []
            case m.Started():
                return self._started(node, message, now) if self._is_of(node, message.attempt) else []
            case m.Alive():
                return self._alive(message, now) if self._is_of(node, message.attempt) else []
            case m.Gone():
                return self._gone_from(node, message, now) if self._is_of(node, message.attempt) else []
            case m.Lingering():
                return self._lingering(node, message, now) if self._is_of(node, message.attempt) else []
            case m.Prepared():
                return self._prepared(node, message, now) if self._is_of(node, message.attempt) else []
            case m.SpawnerSignalled():
                return self.step(Signalled(signum=message.signum, node=node, spawner=True), now)
            case m.WorkerHalted():
                return [Suspend()] if self.settings.terminal else []
            case m.Stacks():
                self._watch.answered(node, message)
                return self._hung(now)
            case m.Remark():
                return self._remark(node, message.text, warning=message.warning)
            case m.PreloadEnded():
                host = {} if self._convening is None else {"host": self._convening.host(node)}
                return [Entry(type="preload", fields={**message.fields, **host})]
            case m.Fault():
                return self._faulted(node, message, now)
            case _:
                return [] if self._convening is None else self._of_gathering(self._convening, node, message, now)

    def _remark(self, node: int, text: str, *, warning: bool) -> list[Action]:
        said = text if self._convening is None else self._convening.says(node, text)
        return [] if said is None else [Say(text=said, level="warning" if warning else "info")]

    def _tick(self, now: float) -> list[Action]:
        convening = self._convening
        if convening is None or self.phase not in ("gathering", "preparing"):
            return self._tick_of_run(now)
        if self.phase == "gathering":
            return self._convened(convening, convening.tick(now), now)
        if now < convening.deadline():
            return []
        refusal = convening.late(self._run.owing)
        return self._meet(convening, now) if refusal is None else self._refuse(refusal)

    # --- nodes come and go

    def _of_membership(
        self, convening: Convening, event: Joined | Unreachable | Lost | Discovered, now: float
    ) -> list[Action]:
        match event:
            case Joined():
                return self._convened(convening, convening.joined(event, now), now)
            case Unreachable():
                return self._convened(convening, convening.unreachable(event, now), now)
            case Discovered():
                return self._convened(convening, convening.discovered(event, now), now)
            case Lost():
                return self._lost(convening, event, now)

    def _go_on_from(self, known: Known, now: float) -> list[Action]:
        """Take over from a coordinator that was lost, which is one more restart."""
        if self.phase not in ("new", "gathering") or known.attempt < self.attempt:
            return []
        self.attempt = known.attempt + 1
        self.restarts = max(self.restarts, known.restarts + 1)
        self._restart_times.extend([now] * (self.restarts - len(self._restart_times)))
        return [Entry(type="taken_over", fields={"attempt": self.attempt, "restarts": self.restarts})]

    def _of_gathering(
        self, convening: Convening, node: int, message: r.Surveyed | r.Reached, now: float
    ) -> list[Action]:
        from distlaunch.core.protocol.remote import Surveyed

        if isinstance(message, Surveyed):
            return self._convened(convening, convening.surveyed(node, message, now), now)
        run = self._run
        awaited = self.phase == "preparing" and convening.reaches and node in run.owing
        if not awaited or not self._is_of(node, message.attempt):
            return []
        convening.reached(node, message)
        run.owing.discard(node)
        return [] if run.owing else self._meet(convening, now)

    def _convened(self, convening: Convening, actions: list[Action], now: float) -> list[Action]:
        """Go on once it is known who takes part."""
        found = convening.settle(self.attempt, now) if self.phase == "gathering" else None
        if found is None:
            return actions
        if isinstance(found, tuple):
            cast, told = found
            return [*actions, *told, *self._prepare(cast, now)]
        return actions + self._refuse(found)

    def _refuse(self, refusal: Refusal) -> list[Action]:
        return [Say(text=refusal.text, level="error"), *self._end(refusal.exit_code)]

    def _meet(self, convening: Convening, now: float) -> list[Action]:
        from distlaunch.planning.master_address import Meeting

        found = convening.meet(now)
        if isinstance(found, list):
            return found + self._try_anew(now)
        return self._start(found) if isinstance(found, Meeting) else self._refuse(found)

    def _try_anew(self, now: float) -> list[Action]:
        """Gather again for an attempt that came to nothing before it had started anything."""
        self.attempt += 1
        return self._begin_attempt(now, fresh=False)

    def _lost(self, convening: Convening, event: Lost, now: float, *, code: int = EXIT_UNAVAILABLE) -> list[Action]:
        run, node = self._run, event.node
        took_part = self.phase not in ("new", "gathering") and node in run.alive
        about = (self.attempt, run.cast.ranks(node)) if took_part else None
        wanted = self.told is None and self._fault is None
        actions = convening.lost(event, about, now, wanted=wanted)
        if event.final and self.phase in ("gathering", "preparing"):
            return actions + self._refuse(convening.refuse(event.why))
        if not actions or not took_part:
            return self._convened(convening, actions, now)
        if self.phase == "preparing":
            return actions + self._try_anew(now)
        owed = node in run.owing
        kind = convening.kind_lost(node)
        loss = run.lost(node, convening.why_lost(node), now, exit_code=code, kind=kind)
        self._watch.lost(node)
        if run.has_ended:
            self._watch.stop()
            self._all_ended_at = self._all_ended_at or now
        if loss is not None and self.phase != "stopping":
            run.first_failure = now if run.first_failure is None else run.first_failure
            actions += self._stop_after_failure()
        elif loss is None and owed:
            text = f"node {convening.host(node)} left ({convening.why_lost(node)}); its workers had all ended with 0"
            actions.append(Say(text=text))
        return actions + (self._hung(now) if run.owing or not owed else self._all_gone(now))

    def _gone_from(self, node: int, message: m.Gone, now: float) -> list[Action]:
        """Take in that a node has nothing left: without an end of each worker, and unasked, it is lost to us."""
        missing = self._run.unaccounted(node) if self.phase in ("starting", "running") else []
        if not missing:
            return self._gone(node, message, now)
        why = f"it says that nothing is left, but not how {name_ranks(missing)} ended"
        convening = self._convening
        if convening is None:
            return self._faulted(node, m.Fault(text=why), now)
        return [convening.leave(node), *self._lost(convening, Lost(node=node, why=why), now)]

    def _faulted(self, node: int, message: m.Fault, now: float) -> list[Action]:
        convening, text = self._convening, message.text
        if convening is None:
            host = self._run.cast.host(node)
            say = f"internal error on {host}: {text}; all workers have been killed"
            return self._broken(text, say, without=node)
        lost = Lost(node=node, why=f"internal error: {text}")
        fields = {"text": text, "node": node, "host": convening.host(node)}
        actions: list[Action] = [Entry(type="fault", fields=fields), convening.leave(node)]
        return actions + self._lost(convening, lost, now, code=EXIT_SOFTWARE)

    # --- the turns of an attempt

    def _begin_attempt(self, now: float, *, fresh: bool = True) -> list[Action]:
        self._all_ended_at = None
        convening = self._convening
        if convening is None:
            return self._prepare(self._run.cast, now)
        self.phase = "gathering"
        return self._convened(convening, convening.begin(now, fresh=fresh), now)

    def _prepare(self, cast: Cast, now: float) -> list[Action]:
        self.phase = "preparing"
        self._run = Attempt(self.attempt, cast, began=now)
        self.progress.begin()
        self._watch.begin(self._run)
        if self._convening is not None:
            return self._convening.prepare(cast, self.attempt, now)
        settings = self.settings
        return [
            ToNode(
                node=node,
                message=m.Prepare(
                    attempt=self.attempt,
                    port=None if node else settings.master_port,
                    ports=settings.worker_ports * len(cast.ranks(node)),
                ),
            )
            for node in cast.members
        ]

    def _prepared(self, node: int, message: m.Prepared, now: float) -> list[Action]:
        run, convening = self._run, self._convening
        if self.phase != "preparing" or (convening is not None and convening.reaches):
            return []
        if message.problem is not None:
            if convening is not None and convening.can_spare(1):
                return convening.leave_out([(node, message.problem)], now) + self._try_anew(now)
            problem = message.problem if convening is None else convening.quote(node, message.problem)
            text = f"error: {problem}" + (f"\n  hint: {message.hint}" if message.hint else "")
            return [Say(text=text, level="error"), *self._end(EXIT_USAGE)]
        if message.port is not None and node == run.cast.members[0]:
            self._port = message.port
        run.ports[node] = message.ports
        warned = self._remark(node, message.warning, warning=True) if message.warning else []
        run.owing.discard(node)
        if run.owing:
            return warned
        if convening is None or len(run.cast.members) == 1:
            return warned + self._start(None)
        run.owing = set(run.cast.members[1:])
        asked = convening.reach(self._port or 0, now)
        return warned + (asked if isinstance(asked, list) else self._refuse(asked))

    def _start(self, meeting: Meeting | None) -> list[Action]:
        run = self._run
        self.phase = "starting"
        run.owing = set(run.cast.members)
        fields: dict[str, object] = {"attempt": self.attempt, "master_port": self._port}
        if meeting is not None:
            fields["master_addr"] = meeting.address
        composition = run.cast.composition
        ports = tuple(port for member in run.cast.members for port in run.ports[member])
        start = StartAttempt(
            attempt=self.attempt, port=self._port, composition=composition, meeting=meeting, ports=ports
        )
        return [Entry(type="attempt_started", fields=fields), start]

    def _conclude(self, now: float) -> list[Action]:
        run, settings = self._run, self.settings
        if self._fault is not None:
            return self._end(EXIT_SOFTWARE)
        if self.told is not None and not self._failed_before_told():
            return self._stopped(self.told)
        self._nodes_lost += len(run.losses)
        if run.went_well:
            return [*self._apart(), *self._succeeded(), *self._end(0)]
        verdict = run.judge(
            settings,
            self.progress,
            lived_s=self._watch.lived_s,
            told=self.told is not None,
            port=self._port,
        )
        replaced = verdict.by_loss and self._convening is not None and self._convening.replaces()
        told = self._told_late if self.told is None else self.told
        if replaced and told is not None:
            return self._stopped(told)
        if replaced and not run.left:
            return self._go_on_without(now)
        why = "told to stop" if self.told is not None else self._why_not_again(verdict.outcome, now)
        if why is None and run.left:
            why = "not restarted: what is left of this attempt would meet the next one"
        signum = self.told
        if why is None and self._told_late is not None:
            why, signum = "told to stop", self._told_late
        if why is not None:
            report = verdict.report(final=True, why_final=settings.dialect.spelt(why), restarts=self.restarts)
            return [report, *self._end(verdict.exit_code if signum is None else 128 + signum)]
        return self._restart(verdict, now)

    def _apart(self) -> list[Action]:
        """Return a warning if the workers of a job of some length never used MASTER_PORT."""
        run, settings = self._run, self.settings
        lived_s = max((end.uptime_s for end in run.finished), default=0.0)
        if not settings.meets_at_port or run.port_used is not False or run.cast.world_size < 2:
            return []
        if lived_s < settings.min_uptime_s:  # nothing that trains
            return []
        text = (
            f"MASTER_PORT was never used: the {counted(run.cast.world_size, 'worker')} did not communicate, so each may"
            " have trained on its own (on CPUs Lightning and Accelerate do that unless they are told otherwise)"
        )
        return [Say(text=text, level="warning")]

    def _succeeded(self) -> list[Action]:
        """Say that a job succeeded only after something had gone wrong; a smooth success is silent."""
        mishaps = [
            counted(number, noun)
            for number, noun in ((self.restarts, "restart"), (self._nodes_lost, "lost node"))
            if number
        ]
        if not mishaps:
            return []
        return [Say(text=f"the job succeeded in attempt {self.attempt}, after {' and '.join(mishaps)}")]

    def _stopped(self, signum: int) -> list[Action]:
        run = self._run
        killed = sum(end.returncode == -signal.SIGKILL for end in run.failures)
        left = f", {killed} of them killed" if killed else ", none had to be killed"
        if (leftovers := run.killed_text()) is not None:
            left = f"{left if killed else ', none of them killed'}; {leftovers}"
        if run.losses:
            left += f"; {counted(len(run.losses), 'node')} had been lost"
        said = f"{counted(run.up, 'worker')} ended{left}" if run.up else "no worker had started"
        diagnosis = restarts.diagnose_stop(
            [*run.failures, *run.finished], self.settings, world_size=run.cast.world_size
        )
        if diagnosis is None:
            return [Say(text=f"stopped: {said}"), *self._end(128 + signum)]
        from distlaunch.diagnosis.report import failed_in_stop

        why = failed_in_stop(diagnosis, world_size=run.cast.world_size, many_hosts=run.many_hosts)
        failed = Failed(
            diagnosis=diagnosis, attempt=self.attempt, final=True, restarts=self.restarts, while_stopping=True
        )
        return [failed, Say(text=f"stopped: {said}; {why}"), *self._end(128 + signum)]

    def _restart(self, verdict: Verdict, now: float) -> list[Action]:
        report = verdict.report(final=False, restarts=self.restarts)
        self._retried_s = verdict.outcome.enough_s if verdict.outcome.is_same(self._previous) else None
        self._previous = verdict.outcome
        self._restart_times.append(now)
        self.restarts += 1
        self.attempt += 1
        fields = {"attempt": self.attempt, "of": self.settings.max_restarts}
        killed = self._run.killed_text(restarts.after_grace(self.settings))
        warned = [] if killed is None else [Say(text=killed, level="warning")]
        return [*warned, report, Entry(type="restarting", fields=fields), *self._begin_attempt(now)]

    def _go_on_without(self, now: float) -> list[Action]:
        """Go on with the nodes that are left, and with those that have come: no restart, as nobody failed."""
        losses = self._run.losses
        self.attempt += 1
        if self._convening is not None:
            self._convening.note(losses)
        fields = {"attempt": self.attempt, "lost": len(losses)}
        return [Entry(type="reforming", fields=fields), *self._begin_attempt(now)]

    def _failed_before_told(self) -> bool:
        first = self._run.first_failure
        return first is not None and first <= self._told_at

    def _why_not_again(self, outcome: restarts.Outcome, now: float) -> str | None:
        window = self.settings.restart_window_s
        while window is not None and self._restart_times and now - self._restart_times[0] > window:
            self._restart_times.popleft()
        return restarts.why_final(
            outcome,
            self._previous,
            used=len(self._restart_times),
            allowed=self.settings.max_restarts,
            window_s=window,
            retried_s=self._retried_s if outcome.is_same(self._previous) else None,
            cut_off=self._convening is not None and self._convening.is_cut_off,
        )
