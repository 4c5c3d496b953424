"""Build the report of a job from its run directory alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from statistics import median
from typing import Any

from distlaunch.core.model.log_times import unpack_marks
from distlaunch.core.model.record import Record
from distlaunch.core.model.run_files import plan_path, times_path
from distlaunch.diagnosis.stragglers import are_equal
from distlaunch.jobs.events import is_stop_signal, read_events
from distlaunch.jobs.job import Job, State
from distlaunch.jobs.report.job_time import (
    AttemptTime,
    SavedStep,
    TimeDivision,
    divide_time,
    find_waits,
)
from distlaunch.jobs.report.step_times import (
    Curve,
    SlowRank,
    loss_curves,
    mean_step_times,
    slow_ranks,
    step_time_curves,
)
from distlaunch.jobs.reported_steps import LATEST, RankSeries, read_series, read_start
from distlaunch.jobs.status import MOST_RANKS, job_record, read_rank

SCHEMA = 1
"""Of ``--format json``. Increased when a field changes its meaning or is removed."""
_MOST_PLAN_BYTES = 1 << 28
_MOST_INDEX_BYTES = 1 << 26
_MOST_PLANS = 50


class Missing(Enum):
    """What a report lacks because the job did not record it. The values are those of ``--format
    json``."""

    EVENTS = "events"
    PROGRESS = "progress"
    """No worker has reported steps."""
    SERIES = "series"
    """Steps are known only from the events, every 10 s, and not for each rank."""
    LOSS = "loss"
    CHECKPOINTS = "checkpoints"
    """No checkpoint was reported, so it is not known which steps are lost at the end."""


class AttemptOutcome(Enum):
    """How an attempt ended. The values are those of ``--format json``."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    HUNG = "hung"
    NODE_LOST = "node_lost"
    STOPPED = "stopped"
    UNKNOWN = "unknown"
    """The launcher was killed."""


class WorkerTime(Record):
    """When one worker ran."""

    rank: int
    begin: float
    end: float
    returncode: int | None
    """-N for signal N; None if it is not known."""
    told_to_stop: bool


class AttemptReport(Record):
    """One attempt."""

    number: int
    begin: float
    end: float
    outcome: AttemptOutcome
    first_step: float | None
    last_step: float | None
    workers: tuple[WorkerTime, ...]


class FailureReport(Record):
    """What ended an attempt, or a node that was lost. Texts are as workers wrote them."""

    time: float
    """When the first worker failed, the hang was detected, or the node was lost."""
    attempt: int | None
    kind: AttemptOutcome
    ranks: tuple[int, ...]
    host: str
    cause: str
    frame: str
    hint: str
    log_path: str
    is_final: bool


class NodeTime(Record):
    """A node that took part in an attempt."""

    host: str
    attempt: int
    begin: float
    end: float
    ranks: tuple[int, ...]
    lost_at: float | None


class CheckpointSummary(Record):
    """The checkpoints that were reported."""

    count: int
    last_step: float
    seconds: float
    """Of all of them together."""
    median_s: float
    bytes: float
    """Of the newest one."""


class JobReport(Record):
    """All that a report shows. Times are seconds since 1970."""

    job: Job
    begin: float
    end: float
    division: TimeDivision
    attempts: tuple[AttemptReport, ...]
    failures: tuple[FailureReport, ...]
    nodes: tuple[NodeTime, ...]
    checkpoints: CheckpointSummary | None
    checkpoint_times: tuple[float, ...]
    last_step: float | None
    step_s: float | None
    """The median over the ranks of the mean step time in the newest attempt."""
    step_times: tuple[Curve, ...]
    losses: tuple[Curve, ...]
    slow: tuple[SlowRank, ...]
    """Of the newest attempt that has reported steps."""
    has_equal_steps: bool
    """Whether the ranks of that attempt have equal mean step times."""
    missing: tuple[Missing, ...]
    stop_signal: str | None = None
    """The first signal that ended the job, or ends it."""

    @property
    def restarts(self) -> int:
        """How many attempts followed the first one."""
        return max(0, len(self.attempts) - 1)

    @property
    def world_size(self) -> int | None:
        """The number of ranks of the newest attempt."""
        if self.attempts and self.attempts[-1].workers:
            return len(self.attempts[-1].workers)
        return self.job.world_size


