"""Compute the progress of a job from its workers' heartbeats. No I/O.

The work per message grows only with the number of ranks in it. Values that need all ranks (the
range of their steps) are computed at most twice a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from distlaunch.coordinator.policy.events_and_actions import Action, RecordEvent
from distlaunch.core.model.record import Record
from distlaunch.core.protocol import agent_messages as m

STEP = "step"
RECORD_S = 10.0
"""Shortest time between two ``progress`` events of an attempt. The last event may follow sooner."""
_SUM_S = 0.5
_RATE_S = 10.0
"""The number of steps per second is an average over this time."""
_LEAST_RATE_S = 0.9
STEPS = 20
"""The step time of a rank is a mean over this many steps, or over more if they take less than
``_LEAST_TIMED_S``."""
_LEAST_TIMED_S = 10.0
"""The delay of a report, up to 1 s, is small against this."""
_REPORTS_S = 3.0
"""Reports of progress may take this long to arrive."""


class Summary(Record):
    """The progress of an attempt: the fields of a ``progress`` event."""

    ranks: int
    """Workers that have sent a heartbeat in this attempt."""
    step_min: float | None
    """The lowest last step of all ranks, if any reports steps."""
    step_max: float | None
    steps_per_s: float | None
    """The rate at which the lowest step has grown over the last 10 s, once known."""
    rank: int
    """The lowest rank that has sent a heartbeat."""
    values: Mapping[str, float]
    """The newest numbers of rank ``rank``."""


class _Steps:
    """The rate of a rank's last ``STEPS`` steps, or of the steps of the last 10 s if they are more."""

    def __init__(self, step: float, now: float) -> None:
        self._samples: deque[tuple[float, float]] = deque([(step, now)])

    def add(self, step: float, now: float) -> None:
        """Record the step of a heartbeat."""
        last = self._samples[-1][0]
        if step < last:  # a new epoch
            self._samples.clear()
        if step != last:
            self._samples.append((step, now))
        while len(self._samples) > 2:
            second_step, second_at = self._samples[1]
            if second_step > step - STEPS or second_at > now - _LEAST_TIMED_S:
                break
            self._samples.popleft()

    @property
    def timed_steps(self) -> float:
        """Return over how many steps the time of a step is measured."""
        return self._samples[-1][0] - self._samples[0][0]

    def step_s(self, now: float) -> float | None:
        """Return the seconds per step, if known. A step that is not ended counts once it takes
        longer than the mean."""
        (first, began), (last, ended) = self._samples[0], self._samples[-1]
        if last <= first:
            return None
        mean_s = (ended - began) / (last - first)
        if now - ended > mean_s + _REPORTS_S:
            return max(mean_s, (now - began) / (last - first + 1))
        return mean_s


class Progress:
    """The heartbeats of a job, attempt by attempt."""

    def __init__(self) -> None:
        self.latest: dict[int, Mapping[str, float]] = {}
        """The newest heartbeat of each rank, with the previous step if it has none."""
        self.summary: Summary | None = None
        self.heartbeat_at = 0.0
        """When the newest heartbeat arrived."""
        self.heartbeat_at_of: dict[int, float] = {}
        """When the newest heartbeat of each rank arrived."""
        self._steps: dict[int, _Steps] = {}
        self._best: float | None = None
        self._best_before: float | None = None
        self._samples: deque[tuple[float, float]] = deque()
        self._summed = self._recorded = float("-inf")
        self._unrecorded = False

    def begin(self) -> None:
        """Prepare for a new attempt. Only the highest step of earlier ones is kept."""
        if self._best is not None and (self._best_before is None or self._best > self._best_before):
            self._best_before = self._best
        self._best = None
        self.latest, self.heartbeat_at_of, self._steps = {}, {}, {}
        self.summary = None
        self._samples.clear()
        self._summed = self._recorded = float("-inf")
        self._unrecorded = False

    def has_advanced(self) -> bool | None:
        """Return whether this attempt has reached a higher step than all earlier ones; None if no
        worker ever reported a step."""
        if self._best is None:
            return None if self._best_before is None else False
        return self._best_before is None or self._best > self._best_before

    def step_s(self, rank: int, now: float) -> float | None:
        """Return a rank's seconds per step over its last steps, if known."""
        steps = self._steps.get(rank)
        return None if steps is None else steps.step_s(now)

    def timed_steps(self, rank: int) -> float:
        """Return over how many steps ``step_s`` is measured."""
        steps = self._steps.get(rank)
        return 0.0 if steps is None else steps.timed_steps

    def on_heartbeats(
        self, heartbeats: Iterable[m.Heartbeat], *, attempt: int, now: float
    ) -> list[Action]:
        """Record heartbeats. Return the ``progress`` event if ``RECORD_S`` have passed since the
        last one."""
        for heartbeat in heartbeats:
            rank, values = heartbeat.rank, heartbeat.values
            step = values.get(STEP)
            if step is not None:
                self._best = step if self._best is None else max(step, self._best)
                if rank in self._steps:
                    self._steps[rank].add(step, now)
                else:
                    self._steps[rank] = _Steps(step, now)
            elif (before := self.latest.get(rank)) is not None and STEP in before:
                values = {STEP: before[STEP], **values}
            self.latest[rank] = values
            self.heartbeat_at = self.heartbeat_at_of[rank] = now
            self._unrecorded = True
        if not self._unrecorded:
            return []
        if now >= self._recorded + RECORD_S:
            return self._record(attempt, now)
        if now >= self._summed + _SUM_S:
            self._sum_up(now)
        return []

    def end(self, *, attempt: int, now: float) -> list[Action]:
        """Return the last event of an attempt, if heartbeats have arrived since the previous
        one."""
        return self._record(attempt, now) if self._unrecorded else []

    def _record(self, attempt: int, now: float) -> list[Action]:
        summary = self._sum_up(now)
        self._recorded, self._unrecorded = now, False
        fields = {
            "attempt": attempt,
            "ranks": summary.ranks,
            "step_min": summary.step_min,
            "step_max": summary.step_max,
            "steps_per_s": None if summary.steps_per_s is None else round(summary.steps_per_s, 3),
            "rank": summary.rank,
            "values": dict(summary.values),
        }
        return [RecordEvent(type="progress", fields=fields)]

    def _sum_up(self, now: float) -> Summary:
        self._summed = now
        steps = [values[STEP] for values in self.latest.values() if STEP in values]
        lowest = min(steps, default=None)
        if lowest is not None:
            self._add_sample(lowest, now)
        rank = min(self.latest)
        self.summary = Summary(
            ranks=len(self.latest),
            step_min=lowest,
            step_max=max(steps, default=None),
            steps_per_s=self._step_rate(),
            rank=rank,
            values=self.latest[rank],
        )
        return self.summary

    def _add_sample(self, lowest: float, now: float) -> None:
        if (
            self._samples and lowest < self._samples[-1][1]
        ):  # a new epoch, or a worker that has only begun to report
            self._samples.clear()
        self._samples.append((now, lowest))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _RATE_S:
            self._samples.popleft()

    def _step_rate(self) -> float | None:
        if len(self._samples) < 2:
            return None
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return (last - first) / (ended - began) if ended - began >= _LEAST_RATE_S else None
