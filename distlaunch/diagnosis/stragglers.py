"""Find the ranks whose steps take longer than the steps of the other ranks. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from statistics import median, median_low

from distlaunch.core.model.record import Record

DEVIATIONS = 3.0
"""A rank is a straggler if its step time is above the median by more than this many median
deviations."""
LEAST_RATIO = 1.2
"""And above the median times this. Ranks that wait for each other have equal step times. Their median
deviation is nearly 0, and the measured times differ by the delay of reports."""
LEAST_STEPS = 20
"""A step time that was measured over fewer steps is not judged."""
LEAST_DELAY_S = 2.0
"""A straggler has fallen behind the median by more than this in the measured steps. Reports come with
a delay of up to 1 s."""
LEAST_RANKS = 3
"""Of two ranks it is not known which one differs."""


class StragglerReason(Enum):
    """Why a rank is a straggler. The values are those of ``--format json``."""

    STEP_TIME = "step_time"
    """Its step time is far above the median."""


class Straggler(Record):
    """A rank that is slower than the others. Times are seconds per step."""

    rank: int
    reason: StragglerReason
    step_s: float
    median_s: float
    deviation_s: float
    """The median of the distances from the median."""

    @property
    def words(self) -> str:
        """The reason as text."""
        return f"step time {self.step_s / self.median_s:.2g} x the median"


StepTime = tuple[float, float]
"""Seconds per step, and over how many steps they were measured."""


def slowest_rank(step_times: Mapping[int, StepTime]) -> int | None:
    """Return the rank with the longest steps. Return None if they are not clearly longer
    (LEAST_RATIO, LEAST_DELAY_S), or if fewer than two ranks have enough steps.

    With two ranks, the slower one is compared with the other. With more, it is compared with the
    median.
    """
    judged = _judged(step_times)
    if len(judged) < 2:
        return None
    slowest = max(judged, key=lambda rank: judged[rank])
    middle = median_low(judged.values())
    return slowest if _is_far_above(judged[slowest], middle, step_times[slowest][1]) else None


def are_equal(step_times: Mapping[int, StepTime]) -> bool:
    """Return whether several ranks have equal step times, as ranks that wait for each other in
    every step have."""
    judged = _judged(step_times)
    return (
        1 < len(judged) == len(step_times)
        and max(judged.values()) <= min(judged.values()) * LEAST_RATIO
    )


def find_stragglers(step_times: Mapping[int, StepTime]) -> dict[int, Straggler]:
    """Return the stragglers by rank, from the step times of each rank."""
    judged = _judged(step_times)
    if len(judged) < LEAST_RANKS:
        return {}
    middle = median(judged.values())
    deviation_s = median(abs(each - middle) for each in judged.values())
    return {
        rank: Straggler(
            rank=rank,
            reason=StragglerReason.STEP_TIME,
            step_s=step_s,
            median_s=middle,
            deviation_s=deviation_s,
        )
        for rank, step_s in judged.items()
        if step_s > middle + DEVIATIONS * deviation_s
        and _is_far_above(step_s, middle, step_times[rank][1])
    }


def _judged(step_times: Mapping[int, StepTime]) -> dict[int, float]:
    """Return the seconds per step of the ranks with enough steps."""
    return {rank: step_s for rank, (step_s, steps) in step_times.items() if steps >= LEAST_STEPS}


def _is_far_above(step_s: float, middle: float, steps: float) -> bool:
    return 0 < middle * LEAST_RATIO < step_s and (step_s - middle) * steps > LEAST_DELAY_S