def build_report(job: Job, now: float | None = None) -> JobReport:
    """Read the run directory of a job, and return its report.

    ``now`` is in seconds since 1970. What cannot be read is missing in the report.
    """
    now = time.time() if now is None else now
    events = [event for event in read_events(job.events) if _time_of(event) is not None]
    series = read_series(job)
    missing = [] if events else [Missing.EVENTS]
    points = _steps_of_attempts(series)
    if not points and (points := _steps_of_events(events)):
        missing.append(Missing.SERIES)
    if not points:
        missing.append(Missing.PROGRESS)
    begin = min((event["time"] for event in events), default=job.started or job.changed)
    end = _end_time(job, events, series, now)
    attempts = _build_attempts(job, events, points, end)
    saved = _read_checkpoints(events)
    losses = tuple(loss_curves(series))
    if points and not losses:
        missing.append(Missing.LOSS)
    was_done = job.exit_code == 0
    needs_checkpoint = job.state.has_ended and not was_done
    if points and not saved:
        missing.append(Missing.CHECKPOINTS)
    division = divide_time(
        begin=begin,
        end=end,
        attempts=[
            AttemptTime(
                number=each.number,
                begin=each.begin,
                end=each.end,
                points=tuple(points.get(each.number, ())),
            )
            for each in attempts
        ],
        checkpoints=[SavedStep(time=when, step=step) for when, step, _, _ in saved],
        waits=find_waits(events, end),
        needs_checkpoint=needs_checkpoint,
    )
    newest = max(points, default=None)
    times = {} if newest is None else mean_step_times(series, newest)
    return JobReport(
        job=job,
        begin=begin,
        end=end,
        division=division,
        attempts=tuple(attempts),
        failures=tuple(_read_failures(events)),
        nodes=tuple(_nodes(job, events, attempts)),
        checkpoints=_sum_checkpoints(saved),
        checkpoint_times=tuple(when for when, _, _, _ in saved),
        last_step=max((step for each in points.values() for _, step in each), default=None),
        step_s=median(step_s for step_s, _ in times.values()) if times else None,
        step_times=tuple(step_time_curves(series, begin, end)),
        losses=losses,
        slow=() if newest is None else tuple(slow_ranks(series, newest)),
        has_equal_steps=are_equal(times),
        missing=tuple(missing),
        stop_signal=next(
            (_text_or_empty(event.get("signal")) for event in events if is_stop_signal(event)), None
        ),
    )


def _steps_of_attempts(series: RankSeries) -> dict[int, list[tuple[float, float]]]:
    """Return for each attempt the steps of one rank: of those with the most reports, the lowest."""
    chosen: dict[int, tuple[int, int]] = {}
    for (attempt, rank), samples in series.items():
        best = chosen.get(attempt)
        if best is None or (len(samples), -rank) > best:
            chosen[attempt] = (len(samples), -rank)
    return {
        attempt: [(when, step) for when, step, _ in series[attempt, -rank]]
        for attempt, (_, rank) in sorted(chosen.items())
    }


def _steps_of_events(
    events: Sequence[Mapping[str, Any]],
) -> dict[int, list[tuple[float, float]]]:
    """Return for each attempt the lowest steps of the events ``progress``."""
    points: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        match event:
            case {"type": "progress", "attempt": int(attempt), "step_min": int() | float() as step}:
                points.setdefault(attempt, []).append((event["time"], float(step)))
            case _:
                pass
    return points


def _time_of(event: Mapping[str, Any]) -> float | None:
    when = event.get("time")
    return when if isinstance(when, (int, float)) and 0 <= when < LATEST else None


def _end_time(
    job: Job, events: Sequence[Mapping[str, Any]], series: RankSeries, now: float
) -> float:
    """Return when the job ended; of a job that runs, ``now``; of a killed one, its last sign."""
    ended = next((each["time"] for each in reversed(events) if each["type"] == "job_ended"), None)
    if ended is not None:
        return float(ended)
    if job.state is State.RUNNING:
        return now
    last = max((each["time"] for each in events), default=job.changed)
    reported = [samples[-1][0] for samples in series.values()]
    return float(max([last, *reported, *_output_times(job, events)]))


