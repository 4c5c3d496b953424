"""Jobs as text for people."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence

from distlaunch.core.model.duration import format_age
from distlaunch.core.model.run_files import SETUP
from distlaunch.core.model.text import counted, name_ranks, printable
from distlaunch.jobs.job import Job, State
from distlaunch.jobs.status import JobStatus

_COLUMNS = ("JOB", "STATE", "AGE", "WORKERS", "STEP", "HOST", "DIRECTORY", "COMMAND")
_LONGEST_COMMAND = 60
_SHORTEST_COMMAND = 12
_LONGEST_DIRECTORY = 30
_SILENT_S = 10.0
_SHOWN_FAILURES = 5


def jobs_table(
    jobs: Sequence[Job],
    statuses: Mapping[str, JobStatus],
    now: float,
    *,
    columns: int | None = None,
) -> list[str]:
    """Return the lines of ``ps``.

    ``statuses`` has, by run directory, the jobs that have not ended. ``now`` is in seconds since
    1970. Commands are cut so that lines have at most ``columns`` characters, if the other columns
    leave room.
    """
    rows = [_COLUMNS, *(_job_row(job, statuses.get(job.path), now) for job in jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS) - 1)]
    others = sum(widths) + 2 * len(widths)
    most = _LONGEST_COMMAND if columns is None else max(_SHORTEST_COMMAND, columns - others)
    return [
        "  ".join(
            [
                *(cell.ljust(width) for cell, width in zip(row, widths, strict=False)),
                _shorten_text(row[-1], most),
            ]
        ).rstrip()
        for row in rows
    ]


def _shorten_text(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _job_row(job: Job, status: JobStatus | None, now: float) -> tuple[str, ...]:
    workers = "-" if job.world_size is None else str(job.world_size)
    step = "-" if job.last_step is None else f"{job.last_step:g}"
    if status is not None:
        if status.workers and job.state is State.RUNNING:
            workers = f"{status.running}/{status.world_size}"
        if status.progress is not None and status.progress.get("step_min") is not None:
            step = str(status.progress["step_min"])
    return (
        printable(job.name),
        _short_state_text(job, status, now),
        "-" if job.started is None else format_age(now - job.started),
        workers,
        step,
        printable(job.host) or "-",
        _short_directory(job),
        command(job),
    )


def _directory(job: Job) -> str:
    """Return the working directory of a job, with ``~`` for the home directory."""
    home = os.path.expanduser("~").rstrip("/")
    cwd = job.cwd
    if home and (cwd == home or cwd.startswith(f"{home}/")):
        cwd = f"~{cwd[len(home) :]}"
    return printable(cwd)


def _short_directory(job: Job) -> str:
    text = _directory(job) or "-"
    most = _LONGEST_DIRECTORY
    return text if len(text) <= most else f"...{text[3 - most :]}"


def describe_job(job: Job, now: float) -> str:
    """Return which job this is, as one line: its name, script, directory and age.

    ``now`` is in seconds since 1970.
    """
    age = "" if job.started is None else f", started {format_age(now - job.started)} ago"
    where = f" in {_directory(job)}" if job.cwd else ""
    return f"job {printable(job.name)}: {command(job)}{age}{where}"


def _short_state_text(job: Job, status: JobStatus | None, now: float) -> str:
    if status is not None and status.is_suspended:
        return "suspended"
    return "stopping" if status is not None and describe_stop(status, now) else _state_text(job)


def _state_text(job: Job) -> str:
    if job.state in (State.FAILED, State.STOPPED):
        return f"{job.state.value} ({job.exit_code})"
    text: str = job.state.value
    return text


def command(job: Job) -> str:
    """Return the script of a job and its arguments, cut to one line."""
    text = printable(shlex.join(script_words(job.argv)))
    return _shorten_text(text, _LONGEST_COMMAND)


def script_words(argv: Sequence[str]) -> list[str]:
    """Return the command of a worker without --setup, Python and ``-u``."""
    if SETUP in argv:
        argv = argv[argv.index(SETUP) + 2 :] or argv
    return [word for word in argv[1:] if word != "-u"] or list(argv)


def status_lines(status: JobStatus, now: float) -> list[str]:
    """Return the lines of ``status``. ``now`` is in seconds since 1970."""
    job = status.job
    rows = [
        ("job", _name_text(job)),
        ("state", _long_state_text(status, now)),
        ("started", _time_text(job.started, now)),
        ("command", command(job)),
        ("directory", _directory(job)),
        ("launcher", _launcher_text(status)),
        ("nodes", printable(status.hosts)),
        ("attempt", _attempt_text(status)),
        ("workers", _workers_text(status)),
        ("step", _step_text(status, now)),
        ("checkpoint", _checkpoint_text(status, now)),
        ("last sign of life", _last_sign_text(status, now)),
        ("last event" if job.exit_code is None else "ended", _last_event_text(job, now)),
        *_failure_rows(status),
        ("hang", printable(status.hang)),
        ("report", printable(status.report or "")),
        ("metrics", printable(status.metrics or "")),
        ("logs", printable(job.path)),
    ]
    width = max(len(name) for name, _ in rows) + 2
    return [f"{name:<{width}}{text}" for name, text in rows if text]


def _name_text(job: Job) -> str:
    if job.name == job.job_id:
        return printable(job.name)
    return f"{printable(job.name)} (job id {printable(job.job_id)})"


def _failure_rows(status: JobStatus) -> list[tuple[str, str]]:
    """Return a row for each of the last failures."""
    rows = [("failure", printable(each.line())) for each in status.failures[-_SHOWN_FAILURES:]]
    more = len(status.failures) - len(rows)
    before = [("failures", f"{more} before these; distlaunch events has them")] if more else []
    return [*before, *rows]


def describe_stop(status: JobStatus, now: float) -> str:
    """Return since when a job stops and how long it may take; empty if it does not stop.

    ``now`` is in seconds since 1970.
    """
    if status.job.state is not State.RUNNING:
        return ""
    if status.stop_signal is None:
        return "stopping" if status.phase == "stopping" else ""
    text = "stopping"
    if status.stop_time is not None:
        text += f" for {format_age(now - status.stop_time)}"
    if status.grace_s is not None:
        text += f", up to {format_age(status.grace_s)}"
    return f"{text} ({printable(status.stop_signal)})"


def _long_state_text(status: JobStatus, now: float) -> str:
    job = status.job
    if stopping := describe_stop(status, now):
        return stopping
    match job.state:
        case State.STOPPED if status.stop_signal is not None:
            return f"stopped by {printable(status.stop_signal)}, with exit code {job.exit_code}"
        case State.RUNNING if job.started is not None:
            return f"running for {format_age(now - job.started)}"
        case State.FAILED | State.STOPPED:
            return f"{job.state.value} with exit code {job.exit_code}"
        case State.KILLED:
            return "killed: the launcher is gone, and did not say how the job ended"
        case State.UNKNOWN:
            return f"unknown: the launcher is on {printable(job.host) or 'another host'}"
        case _:
            return _state_text(job)


def _launcher_text(status: JobStatus) -> str:
    job = status.job
    if job.launcher is None:
        return printable(job.host)
    if job.state.has_ended:
        return f"was pid {job.launcher.pid} on {printable(job.host)}"
    text = f"pid {job.launcher.pid} on {printable(job.host)}"
    if not status.is_suspended:
        return text
    return f"{text}, suspended: it does not answer, and kill -CONT {job.launcher.pid} lets it go on"


def _attempt_text(status: JobStatus) -> str:
    if status.attempt is None:
        return ""
    lost = f"; {counted(status.lost_nodes, 'node')} lost" if status.lost_nodes else ""
    if not status.restarts:
        return f"{status.attempt}{lost}" if lost else ""
    of = "" if status.max_restarts is None else f" of {status.max_restarts}"
    return f"{status.attempt}, after {status.restarts}{of} restarts{lost}"


def _workers_text(status: JobStatus) -> str:
    if not status.workers:
        return ""
    ended: dict[int, list[int]] = {}
    for worker in status.workers:
        if worker.returncode is not None:
            ended.setdefault(worker.returncode, []).append(worker.rank)
    parts = [f"{status.running} of {status.world_size} run"]
    if status.job.state is not State.RUNNING:
        parts = [counted(len(status.workers), "worker")]
    for code, ranks in sorted(ended.items()):
        how = f"exit code {code}" if code >= 0 else signal_name(-code)
        parts.append(f"{name_ranks(ranks)}: {how}")
    return "; ".join(parts)


def signal_name(number: int) -> str:
    """Return ``SIGTERM``, or ``signal 50`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_event_text(job: Job, now: float) -> str:
    """Return when the job last changed; of a job that has ended, also how long it ran."""
    text = _time_text(job.changed, now)
    if job.exit_code is None or job.started is None:
        return text
    return f"{text}, after {format_age(job.changed - job.started)}"


def _last_sign_text(status: JobStatus, now: float) -> str:
    """Return when a worker last showed that it is alive, and which rank has been silent longest if
    that is long."""
    signs = [worker for worker in status.workers if worker.last_sign is not None and worker.runs]
    if status.last_sign is None or not signs:
        return ""
    text = f"{format_age(now - status.last_sign)} ago"
    oldest = min(signs, key=lambda worker: worker.last_sign or 0.0)
    silent_s = now - (oldest.last_sign or now)
    return (
        text if silent_s < _SILENT_S else f"{text}; rank {oldest.rank}: {format_age(silent_s)} ago"
    )


def _step_text(status: JobStatus, now: float) -> str:
    progress = status.progress
    if progress is None or progress.get("step_min") is None:
        return ""
    low, high = progress["step_min"], progress.get("step_max")
    text = str(low) if high in (None, low) else f"{low} to {high}"
    if status.job.state.has_ended:
        return text
    rate = progress.get("steps_per_s")
    if isinstance(rate, (int, float)):
        text += f", {rate:.3g} steps/s"
    when = progress.get("time")
    return f"{text} ({format_age(now - when)} ago)" if isinstance(when, (int, float)) else text


def _checkpoint_text(status: JobStatus, now: float) -> str:
    found = status.checkpoint
    if found is None:
        return ""
    age = "" if found.time is None else f" ({format_age(now - found.time)} ago)"
    return f"step {found.step:g}{age}"


def _time_text(seconds: float | None, now: float) -> str:
    if seconds is None:
        return ""
    return f"{local_time(seconds, '%Y-%m-%d %H:%M:%S')} ({format_age(now - seconds)} ago)"


def local_time(seconds: float, form: str) -> str:
    """Format a time in seconds since 1970 as ``strftime``. Any number is allowed."""
    try:
        return time.strftime(form, time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return f"{seconds:g} s after 1970"
