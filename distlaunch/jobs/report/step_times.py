"""Compute curves of step times and losses, and the ranks that were slow. No I/O.

A rank reports about once a second, so a step time is the time between two reports, divided by the
steps between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from distlaunch.core.model.record import Record
from distlaunch.diagnosis.stragglers import LEAST_STEPS, StepTime, find_stragglers
from distlaunch.jobs.reported_steps import RankSeries, Sample

POINTS = 120
"""How many points a curve has at most."""
_LEAST_S = 2.0
"""Shortest time over which a step time is measured: reports come with a delay of up to 1 s."""
_LOW = 0.1


class CurvePoint(Record):
    """The values of all ranks at one place of a curve."""

    x: float
    low: float
    middle: float
    high: float


class Curve(Record):
    """Values of one attempt."""

    attempt: int
    points: tuple[CurvePoint, ...]


class SlowRank(Record):
    """A rank whose steps took longer than the steps of the others."""

    attempt: int
    rank: int
    step_s: float
    median_s: float
    """The median of all ranks of the attempt."""
    steps: float
    """Over how many steps this was measured."""


def step_time_curves(series: RankSeries, begin: float, end: float) -> list[Curve]:
    """Return the step times over the time of the job, in seconds: the median of the ranks, and the
    tenth and ninetieth percentile."""
    width = max((end - begin) / POINTS, _LEAST_S)
    values: dict[tuple[int, int], list[float]] = {}
    for (attempt, _), samples in series.items():
        for place, step_s in _step_times(samples, begin, width):
            values.setdefault((attempt, place), []).append(step_s)
    return _build_curves(
        (attempt, min(begin + (place + 0.5) * width, end), found)
        for (attempt, place), found in sorted(values.items())
    )


def _step_times(
    samples: Sequence[Sample], begin: float, width: float
) -> Iterable[tuple[int, float]]:
    """Yield the mean step time of a rank for each place of a curve."""
    start: tuple[float, float] | None = None
    last: tuple[float, float] | None = None
    place = -1
    for time, step, _ in samples:
        here = int((time - begin) / width)
        if here != place:
            if start is not None and last is not None and last[1] > start[1]:
                yield place, (last[0] - start[0]) / (last[1] - start[1])
            start, place = last, here
        if last is not None and step < last[1]:
            start = None  # a new epoch
        last = (time, step)
        if start is None:
            start = last
    if start is not None and last is not None and last[1] > start[1]:
        yield place, (last[0] - start[0]) / (last[1] - start[1])


def loss_curves(series: RankSeries) -> list[Curve]:
    """Return the losses over the steps: the mean of the ranks, the lowest and the highest."""
    steps = [step for samples in series.values() for _, step, loss in samples if loss is not None]
    if not steps:
        return []
    first = min(steps)
    width = max((max(steps) - first) / POINTS, 1.0)
    newest: dict[tuple[int, int], dict[int, float]] = {}
    at: dict[tuple[int, int], float] = {}
    for (attempt, rank), samples in series.items():
        for _, step, loss in samples:
            if loss is not None:
                key = attempt, int((step - first) / width)
                newest.setdefault(key, {})[rank] = loss
                at[key] = max(step, at.get(key, step))
    curves: dict[int, list[CurvePoint]] = {}
    for key, found in sorted(newest.items()):
        losses = found.values()
        point = CurvePoint(
            x=at[key], low=min(losses), middle=sum(losses) / len(losses), high=max(losses)
        )
        curves.setdefault(key[0], []).append(point)
    return [Curve(attempt=attempt, points=tuple(found)) for attempt, found in curves.items()]


def _build_curves(values: Iterable[tuple[int, float, list[float]]]) -> list[Curve]:
    points: dict[int, list[CurvePoint]] = {}
    for attempt, x, found in values:
        found.sort()
        points.setdefault(attempt, []).append(
            CurvePoint(
                x=x,
                low=found[int(_LOW * (len(found) - 1))],
                middle=median(found),
                high=found[-1 - int(_LOW * (len(found) - 1))],
            )
        )
    return [Curve(attempt=attempt, points=tuple(found)) for attempt, found in points.items()]


def mean_step_times(series: RankSeries, attempt: int) -> dict[int, StepTime]:
    """Return for each rank of an attempt its mean step time in seconds, and over how many steps.

    Ranks with fewer than 20 steps are left out.
    """
    found = {}
    for (number, rank), samples in series.items():
        if number != attempt or len(samples) < 2:
            continue
        seconds = steps = 0.0
        for (before, low, _), (after, high, _) in pairwise(samples):
            if high >= low:
                seconds += after - before
                steps += high - low
        if steps >= LEAST_STEPS:
            found[rank] = (seconds / steps, steps)
    return found


def slow_ranks(series: RankSeries, attempt: int) -> list[SlowRank]:
    """Return the stragglers of an attempt by their mean step times, the slowest first."""
    times = mean_step_times(series, attempt)
    slow = [
        SlowRank(
            attempt=attempt,
            rank=rank,
            step_s=each.step_s,
            median_s=each.median_s,
            steps=times[rank][1],
        )
        for rank, each in find_stragglers(times).items()
    ]
    return sorted(slow, key=lambda each: -each.step_s)