def _output_times(job: Job, events: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    """Yield the times at which output of the newest attempt has come."""
    attempts = [
        number
        for event in events
        if event["type"] == "attempt_started"
        and (number := _int_or_none(event.get("attempt"))) is not None
    ]
    if attempts:
        data = read_start(times_path(job.path, attempts[-1]), _MOST_INDEX_BYTES)
        yield from (mark.time for mark in unpack_marks(data) if 0 <= mark.time < LATEST)


def _build_attempts(
    job: Job,
    events: Sequence[Mapping[str, Any]],
    points: Mapping[int, Sequence[tuple[float, float]]],
    end: float,
) -> list[AttemptReport]:
    builder = _AttemptBuilder()
    for event in events:
        builder.apply(event)
    return builder.attempts(job, points, end)


class _Attempt:
    """What is known of an attempt while events are read."""

    def __init__(self, number: int, begin: float) -> None:
        self.number = number
        self.begin = begin
        self.end: float | None = None
        self.outcome: AttemptOutcome | None = None
        self.started: dict[int, float] = {}
        self.exits: dict[int, tuple[float, int, bool]] = {}


class _AttemptBuilder:
    def __init__(self) -> None:
        self._all: list[_Attempt] = []
        self._is_stopped = False

    def apply(self, event: Mapping[str, Any]) -> None:
        when = event["time"]
        match event:
            case {"type": "attempt_started", "attempt": int(number)}:
                self._all.append(_Attempt(number, when))
                return
            case {"type": "signal"}:
                self._is_stopped = True
            case _:
                pass
        if not self._all:
            return
        attempt = self._all[-1]
        match event:
            case {"type": "workers_started", "pids": dict(pids)}:
                for rank in pids:
                    if (started := read_rank(rank)) is not None:
                        attempt.started[started] = when
            case {"type": "worker_exited", "rank": int(rank), "returncode": int(code)} if (
                0 <= rank < MOST_RANKS
            ):
                told = event.get("told_to_stop") is True
                attempt.exits[rank] = (when, code, told)
                if code and not told and attempt.end is None:
                    attempt.end = when
            case {"type": "hang"}:
                attempt.outcome = AttemptOutcome.HUNG
                attempt.end = when if attempt.end is None else attempt.end
            case {"type": "node_lost", "ranks": list()}:
                attempt.outcome = attempt.outcome or AttemptOutcome.NODE_LOST
                attempt.end = when if attempt.end is None else attempt.end
            case {"type": "failure"}:
                stopped = self._is_stopped or event.get("while_stopping") is True
                attempt.outcome = attempt.outcome or (
                    AttemptOutcome.STOPPED if stopped else AttemptOutcome.FAILED
                )
                attempt.end = when if attempt.end is None else attempt.end
            case _:
                pass

    def attempts(
        self, job: Job, points: Mapping[int, Sequence[tuple[float, float]]], end: float
    ) -> list[AttemptReport]:
        found = []
        for place, each in enumerate(self._all):
            is_last = place == len(self._all) - 1
            outcome = each.outcome or (
                self._outcome_of_newest(job, each) if is_last else AttemptOutcome.FAILED
            )
            finish = max((when for when, _, _ in each.exits.values()), default=None)
            stop = each.end if each.end is not None else finish
            if stop is None or outcome is AttemptOutcome.RUNNING:
                stop = end if is_last else self._all[place + 1].begin
            steps = points.get(each.number, ())
            found.append(
                AttemptReport(
                    number=each.number,
                    begin=each.begin,
                    end=max(each.begin, stop),
                    outcome=outcome,
                    first_step=steps[0][1] if steps else None,
                    last_step=max(step for _, step in steps) if steps else None,
                    workers=tuple(_worker_times(each, stop)),
                )
            )
        return found

    def _outcome_of_newest(self, job: Job, attempt: _Attempt) -> AttemptOutcome:
        if job.state is State.RUNNING:
            return AttemptOutcome.RUNNING
        if job.exit_code == 0:
            return AttemptOutcome.SUCCEEDED
        if job.state is State.STOPPED or self._is_stopped:
            return AttemptOutcome.STOPPED
        return (
            AttemptOutcome.FAILED
            if job.exit_code is not None or attempt.exits
            else AttemptOutcome.UNKNOWN
        )


def _worker_times(attempt: _Attempt, end: float) -> Iterable[WorkerTime]:
    for rank in sorted({*attempt.started, *attempt.exits}):
        stopped, code, told = attempt.exits.get(rank, (end, None, False))
        yield WorkerTime(
            rank=rank,
            begin=attempt.started.get(rank, attempt.begin),
            end=max(stopped, attempt.begin),
            returncode=code,
            told_to_stop=told,
        )


def _read_failures(events: Iterable[Mapping[str, Any]]) -> Iterable[FailureReport]:
    """Yield the failures. The event of a failure comes when all workers have ended, so the first
    worker that ended wrongly tells the time."""
    first_exits: dict[int | None, float] = {}
    for event in events:
        attempt = _int_or_none(event.get("attempt"))
        match event:
            case {"type": "worker_exited", "returncode": int(code)} if (
                code and event.get("told_to_stop") is not True
            ):
                first_exits.setdefault(attempt, event["time"])
            case {"type": "failure", "diagnosis": dict(found)}:
                raised = ": ".join(
                    filter(
                        None,
                        (
                            _text_or_empty(found.get("exception_type")),
                            _text_or_empty(found.get("message")),
                        ),
                    )
                )
                summary = _text_or_empty(found.get("summary"))
                yield FailureReport(
                    time=first_exits.get(attempt, event["time"]),
                    attempt=attempt,
                    kind=AttemptOutcome.FAILED,
                    ranks=_ranks_or_empty(found.get("ranks")),
                    host=_text_or_empty(found.get("host")),
                    cause=f"{raised} ({summary})" if raised and summary else raised or summary,
                    frame=_text_or_empty(found.get("frame")),
                    hint=_text_or_empty(found.get("hint")),
                    log_path=_text_or_empty(found.get("log_path")),
                    is_final=event.get("final") is True,
                )
            case {"type": "hang"}:
                yield FailureReport(
                    time=event["time"],
                    attempt=attempt,
                    kind=AttemptOutcome.HUNG,
                    ranks=_ranks_or_empty(event.get("behind")),
                    host="",
                    cause=_text_or_empty(event.get("summary")),
                    frame=_text_or_empty(event.get("frame")),
                    hint=_text_or_empty(event.get("hint")),
                    log_path="",
                    is_final=False,
                )
            case {"type": "node_lost"}:
                yield FailureReport(
                    time=event["time"],
                    attempt=attempt,
                    kind=AttemptOutcome.NODE_LOST,
                    ranks=_ranks_or_empty(event.get("ranks")),
                    host=_text_or_empty(event.get("host")),
                    cause=_text_or_empty(event.get("why")),
                    frame="",
                    hint="",
                    log_path="",
                    is_final=False,
                )
            case _:
                pass


def _text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""


def _int_or_none(value: object) -> int | None:
    return value if type(value) is int else None


def _ranks_or_empty(value: object) -> tuple[int, ...]:
    return tuple(each for each in value if type(each) is int) if isinstance(value, list) else ()


_Saved = tuple[float, float, float, float]
"""Time, step, seconds and bytes of a checkpoint."""


def _read_checkpoints(events: Iterable[Mapping[str, Any]]) -> list[_Saved]:
    found = []
    for event in events:
        if event["type"] == "checkpoint":
            values = [event.get(name) for name in ("time", "step", "seconds", "bytes")]
            if all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
                when, step, seconds, size = (float(value) for value in values)  # type: ignore[arg-type]
                found.append((when, step, seconds, size))
    return found


def _sum_checkpoints(saved: Sequence[_Saved]) -> CheckpointSummary | None:
    if not saved:
        return None
    seconds = [each[2] for each in saved]
    return CheckpointSummary(
        count=len(saved),
        last_step=saved[-1][1],
        seconds=sum(seconds),
        median_s=median(seconds),
        bytes=saved[-1][3],
    )


def _nodes(
    job: Job, events: Sequence[Mapping[str, Any]], attempts: Sequence[AttemptReport]
) -> Iterable[NodeTime]:
    """Yield each node's time in each of the newest attempts.

    The plan of an attempt names its nodes. A lost node's time ends at its loss.
    """
    lost: dict[tuple[int | None, str], float] = {}
    for event in events:
        if event["type"] == "node_lost":
            lost.setdefault(
                (_int_or_none(event.get("attempt")), _text_or_empty(event.get("host"))),
                event["time"],
            )
    for attempt in attempts[-_MOST_PLANS:]:
        for host, ranks in _hosts_of(job, attempt.number):
            lost_at = lost.get((attempt.number, host))
            yield NodeTime(
                host=host,
                attempt=attempt.number,
                begin=attempt.begin,
                end=attempt.end if lost_at is None else max(attempt.begin, lost_at),
                ranks=ranks,
                lost_at=lost_at,
            )


def _hosts_of(job: Job, attempt: int) -> list[tuple[str, tuple[int, ...]]]:
    try:
        plan = json.loads(read_start(plan_path(job.path, attempt), _MOST_PLAN_BYTES))
    except (ValueError, RecursionError):
        return []
    found = []
    nodes = plan.get("nodes") if isinstance(plan, dict) else None
    for node in nodes if isinstance(nodes, list) else ():
        match node:
            case {"host": str(host), "workers": list(workers)}:
                ranks = [each.get("rank") for each in workers if isinstance(each, dict)]
                found.append((host, tuple(rank for rank in ranks if type(rank) is int)))
            case _:
                pass
    return found


def report_record(report: JobReport) -> dict[str, Any]:
    """Return the fields of ``--format json``."""
    division = report.division
    return {
        "schema": SCHEMA,
        "job": job_record(report.job),
        "stop_signal": report.stop_signal,
        "begin": report.begin,
        "end": report.end,
        "total_s": report.end - report.begin,
        "goodput": division.goodput,
        "time_s": {use.value: division.total(use) for use in {span.use for span in division.spans}},
        "spans": [
            {"use": span.use.value, "begin": span.begin, "end": span.end} for span in division.spans
        ],
        "lost_steps": division.lost_steps,
        "last_step": report.last_step,
        "step_s": report.step_s,
        "world_size": report.world_size,
        "restarts": report.restarts,
        "attempts": [
            {
                "attempt": each.number,
                "begin": each.begin,
                "end": each.end,
                "outcome": each.outcome.value,
                "first_step": each.first_step,
                "last_step": each.last_step,
                "world_size": len(each.workers),
            }
            for each in report.attempts
        ],
        "failures": [
            {
                "time": each.time,
                "attempt": each.attempt,
                "kind": each.kind.value,
                "ranks": list(each.ranks),
                "host": each.host or None,
                "cause": each.cause,
                "frame": each.frame or None,
                "hint": each.hint or None,
                "log_path": each.log_path or None,
                "final": each.is_final,
            }
            for each in report.failures
        ],
        "nodes": [
            {
                "host": each.host,
                "attempt": each.attempt,
                "begin": each.begin,
                "end": each.end,
                "ranks": list(each.ranks),
                "lost_at": each.lost_at,
            }
            for each in report.nodes
        ],
        "checkpoints": None
        if report.checkpoints is None
        else {
            "count": report.checkpoints.count,
            "last_step": report.checkpoints.last_step,
            "seconds": report.checkpoints.seconds,
            "median_s": report.checkpoints.median_s,
            "bytes": report.checkpoints.bytes,
        },
        "step_times": [_curve_record(curve) for curve in report.step_times],
        "losses": [_curve_record(curve) for curve in report.losses],
        "slow_ranks": [
            {
                "attempt": each.attempt,
                "rank": each.rank,
                "step_s": each.step_s,
                "median_s": each.median_s,
                "steps": each.steps,
            }
            for each in report.slow
        ],
        "equal_step_times": report.has_equal_steps,
        "missing": [each.value for each in report.missing],
    }


def _curve_record(curve: Curve) -> dict[str, Any]:
    return {
        "attempt": curve.attempt,
        "points": [[point.x, point.low, point.middle, point.high] for point in curve.points],
    }
