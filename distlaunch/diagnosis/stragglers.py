"""Find the ranks whose steps take longer than those of the others. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from statistics import median

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
