"""What a job does now, from its events and its launcher."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from typing import Any

from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.run_files import REPORT
from distlaunch.core.model.text import name_ranks
from distlaunch.core.protocol.control_messages import ControlError
from distlaunch.jobs.control import ANSWER_S, NoControlError, ask
from distlaunch.jobs.events import is_stop_signal, read_events_but_old_progress
from distlaunch.jobs.job import Job, State
from distlaunch.jobs.reported_steps import read_last_steps

_MOST_FAILURES = 100
"""The newest failures of a job that are kept."""
_LONGEST_MESSAGE = 200
MOST_RANKS = 1 << 20
"""Events with higher ranks are damaged."""
_RANK_CHARS = 7


class WorkerStatus(Record):
    """A worker of the newest attempt."""

    rank: int
    pid: int | None
    """On its node; None if the node has not reported it."""
    returncode: int | None
    """-N for signal N; None while it runs."""
    told_to_stop: bool
    host: str | None = None
    """None if the launcher was not asked, as the fields below except ``step``."""
    state: str | None = None
    """See ``WorkerSnapshot``."""
    step: float | None = None
    """The last that the worker has reported."""
    step_s: float | None = None
    """Seconds per step, over the last steps."""
    last_sign: float | None = None
    """When it last wrote output or reported progress, or started; in seconds since 1970."""

    @property
    def runs(self) -> bool:
        """Whether the worker runs, as far as known."""
        return self.returncode is None and self.state != "lost"

    def record(self) -> dict[str, Any]:
        """Return the fields of ``--format json``."""
        return {
            "rank": self.rank,
            "pid": self.pid,
            "returncode": self.returncode,
            "told_to_stop": self.told_to_stop,
            "host": self.host,
            "state": self.state,
            "step": self.step,
            "step_s": self.step_s,
            "last_sign": self.last_sign,
        }


class FailureCause(Record):
    """Why an attempt failed."""

    attempt: int | None
    ranks: tuple[int, ...]
    """Ranks that failed for this reason."""
    summary: str
    """How they ended: ``exit code 1``."""
    exception: str
    """The exception with its message; empty if it is not known."""
    frame: str
    """Where it was raised; empty if that is not known."""

    def line(self) -> str:
        """Return the cause as one line."""
        text = f"attempt {self.attempt}: " if self.attempt is not None else ""
        text += f"{name_ranks(self.ranks)}: " if self.ranks else ""
        text += self.summary
        text += f": {self.exception}" if self.exception else ""
        return f"{text} ({self.frame})" if self.frame else text

    def record(self) -> dict[str, Any]:
        """Return the fields of ``--format json``."""
        return {
            "attempt": self.attempt,
            "ranks": list(self.ranks),
            "summary": self.summary,
            "exception": self.exception or None,
            "frame": self.frame or None,
        }


class LastCheckpoint(Record):
    """A checkpoint that a worker has reported."""

    step: float
    time: float | None
    """When the launcher wrote it down, in seconds since 1970."""


class JobStatus(Record):
    """What a job does now. Times are seconds since 1970."""

    job: Job
    attempt: int | None
    """The newest attempt; None before the first."""
    restarts: int
    max_restarts: int | None
    """None if the job has not been restarted so far."""
    hosts: str
    """Hosts of the newest attempt, folded as in a host list."""
    workers: tuple[WorkerStatus, ...]
    lost_nodes: int
    attempt_world_size: int | None
    """None if no event has it."""
    progress: Mapping[str, Any] | None
    """The newest event ``progress`` of the attempt."""
    failures: tuple[FailureCause, ...]
    """The causes of the failures, also of those after which the job was restarted."""
    hang: str
    """The summary of the hang that ended the job or an attempt."""
    report: str | None
    metrics: str | None = None
    """URL of the metrics of a job that has not ended; None if they are not served."""
    stop_signal: str | None = None
    """The first signal that ended the job, or ends it."""
    stop_time: float | None = None
    """When the launcher got it."""
    grace_s: float | None = None
    """The time that workers have to stop (--grace); None if the event file does not have it."""
    checkpoint: LastCheckpoint | None = None
    """The last checkpoint that a worker has reported."""
    is_suspended: bool = False
    """Whether the launcher is stopped (Ctrl-Z, a debugger), and so cannot answer."""
    phase: str | None = None
    """What the launcher does (``policy.job.Phase``); None if it was not asked."""

    @property
    def running(self) -> int:
        """How many workers run, as far as known."""
        return sum(worker.runs for worker in self.workers)

    @property
    def killed(self) -> int:
        """How many workers were asked to stop and ended by SIGKILL."""
        return sum(
            worker.told_to_stop and worker.returncode == -signal.SIGKILL for worker in self.workers
        )

    @property
    def last_sign(self) -> float | None:
        """When the last sign of life of a worker came, in seconds since 1970; None if none came."""
        times = (worker.last_sign for worker in self.workers if worker.last_sign is not None)
        return max(times, default=None)

    @property
    def world_size(self) -> int:
        """The number of workers of the attempt, also of those that have not started."""
        return max(self.attempt_world_size or self.job.world_size or 0, len(self.workers))

    def record(self) -> dict[str, Any]:
        """Return the fields of ``--format json``."""
        return {
            **job_record(self.job),
            "attempt": self.attempt,
            "restarts": self.restarts,
            "max_restarts": self.max_restarts,
            "hosts": self.hosts,
            "phase": self.phase,
            "launcher_suspended": self.is_suspended,
            "stop_signal": self.stop_signal,
            "stop_time": self.stop_time,
            "grace_s": self.grace_s,
            "workers": [worker.record() for worker in self.workers],
            "last_sign": self.last_sign,
            "lost_nodes": self.lost_nodes,
            "progress": None
            if self.progress is None
            else {
                name: self.progress.get(name)
                for name in ("time", "step_min", "step_max", "steps_per_s", "values")
            },
            "failure": self.failures[-1].line() if self.failures else None,
            "failures": [failure.record() for failure in self.failures],
            "checkpoint": None
            if self.checkpoint is None
            else {"step": self.checkpoint.step, "time": self.checkpoint.time},
            "hang": self.hang or None,
            "report": self.report,
            "metrics": self.metrics,
        }


def job_record(job: Job) -> dict[str, Any]:
    """Return the fields of a job in ``--format json``."""
    return {
        "name": job.name,
        "job_id": job.job_id,
        "state": job.state.value,
        "exit_code": job.exit_code,
        "host": job.host or None,
        "pid": None if job.launcher is None else job.launcher.pid,
        "started": job.started,
        "last_event": job.changed,
        "world_size": job.world_size,
        "backend": job.backend or None,
        "argv": list(job.argv),
        "cwd": job.cwd or None,
        "run_dir": job.path,
    }


def read_status(job: Job, *, timeout_s: float = ANSWER_S) -> JobStatus:
    """Return what a job does now, from its events and, while it runs here, from its launcher.

    The events are enough if the launcher does not answer within ``timeout_s``.
    """
    status = fold_events(job, read_events_but_old_progress(job.events))
    if job.state is not State.RUNNING or not job.is_here:
        return _with_steps(status)
    if job.launcher is not None and job.launcher.is_suspended():
        return _with_steps(replace(status, is_suspended=True))
    try:
        snapshot = ask(job.path, "snapshot", timeout_s=timeout_s)
        return with_snapshot(status, snapshot, time.time())
    except (NoControlError, ControlError):
        return _with_steps(status)
    except (KeyError, TypeError):  # the launcher is of another version
        return _with_steps(status)


def _with_steps(status: JobStatus) -> JobStatus:
    """Return a status with the last step that each worker has reported, from the run directory."""
    if status.attempt is None or not status.workers:
        return status
    steps = read_last_steps(status.job, status.attempt) or _steps_of(status.progress or {})
    return replace(
        status,
        workers=tuple(replace(worker, step=steps.get(worker.rank)) for worker in status.workers),
    )


def _steps_of(progress: Mapping[str, Any]) -> dict[int, float]:
    """Return the step of the only rank that an event ``progress`` names."""
    match progress:
        case {"rank": int(rank), "values": {"step": float(step) | int(step)}}:
            return {rank: step}
        case _:
            return {}


def with_snapshot(status: JobStatus, snapshot: Mapping[str, Any], now: float) -> JobStatus:
    """Return a status with what the launcher knows at the time ``now``.

    ``snapshot`` has the fields of a ``JobSnapshot``.
    """
    told = {worker.rank for worker in status.workers if worker.told_to_stop}
    workers = tuple(
        WorkerStatus(
            rank=worker["rank"],
            pid=worker["pid"],
            returncode=worker["returncode"],
            told_to_stop=worker["rank"] in told,
            host=worker["host"],
            state=worker["state"],
            step=worker["step"],
            step_s=worker["step_s"],
            last_sign=None
            if worker["last_sign_age_s"] is None
            else now - worker["last_sign_age_s"],
        )
        for worker in snapshot["workers"]
        if worker["state"] != "starting"
    )
    steps = [worker.step for worker in workers if worker.step is not None]
    progress = status.progress
    if steps:
        ages = [worker.get("progress_age_s") for worker in snapshot["workers"]]
        newest = min((each for each in ages if each is not None), default=0.0)
        live = {"time": now - newest, "step_min": min(steps), "step_max": max(steps)}
        progress = {**(progress or {}), **live}
    return replace(
        status,
        phase=snapshot["phase"],
        attempt=snapshot["attempt"] if workers else status.attempt,
        restarts=snapshot["restarts"],
        workers=workers,
        lost_nodes=snapshot["node_losses"],
        progress=progress,
    )


def fold_events(job: Job, events: Iterable[Mapping[str, Any]]) -> JobStatus:
    """Return what a job does after these events. Events with missing fields are skipped."""
    state = _StatusBuilder()
    for event in events:
        state.apply(event)
    report = os.path.join(job.path, REPORT)
    return JobStatus(
        job=job,
        attempt=state.attempt,
        restarts=state.restarts,
        max_restarts=state.max_restarts,
        hosts=state.hosts or job.host,
        workers=tuple(state.workers[rank] for rank in sorted(state.workers)),
        lost_nodes=state.lost,
        attempt_world_size=state.world_size,
        progress=state.progress,
        failures=tuple(state.failures),
        hang=state.hang,
        report=report if os.path.isfile(report) else None,
        stop_signal=state.stop_signal,
        stop_time=state.stop_time,
        grace_s=state.grace_s,
        checkpoint=state.checkpoint,
        metrics=None if job.state.has_ended else state.metrics,
    )


class _StatusBuilder:
    def __init__(self) -> None:
        self.attempt: int | None = None
        self.restarts = 0
        self.max_restarts: int | None = None
        self.hosts = ""
        self.world_size: int | None = None
        self.workers: dict[int, WorkerStatus] = {}
        self.lost = 0
        self.progress: Mapping[str, Any] | None = None
        self.failures: list[FailureCause] = []
        self.hang = ""
        self.metrics: str | None = None
        self.stop_signal: str | None = None
        self.stop_time: float | None = None
        self.grace_s: float | None = None
        self.checkpoint: LastCheckpoint | None = None

    def apply(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"type": "job_started", "grace_s": float(grace_s) | int(grace_s)}:
                self.grace_s = grace_s
            case {"type": "signal", "signal": str(name)} if (
                self.stop_signal is None and is_stop_signal(event)
            ):
                when = event.get("time")
                self.stop_signal = name
                self.stop_time = when if isinstance(when, (int, float)) else None
            case {"type": "composed", "hosts": str(hosts), **more}:
                self.hosts = hosts
                size = more.get("world_size")
                self.world_size = size if isinstance(size, int) else None
            case {"type": "attempt_started", "attempt": int(attempt)}:
                self.attempt, self.workers, self.progress = attempt, {}, None
            case {"type": "workers_started", "pids": dict(pids)}:
                for rank, pid in pids.items():
                    self._on_worker_started(rank, pid)
            case {"type": "worker_exited", "rank": int(rank), "returncode": int(code), **more}:
                pid = more.get("pid")
                self.workers[rank] = WorkerStatus(
                    rank=rank,
                    pid=pid if isinstance(pid, int) else None,
                    returncode=code,
                    told_to_stop=more.get("told_to_stop") is True,
                )
            case {"type": "restarting", **more}:
                self.restarts += 1
                most = more.get("of")
                self.max_restarts = most if isinstance(most, int) else self.max_restarts
            case {"type": "failure", "diagnosis": {"summary": str(summary), **more}}:
                self.failures.append(read_failure(self.attempt, summary, more))
                del self.failures[:-_MOST_FAILURES]
            case {"type": "hang", "summary": str(summary)}:
                self.hang = summary
            case {"type": "metrics_served", "url": str(url)}:
                self.metrics = url
            case {"type": "checkpoint", "step": float(step) | int(step), **more}:
                when = more.get("time")
                self.checkpoint = LastCheckpoint(
                    step=step, time=when if isinstance(when, (int, float)) else None
                )
            case {"type": "node_lost"}:
                self.lost += 1
            case {"type": "progress"}:
                self.progress = event
            case _:
                return

    def _on_worker_started(self, rank: object, pid: object) -> None:
        if (number := read_rank(rank)) is not None and isinstance(pid, int):
            self.workers[number] = WorkerStatus(
                rank=number, pid=pid, returncode=None, told_to_stop=False
            )


def read_rank(text: object) -> int | None:
    """Return the rank that a key of an event holds, if it is valid."""
    if not isinstance(text, str) or not text.isdecimal() or len(text) > _RANK_CHARS:
        return None
    rank = int(text)
    return rank if rank < MOST_RANKS else None


def read_failure(attempt: int | None, summary: str, fields: Mapping[Any, Any]) -> FailureCause:
    """Return the cause that an event ``failure`` has."""
    ranks = fields.get("ranks")
    is_known = isinstance(ranks, list) and all(type(each) is int for each in ranks)
    kind, message, frame = (
        value if isinstance(value := fields.get(name), str) else ""
        for name in ("exception_type", "message", "frame")
    )
    is_other = fields.get("awaited") is True  # the exception is that of a rank that waited
    exception = "" if is_other or not kind else one_line(": ".join(filter(None, (kind, message))))
    return FailureCause(
        attempt=attempt,
        ranks=tuple(ranks) if is_known and ranks else (),
        summary=summary,
        exception=exception,
        frame=frame,
    )


def one_line(text: str, *, most: int = _LONGEST_MESSAGE) -> str:
    """Return a text with its lines joined, and its middle left out if it is long."""
    whole = " ".join(text.split())
    if len(whole) <= most:
        return whole
    half = (most - 5) // 2
    return f"{whole[:half]} ... {whole[-half:]}"
