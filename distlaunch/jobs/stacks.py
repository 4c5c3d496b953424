"""The stacks of the workers of a running job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from distlaunch.core.errors import UsageError
from distlaunch.core.model.record import Record, defaults_of, fields_of
from distlaunch.core.model.text import name_ranks, printable
from distlaunch.core.protocol import agent_messages as m
from distlaunch.diagnosis.hang import describe_places
from distlaunch.jobs.job import Job
from distlaunch.jobs.running import ask_running

_ANSWER_S = 7.0
"""The launcher waits some seconds for nodes that do not answer."""


class StackReport(Record):
    """Where the workers of a job are."""

    text: str
    record: Mapping[str, Any]
    """The fields of ``--format json``."""


def read_stacks(job: Job, ranks: Collection[int] | None, *, command: str) -> StackReport:
    """Return the stacks of a job's workers.

    Raises ConfigError if the job cannot be asked, and UsageError for a rank that does not run.
    """
    snapshot = ask_running(job, command, "snapshot", timeout_s=_ANSWER_S)
    answers = ask_running(job, command, "stacks", timeout_s=_ANSWER_S)
    return report_of(job.job_id, snapshot, answers, ranks)


def report_of(
    job_id: str,
    snapshot: Mapping[str, Any],
    answers: Mapping[str, Any],
    ranks: Collection[int] | None,
) -> StackReport:
    """Return the report of the launcher's answers. They may come from another release."""
    workers = {worker["rank"]: worker for worker in snapshot["workers"]}
    running = [rank for rank, worker in workers.items() if worker["state"] == "running"]
    if ranks is not None and (missing := sorted(set(ranks) - set(running))):
        raise UsageError(
            f"{name_ranks(missing)} of job {printable(job_id)}: not running",
            hint=f"{name_ranks(running)} of attempt {snapshot['attempt']} run" if running else None,
        )
    stacks = [
        _stack(each)
        for node in answers["nodes"]
        for each in node["stacks"] or ()
        if ranks is None or each["rank"] in ranks
    ]
    known = {stack.rank for stack in stacks}
    unanswered = [
        rank for rank in running if rank not in known and (ranks is None or rank in ranks)
    ]
    places = describe_places(
        stacks,
        unanswered=unanswered,
        steps={rank: each["step"] for rank, each in workers.items() if each["step"] is not None},
        hosts=lambda rank: workers[rank]["host"] if rank in workers else "",
        script_dir=answers.get("script_dir", ""),
    )
    ended = sorted(rank for rank, each in workers.items() if each["state"] == "ended")
    text = places.text
    if ended and ranks is None:
        text += f"{name_ranks(ended)}: ended\n"
    return StackReport(
        text=text,
        record={
            "job_id": job_id,
            "attempt": answers["attempt"],
            "groups": list(places.groups),
            "ended": ended,
            "unanswered": unanswered,
        },
    )


def _stack(given: Mapping[str, Any]) -> m.Stack:
    """Read the fields that this release knows."""
    known = {name: given[name] for name in fields_of(m.Stack) if name in given}
    return m.Stack(**{**defaults_of(m.Stack), **known})
