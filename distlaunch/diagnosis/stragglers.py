"""Find the ranks whose steps take longer than the steps of the other ranks. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from statistics import median, median_low

from distlaunch.core.model.record import Record

DEVIATIONS = 3.0
"""A rank is a straggler if its step time is above the median by more than this many median
deviations."""
LEAST_DEVIATION = 0.02
"""The median deviation counts as at least this share of the median. Ranks that wait for each other
have equal step times, and the times of their reports differ by more than nothing."""
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


def slowest_rank(step_times: Mapping[int, float]) -> int | None:
    """Return the rank with the longest steps; None if they are not longer than those of the others
    by more than reports can show.

    Of two ranks the other one is the measure, of more the median.
    """
    if len(step_times) < 2:
        return None
    slowest = max(step_times, key=lambda rank: step_times[rank])
    limit_s = median_low(step_times.values()) * (1 + DEVIATIONS * LEAST_DEVIATION)
    return slowest if step_times[slowest] > limit_s else None


def are_equal(step_times: Mapping[int, float]) -> bool:
    """Return whether several ranks have equal step times, as ranks that wait for each other in
    every step have."""
    return len(step_times) > 1 and slowest_rank(step_times) is None


def find_stragglers(step_times: Mapping[int, float]) -> dict[int, Straggler]:
    """Return the stragglers by rank, from the seconds per step of each rank.

    The times are means over the last steps of each rank.
    """
    if len(step_times) < LEAST_RANKS:
        return {}
    middle = median(step_times.values())
    if middle <= 0:
        return {}
    deviation_s = median(abs(each - middle) for each in step_times.values())
    limit_s = middle + DEVIATIONS * max(deviation_s, LEAST_DEVIATION * middle)
    return {
        rank: Straggler(
            rank=rank,
            reason=StragglerReason.STEP_TIME,
            step_s=step_s,
            median_s=middle,
            deviation_s=deviation_s,
        )
        for rank, step_s in step_times.items()
        if step_s > limit_s
    }
