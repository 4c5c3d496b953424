"""Decide whether a job gets another attempt, and if not, why (the restart rule). No I/O.

The job policy uses it after a failed attempt, a joined launcher after it has lost the coordinator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record, assert_never, replace
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.diagnosis.model import Diagnosis, RepeatKind


class FinalReason(Enum):
    """Why no further attempt follows."""

    NOT_WANTED = auto()
    """--max-restarts is 0."""
    WOULD_REPEAT = auto()
    """The failure would certainly repeat."""
    USED_UP = auto()
    NO_PROGRESS = auto()
    """The same failure happened twice without progress between."""
    NO_NODE = auto()
    """No node can be reached any longer."""
    PROCESSES_LEFT = auto()
    """Processes of the attempt are left that KILL did not end."""
    HUNG = auto()
    """The attempt hung, and --hang-action is ``stop``."""
    STOPPED = auto()
    """The job was asked to stop."""
    COORDINATOR_LOST = auto()
    """A joined launcher has lost the coordinator, and all restarts are used up."""


class Restart(Record):
    """Another attempt follows after ``delay_s`` seconds."""

    delay_s: float = 0.0


class Final(Record):
    """No further attempt follows. The other fields are only for the text."""

    reason: FinalReason
    allowed: int = 0
    """For ``USED_UP``, like the next two fields: the number of allowed restarts."""
    window_s: float | None = None
    """The number of seconds within which restarts count."""
    retried_s: float | None = None
    """How long the previous attempt ran, if it had the same failure and this time counted as
    progress."""
    repeats: RepeatKind | None = None
    """For ``WOULD_REPEAT``."""
    by_steps: bool = False
    """For ``NO_PROGRESS``: the progress is known from heartbeats."""


RestartDecision = Restart | Final
_MOST_DOUBLED = 60
"""A delay of 1 ns that is doubled more often exceeds any delay that can be requested."""


class Outcome(Record):
    """The facts about a failed attempt for the restart rule."""

    signature: tuple[str, str] | None
    repeats: RepeatKind | None
    progressed: bool
    """Whether the attempt reached a higher step than all earlier ones; without steps, whether it
    ran for --min-uptime."""
    by_steps: bool = False
    """Workers report steps."""
    enough_s: float | None = None
    """How long the attempt ran, if this counts as progress."""

    @staticmethod
    def of(
        diagnosis: Diagnosis,
        failures: Sequence[WorkerExit],
        *,
        min_uptime_s: float,
        has_advanced: bool | None,
    ) -> Outcome:
        """Return the outcome of an attempt in which workers failed. ``has_advanced``: progress by
        heartbeats, if there are any."""
        first = diagnosis.cause.ranks[0]
        uptimes = {end.rank: end.uptime_s for end in failures}
        uptime_s = uptimes.get(first, failures[0].uptime_s if failures else 0.0)
        outcome = Outcome.after(
            diagnosis.signature, uptime_s, min_uptime_s=min_uptime_s, has_advanced=has_advanced
        )
        return replace(outcome, repeats=diagnosis.repeats)

    @staticmethod
    def after(
        signature: tuple[str, str] | None,
        lived_s: float,
        *,
        min_uptime_s: float,
        has_advanced: bool | None,
    ) -> Outcome:
        """Return the outcome of an attempt that ran for ``lived_s`` before it failed, hung or lost
        a node."""
        long_enough = lived_s >= min_uptime_s
        return Outcome(
            signature=signature,
            repeats=None,
            progressed=long_enough if has_advanced is None else has_advanced,
            by_steps=has_advanced is not None,
            enough_s=lived_s if has_advanced is None and long_enough and min_uptime_s > 0 else None,
        )

    @property
    def ends_row(self) -> bool:
        """Whether the count of successive restarts begins again: the attempt made progress.

        With --min-uptime 0, only heartbeats show progress.
        """
        return self.progressed and (self.by_steps or self.enough_s is not None)

    def is_same(self, other: Outcome | None) -> bool:
        """Return whether both attempts failed in the same way at the same line of code."""
        return (
            other is not None and self.signature is not None and self.signature == other.signature
        )


class RestartRule:
    """Decides on restarts and counts them. Times are seconds on the job's clock."""

    def __init__(
        self,
        *,
        allowed: int,
        window_s: float | None = None,
        delay_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """``delay_s`` is the first and the longest delay before a restart."""
        self._allowed = allowed
        self._window_s = window_s
        self._first_delay_s, self._longest_delay_s = delay_s
        self._in_row = 0
        """Restarts since the last attempt that made progress."""
        self.count = 0
        """The number of restarts up to now."""
        self._times: deque[float] = deque()
        """The times of the restarts that count against ``allowed``."""
        self._previous: Outcome | None = None
        self._retried_s: float | None = None
        """Uptime that counted as progress when the failure of ``_previous`` was a repetition."""

    def after_failure(
        self, outcome: Outcome, now: float, *, cut_off: bool = False, processes_left: bool = False
    ) -> RestartDecision:
        """Return the decision after a failed attempt.

        ``cut_off``: no node can be reached any longer. ``processes_left``: processes of the attempt
        still run.
        """
        while self._window_s is not None and self._times and now - self._times[0] > self._window_s:
            self._times.popleft()
        if self._allowed == 0:
            return Final(reason=FinalReason.NOT_WANTED)
        if outcome.repeats is not None and not outcome.progressed:
            return Final(reason=FinalReason.WOULD_REPEAT, repeats=outcome.repeats)
        is_same = outcome.is_same(self._previous)
        if len(self._times) >= self._allowed:
            return Final(
                reason=FinalReason.USED_UP,
                allowed=self._allowed,
                window_s=self._window_s,
                retried_s=self._retried_s if is_same else None,
            )
        if is_same and not outcome.progressed:
            return Final(reason=FinalReason.NO_PROGRESS, by_steps=outcome.by_steps)
        if cut_off:
            return Final(reason=FinalReason.NO_NODE)
        if processes_left:
            return Final(reason=FinalReason.PROCESSES_LEFT)
        return Restart(delay_s=self._delay_s(outcome))

    def _delay_s(self, outcome: Outcome) -> float:
        """Return the delay before the next restart, which doubles with each successive one."""
        in_row = 0 if outcome.ends_row else min(self._in_row, _MOST_DOUBLED)
        return min(self._first_delay_s * 2.0**in_row, self._longest_delay_s)

    def after_coordinator_loss(self, *, has_begun: bool, flexible: bool) -> RestartDecision:
        """Return whether a joined launcher connects again after it has lost the coordinator.

        ``has_begun``: it has taken part in an attempt. Otherwise connecting again is no restart.
        ``flexible``: the job continues without a node and accepts it again later.
        """
        if not has_begun or flexible or self.count < self._allowed:
            return Restart()
        return Final(reason=FinalReason.COORDINATOR_LOST)

    def on_restart(self, outcome: Outcome, now: float) -> None:
        """Count a restart after an attempt with this outcome, which the next failure is compared
        with."""
        self._retried_s = outcome.enough_s if outcome.is_same(self._previous) else None
        self._previous = outcome
        self._in_row = 1 if outcome.ends_row else self._in_row + 1
        self._times.append(now)
        self.count += 1

    def on_takeover(self, known: int, now: float) -> None:
        """Count a restart for a coordinator that was lost after ``known`` restarts."""
        self.count = max(self.count, known + 1)
        self._times.extend([now] * (self.count - len(self._times)))


def text_of(decision: Final) -> str:
    """Return why no further attempt follows; empty if no restarts were requested."""
    match decision.reason:
        case FinalReason.NOT_WANTED:
            return ""
        case FinalReason.WOULD_REPEAT:
            article = "an" if (decision.repeats or "")[:1] in tuple("aeio") else "a"
            return f"not restarted: {article} {decision.repeats} would repeat"
        case FinalReason.USED_UP:
            within = f" within {decision.window_s:g} s" if decision.window_s is not None else ""
            used_up = (
                f"all {decision.allowed} restarts are"
                if decision.allowed > 1
                else "the one restart is"
            )
            hint = (
                ""
                if decision.retried_s is None
                else "\n  hint: the same failure was tried again: without heartbeats"
                " (`distlaunch help progress`),\n"
                f"    {decision.retried_s:.1f} s of uptime counted as progress; use heartbeats, or"
                f" a longer {Opt.MIN_UPTIME}"
            )
            return f"{used_up} used up{within}{hint}"
        case FinalReason.NO_PROGRESS:
            hint = (
                "progress is a higher step (heartbeat) than in any attempt before"
                if decision.by_steps
                else "without heartbeats (`distlaunch help progress`) only an attempt of"
                f" {Opt.MIN_UPTIME} counts as\n"
                f"    progress; {Opt.MIN_UPTIME(0)} has every failure tried again"
            )
            return f"not restarted: the same failure twice without progress\n  hint: {hint}"
        case FinalReason.NO_NODE:
            return "not restarted: no node can be reached any more"
        case FinalReason.PROCESSES_LEFT:
            return "not restarted: what is left of this attempt would meet the next one"
        case FinalReason.HUNG:
            return f"not restarted: with {Opt.HANG_ACTION('restart')}, a hang is restarted"
        case FinalReason.STOPPED:
            return "told to stop"
        case FinalReason.COORDINATOR_LOST:
            return "the job has failed: there is no restart left"
        case _:
            assert_never(decision.reason)
