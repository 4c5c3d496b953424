"""Layer job: whether the workers of an attempt have fallen silent, and who has left the others alone. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlaunch.core.model.ids import name_ranks
from distlaunch.core.model.text import counted
from distlaunch.core.wire import messages as m
from distlaunch.job.actions import Action, Say, ToNode
from distlaunch.job.attempt import Attempt
from distlaunch.job.progress import Progress
from distlaunch.job.settings import PolicySettings

if TYPE_CHECKING:
    from distlaunch.job.diagnose.hang import HangDiagnosis

SLACK_S = 0.3
ANSWER_S = 3.0
"""How long the nodes may take to tell where their workers stand."""
ALONE_S = 60.0
"""After a worker has ended with 0 the others may go on for so long before that is mentioned, once in a job."""


class Watch:
    """Watches one attempt at a time, from when all its workers have started until its end is in sight."""

    def __init__(self, settings: PolicySettings, run: Attempt) -> None:
        timeout_s = settings.hang_timeout_s
        self._timeout_s = None if timeout_s is None else timeout_s + SLACK_S
        self._settings = settings
        self._run = run
        self._mentioned = False
        self.ended: list[int] = []
        """Ranks that have ended with 0."""
        self.silent_s = 0.0
        """How long there had been no sign of life when the nodes were asked."""
        self.lived_s = 0.0
        """For how long there had been some before that."""
        self.stacks: list[m.Stack] = []
        self._reporting: set[int] = set()
        self._wrote: float | None = None
        """When there was output last, since the last sign of life, of workers whose heartbeats count instead."""
        self._serial = 0
        self._since = 0.0
        self._last: float | None = None  # None: not watching
        self._owing: set[int] = set()  # nodes that were asked for stacks
        self._until: float | None = None
        self._alone_at: float | None = None
        self._over = False

    def begin(self, run: Attempt) -> None:
        """Forget the attempt before."""
        self._run = run
        self.ended, self.stacks = [], []
        self._reporting = set()
        self.stop()
        self._over = False

    def all_started(self, now: float) -> None:
        """Watch from now on."""
        self._since = now
        if self._timeout_s is not None:
            self._last = now

    def stop(self) -> None:
        """Watch no more: the attempt ends, for whatever reason."""
        self._last = self._until = self._alone_at = None
        self._owing = set()
        self._over = True

    @property
    def found(self) -> bool:
        """Tell whether all workers are silent, and the nodes have told where they stand or will not."""
        return self._until is not None and not self._owing

    def deadline(self) -> float | None:
        """Give when ``tick`` is due."""
        times = [self._until, self._alone_at]
        if self._last is not None and self._timeout_s is not None and self._until is None:
            times.append(self._last + self._timeout_s)
        return min((time for time in times if time is not None), default=None)

    def worker_ended(self, rank: int, now: float) -> list[Action]:
        """Take in that a worker has ended with 0: a sign of life, and the others may come to wait for it."""
        self.ended.append(rank)
        if not self._over and not self._mentioned and self._alone_at is None:
            self._alone_at = now + ALONE_S
        return self._sign(now)

    def heard(self, message: m.Alive, now: float) -> list[Action]:
        """Take in what has moved: heartbeats, and of workers that never sent one their output."""
        self._reporting.update(heartbeat.rank for heartbeat in message.heartbeats)
        if message.heartbeats or message.held or any(rank not in self._reporting for rank in message.wrote):
            return self._sign(now)
        if message.wrote:
            self._wrote = now
        return []

    def _sign(self, now: float) -> list[Action]:
        self._wrote = None
        if self._last is None:
            return []
        self._last = now
        if self._until is None:
            return []
        self._until, self._owing, self.stacks = None, set(), []
        text = (
            "a sign of life came while the workers' stacks were taken: the job goes on"
            " (rarely, the signal that asks for them is what ended a wait)"
        )
        return [Say(text=text, level="warning")]

    def answered(self, node: int, message: m.Stacks) -> None:
        """Take in where the workers of a node stand."""
        if (message.attempt, message.serial) == (self._run.number, self._serial) and node in self._owing:
            self._owing.discard(node)
            self.stacks += message.stacks

    def lost(self, node: int) -> None:
        """Take in that a node is gone: it tells nothing any more."""
        self._owing.discard(node)

    def tick(self, now: float) -> list[Action]:
        """Do what has come due."""
        actions: list[Action] = []
        if self._alone_at is not None and now >= self._alone_at:
            self._alone_at, self._mentioned = None, True
            running = self._run.up - self._run.ended
            text = (
                f"{name_ranks(self.ended)} ended with 0 {ALONE_S:g} s ago; {counted(running, 'worker')} still running"
            )
            actions.append(Say(text=text))
        if self._until is not None:
            if now >= self._until:
                self._owing.clear()
        elif self._last is not None and self._timeout_s is not None and now >= (due := self._last + self._timeout_s):
            if now > due + m.LATE_S:
                self._last = now - self._timeout_s + m.LATE_S
                return actions
            actions += self._ask(self._last, now)
        return actions

    def _ask(self, last: float, now: float) -> list[Action]:
        nodes = sorted(self._run.owing)  # the others have no workers left
        self.silent_s, self.lived_s = now - last, last - self._since
        self._owing, self._until = set(nodes), now + ANSWER_S
        self._serial += 1
        question = m.CollectStacks(attempt=self._run.number, serial=self._serial)
        return [ToNode(node=node, message=question) for node in nodes]

    def diagnose(self, progress: Progress) -> HangDiagnosis:
        """Find who is behind, now that all have told where they stand."""
        from distlaunch.job.diagnose.hang import diagnose_hang

        settings, cast = self._settings, self._run.cast
        return diagnose_hang(
            self.stacks,
            world_size=cast.world_size,
            silent_s=round(self.silent_s, 1),
            output_came=self._wrote is not None and self._wrote > self._since + self.lived_s + self.silent_s / 2,
            heartbeats=progress.latest,
            ended=self.ended,
            hosts=cast.host_of,
            script_dir=settings.script_dir,
            spelt=settings.dialect.spelt,
        )
