"""The steps that workers have reported, from ``steps.bin`` in the run directory of a job."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from distlaunch.core.model.run_files import SERIES
from distlaunch.core.model.step_series import split_blocks, unpack_block
from distlaunch.jobs.job import Job

Sample = tuple[float, float, float | None]
"""Time, step, loss."""
RankSeries = Mapping[tuple[int, int], Sequence[Sample]]
"""The samples of each attempt and rank, in order of time."""
LATEST = 1e11
"""Later times, in seconds since 1970, are damage."""
_MOST_BYTES = 1 << 28


def read_series(job: Job) -> dict[tuple[int, int], list[Sample]]:
    """Return what each rank has reported in each attempt: time, step and loss.

    Reports without a step are left out. Return nothing if the file cannot be read.
    """
    data = read_start(os.path.join(job.path, SERIES), _MOST_BYTES)
    series: dict[tuple[int, int], list[Sample]] = {}
    for block in split_blocks(data):
        attempt, rows = unpack_block(block)
        for rank, when, step, loss, _ in rows:
            if step is not None and math.isfinite(step) and 0 <= when < LATEST:
                series.setdefault((attempt, rank), []).append((when, step, loss))
    return series


def read_last_steps(job: Job, attempt: int) -> dict[int, float]:
    """Return the step that each rank has reported last in an attempt, by rank."""
    return {
        rank: samples[-1][1]
        for (number, rank), samples in read_series(job).items()
        if number == attempt
    }


def read_start(path: str, most_bytes: int) -> bytes:
    """Return the first bytes of a file; nothing if it cannot be read."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(os.open(path, flags), "rb") as file:
            return file.read(most_bytes)
    except OSError:
        return b""
