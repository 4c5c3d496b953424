"""What a job does now, from its events and its launcher."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.run_files import REPORT
from distlaunch.core.model.text import name_ranks
from distlaunch.core.protocol.control_messages import ControlError
from distlaunch.jobs.control import ANSWER_S, NoControlError, ask
from distlaunch.jobs.events import read_events_but_old_progress
from distlaunch.jobs.job import Job, State


class WorkerStatus(Record):
    """A worker of the newest attempt."""

    rank: int
    pid: int | None
    """On its node; None if the node has not reported it."""
    returncode: int | None
    """-N for signal N; None while it runs."""
    told_to_stop: bool
    host: str | None = None
    """None if the launcher was not asked, as the fields below."""
    state: str | None = None
    """See ``WorkerSnapshot``."""
    step: float | None = None
    step_s: float | None = None
    """Seconds per step, over the last steps."""
    last_sign: float | None = None
    """When it last wrote output or reported progress, or started; in seconds since 1970."""

    @property
    def runs(self) -> bool:
        """Return whether it runs, as far as known."""
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
    progress: Mapping[str, Any] | None
    """The newest event ``progress`` of the attempt."""
    failure: str
    """The cause of the newest failure."""
    hang: str
    """The summary of the hang that ended the job or an attempt."""
    report: str | None
    metrics: str | None = None
    """URL of the metrics of a job that has not ended; None if they are not served."""
    phase: str | None = None
    """What the launcher does (``policy.job.Phase``); None if it was not asked."""

    @property
    def running(self) -> int:
        """Return how many workers run, as far as known."""
        return sum(worker.runs for worker in self.workers)

    @property
    def last_sign(self) -> float | None:
        """Return when the last sign of life of a worker came, in seconds since 1970."""
        times = (worker.last_sign for worker in self.workers if worker.last_sign is not None)
        return max(times, default=None)

    def record(self) -> dict[str, Any]:
        """Return the fields of ``--format json``."""
        return {
            **job_record(self.job),
            "attempt": self.attempt,
            "restarts": self.restarts,
            "max_restarts": self.max_restarts,
            "hosts": self.hosts,
            "phase": self.phase,
            "workers": [worker.record() for worker in self.workers],
            "last_sign": self.last_sign,
            "lost_nodes": self.lost_nodes,
            "progress": None
            if self.progress is None
            else {
                name: self.progress.get(name)
                for name in ("time", "step_min", "step_max", "steps_per_s", "values")
            },
            "failure": self.failure or None,
            "hang": self.hang or None,
            "report": self.report,
            "metrics": self.metrics,
        }


def job_record(job: Job) -> dict[str, Any]:
    """Return the fields of a job in ``--format json``."""
    return {
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
        return status
    try:
        snapshot = ask(job.path, "snapshot", timeout_s=timeout_s)
        return with_snapshot(status, snapshot, time.time())
    except (NoControlError, ControlError):
        return status
    except (KeyError, TypeError):  # the launcher is of another version
        return status


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
        live = {"time": now, "step_min": min(steps), "step_max": max(steps)}
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
    state = _State()
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
        progress=state.progress,
        failure=state.failure,
        hang=state.hang,
        report=report if os.path.isfile(report) else None,
        metrics=None if job.state.has_ended else state.metrics,
    )


class _State:
    def __init__(self) -> None:
        self.attempt: int | None = None
        self.restarts = 0
        self.max_restarts: int | None = None
        self.hosts = ""
        self.workers: dict[int, WorkerStatus] = {}
        self.lost = 0
        self.progress: Mapping[str, Any] | None = None
        self.failure = self.hang = ""
        self.metrics: str | None = None

    def apply(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"type": "composed", "hosts": str(hosts)}:
                self.hosts = hosts
            case {"type": "attempt_started", "attempt": int(attempt)}:
                self.attempt, self.workers, self.progress = attempt, {}, None
            case {"type": "workers_started", "pids": dict(pids)}:
                for rank, pid in pids.items():
                    self._started(rank, pid)
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
                ranks = more.get("ranks")
                self.failure = f"attempt {self.attempt}: {_of_ranks(ranks)}{summary}"
            case {"type": "hang", "summary": str(summary)}:
                self.hang = summary
            case {"type": "metrics_served", "url": str(url)}:
                self.metrics = url
            case {"type": "node_lost"}:
                self.lost += 1
            case {"type": "progress"}:
                self.progress = event
            case _:
                return

    def _started(self, rank: object, pid: object) -> None:
        if isinstance(rank, str) and rank.isdecimal() and isinstance(pid, int):
            number = int(rank)
            self.workers[number] = WorkerStatus(
                rank=number, pid=pid, returncode=None, told_to_stop=False
            )


def _of_ranks(ranks: object) -> str:
    if not isinstance(ranks, list) or not ranks or not all(isinstance(each, int) for each in ranks):
        return ""
    return f"{name_ranks(ranks)}: "
