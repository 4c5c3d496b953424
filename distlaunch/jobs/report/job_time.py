"""Split the time of a job into spans, each with its use (``TimeUse``). No I/O.

Times are seconds since 1970. Of each attempt, the steps of one rank are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

from distlaunch.core.model.record import Record

Point = tuple[float, float]
"""A time, and the step that a rank reported then."""


class TimeUse(Enum):
    """What a part of a job's time was used for. The values are those of ``--format json``."""

    STEPS = "steps"
    """Steps that no later attempt has done again."""
    LOST = "lost"
    """Steps after the checkpoint from which the job continued, or would have to continue."""
    START = "start"
    """From the start of the job to the first report of a step."""
    RECOVERY = "recovery"
    """From the last report of a failed attempt to the first one of the next."""
    WAITING = "waiting"
    """Until it was known which nodes take part."""
    END = "end"
    """After the last report of a step."""
    UNKNOWN = "unknown"
    """Workers ran and reported no steps."""


class Span(Record):
    """A part of a job's time."""

    use: TimeUse
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """The length."""
        return self.end - self.begin


class AttemptTime(Record):
    """The times of one attempt."""

    number: int
    begin: float
    """When the workers were started."""
    end: float
    """When the attempt had failed or ended."""
    points: tuple[Point, ...]
    """The reported steps of one rank, in order of time; empty if there are none."""


class SavedStep(Record):
    """A checkpoint."""

    time: float
    step: float
    """How many steps are done in it."""


class TimeDivision(Record):
    """How the time of a job is divided."""

    spans: tuple[Span, ...]
    """Without gaps, in order of time."""
    lost_steps: float | None
    """None if it is not known."""

    def total(self, use: TimeUse) -> float:
        """Return the seconds of a use."""
        return sum(span.seconds for span in self.spans if span.use is use)

    @property
    def goodput(self) -> float | None:
        """The share of the time that went to steps that counted; None if no steps are
        known."""
        whole = sum(span.seconds for span in self.spans)
        if whole <= 0 or not any(span.use in (TimeUse.STEPS, TimeUse.LOST) for span in self.spans):
            return None
        return self.total(TimeUse.STEPS) / whole


def divide_time(
    *,
    begin: float,
    end: float,
    attempts: Sequence[AttemptTime],
    checkpoints: Sequence[SavedStep],
    waits: Sequence[tuple[float, float]],
    needs_checkpoint: bool,
) -> TimeDivision:
    """Divide the time from ``begin`` to ``end``.

    ``waits``: when the job waited for nodes. ``needs_checkpoint``: the job has ended and was not
    done, so that steps after the newest checkpoint are lost.
    """
    divided = _Division(begin, has_steps=any(attempt.points for attempt in attempts))
    lost_steps: float | None = 0.0
    for number, attempt in enumerate(attempts):
        if not attempt.points:
            divided.add_silent(attempt)
            continue
        following = next((each for each in attempts[number + 1 :] if each.points), None)
        limit = _first_lost_step(following, checkpoints, needs_checkpoint=needs_checkpoint)
        counted = _time_of_limit(attempt.points, limit)
        if counted is None:
            counted, lost_steps = attempt.points[-1][0], None
        elif lost_steps is not None and limit is not None:
            lost_steps += max(0.0, attempt.points[-1][1] + 1 - max(limit, attempt.points[0][1]))
        divided.add_steps(attempt, counted)
    if needs_checkpoint and not checkpoints:
        lost_steps = None
    divided.add(TimeUse.END if divided.has_steps else TimeUse.UNKNOWN, end)
    spans = _with_waits(divided.spans, waits)
    return TimeDivision(spans=tuple(spans), lost_steps=lost_steps if divided.has_steps else None)


class _Division:
    """Spans that follow each other."""

    def __init__(self, begin: float, *, has_steps: bool) -> None:
        self.spans: list[Span] = []
        self.has_steps = has_steps
        self._at = begin
        self._before = TimeUse.START
        """The use of time before the steps of an attempt."""

    def add(self, use: TimeUse, end: float) -> None:
        if end > self._at:
            if self.spans and self.spans[-1].use is use:
                self.spans[-1] = Span(use=use, begin=self.spans[-1].begin, end=end)
            else:
                self.spans.append(Span(use=use, begin=self._at, end=end))
            self._at = end

    def add_silent(self, attempt: AttemptTime) -> None:
        self.add(self._before, attempt.begin)
        self.add(self._before if self.has_steps else TimeUse.UNKNOWN, attempt.end)
        self._before = TimeUse.RECOVERY

    def add_steps(self, attempt: AttemptTime, counted: float) -> None:
        self.add(self._before, attempt.points[0][0])
        self.add(TimeUse.STEPS, counted)
        self.add(TimeUse.LOST, attempt.points[-1][0])
        self._before = TimeUse.RECOVERY


def _first_lost_step(
    following: AttemptTime | None, checkpoints: Sequence[SavedStep], *, needs_checkpoint: bool
) -> float | None:
    """Return the first step of an attempt that did not count; None if all counted.

    ``following``: the next attempt that has reported steps.
    """
    if following is None:
        return checkpoints[-1].step if needs_checkpoint and checkpoints else None
    time, first = following.points[0]
    saved = [each.step for each in checkpoints if each.time <= time and each.step <= first]
    return max(saved, default=first)


def _time_of_limit(points: Sequence[Point], limit: float | None) -> float | None:
    """Return when the last step before ``limit`` was done, interpolated between the reports.

    With None, return the time of the last report. Return None if the steps go back, so that a step
    has no single time.
    """
    if limit is None:
        return points[-1][0]
    if any(later < earlier for (_, earlier), (_, later) in pairwise(points)):
        return None
    last = limit - 1
    if points[0][1] >= last:
        return points[0][0]
    for (before, low), (after, high) in pairwise(points):
        if high >= last:
            return before + (after - before) * (last - low) / (high - low)
    return points[-1][0]


def _with_waits(spans: Iterable[Span], waits: Sequence[tuple[float, float]]) -> list[Span]:
    """Return the spans with the parts of start and recovery as waits that lie in ``waits``."""
    found: list[Span] = []
    for span in spans:
        if span.use not in (TimeUse.START, TimeUse.RECOVERY, TimeUse.UNKNOWN):
            found.append(span)
            continue
        at = span.begin
        for begin, end in waits:
            low, high = max(begin, at), min(end, span.end)
            if low < high:
                if at < low:
                    found.append(Span(use=span.use, begin=at, end=low))
                found.append(Span(use=TimeUse.WAITING, begin=low, end=high))
                at = high
        if at < span.end:
            found.append(Span(use=span.use, begin=at, end=span.end))
    return found


_NODE_EVENTS = {"composed", "node_joined", "node_unreachable"}


def find_waits(events: Sequence[Mapping[str, Any]], end: float) -> list[tuple[float, float]]:
    """Return when a job of several nodes waited until it was known which of them take part.

    A wait begins at the start of the job, and at the end of an attempt after the time of
    --restart-delay.
    """
    if not any(event["type"] in _NODE_EVENTS for event in events):
        return []
    found = []
    since: float | None = None
    for event in events:
        time = event["time"]
        match event["type"]:
            case "job_started" | "reforming":
                since = time
            case "restarting":
                delay = event.get("delay_s")
                since = time + (delay if isinstance(delay, (int, float)) else 0.0)
            case "composed" | "attempt_started" if since is not None:
                if time > since:
                    found.append((since, time))
                since = None
            case _:
                pass
    if since is not None and since < end:
        found.append((since, end))
    return found
