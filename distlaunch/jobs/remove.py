"""Remove the files of a job that has ended."""

from __future__ import annotations

import os
from contextlib import suppress

from distlaunch.coordinator.runtime.run_directory import LATEST, remove_run
from distlaunch.jobs.job import Job


def remove_job(job: Job) -> int:
    """Remove the run directory of a job. Return how many files are left in it.

    Files that distlaunch has not written stay, for example checkpoints.
    """
    remove_run(job.path)
    latest = os.path.join(os.path.dirname(job.path), LATEST)
    with suppress(OSError):
        if os.path.islink(latest) and not os.path.exists(latest):
            os.unlink(latest)
    return sum(len(names) for _, _, names in os.walk(job.path))
