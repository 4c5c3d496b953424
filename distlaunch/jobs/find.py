"""Find jobs by their run directories, and one job by what a user calls it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from distlaunch.coordinator.runtime.run_directory import (
    LATEST,
    log_base,
    registry_of,
    runs_in,
    temporary_base,
)
from distlaunch.core.errors import UsageError
from distlaunch.core.model.text import counted, printable, quoted
from distlaunch.jobs.job import Job, read_job, read_marker

_MOST_NAMED = 5


def find_jobs(log_dir: str | None, environ: Mapping[str, str]) -> list[Job]:
    """Return all jobs of this user, the newest first.

    Without ``log_dir``: those in the default log directory, in the temporary ones that replace it,
    and those made with --log-dir.
    """
    jobs = [job for path in run_directories(log_dir, environ) if (job := read_job(path))]
    return sorted(jobs, key=lambda job: (job.started or job.changed, job.name), reverse=True)


def run_directories(log_dir: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return the run directories that ``find_jobs`` reads."""
    if log_dir is not None:
        return [os.path.realpath(path) for path in _runs_in_directory(os.path.abspath(log_dir))]
    found: dict[str, None] = {}
    base = log_base(None, environ)
    for path in _runs_in_directory(base) if base is not None else ():
        found[os.path.realpath(path)] = None
    for path in _runs_in_temporary_directories():
        found[os.path.realpath(path)] = None
    registry = registry_of(environ)
    with suppress(OSError):
        for link in os.scandir(registry) if registry is not None else ():
            target = os.path.realpath(link.path)
            if read_marker(target) is not None:
                found[target] = None
    return list(found)


def find_job(
    word: str,
    log_dir: str | None,
    environ: Mapping[str, str],
    *,
    only: Callable[[Job], bool] | None = None,
) -> Job:
    """Return the job that a word means.

    In this order: the path of a run directory; ``latest``; the name of a run directory; a job id;
    the beginning of one job id or name. Of several jobs, the newest is meant. With ``only`` the
    word must mean one job alone, not counting those for which it is false; ``latest`` means the
    newest all the same if it was started in the working directory. Raises UsageError if there is
    none, or several.
    """
    if os.sep in word:
        job = read_job(os.path.realpath(word))
        if job is None:
            raise UsageError(
                f"{quoted(word)} is no run directory of a job of yours",
                hint="distlaunch ps --all lists your jobs",
            )
        return job
    jobs = find_jobs(log_dir, environ)
    if word == LATEST and jobs:
        return jobs[0] if only is None else _sure_newest(jobs, only)
    for same in (
        [job for job in jobs if job.name == word],
        [job for job in jobs if job.job_id == word],
    ):
        if same:
            return _choose_newest(same, word, only)
    begun = [
        job for job in jobs if word and (job.job_id.startswith(word) or job.name.startswith(word))
    ]
    if len({job.job_id for job in begun}) == 1:
        return _choose_newest(begun, word, only)
    raise _no_job_error(word, jobs, begun, log_dir)


def newer_jobs(job: Job, log_dir: str | None, environ: Mapping[str, str]) -> list[Job]:
    """Return the later jobs with this job's id, the newest first. Return an empty list if the name
    of this job's run directory is not its id."""
    if job.name != job.job_id:
        return []
    jobs = find_jobs(log_dir, environ)
    same = [each.path for each in jobs if each.job_id == job.job_id]
    newer = same[: same.index(job.path)] if job.path in same else []
    return [each for each in jobs if each.path in newer]


def _sure_newest(jobs: list[Job], only: Callable[[Job], bool]) -> Job:
    """Return the newest job, for a command that changes it.

    Raises UsageError if it was started in another directory, and the user may mean another job.
    """
    newest, left = jobs[0], [job for job in jobs if only(job)]
    if len(left) > 1 and newest in left and not _is_here(newest):
        raise UsageError(
            f"the newest job is {printable(newest.name)}, and it was started in another directory: "
            f"{printable(newest.cwd) or 'not known'}; {LATEST} may also mean: "
            f"{_list_names([job for job in left if job is not newest])}",
            hint=f"write the name of the job instead of {LATEST}; distlaunch ps --all lists your jobs",
        )
    return newest


def _is_here(job: Job) -> bool:
    """Return whether a job was started in the working directory."""
    try:
        return bool(job.cwd) and os.path.samefile(job.cwd, os.curdir)
    except OSError:
        return False


def _choose_newest(jobs: list[Job], word: str, only: Callable[[Job], bool] | None) -> Job:
    """Return the newest job. Raises UsageError if ``only`` leaves several."""
    left = jobs if only is None else [job for job in jobs if only(job)] or jobs
    if only is not None and len(left) > 1:
        raise UsageError(
            f"{quoted(word)} means {counted(len(left), 'job')}: {_list_names(left, in_full=True)}",
            hint="name one of them by the path of its run directory, or by its name in distlaunch ps",
        )
    return left[0]


def _no_job_error(word: str, jobs: list[Job], begun: list[Job], log_dir: str | None) -> UsageError:
    where = "" if log_dir is None else f" in {printable(log_dir)}"
    if begun:
        return UsageError(
            f"{quoted(word)} is the beginning of {counted(len(begun), 'job')}{where}: {_list_names(begun)}",
            hint="write more of the id",
        )
    if not jobs:
        return UsageError(
            f"there is no job {quoted(word)}{where}: no jobs were found",
            hint="--log-dir DIR looks in another log directory",
        )
    from difflib import get_close_matches

    names = {name.lower(): name for job in reversed(jobs) for name in (job.job_id, job.name)}
    names[LATEST] = LATEST
    close = get_close_matches(word.lower(), names, n=_MOST_NAMED, cutoff=0.5)
    near = [names[each] for each in close]
    listed = ", ".join(map(printable, near)) if near else _list_names(jobs)
    return UsageError(
        f"there is no job {quoted(word)}{where}; {'near' if near else 'newest'}: {listed}",
        hint="distlaunch ps --all lists your jobs",
    )


def _list_names(jobs: list[Job], *, in_full: bool = False) -> str:
    named = [job.path if in_full else job.name for job in jobs[:_MOST_NAMED]]
    shown = ", ".join(map(printable, named))
    more = len(jobs) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _runs_in_directory(base: str) -> Iterator[str]:
    with suppress(OSError):
        for entry in runs_in(base):
            yield entry.path


def _runs_in_temporary_directories() -> Iterator[str]:
    try:
        first = temporary_base(tempfile.gettempdir())
    except OSError:
        return
    folder, name = os.path.split(first)
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name == name or entry.name.startswith(f"{name}-"):
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False) and entry.stat().st_uid == os.getuid():
                        yield from _runs_in_directory(entry.path)
