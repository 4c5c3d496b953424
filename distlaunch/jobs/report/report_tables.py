"""The tables and sentences of a report, which HTML and Markdown share. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from distlaunch.core.model.duration import format_duration
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, format_size, name_ranks
from distlaunch.jobs.job import State
from distlaunch.jobs.report.job_report import AttemptOutcome, JobReport, Missing
from distlaunch.jobs.report.job_time import TimeUse
from distlaunch.jobs.report.report_charts import OUTCOME_NAMES, USE_NAMES, number

_MOST_ROWS = 50
_LONGEST_TEXT = 600
_LEAST_AFTER_S = 0.1
_USES_OF_STEPS = (TimeUse.STEPS, TimeUse.LOST, TimeUse.RECOVERY, TimeUse.END)


class Table(Record):
    """A table of texts."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    """Columns of numbers."""
    omitted: int = 0
    """How many further rows are left out."""


_MISSING_TEXTS = {
    Missing.EVENTS: "events.jsonl cannot be read, so times and failures are missing.",
    Missing.PROGRESS: "No worker reported steps, so goodput, step times and losses are missing. "
    "distlaunch help progress says how to report them.",
    Missing.SERIES: "steps.bin is missing, so step times and losses of the ranks are missing. The "
    "steps are those of events.jsonl, one every 10 s.",
    Missing.LOSS: "No worker reported a loss.",
    Missing.CHECKPOINTS: "No checkpoint was reported, so lost steps are known only where a later "
    "attempt has repeated them.",
}


def missing_texts(report: JobReport) -> list[str]:
    """Return a sentence for each thing that the report lacks."""
    return [_MISSING_TEXTS[each] for each in report.missing]


def headline(report: JobReport) -> str:
    """Return how the job stands, in one sentence."""
    job = report.job
    match job.state:
        case State.RUNNING:
            how = "runs"
        case State.SUCCEEDED:
            how = "succeeded"
        case State.KILLED:
            how = "was killed: the launcher is gone"
        case State.UNKNOWN:
            how = "has not ended, as far as is known here"
        case State.STOPPED if report.stop_signal:
            how = f"was stopped by {report.stop_signal}, with exit code {job.exit_code},"
        case _:
            how = f"{job.state.value} with exit code {job.exit_code}"
    size = report.world_size
    workers = "" if size is None else f", {counted(size, 'worker')}"
    backend = f", {job.backend}" if job.backend else ""
    return f"The job {how} after {format_duration(report.end - report.begin)}{workers}{backend}."


def figures(report: JobReport) -> list[tuple[str, str]]:
    """Return the most important figures: name and value."""
    division = report.division
    return [
        ("goodput", _percent_text(division.goodput)),
        ("total time", format_duration(report.end - report.begin)),
        ("restarts", str(report.restarts)),
        ("last step", _number_text(report.last_step)),
        ("step time", _duration_text(report.step_s)),
        ("lost steps", _number_text(division.lost_steps)),
        ("nodes lost", str(_node_losses(report))),
    ]


def _node_losses(report: JobReport) -> int:
    return sum(each.kind is AttemptOutcome.NODE_LOST for each in report.failures)


def time_table(report: JobReport) -> Table:
    """Return what the time was used for."""
    whole = report.end - report.begin
    rows = []
    for use in TimeUse:
        seconds = report.division.total(use)
        if seconds:
            rows.append((USE_NAMES[use], format_duration(seconds), _percent_text(seconds / whole)))
    return Table(heads=("Use", "Time", "Share"), rows=tuple(rows), right=frozenset({1, 2}))


def time_uses(report: JobReport) -> list[TimeUse]:
    """Return the uses of the rows of ``time_table``."""
    return [use for use in TimeUse if report.division.total(use)]


def attempts_table(report: JobReport) -> Table:
    """Return the attempts."""
    rows = [
        (
            str(each.number),
            OUTCOME_NAMES[each.outcome],
            _after(each.begin - report.begin),
            format_duration(each.end - each.begin),
            _number_text(each.first_step),
            _number_text(each.last_step),
            str(len(each.workers)),
        )
        for each in report.attempts
    ]
    heads = ("Attempt", "Result", "Began after", "Ran for", "First step", "Last step", "Workers")
    return _cut_table(heads, rows, right={0, 2, 3, 4, 5, 6})


def failures_table(report: JobReport) -> Table | None:
    """Return the failures with their first cause; None if there were none."""
    rows = []
    for each in report.failures:
        who = name_ranks(each.ranks) if each.ranks else ""
        at = each.frame and f"\nat {each.frame}"
        hint = each.hint and f"\nhint: {each.hint}"
        log = each.log_path and f"\nlog: {each.log_path}"
        rows.append(
            (
                _after(each.time - report.begin),
                "" if each.attempt is None else str(each.attempt),
                OUTCOME_NAMES[each.kind],
                "\n".join(filter(None, (who, each.host))),
                _shorten_text(each.cause) + at + hint + log,
            )
        )
    heads = ("After", "Attempt", "Kind", "Where", "First cause")
    return _cut_table(heads, rows, right={0, 1}) if rows else None


def slow_ranks_text(report: JobReport) -> str:
    """Return a sentence about the slow ranks if there are none; empty if there are some."""
    if report.slow:
        return ""
    if report.has_equal_steps:
        return (
            "All ranks have equal step times, as in a training whose ranks wait for each other in "
            "every step. While a job runs, distlaunch stack shows for which rank the others wait."
        )
    return "There are none."


def slow_ranks_table(report: JobReport) -> Table | None:
    """Return the slow ranks; None if there are none."""
    rows = [
        (
            str(each.rank),
            _duration_text(each.step_s),
            _duration_text(each.median_s),
            f"+{each.step_s / each.median_s - 1:.1%}" if each.median_s else "",
            number(round(each.steps)),
        )
        for each in report.slow
    ]
    heads = ("Rank", "Step time", "Median", "Slower by", "Steps")
    return _cut_table(heads, rows, right=set(range(5))) if rows else None


def checkpoints_table(report: JobReport) -> Table | None:
    """Return the sums of all checkpoints; None if none was reported."""
    saved = report.checkpoints
    if saved is None:
        return None
    row = (
        str(saved.count),
        _number_text(saved.last_step),
        format_size(saved.bytes),
        format_duration(saved.median_s),
        format_duration(saved.seconds),
    )
    heads = ("Number", "Steps in the newest", "Its size", "Median time", "Time of all")
    return Table(heads=heads, rows=(row,), right=frozenset(range(5)))


def nodes_table(report: JobReport) -> Table | None:
    """Return the nodes; None if they are not known."""
    hosts: dict[str, list[str]] = {}
    for node in report.nodes:
        row = hosts.setdefault(node.host, ["", "0", "0"])
        row[0] = name_ranks(node.ranks)
        row[1] = str(int(row[1]) + 1)
        row[2] = str(int(row[2]) + (node.lost_at is not None))
    rows = [(host, *row) for host, row in hosts.items()]
    rows.sort(key=lambda row: row[3] == "0")
    heads = ("Host", "Ranks in its newest attempt", "Attempts", "Times lost")
    return _cut_table(heads, rows, right={2, 3}) if rows else None


def comparison_table(first: JobReport, second: JobReport) -> Table:
    """Return the figures of two jobs and how they differ."""
    rows = [
        _compared("Goodput", first.division.goodput, second.division.goodput, _percent_text),
        _compared(
            "Total time", first.end - first.begin, second.end - second.begin, format_duration
        ),
        _compared("Step time", first.step_s, second.step_s, _duration_text),
        _compared_counts("Workers", first.world_size, second.world_size),
        _compared_counts("Restarts", first.restarts, second.restarts),
        _compared_counts("Nodes lost", _node_losses(first), _node_losses(second)),
        _compared_counts("Last step", first.last_step, second.last_step),
        _compared_counts("Lost steps", first.division.lost_steps, second.division.lost_steps),
        _compared("Last loss", _last_loss(first), _last_loss(second), number),
        *(
            _compared_times(use, first, second)
            for use in TimeUse
            if first.division.total(use) or second.division.total(use)
        ),
    ]
    heads = ("", first.job.name, second.job.name, "Difference")
    return Table(heads=heads, rows=tuple(rows), right=frozenset({1, 2, 3}))


def _compared(
    name: str, first: float | None, second: float | None, word: Callable[[float], str]
) -> tuple[str, ...]:
    """Return a row of two values, and the difference in percent; where one of them is zero, the
    difference itself."""
    texts = ["not known" if each is None else word(each) for each in (first, second)]
    if first is None or second is None:
        return (name, *texts, "")
    if first == second:
        return (name, *texts, "+0.0%")
    if not first or not second:
        return (name, *texts, f"+{word(second)}" if second else f"-{word(first)}")
    return (name, *texts, f"{second / first - 1:+.1%}")


def _compared_counts(name: str, first: float | None, second: float | None) -> tuple[str, ...]:
    if first is None or second is None:
        return (name, _number_text(first), _number_text(second), "")
    less = round(second) - round(first)
    sign = "+" if less > 0 else "-" if less < 0 else ""
    return (name, _number_text(first), _number_text(second), f"{sign}{number(abs(less))}")


def _compared_times(use: TimeUse, first: JobReport, second: JobReport) -> tuple[str, ...]:
    """Return a row of the times of a use. Those of a job without steps do not compare with those of
    a job with steps."""
    name = f"Time: {USE_NAMES[use]}"
    seconds = [report.division.total(use) for report in (first, second)]
    silent = [Missing.PROGRESS in report.missing for report in (first, second)]
    if use is TimeUse.WAITING or silent[0] == silent[1]:
        return _compared(name, seconds[0], seconds[1], format_duration)
    texts = [
        "not known" if is_silent and use in _USES_OF_STEPS and not found else format_duration(found)
        for found, is_silent in zip(seconds, silent, strict=True)
    ]
    return (name, *texts, "")


def _last_loss(report: JobReport) -> float | None:
    return report.losses[-1].points[-1].middle if report.losses else None


def _cut_table(
    heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: Collection[int]
) -> Table:
    """Return a table with the last rows, if there are many."""
    return Table(
        heads=heads,
        rows=tuple(rows[-_MOST_ROWS:]),
        right=frozenset(right),
        omitted=max(0, len(rows) - _MOST_ROWS),
    )


def _shorten_text(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} …"


def _after(seconds: float) -> str:
    """Return a time since the start. A report needs no fractions of a second at the very start."""
    return "0 s" if seconds < _LEAST_AFTER_S else format_duration(seconds)


def _percent_text(share: float | None) -> str:
    return "not known" if share is None else f"{share:.1%}"


def _duration_text(seconds: float | None) -> str:
    return "not known" if seconds is None else format_duration(seconds)


def _number_text(value: float | None) -> str:
    return "not known" if value is None else number(round(value))
